"""A store that remembers names and sizes but no bytes: for replay of traces, sizing, and tests of bookkeeping."""

from collections.abc import Mapping, Sequence
from threading import Lock

from unified_cache.errors import ClosedError, ConfigError, StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.common.lru import StoreLru, page_bytes
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan

__all__ = ["KeysOnlyStorage", "open_url"]


class KeysOnlyStorage:
    """Answer as ``MemoryStorage`` would, under the same cap and in the same order of eviction, and move no bytes.

    A hit leaves the buffers as they were. Objects count as large as their buffers or, where ``object_bytes`` gives
    a size for every pool by name, that large; then pages may come without buffers. Thread-safe.
    """

    def __init__(self, bytes_max: int | None = None, object_bytes: Mapping[str, int] | None = None) -> None:
        self._lru = StoreLru(bytes_max)
        self._object_bytes = object_bytes
        self._closed = False
        self._guard = Lock()

    @property
    def bytes_used(self) -> int:
        """Bytes that the objects remembered now would take."""
        return self._lru.bytes_used

    def capability(self) -> Capability:
        """Say what this backend can do."""
        with self._guard:
            self._check_open()
            return Capability("keys_only", durable=False, bytes_max=self._lru.bytes_max)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Accept any identity; names need no announcement."""
        with self._guard:
            self._check_open()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether it is remembered. No access."""
        with self._guard:
            self._check_open()
            known = self._lru
            return Answer.of_reads(label in known for label in labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Tell for each page whether it is remembered at that size; a page of another size is forgotten."""
        with self._guard:
            self._check_open()
            return self._lru.find([page.label for page in pages], self._sizes_of(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Remember pages, as far as there is room.

        Raises:
            StorageError: the level is DURABLE, which this store cannot promise. Nothing was remembered.
        """
        with self._guard:
            self._check_open()
            if level is Level.DURABLE:
                raise StorageError("keys_only cannot store at level DURABLE, only CACHED", retryable=False)
            stored, _ = self._lru.store([page.label for page in pages], self._sizes_of(pages))
            return Answer.of_puts(stored)

    def remove(self, labels: Sequence[Label]) -> int:
        """Forget objects; return how many were remembered."""
        with self._guard:
            self._check_open()
            before = len(self._lru)
            for label in labels:
                self._lru.forget(label)
            return before - len(self._lru)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity by name. Linear in all objects remembered."""
        with self._guard:
            self._check_open()
            return self._lru.scan(identity, cursor)

    def close(self) -> None:
        """Refuse every later call."""
        with self._guard:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this keys-only store was closed")

    def _sizes_of(self, pages: Sequence[PageIO]) -> list[int]:
        object_bytes = self._object_bytes
        if object_bytes is None:
            return [page_bytes(page) for page in pages]
        return [object_bytes[page.label.pool] for page in pages]


def open_url(rest: str, bytes_max: int | None) -> KeysOnlyStorage:
    """Open ``keys_only:``; nothing may follow the colon."""
    if rest:
        raise ConfigError(f"keys_only: takes nothing after the colon, found {rest!r}")
    return KeysOnlyStorage(bytes_max)
