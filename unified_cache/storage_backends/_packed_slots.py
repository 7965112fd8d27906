"""Which slots of packed files are free, and which of these still take room on the disk."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from unified_cache.storage_backends._packed_file import PackedFile, Shape, Slot

__all__ = ["FreeSlots"]


class FreeSlots:
    """The free slots of all files of one shape. Bookkeeping only, not thread-safe.

    Those that were used go first, and of these the lowest: what is used stays together, so that a batch has neighbours
    and the files at the end become empty.
    """

    __slots__ = ("_files", "_fresh", "_given_back", "_idle", "_next_number", "_slot_bytes", "_slots_count", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._slot_bytes = shape.slot_bytes
        self._slots_count = shape.slots_count
        self._files: dict[int, PackedFile] = {}
        self._idle: list[tuple[int, int]] = []
        """Heap of free slots that take room, by file and slot."""
        self._given_back: list[tuple[int, int]] = []
        """Heap of those that take none."""
        self._fresh: dict[int, int] = {}
        """First slot of each file from which on none was ever used."""
        self._next_number = 0

    @property
    def files(self) -> list[PackedFile]:
        """All files, used or not."""
        return list(self._files.values())

    @property
    def idle_bytes(self) -> int:
        """Room that free slots take on the disk."""
        return len(self._idle) * self._slot_bytes

    def new_number(self) -> int:
        """Return a number that no file has or had."""
        self._next_number += 1
        return self._next_number

    def skip(self, number: int) -> None:
        """Give ``number`` and those below it to no file from now on."""
        self._next_number = max(self._next_number, number)

    def add(self, file: PackedFile, used: Sequence[int]) -> None:
        """Take in a file in which the slots in ``used`` hold pages; free ones below the last of them may take room."""
        self.skip(file.number)
        self._files[file.number] = file
        fresh = self._fresh[file.number] = max(used, default=-1) + 1
        holes = set(range(fresh)).difference(used)
        self._idle += [(file.number, slot) for slot in holes]
        heapq.heapify(self._idle)

    def take(self, count: int) -> list[Slot]:
        """Take slots that are free, as many as there are up to ``count``."""
        taken: list[Slot] = []
        for free in (self._idle, self._given_back):
            while free and len(taken) < count:
                number, slot = heapq.heappop(free)
                taken.append(Slot(self._files[number], slot))
        for number, fresh in self._fresh.items():
            if len(taken) == count:
                break
            end = min(fresh + count - len(taken), self._slots_count)
            taken += [Slot(self._files[number], slot) for slot in range(fresh, end)]
            self._fresh[number] = end
        return taken

    def give(self, slots: Iterable[Slot]) -> None:
        """Take slots back that nobody uses any more."""
        for slot in slots:
            heapq.heappush(self._idle, (slot.file.number, slot.number))

    def take_empty_files(self) -> list[PackedFile]:
        """Give away the files in which every slot is free."""
        free_count = Counter(number for free in (self._idle, self._given_back) for number, _ in free)
        empty = {number for number, fresh in self._fresh.items() if fresh == free_count[number]}
        for free in (self._idle, self._given_back):
            free[:] = [place for place in free if place[0] not in empty]
            heapq.heapify(free)
        for number in empty:
            del self._fresh[number]
        return [self._files.pop(number) for number in empty]

    def take_idle(self) -> list[Slot]:
        """Take all free slots that take room; each is to come back by ``give_emptied``, or by ``give``."""
        taken = [Slot(self._files[number], slot) for number, slot in self._idle]
        self._idle = []
        return taken

    def give_emptied(self, slots: Iterable[Slot]) -> None:
        """Take slots back that take no room any more."""
        for slot in slots:
            heapq.heappush(self._given_back, (slot.file.number, slot.number))
