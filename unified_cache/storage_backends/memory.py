"""A store in this process's memory, for tests and examples, and as the model that other stores are compared with."""

from collections.abc import Mapping, Sequence
from threading import Lock

from unified_cache.errors import ClosedError, ConfigError, StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.common.lru import StoreLru, page_bytes
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan

__all__ = ["MemoryStorage", "open_url"]


class MemoryStorage:
    """Keep sealed pages in a dict, with an optional cap in bytes and the least recently used going first.

    A batch never evicts its own pages: of a chain longer than the cap the first pages are stored, the rest declined.
    Not durable. Thread-safe: one guard around everything.
    """

    def __init__(self, bytes_max: int | None = None) -> None:
        self._lru = StoreLru(bytes_max)
        self._pages: dict[Label, bytes] = {}
        self._closed = False
        self._guard = Lock()

    @property
    def bytes_used(self) -> int:
        """Bytes of all pages held now."""
        return self._lru.bytes_used

    def capability(self) -> Capability:
        """Say what this backend can do."""
        with self._guard:
            self._check_open()
            return Capability("memory", durable=False, bytes_max=self._lru.bytes_max)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Accept any identity; pages in memory need no announcement."""
        with self._guard:
            self._check_open()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether it is held. No access."""
        with self._guard:
            self._check_open()
            return Answer.of_reads(label in self._pages for label in labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Copy each page into its buffers. A page of another length is dropped."""
        with self._guard:
            self._check_open()
            hits = self._lru.find([page.label for page in pages], [page_bytes(page) for page in pages])
            for page, hit in zip(pages, hits, strict=True):
                if hit:
                    _fill(page.buffers, self._pages[page.label])
                else:
                    self._pages.pop(page.label, None)
            return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Copy pages in, as far as there is room.

        Raises:
            StorageError: the level is DURABLE, which memory cannot promise. Nothing was stored.
        """
        with self._guard:
            self._check_open()
            if level is Level.DURABLE:
                raise StorageError("memory cannot store at level DURABLE, only CACHED", retryable=False)
            sizes = [page_bytes(page) for page in pages]
            stored, evicted = self._lru.store([page.label for page in pages], sizes)
            for label in evicted:
                del self._pages[label]
            for page, object_bytes, ok in zip(pages, sizes, stored, strict=True):
                found = self._pages.get(page.label)
                if not ok:
                    self._pages.pop(page.label, None)
                elif found is None or len(found) != object_bytes:
                    self._pages[page.label] = b"".join(page.buffers)
            return Answer.of_puts(stored)

    def remove(self, labels: Sequence[Label]) -> int:
        """Drop pages; return how many there were."""
        with self._guard:
            self._check_open()
            return sum(self._drop(label) for label in labels)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List pages of one identity by name. Linear in all pages held."""
        with self._guard:
            self._check_open()
            return self._lru.scan(identity, cursor)

    def close(self) -> None:
        """Let every page go; memory is where this backend keeps them."""
        with self._guard:
            self._closed = True
            self._pages.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this memory store was closed")

    def _drop(self, label: Label) -> bool:
        self._lru.forget(label)
        return self._pages.pop(label, None) is not None


def _fill(buffers: Sequence[memoryview], page: bytes) -> None:
    start = 0
    view = memoryview(page)
    for buffer in buffers:
        end = start + buffer.nbytes
        buffer[:] = view[start:end]
        start = end


def open_url(rest: str, bytes_max: int | None) -> MemoryStorage:
    """Open ``memory:``; nothing may follow the colon."""
    if rest:
        raise ConfigError(f"memory: takes nothing after the colon, found {rest!r}")
    return MemoryStorage(bytes_max)
