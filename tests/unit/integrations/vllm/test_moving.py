from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.vllm_tier import NAMES, ROW, TIMEOUT_S, GatedStorage, HostMemory, offload_key
from tests.support.waiting import wait_until
from unified_cache.integrations.engine_store import EngineStore
from unified_cache.integrations.engine_store.calls import STARTED_PARTS_MAX, THREADS_MAX, WRITES_MAX
from unified_cache.integrations.vllm.moving import ChunkJob, JobEnd, MovedChunk, Moving
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Answer, Level

ROWS = 16
CONFIG = TierSettings(url="memory:", store_share=8 / ROWS)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    host = HostMemory(ROWS)
    yield host
    host.close()


@pytest.fixture
def store() -> GatedStorage:
    return GatedStorage()


@pytest.fixture
def engine_store(store: GatedStorage) -> Iterator[EngineStore]:
    with store.opened() as opened:
        yield opened
        store.gate.set()


@pytest.fixture
def moving(memory: HostMemory, store: GatedStorage, engine_store: EngineStore) -> Iterator[Moving]:
    rows = memory.rows()
    running = Moving(engine_store, rows, CONFIG)
    yield running
    store.gate.set()
    assert running.close(TIMEOUT_S)
    assert running.jobs_count == 0
    rows.release()


def chunk(number: int, row: int) -> MovedChunk:
    key = offload_key(number)
    return MovedChunk(key, NAMES.label(key), row)


def load(number: int, *chunks: MovedChunk) -> ChunkJob:
    return ChunkJob(number, True, chunks)


def keep(number: int, *chunks: MovedChunk) -> ChunkJob:
    return ChunkJob(number, False, chunks)


def drained(moving: Moving) -> list[JobEnd]:
    moving.drain(TIMEOUT_S)
    return moving.ended()


def stored(memory: HostMemory, moving: Moving, *numbers: int) -> None:
    for row, number in enumerate(numbers):
        memory.fill(row, number)
    moving.submit(keep(0, *(chunk(number, row) for row, number in enumerate(numbers))))
    assert all(not end.failed for end in drained(moving))


def test_what_was_stored_from_one_row_is_loaded_into_another(memory: HostMemory, moving: Moving) -> None:
    stored(memory, moving, 1, 2)
    moving.submit(load(7, chunk(2, 5), chunk(1, 6)))
    (end,) = drained(moving)
    assert (end.job.number, end.failed) == (7, ())
    assert (memory.row(5), memory.row(6)) == (memory.payload(2), memory.payload(1))


def test_a_load_that_failed_in_part_says_which_chunks_came(memory: HostMemory, moving: Moving) -> None:
    stored(memory, moving, 1, 2)
    moving.submit(load(7, chunk(1, 5), chunk(9, 6), chunk(2, 7)))
    (end,) = drained(moving)
    assert end.moved == (offload_key(1), offload_key(2))
    assert end.failed == (offload_key(9),)
    assert end.answers == (Answer.HIT, Answer.MISS, Answer.HIT)


