"""The storage contract, over every backend that needs nothing but this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.testing.storage_contract import ROOM_BYTES_MAX, KeysOnlyContract, StorageContract


class TestMemoryStorage(StorageContract):
    @pytest.fixture(params=[None, ROOM_BYTES_MAX])
    def storage(self, request: pytest.FixtureRequest) -> StorageBackend:
        return MemoryStorage(request.param)


class TestVerifiedMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> StorageBackend:
        return VerifiedStorage(MemoryStorage(ROOM_BYTES_MAX))


class TestKeysOnlyStorage(KeysOnlyContract):
    @pytest.fixture(params=[None, ROOM_BYTES_MAX])
    def storage(self, request: pytest.FixtureRequest) -> StorageBackend:
        return KeysOnlyStorage(request.param)


class TestFileStorage(StorageContract):
    @pytest.fixture(params=[None, ROOM_BYTES_MAX])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
        storage = FileStorage.open(tmp_path / "store", bytes_max=request.param)
        yield storage
        storage.close()


class TestVerifiedFileStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[StorageBackend]:
        storage = VerifiedStorage(FileStorage.open(tmp_path / "store", bytes_max=ROOM_BYTES_MAX))
        yield storage
        storage.close()


class TestPackedStorage(StorageContract):
    @pytest.fixture(params=[None, ROOM_BYTES_MAX])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
        storage = PackedStorage.open(tmp_path / "store", bytes_max=request.param)
        yield storage
        storage.close()


class TestVerifiedPackedStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[StorageBackend]:
        storage = VerifiedStorage(PackedStorage.open(tmp_path / "store", bytes_max=ROOM_BYTES_MAX))
        yield storage
        storage.close()
