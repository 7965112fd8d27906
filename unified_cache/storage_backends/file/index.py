"""Objects in a file store as one process knows them: their order of use and their bytes, in 60 bytes of memory each.

Every process has an index of its own, filled by a listing of the directories and kept by what it does itself; a sweep
makes another one. So no process waits for one that holds an index, or mends one that a dead process left.
"""

import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.front import STAMP_MAX_NS
from unified_cache.storage_backends.directory.records import PageRecords, PageSlot, new_slot
from unified_cache.storage_backends.file.page_reader import ListedObject
from unified_cache.storage_backends.protocol import StoredObject

SHELF_OBJECTS = 4096
"""Of one identity, pool and length that have records side by side; what is not used of them takes 2 bytes each."""


class _Shelf:
    """Records of objects of one identity, pool and length."""

    __slots__ = ("free", "key", "object_bytes", "records_count", "records_start")

    def __init__(self, key: tuple[bytes, str, int]) -> None:
        self.key = key
        self.object_bytes = key[2]
        self.records_count = SHELF_OBJECTS
        self.records_start = 0
        self.free = array("H", reversed(range(SHELF_OBJECTS)))
        """Numbers of records that no object has; the last one goes first."""


IndexedObject = PageSlot[_Shelf]


class FileIndex:
    """LRU order of objects with their sizes. Bookkeeping only; not thread-safe."""

    def __init__(self, taken_bytes: Callable[[int], int]) -> None:
        """``taken_bytes`` says what an object of a length takes of the cap."""
        self.bytes_used = 0
        self._taken_bytes = taken_bytes
        self._records: PageRecords[_Shelf] = PageRecords(secrets.randbits(64), taken_bytes)
        self._shelves: dict[tuple[bytes, str, int], list[_Shelf]] = {}
        """Those with free records, by what they are for."""

    def __len__(self) -> int:
        return self._records.count

    @property
    def newest_use(self) -> int:
        """Time of use of the most recent object, or later."""
        return self._records.new_uses(0)

    def labels(self) -> Iterator[Label]:
        """Yield the objects in no order."""
        for shelf in self._records.segments():
            for record in self._records.records_of(shelf).tolist():
                yield self._records.label_of(record)

    @property
    def last_birth(self) -> int:
        """Number of the object that was added last: while it is the same, none was added."""
        return self._records.last_birth

    def add(self, objects: Sequence[StoredObject]) -> None:
        """Make objects that are not known the most recent ones, the first one most of all."""
        latest = self._records.new_uses(len(objects))
        self._enter([(each, latest - number) for number, each in enumerate(objects)])

    def add_listed(self, listed: Sequence[ListedObject]) -> None:
        """Add objects that are not known, each as it was used when its file says."""
        uses = [min(max(each.mtime_ns, 1), STAMP_MAX_NS) for each in listed]
        self._outrun(uses)
        objects = [StoredObject(each.label, each.object_bytes) for each in listed]
        self._enter(zip(objects, uses, strict=True))
        self._records.clear_recent()  # most are not used soon

    def find_all(self, labels: Sequence[Label]) -> list[IndexedObject | None]:
        """Return where each object is known, None of one that is not."""
        return self._records.find_all(labels)

    def touch(self, labels: Sequence[Label]) -> list[IndexedObject | None]:
        """Make objects the most recent ones, the first one most of all; return them as ``find_all`` does."""
        found = self._records.find_all(labels)
        if any(found):
            self._records.use(found, self._records.new_uses(len(labels)))
        return found

    def use_later(self, uses: Mapping[Label, int]) -> None:
        """Give objects other times of use, those that were used before that."""
        self._outrun(uses.values())
        for slot, use in zip(self._records.find_all(list(uses)), uses.values(), strict=True):
            if slot is not None and self._records.use_of(slot.record) < use:
                self._records.use((slot,), use)

    def least_recent(
        self, short_bytes: int, keep: Iterable[IndexedObject | None], count_min: int = 0
    ) -> tuple[list[IndexedObject], int]:
        """Name the least recent objects that come to ``short_bytes``, ``count_min`` at least, none in ``keep``.

        Return what is short after all, too. The caller takes them out, unless they are too few.
        """
        kept = {found.record for found in keep if found is not None}
        return self._records.oldest(short_bytes, kept, count_min)

    def take_out(self, found: Iterable[IndexedObject | None]) -> list[StoredObject]:
        """Drop objects, those of them that are known; return them."""
        objects: list[StoredObject] = []
        is_there, leave = self._records.is_there, self._records.leave
        for each in found:
            if each is not None and is_there(each):
                shelf = each.segment
                identity, pool, object_bytes = shelf.key
                objects.append(StoredObject(Label(identity, leave(each), pool), object_bytes))
                self.bytes_used -= self._taken_bytes(object_bytes)
                shelf.free.append(each.number)
                if len(shelf.free) == 1:
                    self._shelves.setdefault(shelf.key, []).append(shelf)
                elif len(shelf.free) == SHELF_OBJECTS:
                    self._shelves[shelf.key].remove(shelf)
        return objects

    def _outrun(self, uses: Iterable[int]) -> None:
        """Make each time of use that is taken from now on later than these."""
        self._records.new_uses(max(max(uses, default=0) - self.newest_use, 0))

    def _enter(self, added: Iterable[tuple[StoredObject, int]]) -> None:
        """Add objects with their times of use."""
        entered: list[tuple[Label, PageSlot[_Shelf], int]] = []
        for (label, object_bytes), use in added:
            key = (label.identity, label.pool, object_bytes)
            shelves = self._shelves.setdefault(key, [])
            if not shelves:
                shelves.append(_Shelf(key))
            shelf = shelves[-1]
            entered.append((label, new_slot((shelf, shelf.free.pop(), 0, 0)), use))
            if not shelf.free:
                shelves.pop()
            self.bytes_used += self._taken_bytes(object_bytes)
        self._records.enter(entered)
