"""Rows that are lent to a call: where a page may be read at once, by a store that need not wait for anything.

    PageIO.buffers   memory that is in use until the store has returned, however late: a page from a disk goes there
    PageIO.lent      rows that their owner takes back at any moment: what the system has in memory goes straight there

A read that waits for a disk cannot be broken off; a copy within memory ends by itself. So a store holds the loan while
it copies, and whoever takes the rows back waits for that copy and nothing else. Rows count as the page only where they
proved it: they were filled by this call, to the end, and their checksum is that of the header.
"""

from collections.abc import Sequence
from threading import Lock
from types import TracebackType

from unified_cache.seal import HEADER_BYTES, Label, PageChecksum, is_header_of

__all__ = ["LentRows", "RowsLoan"]


class RowsLoan:
    """Rows of all pages of one call. Thread-safe: the call runs on one thread, and the owner takes back on another."""

    __slots__ = ("_rows", "guard")

    def __init__(self, rows: Sequence[tuple[memoryview, ...]]) -> None:
        """``rows`` are those of each page, payload alone, writable where a store is to fill them."""
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


class LentRows:
    """The rows of one page behind a header of ours. One thread at a time.

    A store enters it to fill it, and adds what it has filled piece by piece, from the first byte of the header on:

        with lent as buffers:
            ...
            lent.add(0, buffers)
            lent.is_filled = True
    """

    __slots__ = ("_checksum", "_header", "_loan", "_number", "is_filled", "is_proven")

    def __init__(self, loan: RowsLoan, number: int, header: memoryview) -> None:
        """``header`` is memory for it, and not the owner's."""
        self._loan = loan
        self._number = number
        self._header = header
        self._checksum = PageChecksum()
        self.is_filled = False
        """Whether a store says that it has filled them, and so has left the page's buffers as they were."""
        self.is_proven = False
        """Whether the rows hold the page, and nobody need read them again to know."""

    def __enter__(self) -> tuple[memoryview, ...]:
        """Return header and rows, nobody else's until the with block ends; nothing where the owner has them again."""
        self._loan.guard.acquire()
        self.is_filled = self.is_proven = False
        if self._loan.is_over:
            return ()
        self._checksum = PageChecksum()
        return (self._header, *self._loan.rows_of(self._number))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loan.guard.release()

    def add(self, start: int, pieces: Sequence[memoryview]) -> None:
        """Add the bytes of the page from ``start`` on, in order; they are in place now. See ``PageChecksum``."""
        self._checksum.add(start, pieces)

    def prove(self, label: Label, payload_bytes: int) -> bool:
        """Tell whether what was added is exactly the page that ``label`` names."""
        found = self._checksum.of(HEADER_BYTES + payload_bytes)
        self.is_proven = found is not None and is_header_of(self._header, label, payload_bytes, found)
        return self.is_proven
