"""The storage contract over the wire: a client, a server, and a store in memory or in a directory behind it."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.support.service import LoopbackServer, limits_with
from unified_cache.errors import StorageError
from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, StorageBackend, StoredObject
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.testing.storage_contract import (
    PAGE_BYTES,
    ROOM_BYTES_MAX,
    StorageContract,
    blank_page,
    bytes_of,
    label,
    listing,
    open_for_contract,
    sealed_page,
)

HOST_BYTES = (0, 4 * PAGE_BYTES, 64 << 20)
"""No memory in front of the store, room for a few pages, room for all."""


def in_memory(path: Path) -> StorageBackend:
    return MemoryStorage(ROOM_BYTES_MAX)


def in_directory(path: Path) -> StorageBackend:
    return FileStorage.open(path / "store", bytes_max=ROOM_BYTES_MAX)


def in_packed_files(path: Path) -> StorageBackend:
    return PackedStorage.open(path / "store", bytes_max=ROOM_BYTES_MAX)


class ServiceContract(StorageContract):
    rounds_of_each_thread = 10

    def test_an_object_whose_length_differs_from_the_buffers_is_a_miss_and_does_not_block_a_later_put_of_that_page(
        self, storage: StorageBackend
    ) -> None:
        # A service knows the layout: it refuses such a page instead of keeping it.
        open_for_contract(storage)
        for number, page_bytes in enumerate((PAGE_BYTES - 1, PAGE_BYTES + 1, HEADER_BYTES)):
            with pytest.raises(StorageError, match="INVALID_ARGUMENT"):
                storage.put([sealed_page(label(number), page_bytes)], Level.CACHED)
            assert storage.get([blank_page(label(number))]) == [Answer.MISS]
            assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
            assert storage.get([blank_page(label(number), page_bytes)]) == [Answer.MISS]
            assert storage.get([blank_page(label(number))]) == [Answer.HIT]


Fronted = tuple[Callable[[Path], StorageBackend], int]
"""A store behind a server: what makes it, and HOST_BYTES."""


def fronted_stores() -> Iterator[object]:
    """Yield every combination."""
    for make, host_bytes in product((in_memory, in_directory, in_packed_files), HOST_BYTES):
        yield pytest.param((make, host_bytes), id=f"{make.__name__}-{host_bytes}")


class TestRemoteStorage(ServiceContract):
    @pytest.fixture(params=list(fronted_stores()))
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
        fronted: Fronted = request.param
        make, host_bytes = fronted
        limits = limits_with(part_bytes=500)
        running = LoopbackServer.start(make(tmp_path), limits, host_bytes=host_bytes)
        storage = VerifiedStorage(running.client())
        yield storage
        storage.close()
        running.stop()


class TestTwoServersOverOneStore(ServiceContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[StorageBackend]:
        servers = [LoopbackServer.start(FileStorage.open(tmp_path / "store")) for _ in range(2)]
        storage = RemoteStorage.open(RemoteOptions(tuple(running.address for running in servers)))
        yield storage
        storage.close()
        for running in servers:
            running.stop()


def test_clear_reaches_the_pages_that_a_full_store_left_in_memory_alone() -> None:
    running = LoopbackServer.start(MemoryStorage(4 * PAGE_BYTES))
    storage = running.client("default:writer")
    open_for_contract(storage)
    try:
        pages = [sealed_page(label(number)) for number in range(10)]
        assert all(storage.put(pages, Level.CACHED))
        assert storage.clear(label(0).identity) == 10
        assert storage.exists([page.label for page in pages]) == [Answer.MISS] * 10
        assert storage.get([blank_page(page.label) for page in pages]) == [Answer.MISS] * 10
        assert running.usage.used["default"] == 0
        renewed = [sealed_page(label(number), salt=1) for number in range(10)]
        assert all(storage.put(renewed, Level.CACHED))
        found = [blank_page(label(number)) for number in range(10)]
        assert all(storage.get(found))
        assert list(map(bytes_of, found)) == list(map(bytes_of, renewed))
    finally:
        storage.close()
        running.stop()


def test_a_scan_lists_each_page_once_that_a_full_store_left_in_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.service.store.host_tier.SCAN_OBJECTS_MAX", 3)
    running = LoopbackServer.start(MemoryStorage(4 * PAGE_BYTES))
    storage = running.client("default:writer")
    open_for_contract(storage)
    try:
        pages = [sealed_page(label(number)) for number in range(10)]
        assert all(storage.put(pages, Level.CACHED))
        found = list(listing(storage, label(0).identity))
        assert sorted(found) == sorted(StoredObject(page.label, PAGE_BYTES) for page in pages)
        with pytest.raises(StorageError, match="a cursor is what the last scan returned"):
            storage.scan(label(0).identity, "0:elsewhere:")
    finally:
        storage.close()
        running.stop()
