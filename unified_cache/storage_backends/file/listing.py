"""Listing of a whole file store, a bounded number of objects at a time."""

from collections.abc import Sequence
from itertools import islice

from unified_cache.seal import Label
from unified_cache.storage_backends.directory.layout import identities_in
from unified_cache.storage_backends.directory.root import StoreRoot
from unified_cache.storage_backends.file.journal import JournalLine
from unified_cache.storage_backends.file.layout import ListedObject, objects_in
from unified_cache.storage_backends.protocol import StoredObject

__all__ = ["LISTED_AT_ONCE", "StoreListing"]

LISTED_AT_ONCE = 1000
"""Objects that one step lists: 20 ms."""


class StoreListing:
    """Every object in the directories of a store, with what the journal said while they were listed.

    One thread at a time goes on with it.
    """

    def __init__(self, root: StoreRoot) -> None:
        self._changes: dict[Label, int | None] = {}
        self.missed_lines = False
        """Whether the journal said more while the objects were listed than was noted."""
        self.by_age: list[StoredObject] = []
        """The objects, the least recently used first, once the listing is over."""
        self.newest_ns = 0
        """When the most recent one was used."""
        self._found: list[ListedObject] = []
        self._rest = (
            known
            for identity in identities_in(root.disk, root.fd)
            for known in objects_in(root.disk, root.fd, identity)
        )

    @property
    def changes(self) -> list[JournalLine]:
        """What the journal said while the objects were listed, of each object the last line."""
        return [JournalLine(*change) for change in self._changes.items()]

    def note(self, lines: Sequence[JournalLine]) -> None:
        """Note lines of the journal, to be applied after the listing."""
        for label, object_bytes in lines:
            self._changes.pop(label, None)
            self._changes[label] = object_bytes

    def go_on(self) -> bool:
        """List a few objects; False where the listing is over.

        Raises:
            OSError: a directory cannot be listed. The listing is of no use any more.
        """
        found = list(islice(self._rest, LISTED_AT_ONCE))
        self._found += found
        if len(found) == LISTED_AT_ONCE:
            return True
        self._found.sort(key=_modified_at)
        self.by_age = [StoredObject(known.label, known.object_bytes) for known in self._found]
        self.newest_ns = self._found[-1].mtime_ns if self._found else 0
        self._found.clear()
        return False


def _modified_at(known: ListedObject) -> int:
    return known.mtime_ns
