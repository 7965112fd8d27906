"""Stores that misbehave on purpose, opened inside of an engine by URL.

    tests.engines.sglang.faults:open_faulty:REST

REST = FAULT/METHOD/URL, such as hang/get/file:/tmp/store

hang       the method does not return for a minute
fail       it raises a fault that a second try does not cure
vanish     it raises as a store that is away does, and so does every other call from then on
full       a put stores nothing
corrupt    a get flips a byte of every page
"""

import threading
from collections.abc import Mapping, Sequence

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, StorageBackend
from unified_cache.storage_backends.url import open_storage

__all__ = ["open_faulty"]

HANG_S = 60.0
"""Far longer than any deadline here, so that a call that waits for it shows."""


class MisbehavingStore:
    """A store of which one method misbehaves."""

    def __init__(self, store: StorageBackend, fault: str, method: str) -> None:
        self._store, self._fault, self._method = store, fault, method
        self._is_away = False
        self._never = threading.Event()

    def capability(self) -> Capability:
        return self._store.capability()

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        self._store.register(manifest, slabs)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self._misbehave("exists")
        return self._store.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self._misbehave("get")
        answers = self._store.get(pages)
        if self._fault == "corrupt":
            for page in pages:
                page.buffers[-1][-1] ^= 1
        return answers

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self._misbehave("put")
        if self._fault == "full":
            return [Answer.DECLINED] * len(pages)
        return self._store.put(pages, level)

    def touch(self, labels: Sequence[Label]) -> None:
        self._store.touch(labels)

    def remove(self, labels: Sequence[Label]) -> int:
        return self._store.remove(labels)

    def clear(self, identity: bytes) -> int:
        return self._store.clear(identity)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return self._store.scan(identity, cursor)

    def close(self) -> None:
        self._store.close()

    def _misbehave(self, method: str) -> None:
        if method == self._method:
            if self._fault == "hang":
                self._never.wait(HANG_S)
            if self._fault == "fail":
                raise StorageError("a fault on purpose", retryable=False)
            self._is_away = self._is_away or self._fault == "vanish"
        if self._is_away:
            raise StorageError("away on purpose", retryable=True)


def open_faulty(rest: str, bytes_max: int | None) -> StorageBackend:
    """Open a store that misbehaves."""
    fault, method, url = rest.split("/", 2)
    return MisbehavingStore(open_storage(url, bytes_max=bytes_max), fault, method)
