"""Reason why a run of pages is missing on a tier, with what is known of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from unified_cache.config import EvictionPolicy, WritePolicy
from unified_cache.miss_reason import MissReason

__all__ = ["Reason", "ago_text"]

_POLICIES = {
    WritePolicy.ON_CALL: "the write policy on_call backs up what the engine asks for alone",
    WritePolicy.SELECTIVE: "the write policy selective waits for a second use",
    WritePolicy.BACK: "the write policy back has put it off",
    WritePolicy.THROUGH: "the backup has not come to it",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a run of pages is missing."""

    why: MissReason
    ago_s: float | None = None
    """Seconds since it happened to the last of the pages; None where nothing happened that is remembered."""
    policy: EvictionPolicy | WritePolicy | None = None
    """Policy that evicted the pages, or that has not copied them to the tier."""
    room_for: str = ""
    """Component that room was made for, where the pages were evicted."""

    @property
    def text(self) -> str:
        """The reason in words."""
        if isinstance(self.policy, WritePolicy):
            return f"{self.why.text}: {_POLICIES[self.policy]}"
        if self.ago_s is None:
            return self.why.text
        if self.policy is None:
            return f"{self.why.text}, {ago_text(self.ago_s)}"
        return f"{self.why.text} {ago_text(self.ago_s)} by {self.policy.value}, to make room for {self.room_for}"

    def as_json(self) -> dict[str, object]:
        """Return it under stable names."""
        value: dict[str, object] = {"why": self.why.key, "text": self.text}
        if self.ago_s is not None:
            value["ago_s"] = self.ago_s
        if self.policy is not None:
            value["policy"] = self.policy.value
        if self.room_for:
            value["room_for"] = self.room_for
        return value


_STEPS: Sequence[tuple[float, str]] = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago_text(ago_s: float) -> str:
    """Say how long ago something was."""
    for seconds, unit in _STEPS:
        if ago_s >= seconds:
            return f"{ago_s / seconds:,.1f} {unit} ago"
    return "just now"
