"""Uses of stored pages that a store does not see, since memory handed the pages out: told to it ahead of a put.

A store that evicts goes by what it is asked for. It evicts for the sake of what is put, so what is in use need be known
to it by then, and not before: uses wait here until a job puts something.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from unified_cache.page import Prompt
from unified_cache.pool import PageNumbers

__all__ = ["TouchCounts", "Touches", "UsedPages"]

TOUCHES_MAX = 64
"""Uses that wait for a put; with one more the oldest is dropped: recency is worth no request's memory for long."""


@dataclass(frozen=True, slots=True)
class UsedPages:
    """Pages of a prompt that a request was handed from memory, and that storage has."""

    prompt: Prompt
    pages: tuple[PageNumbers, ...]
    """Their numbers, by component."""

    @property
    def count(self) -> int:
        """Pages of all components together."""
        return sum(map(len, self.pages))


@dataclass(frozen=True, slots=True)
class TouchCounts:
    """Pages in use, by whether storage came to know of it; each as often as it was to be told."""

    told_pages: int = 0
    dropped_pages: int = 0
    """Not told: too many uses waited for a put, or the store failed."""


class Touches:
    """Uses that a store is to be told of, the latest last, at most TOUCHES_MAX, and counts of them. Thread-safe."""

    __slots__ = ("_dropped_pages", "_guard", "_told_pages", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[UsedPages] = deque()
        self._told_pages = 0
        self._dropped_pages = 0
        self._guard = Lock()

    def add(self, used: UsedPages) -> None:
        """Have a use wait for the next put."""
        with self._guard:
            self._waiting.append(used)
            if len(self._waiting) > TOUCHES_MAX:
                self._dropped_pages += self._waiting.popleft().count

    def take_all(self) -> Sequence[UsedPages]:
        """Return and forget all that wait, the oldest first; whoever takes them says whether the store was told."""
        with self._guard:
            waiting, self._waiting = self._waiting, deque()
        return waiting

    def note_told(self, used: UsedPages) -> None:
        """Count a use that the store was told of."""
        with self._guard:
            self._told_pages += used.count

    def note_dropped(self, used: UsedPages) -> None:
        """Count a use that the store could not be told of."""
        with self._guard:
            self._dropped_pages += used.count

    def counts(self) -> TouchCounts:
        """Return the counts so far."""
        with self._guard:
            return TouchCounts(self._told_pages, self._dropped_pages)
