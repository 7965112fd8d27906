"""Byte cap of a file store, the room on its file system, and the eviction of files for both."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from threading import Lock

from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.disk import (
    block_bytes,
    in_blocks,
    missing_bytes,
    missing_inodes,
    opened,
    size_of,
)
from unified_cache.storage_backends.directory.front import SPARE_BYTES, Stamps, space_text
from unified_cache.storage_backends.directory.root import StoreRoot, identities_in
from unified_cache.storage_backends.file.index import FileIndex, IndexedObject
from unified_cache.storage_backends.file.page_reader import objects_in, path_of, unlink_object
from unified_cache.storage_backends.protocol import PageIO, StoredObject, page_bytes
from unified_cache.storage_backends.removals import RemovalBuffer

SWEEP_SHARE = 16
"""A process begins a sweep whenever it has stored the cap divided by this, and ends it within as much more."""

LOW_SHARE = 8
"""The low mark of a sweep is the cap less the cap divided by this; the high mark is the cap."""

LISTED_MIN = 16
"""Objects that each put at least lists while a sweep is under way: 0.3 ms."""

LISTED_MAX = 4096
"""Objects of a listing that are kept one by one, before they are entered in the index."""

INODES_SPARE = 64
"""Files that an eviction for want of inodes makes room for beyond the batch: directories, manifests, a restart."""

_NAME = "visits"
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OpenCounter:
    """A file that grows by a byte at each opening of the store, to notice a short-lived process. Not thread-safe."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._count = -1
        self.is_alone = False

    @classmethod
    def enter(cls, root: StoreRoot) -> "OpenCounter":
        """Count this opening."""
        with opened(root.disk, _NAME, _FLAGS, dir_fd=root.fd) as fd:
            root.disk.write(fd, b"\n")
        return cls(root)

    def forget(self) -> None:
        """Make the next look return False."""
        self.is_alone = False

    def look(self) -> bool:
        """Return whether no other process has been in the store since the last look."""
        before = (self._count, self.is_alone)
        try:
            # The count first: who enters after this is in the store, or counted the next time.
            self._count = self._root.disk.stat(_NAME, dir_fd=self._root.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            self._count = -1
        self._root.remove_dead()
        self.is_alone = self._root.is_alone()
        return before == (self._count, True) and self.is_alone


class _Sweep:
    """A listing of the whole store, under way."""

    def __init__(self, root: StoreRoot, index: FileIndex, changes: dict[Label, int | None]) -> None:
        """Take the changes of this process that the directories may not show yet: pages on their way.

        ``index`` is an empty one.
        """
        self.changes = changes
        """What this process has stored and removed since the listing began, by object; None for a removal."""
        self.index = index
        """What was listed."""
        self._rest = (
            known
            for identity in identities_in(root.disk, root.fd)
            for known in objects_in(root.disk, root.fd, identity)
        )

    def go_on(self, count: int | None) -> bool:
        """List so many objects more, None for all; False at the end. After an OSError it is of no use."""
        while count is None or count > 0:
            wanted_count = LISTED_MAX if count is None else min(count, LISTED_MAX)
            found = list(islice(self._rest, wanted_count))
            self.index.add_listed(found)
            if len(found) < wanted_count:
                return False
            count = None if count is None else count - wanted_count
        return True


class FileQuota:
    """LRU order and byte count of a store, as far as this process knows it, and the eviction for want of room.

    An object counts as the whole blocks that the file system has for it.

    A process that is alone in the directory knows all of it, and keeps the cap exactly: what several of its threads put
    at a time is over by the end of the last put. Where there are others, it
    counts what they stored when it sweeps: it lists the directories, a few objects with each of its puts, and if they
    hold more than the cap (the high mark) it evicts the least recently used down to the low mark. It begins a sweep
    whenever it has stored ``cap / SWEEP_SHARE``, and ends it before it has stored as much again. So with one cap for
    all, even when some die, the directories hold at most

        cap + (processes - 1) * 2 * (cap / SWEEP_SHARE + pages of puts under way)

    and what is being removed at the moment: the process whose sweep began last counts at most the cap, and each other
    one has stored no more than that since. Sweeps need no lock: two at a time choose the same victims.

    Where the file system has less free than a put and the reserve need, the least recent objects go too. Without a cap
    nothing is listed or counted until that happens first; then the store is known as with a cap, from one listing on.

    Thread-safe. Objects are removed outside the guards.
    """

    def __init__(
        self,
        root: StoreRoot,
        bytes_max: int | None,
        stamps: Stamps,
        open_counter: OpenCounter,
        free_bytes_min: int,
    ) -> None:
        self.bytes_max = bytes_max
        self.removed = RemovalBuffer()
        """What has gone, as far as this process knows, for subscribers.

        What other processes removed is reported once a sweep of this one has missed it; without a cap there is none.
        """
        self._root = root
        self.taken_bytes = lru_cache(maxsize=64)(partial(in_blocks, block_bytes(root.disk, root.fd)))
        """What an object of a length takes of the file system."""
        self._index = FileIndex(self.taken_bytes)
        self._is_counting = bytes_max is not None
        """Whether this process counts what it stores and removes."""
        self._is_known = False
        """Whether it knows what was in the store before."""
        self._listed_bytes = 0
        """What it knew after the last listing."""
        self._stamps = stamps
        self._open_counter = open_counter
        self._free_bytes_min = free_bytes_min
        self._sweep_bytes = 0
        self._restored_count = 0
        self.evicted_count = 0
        self._unswept_bytes = 0
        """Granted since the last sweep began."""
        self._under_way: Counter[StoredObject] = Counter()
        """Pages granted room whose files have no name yet, with the puts that write them."""
        self._sweep: _Sweep | None = None
        self._sweep_guard = Lock()
        """Held by the one thread that goes on with the sweep; taken before ``_guard``."""
        self._guard = Lock()
        """Guards the LRU order and the counts; no file is waited for but to see whether one that may go is there."""

    def fill(self) -> None:
        """List the directories and evict what exceeds the cap; times of use from now on are later than all found."""
        with self._sweep_guard:
            self._list()

    def _list(self) -> None:
        self._open_counter.look()
        with self._guard:
            self._is_counting = True
            self._sweep = sweep = self._new_sweep()
        sweep.go_on(None)
        self._end(sweep)
        self._stamps.outrun(self._index.newest_use)
        self._is_known = True

    def bytes_used(self) -> int:
        """Sum up the blocks of objects that lie in the directories, of all processes. Linear in objects."""
        disk, root_fd = self._root.disk, self._root.fd
        listed = (known for each in identities_in(disk, root_fd) for known in objects_in(disk, root_fd, each))
        return sum(self.taken_bytes(known.object_bytes) for known in listed)

    def reserve(self, fresh: Sequence[StoredObject], batch: Sequence[PageIO]) -> set[Label]:
        """Grant room to the first of ``fresh``, evicting none of the batch; return those. ``end_grant`` ends each."""
        if self._restored_count != self._root.restored_count:
            self._begin_again()
        granted = [
            each for each in fresh if self.bytes_max is None or self.taken_bytes(each.object_bytes) <= self.bytes_max
        ]
        reason = self._make_space(granted, batch) or f"they exceed the cap of {self.bytes_max} bytes"
        if self._is_counting:
            self._go_on_sweeping(self._taken(granted))
            if not self._evict_for(granted, batch):
                reason = "what is least recent could not be removed"
        if len(granted) < len(fresh):
            self._root.declines.record(len(fresh) - len(granted), reason)
        self.removed.restored(each.label for each in granted)
        return {each.label for each in granted}

    def end_grant(self, named: Sequence[StoredObject], dropped: Sequence[StoredObject]) -> None:
        """Release the room of pages that were not written; count again those uncounted before their files had names."""
        # Another process may have stored a page under the same name: that stays counted.
        gone = [each.label for each in dropped if self._object_size(each.label) is None]
        victims: list[StoredObject] = []
        if self._is_counting:
            with self._guard:
                self._end_under_way((*named, *dropped))
                if gone:
                    self._uncount_gone(gone)
                self._count_there([each.label for each in named])
                chosen, _ = self._victims(0, ())
                victims = self._take_out(chosen) if chosen else []
        if victims:
            self._evict(victims)
        self.removed.record(gone)

    def evict_for_fault(self, batch: Sequence[PageIO]) -> bool:
        """Evict where the system had no room for a batch, see ``DirectoryStorage``."""
        disk, root_fd = self._root.disk, self._root.fd
        wanted_bytes = SPARE_BYTES + sum(self.taken_bytes(page_bytes(page)) for page in batch)
        short_bytes = max(wanted_bytes, missing_bytes(disk, root_fd, wanted_bytes + self._free_bytes_min))
        short_count = missing_inodes(disk, root_fd, len(batch) + INODES_SPARE)
        return self._evict_oldest(short_bytes, frozenset(page.label for page in batch), max(short_count, 0))

    def use(self, labels: Sequence[Label], pages: Sequence[PageIO] = ()) -> None:
        """Make objects recent, the first most of all, and count unknown ones: those in ``pages``, and what is there."""
        if not self._is_counting:
            return
        with self._guard:
            found = self._index.touch(labels)
        if not all(found):
            unknown = [label for label, each in zip(labels, found, strict=True) if each is None]
            # What a process knew that is alone, and knows no more, may be gone since the page was read.
            known = {} if self._open_counter.is_alone else {page.label: page_bytes(page) for page in pages}
            for label in unknown:
                with self._guard:
                    if label not in known:
                        self._count_there((label,))
                    elif self._index.find_all((label,)) == [None]:
                        self._add([StoredObject(label, known[label])])
            with self._guard:
                self._index.touch(labels)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were, and raise OSError for the first that cannot be removed."""
        with self._guard:
            self._forget(labels)
        self.removed.record(labels)
        try:
            return sum(unlink_object(self._root.disk, self._root.fd, label) for label in labels)
        finally:
            with self._guard:
                self._uncount_gone(labels)

    def _evict_for(self, granted: list[StoredObject], batch: Sequence[PageIO]) -> bool:
        """Evict for what is granted, and take out of it what finds no room; False, and all out, where that fails."""
        with self._guard:
            keep = self._index.touch([page.label for page in batch])
            chosen = self._choose_victims(granted, keep)
            if any(keep):
                self._forget([each.label for each in granted])  # of another length, or its file is gone
            self._add(granted)
            self._under_way.update(granted)
            self._unswept_bytes += self._taken(granted)
            victims, last_birth = self._take_out(chosen), self._index.last_birth
        _, stuck_count = self._evict(victims, last_birth) if victims else (0, 0)
        if not stuck_count:
            return True
        with self._guard:
            self._forget([each.label for each in granted])
            self._end_under_way(granted)
        granted.clear()
        return False

    def _victims(self, needed_bytes: int, keep: Sequence[IndexedObject | None]) -> tuple[list[IndexedObject], int]:
        """Name the least recent objects that make room for so many bytes, and the bytes still short after that."""
        if self.bytes_max is None:
            return [], 0
        short_bytes = self._index.bytes_used + needed_bytes - self.bytes_max
        if short_bytes <= 0:
            return [], 0
        if needed_bytes > self.bytes_max:
            return [], needed_bytes - self.bytes_max
        return self._index.least_recent(short_bytes, keep)

    def _choose_victims(self, granted: list[StoredObject], keep: Sequence[IndexedObject | None]) -> list[IndexedObject]:
        """Name victims for what is granted; take out of it what finds no room."""
        while True:
            victims, short_bytes = self._victims(self._taken(granted), keep)
            if not short_bytes or not granted:
                return victims
            while short_bytes > 0 and granted:
                short_bytes -= self._taken([granted.pop()])

    def _make_space(self, granted: list[StoredObject], batch: Sequence[PageIO]) -> str:
        """Evict until the file system has room for what is granted; take out of it, and say why, what finds none."""
        short_bytes = self._short_bytes(granted)
        if short_bytes <= 0:
            return ""
        reason = space_text(self._root, self._free_bytes_min)
        keep = frozenset(page.label for page in batch)
        is_over = not self._know()
        while granted and short_bytes > 0:
            if is_over or (short_bytes > self._index.bytes_used and not self._list_again()):
                short_bytes -= self._taken([granted.pop()])
                continue
            before_bytes, is_evicted = short_bytes, self._evict_oldest(short_bytes, keep)
            short_bytes = self._short_bytes(granted)
            # Where that brought nothing others take it, or the system is not done with it: no more goes.
            is_over = not is_evicted or short_bytes >= before_bytes
        return reason

    def _short_bytes(self, granted: Sequence[StoredObject]) -> int:
        wanted_bytes = self._taken(granted) + self._free_bytes_min
        return missing_bytes(self._root.disk, self._root.fd, wanted_bytes) if granted else 0

    def _evict_oldest(self, short_bytes: int, keep: frozenset[Label], count_min: int = 0) -> bool:
        """Remove the least recent objects of so many bytes, ``count_min`` at least; return whether there were any."""
        while self._know():
            with self._guard:
                unnamed = self._index.find_all([*keep, *(each.label for each in self._under_way)])
                chosen, _ = self._index.least_recent(short_bytes, unnamed, count_min)
                victims = self._take_out(chosen)
            removed_count, stuck_count = self._evict(victims)
            if removed_count:
                return True
            if stuck_count or (not victims and not self._list_again()):
                break
        return False

    def _know(self) -> bool:
        """List the store unless this process knows what is in it; return whether it does."""
        if not self._is_known:
            with self._sweep_guard, suppress(OSError):  # what cannot be listed is not evicted
                if not self._is_known:
                    self._list()
        return self._is_known

    def _list_again(self) -> bool:
        """List the store where most that was known is gone, and others may have stored more; return whether it was."""
        if self._index.bytes_used >= self._listed_bytes:
            return False
        with self._sweep_guard, suppress(OSError):
            if not self._open_counter.look():
                self._list()
                return True
        return False

    def _taken(self, objects: Iterable[StoredObject]) -> int:
        return sum([self.taken_bytes(each.object_bytes) for each in objects])

    def _evict(self, victims: Sequence[StoredObject], last_birth: int = -1) -> tuple[int, int]:
        """Remove what is counted no more; count again what cannot be removed. Return how many went and how many not.

        Where no other object was added since the one of ``last_birth``, no victim is counted again.
        """
        removed_count = 0
        stuck: list[StoredObject] = []
        for victim in victims:
            try:
                removed_count += unlink_object(self._root.disk, self._root.fd, victim.label)
            except OSError:
                stuck.append(victim)
        with self._guard:
            self.evicted_count += len(victims) - len(stuck)
            if last_birth != self._index.last_birth or self._sweep is not None:
                self._uncount_gone([victim.label for victim in victims if victim not in stuck])
            if stuck:
                found = self._index.find_all([victim.label for victim in stuck])
                self._add([victim for victim, there in zip(stuck, found, strict=True) if not there])
        self.removed.record(victim.label for victim in victims if victim not in stuck)
        return removed_count, len(stuck)

    def _go_on_sweeping(self, coming_bytes: int) -> None:
        """Go on with the sweep that is under way as fast as its bound needs, or begin one that is due."""
        must_end = self._unswept_bytes + coming_bytes > self._sweep_bytes
        if not self._sweep_guard.acquire(blocking=must_end):
            return
        try:
            if self._sweep is None:
                self._begin_if_due()
                must_end = coming_bytes >= self._sweep_bytes
            sweep = self._sweep
            if sweep is None:
                return
            # Twice as fast as what is known would need: others may have stored as much again.
            share = 2 * coming_bytes / max(1, self._sweep_bytes)
            if not sweep.go_on(None if must_end else LISTED_MIN + int(share * len(self._index))):
                self._end(sweep)
        except OSError:
            # What cannot be listed now may be at the next put, from the beginning.
            self._sweep_again()
        finally:
            self._sweep_guard.release()

    def _begin_again(self) -> None:
        """Believe nothing of what was known before somebody removed the directory."""
        self._restored_count = self._root.restored_count
        self.removed.lose()
        with self._sweep_guard:
            self._sweep_again()

    def _sweep_again(self) -> None:
        self._open_counter.forget()
        self._sweep = None
        self._unswept_bytes = self._sweep_bytes

    def _begin_if_due(self) -> None:
        """Begin a sweep where enough was stored since the last one, and others were there or are."""
        if self._unswept_bytes < self._sweep_bytes:
            return
        is_alone = self._open_counter.look()
        with self._guard:
            self._unswept_bytes = 0
            if not is_alone:
                self._sweep = self._new_sweep()

    def _end(self, sweep: _Sweep) -> None:
        """Know what was listed and what this process did meanwhile; evict what exceeds the cap."""
        unwritten = self._stamps.unwritten()
        sweep.index.use_later(unwritten)
        with self._guard:
            known, self._index = self._index, sweep.index
            for label, object_bytes in sweep.changes.items():
                self._index.take_out(self._index.find_all((label,)))
                if object_bytes is not None:
                    self._index.add((StoredObject(label, object_bytes),))
            gone: list[Label] = []
            if self.removed.has_subscribers:
                before = list(known.labels())
                gone = [label for label, found in zip(before, self._index.find_all(before), strict=True) if not found]
            self._sweep = None
            self._sweep_bytes = (self.bytes_max or self._index.bytes_used) // SWEEP_SHARE
            victims: list[StoredObject] = []
            if self.bytes_max is not None and self._index.bytes_used > self.bytes_max:
                short_bytes = self._index.bytes_used - self.bytes_max
                below_bytes = 0 if self._open_counter.is_alone else self.bytes_max // LOW_SHARE
                keep = self._index.find_all([each.label for each in self._under_way])
                victims = self._take_out(self._index.least_recent(short_bytes + below_bytes, keep)[0])
            self._listed_bytes = self._index.bytes_used
        self.removed.record(gone)
        self._evict(victims)

    def _add(self, objects: Sequence[StoredObject]) -> None:
        """Count objects, the first one as the most recent. The caller holds the guard."""
        self._index.add(objects)
        if self._sweep is not None:
            for label, object_bytes in reversed(objects):
                self._sweep.changes.pop(label, None)
                self._sweep.changes[label] = object_bytes

    def _new_sweep(self) -> _Sweep:
        return _Sweep(
            self._root, FileIndex(self.taken_bytes), {each.label: each.object_bytes for each in self._under_way}
        )

    def _end_under_way(self, objects: Sequence[StoredObject]) -> None:
        for each in objects:
            left_count = self._under_way.pop(each, 0) - 1
            if left_count > 0:
                self._under_way[each] = left_count

    def _forget(self, labels: Sequence[Label]) -> None:
        """Count objects no more. The caller holds the guard."""
        self._take_out(self._index.find_all(labels))
        if self._sweep is not None:
            self._sweep.changes.update(dict.fromkeys(labels))

    def _take_out(self, found: Iterable[IndexedObject | None]) -> list[StoredObject]:
        """Count known objects no more, and return them. The caller holds the guard."""
        objects = self._index.take_out(found)
        if self._sweep is not None:
            self._sweep.changes.update({each.label: None for each in objects})
        return objects

    def _count_there(self, labels: Sequence[Label]) -> None:
        """Count what has a file, and is not counted. The caller holds the guard."""
        found = self._index.find_all(labels)
        for label in () if all(found) else [label for label, each in zip(labels, found, strict=True) if not each]:
            object_bytes = self._object_size(label)
            if object_bytes is not None:
                self._add([StoredObject(label, object_bytes)])

    def _uncount_gone(self, labels: Sequence[Label]) -> None:
        """Count no more what has no file; a put of it that is under way counts it again. The caller holds the guard."""
        found = self._index.find_all(labels)
        if any(found) or self._sweep is not None:
            known = dict(zip(labels, found, strict=True))
            self._forget([label for label in labels if not known[label] or self._object_size(label) is None])

    def _object_size(self, label: Label) -> int | None:
        """Return the bytes of the file that has an object's name; None where there is none, or that cannot be seen."""
        try:
            return size_of(self._root.disk, self._root.fd, path_of(label))
        except OSError:
            return None
