"""The storage contract, over every wrapper around a store in memory and around one in a directory."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.faulty_storage import FaultyStorage, ScriptedFaults
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.storage_backends.wrappers import CheckedStorage, StorageGuard
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics
from unified_cache.testing.storage_contract import ROOM_BYTES_MAX, StorageContract

THREADS_MAX = 3
"""Fewer than the contract's callers, so that some wait for a thread."""


def metered(backend: StorageBackend) -> StorageBackend:
    return MeteredStorage(backend, StorageMetrics(CollectorRegistry()), "contract")


def guarded(backend: StorageBackend) -> StorageBackend:
    config = GuardConfig(deadline_s=PATIENCE_S, calls_max=THREADS_MAX)
    return StorageGuard(backend, backend.capability(), config)


def faulty(backend: StorageBackend) -> StorageBackend:
    return FaultyStorage(backend, ScriptedFaults({}), random.Random(1))


def stacked(backend: StorageBackend) -> StorageBackend:
    return VerifiedStorage(guarded(metered(CheckedStorage(faulty(backend)))))


WRAPPERS = (CheckedStorage, metered, guarded, faulty, stacked)


def in_memory(path: Path) -> StorageBackend:
    return MemoryStorage(ROOM_BYTES_MAX)


def in_directory(path: Path) -> StorageBackend:
    return FileStorage.open(path / "store", bytes_max=ROOM_BYTES_MAX)


class TestWrappers(StorageContract):
    @pytest.fixture(params=[in_memory, in_directory], ids=lambda make: make.__name__)
    def backend(self, request: pytest.FixtureRequest, tmp_path: Path) -> StorageBackend:
        make: Callable[[Path], StorageBackend] = request.param
        return make(tmp_path)

    @pytest.fixture(params=WRAPPERS, ids=lambda wrap: wrap.__name__)
    def storage(self, request: pytest.FixtureRequest, backend: StorageBackend) -> Iterator[StorageBackend]:
        wrap: Callable[[StorageBackend], StorageBackend] = request.param
        storage = wrap(backend)
        yield storage
        storage.close()
