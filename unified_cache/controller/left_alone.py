"""Answer of a transfer to what it could have brought and did not."""

from dataclasses import dataclass
from enum import Enum

from unified_cache.controller.transfer_kind import TransferKind

__all__ = ["LeftAlone", "LeftAloneReason"]

TIERS = {TransferKind.PREFETCH: "storage", TransferKind.LOAD: "host"}
"""Where pages are left alone, by the transfer that would bring them."""


class LeftAloneReason(Enum):
    """Reason to leave pages where they are; the value is what JSON has."""

    COMPUTING_IS_FASTER = "computing_is_faster"
    PAST_DEADLINE = "past_deadline"
    """Bringing them would be worth it, and would take longer than the request can wait."""


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Pages [start, end) of a prompt that could be brought up from a lower tier and are not, on purpose."""

    kind: TransferKind
    """PREFETCH for those in storage, LOAD for those on the host."""
    start: int
    end: int
    page_size: int
    reason: LeftAloneReason
    load_s: float
    """Seconds that bringing them was expected to take."""
    compute_s: float
    """Seconds that computing them was expected to take."""

    @property
    def tokens(self) -> int:
        """Tokens of these pages."""
        return (self.end - self.start) * self.page_size

    @property
    def text(self) -> str:
        """The answer in words."""
        held = f"{TIERS[self.kind]} has {self.tokens:,} tokens, not worth loading: "
        if self.reason is LeftAloneReason.PAST_DEADLINE:
            return f"{held}that takes {_seconds(self.load_s)}, longer than the deadline allows"
        return f"{held}that takes {_seconds(self.load_s)}, computing them {_seconds(self.compute_s)}"

    def as_json(self) -> dict[str, object]:
        """Return it under stable names, for ``json.dump``."""
        return {
            "tier": TIERS[self.kind],
            "start": self.start,
            "end": self.end,
            "why": self.reason.value,
            "load_s": self.load_s,
            "compute_s": self.compute_s,
            "text": self.text,
        }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
