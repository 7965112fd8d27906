"""Front of the stores in a directory: what ``file:`` and ``packed:`` do alike, whatever lies where in it.

DirectoryReader    calls in flight, manifests, errors named: all that a store opened to be read alone needs
DirectoryStorage   and that of one that writes: identities announced, recency, removals told
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.common.calls import CallsInFlight
from unified_cache.storage_backends.directory.descriptors import storage_error
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.manifests import read_manifests, write_manifest
from unified_cache.storage_backends.directory.root import StoreFormat, StoreRoot
from unified_cache.storage_backends.directory.stamps import Stamps
from unified_cache.storage_backends.memory_reads import RowsTarget
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.removals import RemovalBuffer, RemovalFeed

__all__ = ["DirectoryReader", "DirectoryStorage"]


class DirectoryReader(ABC):
    """A store in a directory, as one who changes nothing sees it. Thread-safe."""

    def __init__(self, disk: Disk, path: Path, root_fd: int, store_format: StoreFormat, opened: str = "") -> None:
        """``root_fd`` stays the caller's; ``opened`` says of a closed store how it was opened."""
        self._disk = disk
        self._path = path
        self._root_fd = root_fd
        self._calls = CallsInFlight(f"the {store_format.name} in {path}{opened}")

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._path

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity, by its digest; None where there is none that can be read.

        Raises:
            StorageError: the directory cannot be listed.
        """
        with self._calls:
            return read_manifests(self._disk, self._path, self._root_fd)

    def close(self) -> None:
        """Wait for calls in flight and let go of every descriptor."""
        if self._calls.close():
            self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Close every descriptor; no call is in flight, and none will be."""

    def _cannot(self, do: str, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot {do} {self._path}/{label.object_name}")


class ObjectOrder(Protocol):
    """Objects of a store in the order of their use."""

    @property
    def removed(self) -> RemovalBuffer:
        """Objects that have gone, for whoever wants to know."""
        ...

    def learn(self, manifest: Manifest) -> None:
        """Record which pools of an identity need the last pages of a prefix alone."""
        ...

    def touch(self, labels: Sequence[Label]) -> Sequence[Label]:
        """Make objects recent, the first most of all; return those whose time of use is to be written."""
        ...

    def record(self, pages: Sequence[RowsTarget], hits: Sequence[Answer | bool]) -> None:
        """Make pages recent that were read, the first one most of all; waits for no file."""
        ...


class DirectoryStorage(DirectoryReader):
    """A store in a directory that is written. Thread-safe."""

    def __init__(self, root: StoreRoot, order: ObjectOrder, stamps: Stamps) -> None:
        super().__init__(root.disk, root.path, root.fd, root.format)
        self._root = root
        self._order = order
        self._stamps = stamps

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Write the manifest beside the pages, durably, unless it is there and sound. The slabs are not needed.

        Raises:
            InputError: the identity in the manifest is not a digest.
            StorageError: the manifest that is there has this digest and says something else, or a fault.
        """
        with self._calls:
            write_manifest(self._root, manifest)
            self._order.learn(manifest)

    def read_memory(self, targets: Sequence[RowsTarget]) -> list[bool]:
        """Read pages that the system has in memory into their rows; a page that came becomes recent.

        A call at which times of use are due is left to ``get``, which writes them.
        """
        with self._calls:
            if self._stamps.are_due():
                return [False] * len(targets)
            came = self._read_memory(targets)
            # One that went while it was read may be another page by now; its seal says which it was, and that counts.
            self._order.record(targets, came)
            self._stamps.keep(targets, came)
            return came

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent, in memory; their times of use are written as those of reads are, many together.

        Raises:
            InputError: a label names no object. Nothing was changed.
        """
        with self._calls:
            self._stamp(self._stamps.touch(self._order.touch(labels)))

    def removals(self) -> RemovalFeed:
        """Begin to tell a subscriber what goes, see ``ObjectOrder.removed``."""
        with self._calls:
            return self._order.removed.subscribe()

    def close(self) -> None:
        """Wait for calls in flight, write times of use, let go of every descriptor and of what is this process's."""
        if self._calls.close():
            self._stamp(self._stamps.take())
            self._let_go()
            self._root.close()

    @abstractmethod
    def _read_memory(self, targets: Sequence[RowsTarget]) -> list[bool]:
        """Fill rows of pages that the system has in memory; return which came and are verified."""

    @abstractmethod
    def _stamp(self, stamps: Mapping[Label, int]) -> None:
        """Write times of use; where that fails, the LRU order after a restart is wrong, and no page is lost."""
