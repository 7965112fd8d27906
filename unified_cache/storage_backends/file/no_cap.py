"""Quota of a file store that was opened without a cap: it keeps no index of the objects, and reads none at open."""

from collections import Counter
from collections.abc import Collection, Sequence
from threading import Lock

from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.directory.layout import identities_in
from unified_cache.storage_backends.directory.root import StoreRoot
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.journal import Journal, JournalLine
from unified_cache.storage_backends.file.layout import objects_in
from unified_cache.storage_backends.file.quota import (
    addition_lines,
    decline_for_free_space,
    is_there,
    note_changes,
    removal_lines,
)
from unified_cache.storage_backends.memory_reads import RowsTarget
from unified_cache.storage_backends.protocol import PageIO, StoredObject
from unified_cache.storage_backends.removals import RemovalBuffer

__all__ = ["NoQuota"]


class NoQuota:
    """The twin of ``SharedQuota`` for a process without a cap: it declines what would fill the file system, no more.

    Other processes may have a cap on the same directory, so the journal still says what this one adds, uses and
    removes. What others say there matters only to pages that are on their way into the store. Thread-safe.
    """

    bytes_max = None
    evicted_count = 0
    unremovable_count = 0

    def __init__(self, root: StoreRoot, directories: OpenDirectories, journal: Journal, free_bytes_min: int) -> None:
        self.removed = RemovalBuffer()
        """What has gone, whoever removed it, for whoever wants to know."""
        self._root = root
        self._directories = directories
        self._journal = journal
        self._free_bytes_min = free_bytes_min
        self._restored_count = 0
        self._unnamed: Counter[Label] = Counter()
        """Pages granted room whose files have no name yet, with the puts that write them."""
        self._evicted: set[Label] = set()
        """Those of them that other processes have evicted meanwhile."""
        self._declined_count = 0
        self._unrecorded_count = 0
        self._guard = Lock()
        """Guards the journal, and all of the above."""

    @property
    def declined_count(self) -> int:
        """Pages that found no room on the file system."""
        return self._declined_count

    @property
    def unrecorded_count(self) -> int:
        """Changes that the journal did not take, by which other processes miscount."""
        return self._unrecorded_count

    def bytes_used(self) -> int:
        """Sum up the objects that lie in the directories. Linear in objects.

        Raises:
            OSError: a directory cannot be listed.
        """
        disk, root_fd = self._root.disk, self._root.fd
        identities = identities_in(disk, root_fd)
        return sum(known.object_bytes for identity in identities for known in objects_in(disk, root_fd, identity))

    def learn(self, manifest: Manifest) -> None:
        """Do nothing: what needs which page matters to an eviction alone."""

    def reserve(self, fresh: Sequence[StoredObject], batch: Sequence[PageIO]) -> set[Label]:
        """Grant room to the first of ``fresh``, as far as the file system has it; return which these are.

        Each grant ends with ``end_grant``.
        """
        granted = list(fresh)
        decline_for_free_space(self._root, granted, self._free_bytes_min)
        with self._guard:
            self._declined_count += len(fresh) - len(granted)
            self._unnamed.update(each.label for each in granted)
            self._publish(addition_lines(granted))
        return {each.label for each in granted}

    def evict_for_inodes(self, batch: Sequence[PageIO]) -> bool:
        """Evict nothing: without a cap nobody does."""
        return False

    def end_grant(self, named: Sequence[StoredObject], dropped: Sequence[StoredObject]) -> None:
        """Tell others which pages got no name after all, and anew of those that they evicted before they had theirs."""
        gone = [each for each in dropped if not is_there(self._root.disk, self._directories, each.label)]
        with self._guard:
            self._publish(removal_lines(gone))
            self._publish(addition_lines([each for each in named if each.label in self._evicted]))
            self._unnamed.subtract(each.label for each in (*named, *dropped))
            self._unnamed = +self._unnamed
            self._evicted.intersection_update(self._unnamed)

    def known(self, labels: Sequence[Label]) -> list[bool]:
        """Know every page: nothing is counted here."""
        return [True] * len(labels)

    def use(self, pages: Sequence[RowsTarget]) -> None:
        """Do nothing, as ``touch``."""

    def record(self, pages: Sequence[PageIO], hits: Sequence[object], told: Collection[Label]) -> None:
        """Let others know of the use of those in ``told``, the first page as the most recent."""
        if told:
            used = [StoredObject(page.label, page_bytes(page)) for page in pages if page.label in told]
            with self._guard:
                self._publish(addition_lines(used))

    def touch(self, labels: Sequence[Label]) -> None:
        """Do nothing: others learn of a use when its file is stamped."""

    def publish_used(self, objects: Sequence[StoredObject]) -> None:
        """Let others know what was read, the last object as the most recent."""
        with self._guard:
            self._publish([JournalLine(*each) for each in objects])

    def forget(self, labels: Sequence[Label]) -> None:
        """Let others know that objects are about to be removed."""
        with self._guard:
            self._publish([JournalLine(label, None) for label in labels])

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _publish(self, lines: Sequence[JournalLine]) -> None:
        """Append lines to the journal; note which pages without a name yet other processes evict."""
        try:
            if self._restored_count != self._root.restored_count:
                self._restored_count = self._root.restored_count
                self.removed.lose()
                self._journal = self._journal.reopened(self._root.fd)
            news = self._journal.exchange(lines)
            if news is None:
                # The others went too far ahead to be followed; whatever has no name yet may have been evicted.
                self._evicted.update(self._unnamed)
                self.removed.lose()
                news = self._journal.exchange(lines)
        except OSError:
            news = None
        if news is None:
            self._unrecorded_count += len(lines)
        note_changes(self.removed, lines if news is None else news)
        if news is None:
            return
        for label, object_bytes in news if self._unnamed else ():
            if label in self._unnamed:
                (self._evicted.add if object_bytes is None else self._evicted.discard)(label)
