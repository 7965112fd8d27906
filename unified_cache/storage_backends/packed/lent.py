"""Pages of a packed store that the system has in memory, read into lent rows: neighbours by one call."""

from collections.abc import Sequence, Set

from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.lent_reads import LentReads, run_pages_max
from unified_cache.storage_backends.lent_rows import LentRows
from unified_cache.storage_backends.packed.segment import SegmentSlot
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["LentRuns"]


class LentRuns:
    """Reads into lent rows of the pages of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._reads = LentReads(disk)

    def read(self, pages: Sequence[PageIO], slots: Sequence[SegmentSlot | None], came: Set[int]) -> set[int]:
        """Fill the rows of pages from their slots, None where there is none; return the numbers of those filled.

        ``came`` are the numbers of pages that need not be read any more.
        """
        filled: set[int] = set()
        start = 0
        while start < len(pages):
            slot, first = slots[start], pages[start].lent
            end = start + 1
            if slot is not None and first is not None and start not in came:
                run = [first]
                pages_max = run_pages_max(first, slot.segment.object_bytes)
                while end < len(pages) and len(run) < pages_max and end not in came:
                    rows = _row_beside(pages[end].lent, first, slot, slots[end], len(run))
                    if rows is None:
                        break
                    run.append(rows)
                    end += 1
                filled.update(range(start, start + slot.segment.read_lent(slot.number, run, self._reads)))
            start = end
        return filled


def _row_beside(
    lent: LentRows | None, first: LentRows, first_slot: SegmentSlot, slot: SegmentSlot | None, distance: int
) -> LentRows | None:
    """Return the rows of a page of the same loan whose slot lies ``distance`` after another one; None if it is not."""
    if lent is None or lent.loan is not first.loan or slot is None:
        return None
    is_beside = slot.segment is first_slot.segment and slot.number == first_slot.number + distance
    return lent if is_beside else None
