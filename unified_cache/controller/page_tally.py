"""Counts of the pages that an operation was asked for: those that arrived, and those left out, by reason."""

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["LeftOut", "PageTally"]


class LeftOut(Enum):
    """Reason why a page that an operation was asked for is not where it should be."""

    HOST_FULL = "host_full"
    """Other operations pinned its pages; or, of a prefetch, neither it nor the device had room."""
    HOST_TOO_SMALL = "host_too_small"
    """The host does not hold the prompt even when it is empty, and there is no storage that it could go on to."""
    DEVICE_FULL = "device_full"
    UNDER_WAY = "under_way"
    """Another backup was storing it."""
    DECLINED = "declined"
    """The store had no room."""
    FAILED = "failed"
    """The store or the copy failed, or did not return in time; or the store did not have what it had announced."""
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """Somebody had the operation make do with what had come: ``finish_early``, a deadline, patience, ``detach``."""
    CLOSED = "closed"
    """The cache was closed before."""
    EVICTED = "evicted"
    """Memory held it no longer, or not all that a resume there needs."""
    QUEUE_FULL = "queue_full"
    """More prompts waited for a backup than the queue holds."""


@dataclass(slots=True)
class PageTally:
    """Pages that one operation was asked for. Once it is over ``asked == arrived + already + sum of left_out``.

    Of a backup these are pages of all components; of a load or a prefetch, pages of the prompt by which it can be
    resumed further.
    """

    asked: int = 0
    arrived: int = 0
    """Brought to where they should be: to memory; by a backup to storage, or to the host where there is no storage."""
    already: int = 0
    """Known to be there before."""
    left_out: dict[LeftOut, int] = field(default_factory=dict)
    copied: int = 0
    """Copied from the device to the host on the way."""
    stored: int = 0
    """Taken by storage, or found there by a put, at the level asked for, by its own word on every rank."""

    @property
    def left_out_count(self) -> int:
        """Pages left out, for whatever reason."""
        return sum(self.left_out.values())

    def gain(self, pages: int) -> None:
        """Set the pages that have arrived by now; what others brought beyond what was asked for counts as asked too."""
        self.arrived = pages
        self.asked = max(self.asked, pages)

    def leave_out(self, reason: LeftOut, pages: int) -> None:
        """Count pages left out."""
        if pages:
            self.left_out[reason] = self.left_out.get(reason, 0) + pages

    def add(self, other: "PageTally") -> None:
        """Count what another operation counted, too."""
        self.asked += other.asked
        self.arrived += other.arrived
        self.already += other.already
        self.copied += other.copied
        self.stored += other.stored
        for reason, pages in other.left_out.items():
            self.leave_out(reason, pages)

    def close(self, reason: LeftOut) -> None:
        """Count what has neither arrived nor been left out by now as left out for ``reason``."""
        self.leave_out(reason, max(self.asked - self.arrived - self.already - self.left_out_count, 0))
