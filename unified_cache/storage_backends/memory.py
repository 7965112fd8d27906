"""Stores in this process's memory: ``memory:`` keeps pages, ``keys_only:`` their names and sizes alone.

``memory:`` is for tests and examples, and the model that other stores are compared with. ``keys_only:`` is for replay
of traces, sizing and tests of bookkeeping: it answers as ``memory:`` would and moves no bytes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock

from unified_cache.core.errors import ClosedError, ConfigError, StorageError
from unified_cache.core.process import HomeProcess
from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.lru import StoreLru
from unified_cache.storage_backends.common.names import check_scan
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, Store, page_bytes
from unified_cache.storage_backends.removals import RemovalBuffer, RemovalFeed

__all__ = ["MemoryStorage"]


class MemoryStorage(Store):
    """Keep sealed pages in memory, with an optional cap in bytes and the least recently used going first.

    A batch never evicts its own pages: of a chain longer than the cap the first pages are stored, the rest declined.
    Not durable. Thread-safe: one guard around everything.
    """

    _name = "memory"

    def __init__(self, bytes_max: int | None = None) -> None:
        self._lru = StoreLru(bytes_max)
        self._pages: dict[Label, bytes] = {}
        self._removed = RemovalBuffer()
        self._closed = False
        self._home = HomeProcess(f"the store {self._name}:")
        self._guard = Lock()

    @property
    def bytes_used(self) -> int:
        """Bytes of all objects now."""
        return self._lru.bytes_used

    def capability(self) -> Capability:
        """Return the abilities of this backend."""
        self._check_open()
        return Capability(
            self._name,
            durable=False,
            bytes_max=self._lru.bytes_max,
            exists_costs_io=False,
            bounded=True,
        )

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Accept any identity; pages in memory need no announcement."""
        self._check_open()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether it is held. No access."""
        self._check_open()
        with self._guard:
            return Answer.of_reads(map(self._pages.__contains__, labels))

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each object, None where there is none. No access."""
        self._check_open()
        with self._guard:
            return [self._lru.size_of(label) for label in labels]

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Copy each page into its buffers; one of another length is dropped, unless it may be the page, coded."""
        answers: list[Answer] = []
        self._check_open()
        with self._guard:
            for page, object_bytes in zip(pages, self._sizes_of(pages), strict=True):
                known = self._lru.size_of(page.label)
                if known == object_bytes:
                    self._fill(page, self._pages[page.label])
                    answers.append(Answer.HIT)
                elif known is None or may_be_coded(object_bytes - HEADER_BYTES, known):
                    answers.append(Answer.MISS)
                else:
                    self._drop(page.label)
                    answers.append(Answer.FLAWED)
            self._lru.touch([page.label for page in reversed(pages)])
        return answers

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Copy pages in, as far as there is room; DURABLE raises StorageError, which memory cannot promise."""
        self._check_open()
        with self._guard:
            if level is Level.DURABLE:
                name = self._name
                raise StorageError(f"{name} cannot store at level DURABLE, only CACHED", retryable=False)
            sizes = self._sizes_of(pages)
            stored, evicted = self._lru.store([page.label for page in pages], sizes)
            for label in evicted:
                del self._pages[label]
            if evicted:
                self._removed.record(evicted)
            for page, object_bytes, ok in zip(pages, sizes, stored, strict=True):
                kept = self._pages.get(page.label)
                if not ok:
                    if self._pages.pop(page.label, None) is not None:
                        self._removed.record((page.label,))
                elif kept is None or len(kept) != object_bytes:
                    self._pages[page.label] = self._take(page)
            self._removed.restored(page.label for page, ok in zip(pages, stored, strict=True) if ok)
            return Answer.of_puts(stored)

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages the most recent ones."""
        self._check_open()
        with self._guard:
            self._lru.touch(reversed(labels))

    def remove(self, labels: Sequence[Label]) -> int:
        """Drop objects; return how many there were."""
        self._check_open()
        with self._guard:
            return sum(self._drop(label) for label in labels)

    def clear(self, identity: bytes) -> int:
        """Drop every page of one identity. Linear in all pages held."""
        self._check_open()
        with self._guard:
            return sum(self._drop(label) for label in self._lru.labels_of(identity))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity by name. Linear in all objects."""
        check_scan(identity, cursor)
        self._check_open()
        with self._guard:
            return self._lru.scan(identity, cursor)

    def removals(self) -> RemovalFeed:
        """Begin to tell a subscriber what goes; closing the store tells nothing."""
        self._check_open()
        with self._guard:
            return self._removed.subscribe()

    def close(self) -> None:
        """Release every page; memory is where this backend keeps them."""
        if not self._home.is_here:
            return
        with self._guard:
            self._closed = True
            self._pages.clear()

    def _sizes_of(self, pages: Sequence[PageIO]) -> list[int]:
        return [page_bytes(page) for page in pages]

    def _take(self, page: PageIO) -> bytes:
        return b"".join(page.buffers)

    def _fill(self, page: PageIO, kept: bytes) -> None:
        start = 0
        view = memoryview(kept)
        for buffer in page.buffers:
            end = start + buffer.nbytes
            buffer[:] = view[start:end]
            start = end

    def _check_open(self) -> None:
        self._home.check()
        if self._closed:
            raise ClosedError(f"this {self._name} store was closed")

    def _drop(self, label: Label) -> bool:
        self._lru.forget(label)
        was_there = self._pages.pop(label, None) is not None
        if was_there:
            self._removed.record((label,))
        return was_there


class KeysOnlyStorage(MemoryStorage):
    """Remember names and sizes but no bytes: a hit leaves the buffers as they were."""

    _name = "keys_only"

    def __init__(self, bytes_max: int | None = None, object_bytes: Mapping[str, int] | None = None) -> None:
        """Objects count as their buffers or, with ``object_bytes`` by pool, as that; then they may have none."""
        super().__init__(bytes_max)
        self._object_bytes = object_bytes

    def _sizes_of(self, pages: Sequence[PageIO]) -> list[int]:
        sizes = self._object_bytes
        return super()._sizes_of(pages) if sizes is None else [sizes[page.label.pool] for page in pages]

    def _take(self, page: PageIO) -> bytes:
        return b""

    def _fill(self, page: PageIO, kept: bytes) -> None:
        pass


def _opened(kind: type[MemoryStorage], scheme: str, rest: str, bytes_max: int | None) -> MemoryStorage:
    if rest:
        raise ConfigError(f"{scheme}: takes nothing after the colon, found {rest!r}")
    return kind(bytes_max)


open_url = partial(_opened, MemoryStorage, "memory")
open_keys_only_url = partial(_opened, KeysOnlyStorage, "keys_only")
