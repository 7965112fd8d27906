"""Byte cap of a file store that all processes share, and the eviction of files for it."""

from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from threading import Lock

from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.common.lru import StoreLru, page_bytes
from unified_cache.storage_backends.directory.descriptors import missing_bytes, missing_inodes, size_of
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.root import StoreRoot
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.journal import Journal, JournalLine
from unified_cache.storage_backends.file.layout import place_of
from unified_cache.storage_backends.file.listing import StoreListing
from unified_cache.storage_backends.memory_reads import RowsTarget
from unified_cache.storage_backends.protocol import Answer, PageIO, StoredObject
from unified_cache.storage_backends.removals import RemovalBuffer

__all__ = [
    "UNREMOVABLE_MAX",
    "SharedQuota",
    "addition_lines",
    "decline_for_free_space",
    "is_there",
    "note_changes",
    "removal_lines",
]

UNREMOVABLE_MAX = 16
"""Objects that cannot be removed in one eviction before it gives up and the put is declined."""


INODES_SPARE = 64
"""Files that an eviction for want of inodes makes room for beyond the batch: directories, manifests, a restart."""


class SharedQuota:
    """LRU order and byte count of the whole store, kept in step with every other process through the journal.

    Pages count from the moment they are granted room, victims no more from the moment they are chosen. So what lies
    in the directories exceeds the cap at most by what all processes together are removing at the moment, and by
    the victims of a process that died while it did.

    A process that fell behind what the journal keeps lists the directories: each of its calls a part, outside the
    guards. Until the listing is complete it evicts by what it knew, and may exceed the cap by what it puts meanwhile.

    Thread-safe. Objects are removed outside the guards.
    """

    def __init__(
        self,
        root: StoreRoot,
        bytes_max: int,
        directories: OpenDirectories,
        journal: Journal,
        free_bytes_min: int,
    ) -> None:
        self.bytes_max = bytes_max
        """Cap of the store."""
        self.removed = RemovalBuffer()
        """What has gone, whoever removed it, for whoever wants to know."""
        self._root = root
        self._lru = StoreLru(bytes_max)
        self._directories = directories
        self._journal = journal
        self._free_bytes_min = free_bytes_min
        self._restored_count = 0
        self._evicted_count = 0
        self._declined_count = 0
        self._unremovable_count = 0
        self._unrecorded_count = 0
        self._listing: StoreListing | None = None
        """Listing under way since the others went too far ahead to be followed; None as long as they did not."""
        self._listing_guard = Lock()
        """Held by the one thread that goes on with the listing; nobody waits for it."""
        self._order = Lock()
        """Guards the journal, and with it the order in which its lines are applied here, and which listing it is."""
        self._guard = Lock()
        """Guards the LRU order; taken inside ``_order``, never held while a file is waited for."""

    @property
    def evicted_count(self) -> int:
        """Objects that this process evicted."""
        return self._evicted_count

    @property
    def declined_count(self) -> int:
        """Pages that found no room."""
        return self._declined_count

    @property
    def unremovable_count(self) -> int:
        """Objects that should have been evicted and could not be removed."""
        return self._unremovable_count

    @property
    def unrecorded_count(self) -> int:
        """Changes that the journal did not take, by which other processes miscount."""
        return self._unrecorded_count

    def fill(self, history: Sequence[JournalLine]) -> int:
        """Take stock of the directories, then of what others have begun meanwhile; evict what exceeds the cap.

        Return when the most recent object was used.

        Raises:
            OSError: the directories cannot be listed.
        """
        listing = StoreListing(self._root)
        while listing.go_on():
            pass
        with self._order:
            self._take_over(listing)
            self._apply(history)
        self.reserve((), ())
        return listing.newest_ns

    def bytes_used(self) -> int:
        """Count the bytes of the objects in the store, and of those granted room by any process.

        Raises:
            OSError: the directories had to be listed, and cannot be.
        """
        with self._order:
            self._publish(())
        with self._listing_guard:
            while self._listing is not None:
                self._go_on(self._listing)
        return self._lru.bytes_used

    def learn(self, manifest: Manifest) -> None:
        """Note which pools of an identity need the last pages of a prefix alone."""
        with self._guard:
            self._lru.chains.learn(manifest)

    def reserve(self, fresh: Sequence[StoredObject], batch: Sequence[PageIO]) -> set[Label]:
        """Grant room to the first of ``fresh``, evicting for them; return which these are.

        Neither a page of the batch, which ``fresh`` are part of, nor one that it needs is evicted for it.
        """
        granted = [each for each in fresh if each.object_bytes <= self.bytes_max]
        decline_for_free_space(self._root, granted, self._free_bytes_min)
        self._evict_for(granted, batch)
        declined_count = len(fresh) - len(granted)
        if declined_count:
            with self._guard:
                self._declined_count += declined_count
        return {each.label for each in granted}

    def _evict_for(self, granted: list[StoredObject], batch: Sequence[PageIO]) -> None:
        """Evict for what is granted; take out of it what finds no room even so."""
        keep = frozenset(page.label for page in batch)
        with self._order:
            # What others have used lately is not to go for this batch.
            self._publish(())
            with self._guard:
                self._lru.link(batch)
                self._lru.touch(page.label for page in reversed(batch))
            victims, _ = self._choose_victims(granted, keep, sum(each.object_bytes for each in granted))
            self._publish([*addition_lines(granted), *removal_lines(victims)])
        self._make_room(granted, keep, victims)
        with self._guard:
            for label in keep:
                if label not in self._lru:
                    self._lru.chains.unlink(label)

    def _make_room(self, granted: list[StoredObject], keep: Container[Label], victims: list[StoredObject]) -> None:
        """Remove victims, and more in the place of those that cannot be removed; decline where that fails."""
        unremovable_count = 0
        while True:
            stuck = self._evict(victims)
            unremovable_count += len(stuck)
            with self._order:
                self._publish(addition_lines(stuck))
                if unremovable_count > UNREMOVABLE_MAX:
                    self._publish(removal_lines(granted))
                    granted.clear()
                    return
                # What others added meanwhile counts too, whoever was first.
                victims, declined = self._choose_victims(granted, keep, 0)
                if not victims and not declined:
                    return
                self._publish(removal_lines([*declined, *victims]))

    def evict_for_inodes(self, batch: Sequence[PageIO]) -> bool:
        """Evict where the file system takes no more files, for those of a batch and some; tell whether that helped."""
        missing_count = missing_inodes(self._root.disk, self._root.fd, len(batch) + INODES_SPARE)
        if missing_count <= 0:
            return False
        keep = frozenset(page.label for page in batch)
        with self._order:
            with self._guard:
                victims = self._lru.least_recent_count(missing_count, keep)
            self._publish(removal_lines(victims))
        stuck = self._evict(victims)
        with self._order:
            self._publish(addition_lines(stuck))
        return len(stuck) < len(victims)

    def end_grant(self, named: Sequence[StoredObject], dropped: Sequence[StoredObject]) -> None:
        """Take back the room of pages without a name; count those anew that others evicted before they had theirs.

        What others did is heard here, while a page that another process stored under the same name stays counted.
        """
        with self._order:
            gone = [each for each in dropped if not is_there(self._root.disk, self._directories, each.label)]
            self._publish(removal_lines(gone))
            with self._guard:
                evicted = [each for each in named if each.label not in self._lru]
            if evicted:
                self._publish(addition_lines(evicted))

    def record(self, pages: Sequence[PageIO], hits: Sequence[Answer | bool], told: Collection[Label]) -> None:
        """Make hits recent, the first page most of all, and let others know of those in ``told``.

        A miss changes nothing: the page may be another process's, granted room and about to be there.
        """
        self._catch_up()
        found = pages if all(hits) else [page for page, hit in zip(pages, hits, strict=True) if hit]
        with self._guard:
            unknown = self._lru.touch([page.label for page in reversed(found)])
            self._lru.link(found)
            self._lru.touch_before([page.label for page in found])
        if not unknown and not told:
            return
        news = {*told, *unknown}
        with self._order:
            self._publish(
                addition_lines([StoredObject(page.label, page_bytes(page)) for page in found if page.label in news])
            )

    def known(self, labels: Sequence[Label]) -> list[bool]:
        """Tell of each page whether it is counted here, so that a use of it is news to nobody; waits for no file."""
        with self._guard:
            return [label in self._lru for label in labels]

    def use(self, pages: Sequence[RowsTarget]) -> None:
        """Make known pages recent that were read, the first one most of all; waits for no file."""
        labels = [page.label for page in pages]
        with self._guard:
            self._lru.touch(reversed(labels))
            self._lru.link([page for page in pages if page.label in self._lru])
            self._lru.touch_before(labels)

    def touch(self, labels: Sequence[Label]) -> None:
        """Make objects recent, the first most of all; take in those that are there and were not known."""
        self._catch_up()
        with self._guard:
            unknown = self._lru.touch(reversed(labels))
            self._lru.touch_before(labels)
        if not unknown:
            return
        sizes = [(label, object_size(self._root.disk, self._directories, label)) for label in unknown]
        with self._order:
            self._publish(
                [JournalLine(label, object_bytes) for label, object_bytes in sizes if object_bytes is not None]
            )

    def publish_used(self, objects: Sequence[StoredObject]) -> None:
        """Let others know what was read, the last object as the most recent."""
        with self._order:
            # In here nobody of this process evicts: what is known now is not told of after it went.
            with self._guard:
                known = [each for each in objects if each.label in self._lru]
            self._publish([JournalLine(*each) for each in known])

    def forget(self, labels: Sequence[Label]) -> None:
        """Note that objects are about to be removed."""
        if labels:
            with self._order:
                self._publish([JournalLine(label, None) for label in labels])

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _choose_victims(
        self, granted: list[StoredObject], keep: Container[Label], needed_bytes: int
    ) -> tuple[list[StoredObject], list[StoredObject]]:
        """Name victims for ``needed_bytes`` more than is counted; take out of ``granted`` what finds no room."""
        declined: list[StoredObject] = []
        with self._guard:
            while True:
                victims, short_bytes = self._lru.victims(needed_bytes, keep)
                if not short_bytes or not granted:
                    return victims, declined
                while short_bytes > 0 and granted:
                    declined.append(granted.pop())
                    short_bytes -= declined[-1].object_bytes
                    needed_bytes -= declined[-1].object_bytes

    def _evict(self, victims: Sequence[StoredObject]) -> list[StoredObject]:
        """Remove objects; return those that cannot be removed."""
        stuck: list[StoredObject] = []
        for victim in victims:
            fan, name = place_of(victim.label)
            try:
                directory = self._directories.find(victim.label.identity, fan)
                if directory is not None:
                    with suppress(FileNotFoundError):
                        self._root.disk.unlink(name, dir_fd=directory.fd)
            except OSError:
                stuck.append(victim)
        with self._guard:
            self._evicted_count += len(victims) - len(stuck)
            self._unremovable_count += len(stuck)
        return stuck

    def _catch_up(self) -> None:
        """List a few more objects where that is under way: every call does so, and none waits for another one's."""
        listing = self._listing
        if listing is None or not self._listing_guard.acquire(blocking=False):
            return
        try:
            if listing is self._listing:
                with suppress(OSError):
                    self._go_on(listing)
        finally:
            self._listing_guard.release()

    def _go_on(self, listing: StoreListing) -> None:
        try:
            if listing.go_on():
                return
        except OSError:
            # What cannot be listed now may be the next time, from the beginning.
            with self._order:
                self._listing = StoreListing(self._root)
            raise
        with self._order:
            self._take_over(listing)
            self._apply(listing.changes)
            # Lines that were missed while it went on may be of objects that it had passed.
            self._listing = StoreListing(self._root) if listing.missed_lines else None

    def _publish(self, changes: Sequence[JournalLine]) -> None:
        """Append changes to the journal, and apply them and what others appended in the order that stands there."""
        try:
            if self._restored_count != self._root.restored_count:
                self._restored_count = self._root.restored_count
                self._journal = self._journal.reopened(self._root.fd)
                self._lose_track()
            news = self._journal.exchange(changes)
            if news is None:
                self._lose_track()
                news = self._journal.exchange(changes)
        except OSError:
            news = None
        if news is None:
            # The count here stays right; the others will be wrong by these objects until they meet them.
            with self._guard:
                self._unrecorded_count += len(changes)
        news = changes if news is None else news
        if self._listing is not None:
            self._listing.note(news)
        self._apply(news)

    def _lose_track(self) -> None:
        """List the directories from now on; until that is over, what was known stands, and what the journal says."""
        self.removed.lose()
        if self._listing is None:
            self._listing = StoreListing(self._root)
        else:
            self._listing.missed_lines = True

    def _take_over(self, listing: StoreListing) -> None:
        with self._guard:
            self._lru.replace(listing.by_age)

    def _apply(self, changes: Sequence[JournalLine]) -> None:
        with self._guard:
            for label, object_bytes in changes:
                if object_bytes is None:
                    self._lru.forget(label)
                else:
                    self._lru.add(label, object_bytes)
            note_changes(self.removed, changes)


