"""Slot allocators: which pages of a pool are free."""

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ConfigError, SlotError
from unified_cache.pool import Slots

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hand out page slots ``1 .. capacity`` from a preallocated stack, O(n) per call.

    Slot 0 is the padding sink: it exists in every pool and is never handed out.
    """

    __slots__ = ("_free", "_free_count", "_order", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"a pool cannot have {capacity} pages")
        self.capacity = capacity
        self._free: Slots = np.arange(capacity, 0, -1, dtype=np.int32)
        self._free_count = capacity
        self._taken: npt.NDArray[np.bool_] = np.zeros(capacity + 1, np.bool_)
        self._order: npt.NDArray[np.int32] = np.zeros(capacity + 1, np.int32)
        """Scratch: where a call to ``free`` names a slot; tells a slot named twice in O(n)."""

    @property
    def free_count(self) -> int:
        """Slots not handed out."""
        return self._free_count

    @property
    def taken_count(self) -> int:
        """Slots handed out."""
        return self.capacity - self._free_count

    def allocate(self, count: int) -> Slots | None:
        """Hand out ``count`` slots, or None and nothing if there are not as many.

        Fresh slots come in ascending runs, so that copies of neighbouring pages join.
        """
        if count > self._free_count:
            return None
        rest = self._free_count - count
        slots = self._free[rest : self._free_count][::-1].copy()
        self._free_count = rest
        self._taken[slots] = True
        return slots

    def free(self, slots: Slots) -> None:
        """Take slots back.

        Raises:
            SlotError: a slot is out of range, was not handed out, or is named twice. Nothing was freed.
        """
        count = len(slots)
        if not count:
            return
        if int(slots.min()) < 1 or int(slots.max()) > self.capacity:
            raise SlotError(f"slots must be in [1, {self.capacity}], found {int(slots.min())} .. {int(slots.max())}")
        if not self._taken[slots].all():
            raise SlotError(f"slot {int(slots[~self._taken[slots]][0])} is free already")
        order = np.arange(count, dtype=np.int32)
        self._order[slots] = order
        if not np.array_equal(self._order[slots], order):
            raise SlotError("a slot is named twice in one call to free")
        self._taken[slots] = False
        self._free[self._free_count : self._free_count + count] = slots[::-1]
        self._free_count += count

    def owns(self, slots: Slots) -> bool:
        """Tell whether every slot is in range and handed out."""
        if not len(slots):
            return True
        return int(slots.min()) >= 1 and int(slots.max()) <= self.capacity and bool(self._taken[slots].all())
