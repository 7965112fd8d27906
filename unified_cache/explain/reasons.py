"""Reasons why a run of pages is missing on a tier, as values and as words."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unified_cache.config import EvictionPolicy, WritePolicy

__all__ = ["Evicted", "Happened", "Reason", "Unbacked", "Unchanged", "Why", "ago_text", "why_text"]


class Why(Enum):
    """Kind of reason; the value is what JSON and tables have."""

    NEVER_COMPUTED = "never_computed"
    NOT_REMEMBERED = "not_remembered"
    """Not held, and not remembered either: never computed here, or longer ago than what is remembered."""
    NOT_KEPT = "not_kept"
    """Full was computed; of windows and states only those at the ends of prompts and at branches are kept."""
    NOT_FETCHED = "not_fetched"
    """On another tier, and was never brought to this one."""
    ARRIVING = "arriving"
    """A transfer is bringing it."""
    EVICTED = "evicted"
    DUPLICATE = "duplicate"
    """Computed while the tree held it; the second copy was dropped."""
    RESET = "reset"
    NOT_BACKED_UP = "not_backed_up"
    BACKUP_DECLINED = "backup_declined"
    BACKUP_FAILED = "backup_failed"
    HOST_FULL = "host_full"
    NOT_STORED = "not_stored"
    STORE_DECLINED = "store_declined"
    STORE_FAILED = "store_failed"
    STORE_EVICTED = "store_evicted"
    STORE_LOST = "store_lost"
    """Stored once, and gone without a word of the store: it tells nobody, or another process removed it."""
    STORE_CLEARED = "store_cleared"
    FLAWED = "flawed"
    STORE_UNAVAILABLE = "store_unavailable"
    NOT_IN_STORE = "not_in_store"
    """Asked of a store alone, which does not say what it had."""
    TOO_LONG = "too_long"
    """Beyond what the device can hold of one prompt; a replay cuts prompts there."""
    PART_OF_PAGE = "part_of_page"
    """Behind the last whole page of a prompt."""


_WORDS = {
    Why.NEVER_COMPUTED: "never computed here",
    Why.NOT_REMEMBERED: "never computed here, or longer ago than is remembered",
    Why.NOT_KEPT: "not kept: windows and states are kept where prompts end and branch",
    Why.NOT_FETCHED: "held by another tier, and not brought here",
    Why.ARRIVING: "on its way",
    Why.EVICTED: "evicted",
    Why.NOT_BACKED_UP: "not backed up",
    Why.NOT_STORED: "not stored",
    Why.DUPLICATE: "computed twice, the second copy dropped",
    Why.RESET: "forgotten by reset",
    Why.BACKUP_DECLINED: "not backed up: too many transfers were under way",
    Why.BACKUP_FAILED: "not backed up: the copy failed",
    Why.HOST_FULL: "not backed up: host memory had no room for it",
    Why.STORE_DECLINED: "not stored: the store had no room",
    Why.STORE_FAILED: "not stored: the store failed or was away",
    Why.STORE_EVICTED: "evicted by the store",
    Why.STORE_LOST: "stored, and gone since without a word of the store",
    Why.STORE_CLEARED: "removed by clear_storage",
    Why.FLAWED: "found damaged in the store, and thrown away",
    Why.STORE_UNAVAILABLE: "the store is not available now",
    Why.NOT_IN_STORE: "not in the store",
    Why.TOO_LONG: "longer than the device can hold",
    Why.PART_OF_PAGE: "part of a page, behind the last whole one",
}
_POLICIES = {
    WritePolicy.ON_CALL: "the write policy on_call backs up what the engine asks for alone",
    WritePolicy.SELECTIVE: "the write policy selective waits for a second use",
    WritePolicy.BACK: "the write policy back has put it off",
    WritePolicy.THROUGH: "the backup has not come to it",
}


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Nothing has happened to these pages, or nothing that is remembered."""

    why: Why

    @property
    def text(self) -> str:
        """The reason in words."""
        return _WORDS[self.why]


@dataclass(frozen=True, slots=True)
class Unbacked:
    """Pages that the write policy has not copied to the tier: NOT_BACKED_UP for the host, NOT_STORED for storage."""

    why: Why
    policy: WritePolicy

    @property
    def text(self) -> str:
        """The reason in words."""
        done = "backed up" if self.why is Why.NOT_BACKED_UP else "stored"
        return f"not {done}: {_POLICIES[self.policy]}"


@dataclass(frozen=True, slots=True)
class Happened:
    """Something has happened to these pages: to the last of them so many seconds ago."""

    why: Why
    ago_s: float

    @property
    def text(self) -> str:
        """The reason in words."""
        return f"{_WORDS[self.why]}, {ago_text(self.ago_s)}"


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pages that their tier's policy has evicted, to make room for a component."""

    ago_s: float
    policy: EvictionPolicy
    room_for: str

    @property
    def why(self) -> Why:
        """EVICTED."""
        return Why.EVICTED

    @property
    def text(self) -> str:
        """The reason in words."""
        return f"evicted {ago_text(self.ago_s)} by {self.policy.value}, to make room for {self.room_for}"


Reason = Unchanged | Unbacked | Happened | Evicted


def why_text(why: Why) -> str:
    """Say a kind of reason, for tables: without time, policy and component."""
    return _WORDS[why]


_STEPS: Sequence[tuple[float, str]] = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago_text(ago_s: float) -> str:
    """Say how long ago something was."""
    for seconds, unit in _STEPS:
        if ago_s >= seconds:
            return f"{ago_s / seconds:,.1f} {unit} ago"
    return "just now"
