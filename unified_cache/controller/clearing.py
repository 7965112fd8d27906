"""Order between puts into a store and clears of it, so that no half of a chain is left or counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["Clearing"]


class Clearing:
    """Puts and clears of one store that are under way. Thread-safe.

    A put that is under way when a clear begins is *void*: its job takes its pages back. No put is allowed during a
    clear, nor while a void one is under way, because its pages might be taken back with those.
    """

    __slots__ = ("_clears_count", "_guard", "_puts", "_void")

    def __init__(self) -> None:
        self._clears_count = 0
        self._puts: set[object] = set()
        self._void: set[object] = set()
        self._guard = Lock()

    @contextmanager
    def clear(self) -> Iterator[None]:
        """Make the puts under way void, and allow no other during the ``with`` block."""
        with self._guard:
            self._clears_count += 1
            self._void |= self._puts
        try:
            yield
        finally:
            with self._guard:
                self._clears_count -= 1

    @contextmanager
    def put(self, job: object) -> Iterator[bool]:
        """Count ``job`` as putting pages during the ``with`` block; yield False if it must put none."""
        with self._guard:
            allowed = not self._clears_count and not self._void
            if allowed:
                self._puts.add(job)
        try:
            yield allowed
        finally:
            with self._guard:
                self._puts.discard(job)
                self._void.discard(job)

    def is_void(self, job: object) -> bool:
        """Tell whether ``job`` has to take back the pages that it has put."""
        with self._guard:
            return job in self._void
