"""The storage contract over the wire: a client, a server, and a store in memory or in a directory behind it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.test_storage_contract import OPENED
from tests.support.service import LoopbackServer
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.service.limits import Limits
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import (
    PAGE_BYTES,
    ROOM_BYTES_MAX,
    StorageContract,
    blank_page,
    label,
    open_for_contract,
    sealed_page,
)


class ServiceContract(StorageContract):
    rounds_of_each_thread = 10

    def test_an_object_whose_length_differs_from_the_buffers_is_a_miss_and_does_not_block_a_later_put_of_that_page(
        self, storage: Store
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


class TestRemoteStorage(ServiceContract):
    @pytest.fixture(params=OPENED)
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        store = OPENED[request.param](tmp_path, ROOM_BYTES_MAX)
        running = LoopbackServer.start(store, Limits(part_bytes=500))
        storage = VerifiedStorage(running.client())
        yield storage
        storage.close()
        running.stop()


class TestTwoServersOverOneStore(ServiceContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Store]:
        servers = [LoopbackServer.start(FileStorage.open(tmp_path / "store")) for _ in range(2)]
        storage = RemoteStorage.open(RemoteOptions(tuple(running.address for running in servers)))
        yield storage
        storage.close()
        for running in servers:
            running.stop()