@pytest.fixture
def single_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each chunk a piece, and enough of them for a part."""
    monkeypatch.setattr("unified_cache.integrations.engine_store.store.PIECE_BYTES_MAX", ROW.payload_bytes)
    monkeypatch.setattr("unified_cache.integrations.engine_store.store.PART_BYTES_MIN", ROW.payload_bytes)


def test_a_load_overtakes_stores_between_two_pieces(moving: Moving, store: GatedStorage, single_pages: None) -> None:
    store.gate.clear()
    moving.submit(keep(0, *(chunk(number, number) for number in range(6))))
    for _ in range(WRITES_MAX):
        assert store.begun.acquire(timeout=TIMEOUT_S)
    for number in range(1, THREADS_MAX):
        moving.submit(load(number, chunk(9, 8 + number)))
    for _ in range(THREADS_MAX - WRITES_MAX):
        assert store.begun.acquire(timeout=TIMEOUT_S)
    store.gate.set()
    drained(moving)
    first = [call for call, _ in store.calls[: THREADS_MAX + 1]]
    assert sorted(first) == ["get"] * (THREADS_MAX - 1) + ["put"] * WRITES_MAX


def test_a_load_finds_a_thread_that_no_store_is_on(moving: Moving, store: GatedStorage) -> None:
    store.gate.clear()
    moving.submit(keep(0, chunk(1, 0)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    moving.submit(load(1, chunk(9, 5)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    assert [call for call, _ in store.calls] == ["put", "get"]


def test_a_large_store_goes_on_while_a_part_of_it_waits_for_the_disk(
    moving: Moving, store: GatedStorage, single_pages: None
) -> None:
    store.gate.clear()
    moving.submit(keep(0, *(chunk(number, number) for number in range(8))))
    for _ in range(WRITES_MAX):
        assert store.begun.acquire(timeout=TIMEOUT_S)
    assert not store.begun.acquire(blocking=False)
    store.gate.set()
    assert [end.failed for end in drained(moving)] == [()]


def test_stores_beyond_their_share_of_the_rows_end_at_once(moving: Moving, store: GatedStorage) -> None:
    store.gate.clear()
    moving.submit(keep(0, *(chunk(number, number) for number in range(8))))
    moving.submit(keep(1, chunk(9, 9)))
    (end,) = moving.ended()
    assert (end.job.number, end.moved) == (1, ())
    assert moving._rows_out[False] == 8


def test_a_job_larger_than_its_share_is_taken_where_no_other_waits(moving: Moving, store: GatedStorage) -> None:
    moving.submit(keep(0, *(chunk(number, number) for number in range(12))))
    (end,) = drained(moving)
    assert not end.failed


def test_a_store_that_does_not_answer_is_not_asked_for_the_rest_of_a_job(
    moving: Moving, store: GatedStorage, single_pages: None
) -> None:
    store.is_away = True
    moving.submit(load(0, *(chunk(number, number) for number in range(5))))
    (end,) = drained(moving)
    assert end.answers == (Answer.UNAVAILABLE,) * 5
    # Each part may have had a piece in hand before the first one was answered.
    assert 1 <= len(store.calls) <= STARTED_PARTS_MAX < 5


def test_a_drain_that_takes_too_long_drops_what_has_not_begun(moving: Moving, store: GatedStorage) -> None:
    store.gate.clear()
    for number in range(WRITES_MAX):
        moving.submit(keep(number, chunk(number, number)))
        assert store.begun.acquire(timeout=TIMEOUT_S)
    moving.submit(keep(9, chunk(9, 7)))
    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(moving.drain, 0.0)
        assert wait_until(lambda: moving.jobs_count == WRITES_MAX, TIMEOUT_S)
        assert [(end.job.number, end.moved) for end in moving.ended()] == [(9, ())]
        store.gate.set()
        draining.result(TIMEOUT_S)
    assert [end.failed for end in moving.ended()] == [()] * WRITES_MAX


def test_every_job_ends_when_moving_is_closed(memory: HostMemory, engine_store: EngineStore) -> None:
    rows = memory.rows()
    running = Moving(engine_store, rows, CONFIG)
    running.submit(keep(0, chunk(1, 1)))
    assert running.close(TIMEOUT_S)
    running.submit(load(1, chunk(1, 2)))
    assert {end.job.number: bool(end.moved) for end in running.ended()} == {0: True, 1: False}
    rows.release()


def test_a_job_without_chunks_ends(moving: Moving) -> None:
    moving.submit(keep(3))
    (end,) = moving.ended()
    assert (end.job.number, end.moved, end.failed) == (3, (), ())


def test_the_store_is_told_what_is_in_use(moving: Moving, store: GatedStorage) -> None:
    label = NAMES.label(offload_key(1))
    moving.touch([label])
    assert store.begun.acquire(timeout=TIMEOUT_S)
    assert store.touched == [label]


def test_a_large_load_is_moved_in_parts_at_a_time(
    moving: Moving, store: GatedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.integrations.engine_store.store.PART_BYTES_MIN", 2 * ROW.payload_bytes)
    for count, calls in ((2, [2]), (4, [2, 2]), (9, [3, 3, 3])):
        store.calls.clear()
        moving.submit(load(0, *(chunk(number, number) for number in range(count))))
        drained(moving)
        assert sorted(store.calls) == [("get", size) for size in calls]


def test_a_durable_put_takes_more_chunks_than_another_one(
    memory: HostMemory, store: GatedStorage, engine_store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.integrations.engine_store.interface.PIECE_BYTES_MAX", 4096)
    monkeypatch.setattr("unified_cache.integrations.engine_store.interface.BATCH_BYTES", 3 * 4096)
    for level, calls in ((Level.CACHED, [1, 1, 1]), (Level.DURABLE, [3])):
        store.calls.clear()
        rows = memory.rows()
        alone = Moving(engine_store, rows, CONFIG.model_copy(update={"level": level}))
        first = 10 * len(calls)
        alone.submit(keep(0, *(chunk(first + number, number) for number in range(3))))
        drained(alone)
        assert [size for call, size in store.calls if call == "put"] == calls
        assert alone.close(TIMEOUT_S)
        rows.release()
