"""Reads that wait for nothing: pages that the system has in memory, straight into the rows of who asks.

A call to a store may wait for a disk, so a caller with a deadline has it made on another thread, into memory that it
can do without. A copy within memory ends by itself: it is made on the caller's own thread, into the rows themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from unified_cache.core.seal import HEADER_BYTES, Label, checksum_of, is_header_of


class RowsPage(Protocol):
    """One page and the rows that it belongs into."""

    @property
    def label(self) -> Label:
        """Name of the page."""
        ...

    @property
    def rows(self) -> tuple[memoryview, ...]:
        """Memory for the payload, in order, without our header; writable, each a contiguous run of bytes."""
        ...


class MemoryReader(Protocol):
    """A store that knows and reads pages from memory, beside what every store does."""

    def knows(self, labels: Sequence[Label]) -> list[bool]:
        """Return for each label whether a get would find it, as far as memory alone says; False means unknown.

        Waits for no disk and for nobody who does; raises ClosedError alone.
        """
        ...

    def read_memory(self, targets: Sequence["RowsTarget"]) -> list[bool]:
        """Fill the rows of pages as far as that takes no waiting; True where they hold exactly the page of that label.

        A page that was read is used now, as by ``get``. Of one that was not nothing is known, and its header and rows
        may hold anything: ``get`` tells. Waits for no disk and for nobody who does; raises ClosedError alone.
        """
        ...


class RowsTarget(NamedTuple):
    """Rows of a page behind memory for its header: where its object is read to."""

    label: Label
    buffers: tuple[memoryview, ...]
    """The header's, then the rows."""
    payload_bytes: int

    @property
    def object_bytes(self) -> int:
        """Bytes of the page, header included."""
        return HEADER_BYTES + self.payload_bytes

    def holds_page(self, checksum: int | None = None) -> bool:
        """Return whether what was read is exactly the page; ``checksum`` is that of the rows, where it is known."""
        header, *rows = self.buffers
        found = checksum_of(rows) if checksum is None else checksum
        return is_header_of(header, self.label, self.payload_bytes, found)


def targets_of(pages: Sequence[RowsPage]) -> list[RowsTarget]:
    """Put memory for a header before the rows of each page."""
    headers = memoryview(bytearray(HEADER_BYTES * len(pages)))
    targets: list[RowsTarget] = []
    start = 0
    for page in pages:
        rows = page.rows
        payload_bytes = rows[0].nbytes if len(rows) == 1 else sum([row.nbytes for row in rows])
        header = headers[start : start + HEADER_BYTES]
        targets.append(RowsTarget(page.label, (header, *rows), payload_bytes))
        start += HEADER_BYTES
    return targets
