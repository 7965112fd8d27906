"""Keeps apart what puts pages into a store and what clears it, so that no half of a chain is left or counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["Clearing"]


class Clearing:
    """Of one store: who puts pages into it and who clears it, on any thread.

    What was being put when a clear began, or begins before its end, is *void*: whoever put it takes it back. Until
    that is over nothing else is put, which might be taken back with it.
    """

    __slots__ = ("_clears_count", "_guard", "_puts", "_void")

    def __init__(self) -> None:
        self._clears_count = 0
        self._puts: set[object] = set()
        self._void: set[object] = set()
        self._guard = Lock()

    @contextmanager
    def clear(self) -> Iterator[None]:
        """Make void what is being put now, and refuse what would be put during a ``with`` block."""
        with self._guard:
            self._clears_count += 1
            self._void |= self._puts
        try:
            yield
        finally:
            with self._guard:
                self._clears_count -= 1

    @contextmanager
    def put(self, who: object) -> Iterator[bool]:
        """Say for the length of a ``with`` block that ``who`` puts pages; yields False if it must not."""
        with self._guard:
            allowed = not self._clears_count and not self._void
            if allowed:
                self._puts.add(who)
        try:
            yield allowed
        finally:
            with self._guard:
                self._puts.discard(who)
                self._void.discard(who)

    def is_void(self, who: object) -> bool:
        """Tell whether what ``who`` has put has to be taken back."""
        with self._guard:
            return who in self._void
