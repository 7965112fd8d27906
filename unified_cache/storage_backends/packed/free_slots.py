"""Free slots of segments, and those of them that still take room on the disk."""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from unified_cache.storage_backends.packed.segment import Segment, SegmentKey, SegmentSlot

__all__ = ["FreeSlots"]


class FreeSlots:
    """The free slots of all segments of one key. Bookkeeping only, not thread-safe.

    Those that were used go first, and of these the lowest: what is used stays together, so that a batch has neighbours
    and the files at the end become empty.
    """

    __slots__ = (
        "_free_count",
        "_fresh",
        "_given_back",
        "_growing",
        "_idle",
        "_numbers",
        "_segments",
        "_slots_count",
        "_withdrawn",
        "key",
    )

    def __init__(self, key: SegmentKey) -> None:
        self.key = key
        self._slots_count = key.slots_count
        self._segments: dict[int, Segment] = {}
        self._idle: list[tuple[int, int]] = []
        """Heap of free slots that take room, by file and slot."""
        self._given_back: list[tuple[int, int]] = []
        """Heap of those that take none."""
        self._fresh: dict[int, int] = {}
        """First slot of each file from which on none was ever used."""
        self._growing: list[int] = []
        """Files with slots that were never used."""
        self._free_count: Counter[int] = Counter()
        """Of each file, in both heaps."""
        self._numbers: set[int] = set()
        self._withdrawn: set[int] = set()
        """Files that get no page any more."""

    @property
    def segments(self) -> list[Segment]:
        """All files, used or not."""
        return list(self._segments.values())

    @property
    def idle_count(self) -> int:
        """Free slots that take room on the disk."""
        return len(self._idle)

    def new_number(self) -> int:
        """Return the lowest number that no file has, and keep it for a new one."""
        number = next(number for number in itertools.count(1) if number not in self._numbers)
        self._numbers.add(number)
        return number

    def keep(self, number: int) -> None:
        """Give ``number`` to no file from now on: something stands under its name."""
        self._numbers.add(number)

    def drop(self, number: int) -> None:
        """Let a new file have ``number`` again."""
        self._numbers.discard(number)

    def add(self, segment: Segment, used: Collection[int], reached: int) -> None:
        """Take in a file: the slots in ``used`` hold pages, other ones below ``reached`` may take room."""
        self._numbers.add(segment.number)
        fresh = max(reached, max(used, default=-1) + 1)
        self._segments[segment.number] = segment
        self._fresh[segment.number] = fresh
        if fresh < self._slots_count:
            self._growing.append(segment.number)
        for slot in sorted(set(range(fresh)).difference(used)):
            heapq.heappush(self._idle, (segment.number, slot))
            self._free_count[segment.number] += 1

    def withdraw(self, segment: Segment) -> None:
        """Give no slot of a file away any more; its pages stay until they go."""
        if self._segments.get(segment.number) is not segment:
            return  # it was given away as empty
        self._withdrawn.add(segment.number)
        for free in (self._idle, self._given_back):
            free[:] = [place for place in free if place[0] != segment.number]
            heapq.heapify(free)
        self._growing = [number for number in self._growing if number != segment.number]

    def take(self, count: int) -> list[SegmentSlot]:
        """Take slots that are free, as many as there are up to ``count``."""
        taken: list[SegmentSlot] = []
        for free in (self._idle, self._given_back):
            while free and len(taken) < count:
                number, slot = heapq.heappop(free)
                self._free_count[number] -= 1
                taken.append(SegmentSlot(self._segments[number], slot))
        while self._growing and len(taken) < count:
            number = self._growing[0]
            fresh = self._fresh[number]
            end = min(fresh + count - len(taken), self._slots_count)
            taken += [SegmentSlot(self._segments[number], slot) for slot in range(fresh, end)]
            self._fresh[number] = end
            if end == self._slots_count:
                del self._growing[0]
        return taken

    def give(self, slots: Iterable[SegmentSlot]) -> None:
        """Take slots back that nobody uses any more."""
        self._give(slots, self._idle)

    def take_empty_segments(self) -> list[Segment]:
        """Give away the files in which every slot is free."""
        return self._take_empty(self._fresh)

    def take_empty_withdrawn(self) -> list[Segment]:
        """Give away those of them that get no page any more."""
        return self._take_empty(self._withdrawn) if self._withdrawn else []

    def _take_empty(self, numbers: Iterable[int]) -> list[Segment]:
        empty = {number for number in numbers if self._fresh[number] == self._free_count[number]}
        if not empty:
            return []
        for free in (self._idle, self._given_back):
            free[:] = [place for place in free if place[0] not in empty]
            heapq.heapify(free)
        for number in empty:
            del self._fresh[number], self._free_count[number]
        self._growing = [number for number in self._growing if number not in empty]
        self._withdrawn -= empty
        return [self._segments.pop(number) for number in empty]

    def take_idle(self) -> list[SegmentSlot]:
        """Take all free slots that take room; each is to come back by ``give_emptied``, or by ``give``."""
        taken = [SegmentSlot(self._segments[number], slot) for number, slot in self._idle]
        self._idle = []
        self._free_count.subtract(slot.segment.number for slot in taken)
        return taken

    def give_emptied(self, slots: Iterable[SegmentSlot]) -> None:
        """Take slots back that take no room any more."""
        self._give(slots, self._given_back)

    def _give(self, slots: Iterable[SegmentSlot], free: list[tuple[int, int]]) -> None:
        for segment, number in slots:
            self._free_count[segment.number] += 1
            if segment.number not in self._withdrawn:
                heapq.heappush(free, (segment.number, number))
