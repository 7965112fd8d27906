"""Rows of an engine that are lent to a call: whoever owns them takes them back at any moment."""

from collections.abc import Sequence
from threading import Lock

__all__ = ["RowsLoan"]


class RowsLoan:
    """Rows of all pages of one call. Thread-safe: the call runs on one thread, and the owner takes back on another."""

    __slots__ = ("_rows", "guard")

    def __init__(self, rows: Sequence[tuple[memoryview, ...]]) -> None:
        """``rows`` are those of each page, payload alone, writable where they are to be filled."""
        self._rows: Sequence[tuple[memoryview, ...]] | None = rows
        self.guard = Lock()
        """Held while rows are used."""

    @property
    def is_over(self) -> bool:
        """Whether the owner has the rows again; whoever holds the guard can believe a no."""
        return self._rows is None

    def rows_of(self, number: int) -> tuple[memoryview, ...]:
        """Return the rows of a page; to be asked and used under the guard, where the loan is not over."""
        assert self._rows is not None
        return self._rows[number]

    def take_back(self) -> None:
        """End the loan, now and for good; wait for a copy under way. No view of the rows is left in it."""
        with self.guard:
            self._rows = None
