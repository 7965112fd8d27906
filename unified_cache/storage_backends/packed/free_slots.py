"""Which slots of packed files are free, and which of these still take room on the disk."""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from unified_cache.storage_backends.packed.segment import PackedFile, Shape, Slot

__all__ = ["FreeSlots"]


class FreeSlots:
    """The free slots of all files of one shape. Bookkeeping only, not thread-safe.

    Those that were used go first, and of these the lowest: what is used stays together, so that a batch has neighbours
    and the files at the end become empty.
    """

    __slots__ = (
        "_files",
        "_free_count",
        "_fresh",
        "_given_back",
        "_growing",
        "_idle",
        "_numbers",
        "_slots_count",
        "shape",
    )

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._slots_count = shape.slots_count
        self._files: dict[int, PackedFile] = {}
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

    @property
    def files(self) -> list[PackedFile]:
        """All files, used or not."""
        return list(self._files.values())

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

    def add(self, file: PackedFile, used: Collection[int], reached: int) -> None:
        """Take in a file: the slots in ``used`` hold pages, other ones below ``reached`` may take room."""
        self._numbers.add(file.number)
        fresh = max(reached, max(used, default=-1) + 1)
        self._files[file.number] = file
        self._fresh[file.number] = fresh
        if fresh < self._slots_count:
            self._growing.append(file.number)
        for slot in sorted(set(range(fresh)).difference(used)):
            heapq.heappush(self._idle, (file.number, slot))
            self._free_count[file.number] += 1

    def take(self, count: int) -> list[Slot]:
        """Take slots that are free, as many as there are up to ``count``."""
        taken: list[Slot] = []
        for free in (self._idle, self._given_back):
            while free and len(taken) < count:
                number, slot = heapq.heappop(free)
                self._free_count[number] -= 1
                taken.append(Slot(self._files[number], slot))
        while self._growing and len(taken) < count:
            number = self._growing[0]
            fresh = self._fresh[number]
            end = min(fresh + count - len(taken), self._slots_count)
            taken += [Slot(self._files[number], slot) for slot in range(fresh, end)]
            self._fresh[number] = end
            if end == self._slots_count:
                del self._growing[0]
        return taken

    def give(self, slots: Iterable[Slot]) -> None:
        """Take slots back that nobody uses any more."""
        for slot in slots:
            heapq.heappush(self._idle, (slot.file.number, slot.number))
            self._free_count[slot.file.number] += 1

    def take_empty_files(self) -> list[PackedFile]:
        """Give away the files in which every slot is free."""
        empty = {number for number, fresh in self._fresh.items() if fresh == self._free_count[number]}
        if not empty:
            return []
        for free in (self._idle, self._given_back):
            free[:] = [place for place in free if place[0] not in empty]
            heapq.heapify(free)
        for number in empty:
            del self._fresh[number], self._free_count[number]
        self._growing = [number for number in self._growing if number not in empty]
        return [self._files.pop(number) for number in empty]

    def take_idle(self) -> list[Slot]:
        """Take all free slots that take room; each is to come back by ``give_emptied``, or by ``give``."""
        taken = [Slot(self._files[number], slot) for number, slot in self._idle]
        self._idle = []
        self._free_count.subtract(slot.file.number for slot in taken)
        return taken

    def give_emptied(self, slots: Iterable[Slot]) -> None:
        """Take slots back that take no room any more."""
        for slot in slots:
            heapq.heappush(self._given_back, (slot.file.number, slot.number))
            self._free_count[slot.file.number] += 1
