"""The storage contract, over every backend that needs nothing but this machine, and over every wrapper of one."""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.store_calls import ScriptedFaults, ScriptedStorage
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice
from unified_cache.testing.storage_contract import ROOM_BYTES_MAX, KeysOnlyContract, StorageContract

THREADS_MAX = 3
"""Fewer than the contract's callers, so that some wait for a thread."""

KEYS = "env:CONTRACT_KEYS"

Wrap = Callable[[Store], Store]
OPENED: Mapping[str, Callable[[Path, int | None], Store]] = {
    "memory": lambda path, bytes_max: MemoryStorage(bytes_max),
    "file": lambda path, bytes_max: FileStorage.open(path / "store", bytes_max=bytes_max),
    "packed": lambda path, bytes_max: PackedStorage.open(path / "store", bytes_max=bytes_max),
}


def bare(backend: Store) -> Store:
    return backend


def metered(backend: Store) -> Store:
    return MeteredStorage(backend, StorageMetrics(CollectorRegistry()), "contract")


def guarded(backend: Store) -> Store:
    config = GuardConfig(deadline_s=PATIENCE_S, calls_max=THREADS_MAX)
    return StorageGuard(backend, backend.capability(), config)


def faulty(backend: Store) -> Store:
    return ScriptedStorage(backend, ScriptedFaults({}), random.Random(1))


def stacked(backend: Store) -> Store:
    return VerifiedStorage(guarded(metered(faulty(backend))))


def compressed(backend: Store) -> Store:
    return CodedStorage(backend, CodingChoice(compress=True))


def encrypted(backend: Store) -> Store:
    return CodedStorage(backend, CodingChoice(compress=True, keys=KEYS))


STORES: list[tuple[str, int | None, Wrap]] = [
    (name, bytes_max, bare) for name in OPENED for bytes_max in (None, ROOM_BYTES_MAX)
]
STORES += [(name, ROOM_BYTES_MAX, wrap) for name in OPENED for wrap in (VerifiedStorage, stacked)]
STORES += [("memory", ROOM_BYTES_MAX, wrap) for wrap in (metered, guarded, faulty)]
STORES += [(name, ROOM_BYTES_MAX, wrap) for name in OPENED for wrap in (compressed, encrypted)]


class TestStores(StorageContract):
    @pytest.fixture(params=STORES, ids=lambda store: f"{store[0]}-{store[1]}-{store[2].__name__}")
    def storage(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Store]:
        monkeypatch.setenv(KEYS.removeprefix("env:"), f"* {'5a' * 32}")
        name, bytes_max, wrap = request.param
        storage: Store = wrap(OPENED[name](tmp_path, bytes_max))
        yield storage
        storage.close()


class TestKeysOnlyStorage(KeysOnlyContract):
    @pytest.fixture(params=[None, ROOM_BYTES_MAX])
    def storage(self, request: pytest.FixtureRequest) -> Store:
        return KeysOnlyStorage(request.param)
