"""Slot allocators: which pages of a pool are free, and which slots of two pools belong together."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError, SlotError
from unified_cache.core.pool import Pages, Slots

FEW_SLOTS = 64
"""Slots up to which a set is faster than numpy."""

_OFFERED = -1
_FREE, _OUT, _KEPT = range(3)
_STATE_NAMES = ("free", "out", "the tree's")


class StoredSlots:
    """Slots of one tier whose page storage says that it has, or is being given, and when it last had a hint of it.

    By component. Time is counted in bytes that storage was given: a store that evicts does so only then.
    """

    __slots__ = ("_has_any", "_now", "_touched_at", "clears_count")

    def __init__(self, capacity: Sequence[int]) -> None:
        self.clears_count = 0
        """Times that all was forgotten: what was read before the last may not be there any more."""
        self._now = 1
        self._has_any = False
        """Whether storage was given any since all was forgotten."""
        self._touched_at: list[npt.NDArray[np.int64]] = [np.zeros(pages + 1, np.int64) for pages in capacity]
        """0 where storage does not have the page, -1 where it is being given."""

    def add(self, component: int, slots: Slots) -> None:
        """Record that storage has the pages in these slots, as of now."""
        self._has_any = True
        self._touched_at[component][slots] = self._now

    def offer(self, component: int, slots: Slots) -> None:
        """Record that a backup is giving storage the pages in these slots, until ``add`` or ``forget``."""
        self._has_any = True
        self._touched_at[component][slots] = _OFFERED

    def offered(self, component: int, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots whose page a backup is giving to storage."""
        mask: npt.NDArray[np.bool_] = self._touched_at[component][slots] == _OFFERED
        return mask

    def record_given(self, given_bytes: int) -> None:
        """Advance the clock, which counts the bytes that storage was given."""
        self._now += given_bytes

    def forget(self, component: int, slots: Slots) -> None:
        """Record that storage may not have them, or that the slots get other pages."""
        if self._has_any:
            self._touched_at[component][slots] = 0

    def forget_all(self) -> None:
        """Record that storage may have none."""
        self.clears_count += 1
        self._has_any = False
        for touched_at in self._touched_at:
            touched_at[:] = 0

    def among(self, component: int, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots whose page storage has."""
        return self._touched_at[component][slots] > 0

    def unheard_of(self, component: int, slots: Slots, given_bytes: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots whose page storage has, with no hint for the last bytes that it was given."""
        touched_at = self._touched_at[component][slots]
        return (touched_at > 0) & (touched_at <= self._now - given_bytes) & (slots >= 0)


class SlotAllocator:
    """Hand out page slots ``1 .. capacity`` from a preallocated stack, O(n) per call.

    A slot is free, *out* (with a request or an operation) or *kept* (the tree's), and only who has it gives it back:

        free --allocate--> out --keep--> kept
        free <----free---- out
        free <---------------drop------- kept

    Slot 0 is the padding sink: it exists in every pool and is never handed out.
    """

    __slots__ = ("_free", "_order", "_states", "capacity", "free_count", "kept_count")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"a pool cannot have {capacity} pages")
        self.capacity = capacity
        self._free: Slots = np.arange(capacity, 0, -1, dtype=np.int32)
        self.free_count = capacity
        """Slots not handed out."""
        self.kept_count = 0
        """Slots in the tree."""
        self._states: npt.NDArray[np.int8] = np.full(capacity + 1, _FREE, np.int8)
        self._order: npt.NDArray[np.int32] = np.zeros(capacity + 1, np.int32)
        """Scratch: where a call names a slot; tells a slot named twice in O(n)."""

    @property
    def out_count(self) -> int:
        """Slots handed out and not kept."""
        return self.capacity - self.free_count - self.kept_count

    def allocate(self, count: int) -> Slots | None:
        """Hand out ``count`` slots, in ascending runs as far as they are fresh; None if there are not as many."""
        if count > self.free_count:
            return None
        rest = self.free_count - count
        slots = self._free[rest : self.free_count][::-1].copy()
        self.free_count = rest
        self._states[slots] = _OUT
        return slots

    def free(self, slots: Slots) -> None:
        """Take slots back that are out; a SlotError, as ``check_out``, frees nothing."""
        self.check_out(slots)
        self._push(slots)

    def keep(self, slots: Slots) -> None:
        """Record that slots which are out are the tree's now; see ``check_out``."""
        self._states[slots] = _KEPT
        self.kept_count += len(slots)

    def drop(self, slots: Slots) -> None:
        """Take slots back that the tree kept; a SlotError frees nothing."""
        self._check(slots, _KEPT)
        self.kept_count -= len(slots)
        self._push(slots)

    def check_out(self, slots: Slots) -> None:
        """Raise SlotError for a slot that is out of range, free, the tree's, or named twice."""
        self._check(slots, _OUT)

    def is_out(self, slots: Slots) -> bool:
        """Return whether every slot is in range and out."""
        return self._all_are(slots, _OUT)

    def out_among(self, slots: Slots) -> Slots:
        """Return those of these slots that are out."""
        is_out: Pages = self._states.take(slots) == _OUT
        return slots[is_out]

    def is_kept(self, slots: Slots) -> bool:
        """Return whether every slot is in range and the tree's."""
        return self._all_are(slots, _KEPT)

    def _all_are(self, slots: Slots, state: int) -> bool:
        if not len(slots):
            return True
        return (
            int(slots.min()) >= 1 and int(slots.max()) <= self.capacity and bool((self._states[slots] == state).all())
        )

    def _check(self, slots: Slots, state: int) -> None:
        count = len(slots)
        if not count:
            return
        # Most calls name few slots: argmin and count_nonzero take half the time of min and any, which begin reductions.
        if slots[slots.argmin()] < 1 or slots[slots.argmax()] > self.capacity:
            raise SlotError(f"slots must be in [1, {self.capacity}], found {int(slots.min())} .. {int(slots.max())}")
        states = self._states.take(slots)
        if states.tobytes().count(state) != count:  # a third of the time of a comparison as an array
            slot = int(slots[states != state][0])
            raise SlotError(f"slot {slot} is {_STATE_NAMES[self._states[slot]]}, not {_STATE_NAMES[state]}")
        if count <= FEW_SLOTS:
            is_twice = len(set(slots.tolist())) < count
        else:
            order = np.arange(count, dtype=np.int32)
            self._order[slots] = order
            is_twice = bool(np.count_nonzero(self._order.take(slots) != order))
        if is_twice:
            raise SlotError("a slot is named twice in one call")

    def _push(self, slots: Slots) -> None:
        count = len(slots)
        if not count:
            return
        self._states[slots] = _FREE
        self._free[self.free_count : self.free_count + count] = slots[::-1]
        self.free_count += count