def decline_for_free_space(root: StoreRoot, granted: list[StoredObject], free_bytes_min: int) -> None:
    """Take from the end of ``granted`` what would leave the file system less than ``free_bytes_min``."""
    if not free_bytes_min or not granted:
        return
    wanted_bytes = sum(each.object_bytes for each in granted)
    short_bytes = missing_bytes(root.disk, root.fd, wanted_bytes + free_bytes_min)
    while granted and short_bytes > 0:
        short_bytes -= granted.pop().object_bytes


def note_changes(removed: RemovalBuffer, changes: Sequence[JournalLine]) -> None:
    """Note what lines of the journal say of pages that went and pages that came, in their order."""
    if removed.is_told:
        for label, object_bytes in changes:
            (removed.note if object_bytes is None else removed.restored)((label,))


def is_there(disk: Disk, directories: OpenDirectories, label: Label) -> bool:
    """Tell whether a file of an object's name is there; where that cannot be seen, it is not."""
    return object_size(disk, directories, label) is not None


def object_size(disk: Disk, directories: OpenDirectories, label: Label) -> int | None:
    """Return the bytes of the file that has an object's name; None where there is none, or that cannot be seen."""
    fan, name = place_of(label)
    try:
        directory = directories.find(label.identity, fan)
        return None if directory is None else size_of(disk, directory, name)
    except OSError:
        return None


def addition_lines(objects: Sequence[StoredObject]) -> list[JournalLine]:
    """Write additions so that the first one ends as the most recent."""
    return [JournalLine(*each) for each in reversed(objects)]


def removal_lines(objects: Sequence[StoredObject]) -> list[JournalLine]:
    """Write removals, in any order."""
    return [JournalLine(each.label, None) for each in objects]
