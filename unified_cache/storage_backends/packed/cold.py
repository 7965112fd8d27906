"""Pages of a packed store that the system does not have in memory: neighbours come together, straight from the disk.

pages asked for     a  b  c  d  e       what is asked for together was stored together, as a rule
slots               7  8  9  3  4       two runs: [7, 10) and [3, 5), a read for each
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import closing

from unified_cache.storage_backends.directory.direct import DirectReads, DirectRun, begins_on_block, run_pages_max
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
        first = next((slot for slot in slots if slot is not None), None)
        if first is not None and self._direct.is_worth_asking(pages) and self._is_cold(first):
            with closing(self._direct.read(self._runs(pages, slots))) as runs:
                for run, is_whole in runs:
                    if is_whole:
                        filled.update(range(run.number, run.number + len(run.pages)))
        return filled

    def _is_cold(self, slot: SegmentSlot) -> bool:
        return slot.segment.has_blocks and slot.segment.is_cold(self._direct, slot.number)

    def _runs(self, pages: Sequence[PageIO], slots: Sequence[SegmentSlot | None]) -> Iterator[DirectRun]:
        """Yield pages in slots beside each other, where the system does not have the first of them in memory."""
        start = 0
        while start < len(pages):
            slot = slots[start]
            end = start + 1
            if slot is not None and slot.segment.has_blocks:
                is_on_block = begins_on_block(pages[start])
                end_max = min(start + run_pages_max(pages[start], slot.segment.key.slot_bytes), len(pages))
                while end < end_max and (other := slots[end]) is not None and other.is_beside(slot, end - start):
                    if begins_on_block(pages[end]) is not is_on_block:
                        break
                    end += 1
                fd, offset = slot.segment.direct_place(self._direct, slot.number)
                if fd >= 0:
                    key, run = slot.segment.key, pages[start:end]
                    yield DirectRun(start, fd, offset, key.object_bytes, key.slot_bytes, run, is_file=False)
            start = end