class MapChange(NamedTuple):
    """Full slots whose entries in the page map have to change; a tuple, since one is made for each page evicted."""

    full: Slots
    peers: Slots | None
    """The peer of each from now on, shape (pages,); None leaves all of them without one."""


class PageMap:
    """Full slot → slot of the component that is reached through Full's slots (SWA), one entry per page.

    The table is changed in place and never replaced; what was read from it is true until the next change, so nobody
    keeps that longer than one forward. ``table[slot]`` is 0, the padding sink, where nothing is mapped. The last entry
    is -1, so that slot -1 stays -1. As full_to_swa_index_mapping in SGLang 0.5.23, in pages instead of tokens.
    """

    __slots__ = ("table", "version")

    def __init__(self, capacity: int) -> None:
        self.table: Slots = np.zeros(capacity + 2, np.int32)
        self.table[-1] = -1
        self.version = 0
        """Counts changed entries; a translation made under another version may be stale."""

    def bind(self, full: Slots, peers: Slots) -> None:
        """Map each Full slot to its peer."""
        self.table[full] = peers
        self.version += len(full)

    def unbind(self, full: Slots) -> None:
        """Leave Full slots without a peer."""
        self.table[full] = 0
        self.version += len(full)

    def apply(self, changes: Iterable[MapChange]) -> None:
        """Make changes of the tree in the order given."""
        for change in changes:
            if change.peers is None:
                self.unbind(change.full)
            else:
                self.bind(change.full, change.peers)

    def peers(self, full: Slots) -> Slots:
        """Return the peer of each Full slot: 0 where there is none, -1 for slot -1."""
        return self.table[full]

    def clear(self) -> None:
        """Unmap everything."""
        self.table[:-1] = 0
        self.version += len(self.table)


class PairedAllocator:
    """Full and SWA slots that belong together, and the map between them.

    Ids diverge as soon as either side frees: nothing may assume that a page has one number in both pools.
    """

    __slots__ = ("full", "map", "peer")

    def __init__(self, full: SlotAllocator, peer: SlotAllocator) -> None:
        self.full = full
        self.peer = peer
        self.map = PageMap(full.capacity)

    def free_full(self, full: Slots) -> None:
        """Free Full slots whose peers were freed or moved before; a SlotError frees nothing."""
        mapped = self.map.peers(full) > 0
        if mapped.any():
            raise SlotError(f"slot {int(full[mapped][0])} still has a peer; free or move that first")
        self.full.free(full)
