"""Pages of a prompt that are to be backed up, until they are where they should be."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from unified_cache.controller import LeftOut
from unified_cache.page import Prompt
from unified_cache.pool import PageNumbers, Pages

__all__ = ["BackupRequest"]

_REASONS = tuple(LeftOut)
_UNTRIED = 1
_FIRST_REASON = 2


class BackupRequest:
    """Pages of one prompt, by component, that still have to be backed up, and why the last backup left each out.

    A write policy makes it when it asks for the backup. A backup takes off what has arrived; what it left out is asked
    for again by the next one.
    """

    __slots__ = ("_states", "_was_tried", "attempts_count", "has_lost", "prompt")

    def __init__(self, prompt: Prompt, wanted: Sequence[Pages]) -> None:
        """Ask for the pages of each component for which ``wanted[component]``, shape (pages_count,), is True."""
        self.prompt = prompt
        self._states: list[npt.NDArray[np.int8]] = [pages.astype(np.int8) for pages in wanted]
        """By component and page: 0 for nothing to do, 1 for a page not tried, else the reason that left it out."""
        self._was_tried = False
        self.attempts_count = 0
        """Backups in a row that brought none of these pages any further."""
        self.has_lost = False
        """Whether pages of it were given up."""

    @property
    def pages_count(self) -> int:
        """Pages that still have to be backed up."""
        return sum([int(np.count_nonzero(states)) for states in self._states])

    def waiting(self, component: int) -> Pages:
        """Return a mask of the pages of a component that still have to be backed up."""
        mask: Pages = self._states[component] > 0
        return mask

    def untried(self, component: int) -> Pages:
        """Return a mask of those that the backup under way has not left out yet."""
        mask: Pages = self._states[component] == _UNTRIED
        return mask

    def begin(self) -> None:
        """Mark all pages as untried, for the next backup."""
        if self._was_tried:
            for states in self._states:
                np.minimum(states, _UNTRIED, out=states)

    def take_off(self, component: int, pages: PageNumbers | Pages | slice) -> int:
        """Take pages off, which have arrived or cannot any more; return how many of them were to be backed up."""
        states = self._states[component]
        count = int(np.count_nonzero(states[pages]))
        states[pages] = 0
        return count

    def leave_out(self, component: int, pages: PageNumbers | Pages, reason: LeftOut) -> None:
        """Record the reason that left pages out, of those that still have to be backed up."""
        self._was_tried = True
        states = self._states[component]
        states[pages] = np.where(states[pages] > 0, _FIRST_REASON + _REASONS.index(reason), 0)

    def leave_untried(self, reason: LeftOut) -> None:
        """Record the reason that left all untried pages out."""
        self._was_tried = True
        for states in self._states:
            states[states == _UNTRIED] = _FIRST_REASON + _REASONS.index(reason)

    def left_out(self) -> Iterator[tuple[LeftOut, int]]:
        """Yield each reason for which pages were left out, and how many."""
        counts = sum(np.bincount(states, minlength=_FIRST_REASON + len(_REASONS)) for states in self._states)
        for reason, count in zip(_REASONS, np.asarray(counts).tolist()[_FIRST_REASON:], strict=True):
            if count:
                yield reason, count

    def merge(self, earlier: "BackupRequest") -> int:
        """Ask for the pages of an earlier request for the same prompt, too; return how many both ask for."""
        both_count = 0
        for component, states in enumerate(self._states):
            waiting = earlier.waiting(component)
            both_count += int(np.count_nonzero(waiting & (states > 0)))
            states[waiting & (states == 0)] = _UNTRIED
        return both_count
