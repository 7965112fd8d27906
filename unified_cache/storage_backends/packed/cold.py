"""Pages of a packed store that the system does not have in memory: neighbours come together, straight from the disk.

pages asked for     a  b  c  d  e       what is asked for together was stored together, as a rule
slots               7  8  9  3  4       two runs: [7, 10) and [3, 5), a read for each
"""

from collections.abc import Sequence, Set

from unified_cache.storage_backends.directory.direct import DIRECT_PAGES_MAX, DirectReads, is_block_aligned
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.packed.segment import SegmentSlot
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["ColdReads"]


class ColdReads:
    """Direct reads of the pages of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._direct = DirectReads(disk)

    def read(self, pages: Sequence[PageIO], slots: Sequence[SegmentSlot | None]) -> Set[int]:
        """Fill pages from their slots, None where there is none; return the numbers of those that were filled.

        Only where the system does not have the first one in memory the others are looked at: a call is of one prompt,
        which is there as a whole or not at all, and what is there must not wait for such a look at each page.
        """
        filled: set[int] = set()
        start = next((number for number, slot in enumerate(slots) if slot is not None), len(slots))
        if start == len(slots) or not self._is_cold(pages[start], slots[start]):
            return filled
        while start < len(pages):
            slot = slots[start]
            end = start + 1
            if slot is not None and slot.segment.has_blocks and _is_fit(pages[start]):
                while end < len(pages) and _follows(slot, slots[end], end - start) and _is_fit(pages[end]):
                    end += 1
                run = [page.buffers[0] for page in pages[start:end]]
                if slot.segment.read_directly(self._direct, slot.number, run):
                    filled.update(range(start, end))
            start = end
        return filled

    def _is_cold(self, page: PageIO, slot: SegmentSlot | None) -> bool:
        if slot is None or not slot.segment.has_blocks or not _is_fit(page):
            return False
        return slot.segment.is_cold(self._direct, slot.number)


def _follows(first: SegmentSlot, slot: SegmentSlot | None, distance: int) -> bool:
    """Tell whether a slot lies ``distance`` after another one, near enough for one read."""
    is_beside = slot is not None and slot.segment is first.segment and slot.number == first.number + distance
    return is_beside and distance < DIRECT_PAGES_MAX


def _is_fit(page: PageIO) -> bool:
    return len(page.buffers) == 1 and is_block_aligned(page.buffers[0])
