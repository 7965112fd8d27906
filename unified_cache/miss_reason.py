"""Reasons why a page is missing on a tier: one list for eviction history, explanations, replays and metrics."""

from enum import IntEnum

__all__ = ["MissReason"]


class MissReason(IntEnum):
    """Reason why a page is missing on a tier. Arrays hold its number, JSON its ``key``, tables its ``text``."""

    NOT_REMEMBERED = 0
    """Not held, and not remembered either: never computed here, or longer ago than what is remembered."""
    NEVER_COMPUTED = 1
    NOT_KEPT = 2
    """Full was computed; of windows and states only those at the ends of prompts and at branches are kept."""
    NOT_FETCHED = 3
    """On another tier, and was never brought to this one."""
    ARRIVING = 4
    """A transfer is bringing it."""
    EVICTED = 5
    """Evicted from a memory tier, to make room for a component."""
    DUPLICATE = 6
    """Computed while the tree held it; the second copy was dropped."""
    RESET = 7
    NOT_BACKED_UP = 8
    BACKUP_DECLINED = 9
    BACKUP_FAILED = 10
    """The copy to the host failed, was late or was cancelled."""
    HOST_FULL = 11
    NOT_STORED = 12
    STORE_DECLINED = 13
    STORE_FAILED = 14
    """The store failed, was late, or was not there."""
    STORE_EVICTED = 15
    """The store removed it, and reported that."""
    STORE_LOST = 16
    """Stored once, and gone without a report: the store makes none, or another process removed it."""
    STORE_CLEARED = 17
    FLAWED = 18
    """Read from storage damaged, or as another page, and thrown away."""
    STORE_UNAVAILABLE = 19
    NOT_IN_STORE = 20
    """Asked of a store alone, which does not say what it had."""
    TOO_LONG = 21
    """Beyond what the device can hold of one prompt; a replay cuts prompts there."""
    PART_OF_PAGE = 22
    """Behind the last whole page of a prompt."""

    @property
    def key(self) -> str:
        """Name in JSON."""
        return self.name.lower()

    @property
    def text(self) -> str:
        """Words for people: without time, policy and component."""
        return _TEXTS[self]


_TEXTS = {
    MissReason.NOT_REMEMBERED: "never computed here, or longer ago than is remembered",
    MissReason.NEVER_COMPUTED: "never computed here",
    MissReason.NOT_KEPT: "not kept: windows and states are kept where prompts end and branch",
    MissReason.NOT_FETCHED: "held by another tier, and not brought here",
    MissReason.ARRIVING: "on its way",
    MissReason.EVICTED: "evicted",
    MissReason.DUPLICATE: "computed twice, the second copy dropped",
    MissReason.RESET: "forgotten by reset",
    MissReason.NOT_BACKED_UP: "not backed up",
    MissReason.BACKUP_DECLINED: "not backed up: too many transfers were under way",
    MissReason.BACKUP_FAILED: "not backed up: the copy failed",
    MissReason.HOST_FULL: "not backed up: host memory had no room for it",
    MissReason.NOT_STORED: "not stored",
    MissReason.STORE_DECLINED: "not stored: the store had no room",
    MissReason.STORE_FAILED: "not stored: the store failed or was away",
    MissReason.STORE_EVICTED: "evicted by the store",
    MissReason.STORE_LOST: "stored, and gone since without a word of the store",
    MissReason.STORE_CLEARED: "removed by clear_storage",
    MissReason.FLAWED: "found damaged in the store, and thrown away",
    MissReason.STORE_UNAVAILABLE: "the store is not available now",
    MissReason.NOT_IN_STORE: "not in the store",
    MissReason.TOO_LONG: "longer than the device can hold",
    MissReason.PART_OF_PAGE: "part of a page, behind the last whole one",
}
