"""Several callers over a store that fails, damages and hangs: no page is ever wrong, and no row is written late."""

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest

from tests.support.engine_rows import EngineRows, opened_store, payload_of
from tests.support.store_calls import ScriptedStorage, SeededFaults, StorageFault
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.integrations.engine_store import EngineStore, EngineStoreConfig
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer

CALLERS = 4
CALLS = 30
ROUNDS_MAX = 20
PAGES = 24

RATES = {
    StorageFault.HANG: 0.06,
    StorageFault.FAIL: 0.1,
    StorageFault.FLIPPED_BIT: 0.1,
    StorageFault.SHORT_READ: 0.05,
    StorageFault.MISDIRECTED_READ: 0.05,
    StorageFault.LOST_WRITE: 0.05,
    StorageFault.TORN_WRITE: 0.05,
    StorageFault.PARTIAL_WRITE: 0.05,
}


def calls_of_one(store: EngineStore, seed: int) -> list[tuple[EngineRows, list[bytes]]]:
    """Make calls; return rows that were asked to be filled, with what they held when the call had returned."""
    rng = random.Random(seed)
    filled: list[tuple[EngineRows, list[bytes]]] = []
    for _ in range(CALLS):
        numbers = rng.sample(range(PAGES), rng.randrange(1, 7))
        if rng.randrange(3) == 0:
            rows = EngineRows.holding(numbers)
            store.put(rows.pages(numbers))
            rows.memory[:] = bytes(len(rows.memory))  # the engine's next request
            rows.close()
            continue
        rows = EngineRows(len(numbers))
        answers = store.get(rows.pages(numbers))
        held = [rows.payload(slot) for slot in range(len(numbers))]
        for number, answer, payload in zip(numbers, answers, held, strict=True):
            assert answer is not Answer.HIT or payload == payload_of(number)
        filled.append((rows, held))
    return filled


@pytest.mark.parametrize("seed", range(3))
def test_no_page_is_wrong_and_no_row_is_written_late(seed: int) -> None:
    rng = random.Random(seed)
    backend = ScriptedStorage(MemoryStorage(), SeededFaults(RATES, rng), rng)
    guard = GuardConfig(
        deadline_s=0.02,
        calls_max=6,
        retry_rounds_max=2,
        retry_pause_s=1e-4,
        breaker_failures_max=10_000,
        breaker_pause_s=1e-6,
        breaker_pause_s_max=1e-6,
    )
    config = EngineStoreConfig(guard=guard, bounce_bytes=32 << 10, piece_bytes=8 << 10)
    store = opened_store(backend, config)
    over = Event()

    def release_late_calls() -> None:
        while not over.wait(0.005):
            if store.counts().late_now_count:
                backend.release()

    releasing = Thread(target=release_late_calls)
    releasing.start()
    found: list[tuple[EngineRows, list[bytes]]] = []
    for round_number in range(ROUNDS_MAX):
        seeds = range(round_number * CALLERS, (round_number + 1) * CALLERS)
        with ThreadPoolExecutor(CALLERS) as callers:
            found += [rows for part in callers.map(lambda number: calls_of_one(store, number), seeds) for rows in part]
        counts = store.counts()
        if counts.late_calls_count and counts.flaws:  # how calls interleave decides which of them are late or damaged
            break
    assert store.wait_for_late_calls(PATIENCE_S)
    over.set()
    releasing.join(PATIENCE_S)
    counts = store.counts()
    assert counts.is_registered
    assert counts.late_calls_count
    assert counts.flaws
    assert counts.quarantined_bytes == 0
    for rows, held in found:
        assert [rows.payload(slot) for slot in range(len(held))] == held
        rows.close()
    store.close()
