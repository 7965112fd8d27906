"""Wrappers on top of each other: whatever the store does, a hit is right, and it comes back when the store does."""

import random
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from tests.support.clock import ManualClock
from tests.support.store_calls import ScriptedStorage, SeededFaults, StorageFault
from tests.support.wrappers import OF_ANY_SPEED, PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level, Store
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, sealed_page

OPERATIONS = 2_000
PAGES = 40
SEALED = [sealed_page(label(number)) for number in range(PAGES)]
CONTENTS = [bytes_of(page) for page in SEALED]

RATES = {
    StorageFault.FAIL: 0.08,
    StorageFault.DELAY: 0.02,
    StorageFault.SHORT_READ: 0.08,
    StorageFault.FLIPPED_BIT: 0.08,
    StorageFault.MISDIRECTED_READ: 0.08,
    StorageFault.LOST_WRITE: 0.08,
    StorageFault.TORN_WRITE: 0.08,
    StorageFault.PARTIAL_WRITE: 0.08,
}


def use(storage: Store, clock: ManualClock, rng: random.Random) -> tuple[int, int]:
    """Put, get and remove at random; return how many pages were hits and how many of these were wrong."""
    hits_count = wrong_count = 0
    for _ in range(OPERATIONS):
        clock.now_s += 1.0
        numbers = rng.sample(range(PAGES), rng.randint(1, 6))
        action = rng.random()
        try:
            if action < 0.45:
                storage.put([SEALED[number] for number in numbers], Level.CACHED)
            elif action < 0.9:
                found = [blank_page(label(number)) for number in numbers]
                for number, page, hit in zip(numbers, found, storage.get(found), strict=True):
                    hits_count += bool(hit)
                    wrong_count += bool(hit) and bytes_of(page) != CONTENTS[number]
            elif action < 0.95:
                storage.exists([label(number) for number in numbers])
            else:
                storage.remove([label(number) for number in numbers])
        except StorageError as error:
            if not error.retryable:
                raise
    return hits_count, wrong_count


def faulty(clock: ManualClock, seed: int) -> ScriptedStorage:
    plan = SeededFaults(RATES, random.Random(seed))
    backend = MemoryStorage(PAGES * PAGE_BYTES * 3 // 4)
    return ScriptedStorage(backend, plan, random.Random(seed + 1), delay_s=0.1, sleep=clock.sleep)


def verified(store: Store, clock: ManualClock) -> Store:
    return VerifiedStorage(store)


def stacked(store: Store, clock: ManualClock) -> Store:
    metered = MeteredStorage(store, StorageMetrics(CollectorRegistry()), "faulty", clock)
    config = GuardConfig(
        deadline_s=PATIENCE_S,
        calls_max=2,
        retry_rounds_max=2,
        retry_pause_s=0.1,
        breaker_failures_max=2,
        breaker_pause_s=2.0,
        breaker_pause_s_max=8.0,
    )
    return VerifiedStorage(StorageGuard(metered, OF_ANY_SPEED, config, clock, clock.sleep, random.Random(9)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("wrap", [verified, stacked])
def test_no_wrong_byte_comes_through_whatever_faults_the_store_has(
    wrap: Callable[[Store, ManualClock], Store], seed: int
) -> None:
    clock = ManualClock()
    store = faulty(clock, seed)
    storage = wrap(store, clock)
    hits_count, wrong_count = use(storage, clock, random.Random(seed + 2))
    assert wrong_count == 0
    assert hits_count > OPERATIONS / 4
    assert set(store.fired_count) == set(RATES)
    storage.close()


def test_without_the_check_the_same_faults_are_seen() -> None:
    clock = ManualClock()
    _, wrong_count = use(faulty(clock, 0), clock, random.Random(2))
    assert wrong_count > 50
