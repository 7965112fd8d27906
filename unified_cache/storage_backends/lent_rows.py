"""Rows that are lent to a call: where a page may be read at once, by a store that need not wait for anything.

    PageIO.buffers   memory that is in use until the store has returned, however late: a page from a disk goes there
    PageIO.lent      rows that their owner takes back at any moment: what the system has in memory goes straight there

A read that waits for a disk cannot be broken off; a copy within memory ends by itself. So a store holds the loan while
it copies, and whoever takes the rows back waits for that copy and nothing else. Rows count as the page only where they
proved it: they were filled by this call, to the end, and their checksum is that of the header.
"""

from collections.abc import Sequence
from threading import Lock

from unified_cache.seal import HEADER_BYTES, Label, PageChecksum, checksum_of, is_header_of

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

    A store holds the loan's guard while it fills them and says what it has filled, of several pages if it likes:

        with lent.loan.guard:
            if not lent.loan.is_over:
                ...                          # fill lent.buffers()
                lent.sum_up()                # once it is whole
    """

    __slots__ = ("_checksum", "_header", "_number", "buffers_count", "is_filled", "is_proven", "loan")

    def __init__(self, loan: RowsLoan, number: int, header: memoryview, rows_count: int) -> None:
        """``header`` is memory for it, and not the owner's; the page has ``rows_count`` rows."""
        self.loan = loan
        self._number = number
        self._header = header
        self.buffers_count = 1 + rows_count
        """Buffers that ``buffers`` returns."""
        self._checksum: int | None = None
        self.is_filled = False
        """Whether a store says that it has filled them, and so has left the page's buffers as they were."""
        self.is_proven = False
        """Whether the rows hold the page, and nobody need read them again to know."""

    def buffers(self) -> tuple[memoryview, ...]:
        """Return header and rows, to be filled under the guard of a loan that is not over; nothing is filled now."""
        self.is_filled = self.is_proven = False
        return (self._header, *self.loan.rows_of(self._number))

    def sum_up(self, checksum: PageChecksum | None = None) -> None:
        """Note that all is filled, under the same guard, and what the payload's checksum is now.

        ``checksum`` has it already if all was added to it while it was filled.
        """
        rows = self.loan.rows_of(self._number)
        page_bytes = HEADER_BYTES + sum([row.nbytes for row in rows])
        self._checksum = checksum_of(rows) if checksum is None else checksum.of(page_bytes)
        self.is_filled = True

    def prove(self, label: Label, payload_bytes: int) -> bool:
        """Tell whether what was filled is exactly the page that ``label`` names."""
        found = self._checksum
        self.is_proven = found is not None and is_header_of(self._header, label, payload_bytes, found)
        return self.is_proven
