"""Pages of a packed store that the system has in memory: what was stored together is read by one call.

pages asked for     a  b  c  d  e       what is asked for together was stored together, as a rule
slots               7  8  9  3  4       two runs: [7, 10) and [3, 5), a read for each
"""

from collections.abc import Sequence

from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.memory_runs import MemoryRuns, run_pages_max
from unified_cache.storage_backends.memory_reads import RowsTarget
from unified_cache.storage_backends.packed.segment import SegmentSlot

__all__ = ["SlotRuns"]


class SlotRuns:
    """Reads from memory of the pages of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._runs = MemoryRuns(disk)

    def read(self, targets: Sequence[RowsTarget], slots: Sequence[SegmentSlot | None]) -> list[bool]:
        """Read pages from their slots, None where there is none; tell of each whether it is there and verified.

        Of a call whose first page is not in memory none is read: it is of one prompt, which is there or not.
        """
        came = [False] * len(targets)
        start, is_first = 0, True
        while start < len(targets) and self._runs.is_possible:
            slot = slots[start]
            end = start + 1
            if slot is not None:
                if is_first and slot.segment.lacks(slot.number, self._runs):
                    break
                is_first = False
                end_max = min(start + run_pages_max(targets[start]), len(targets))
                while end < end_max and (other := slots[end]) is not None and other.is_beside(slot, end - start):
                    end += 1
                came[start:end] = slot.segment.read_memory(slot.number, targets[start:end], self._runs)
            start = end
        return came
