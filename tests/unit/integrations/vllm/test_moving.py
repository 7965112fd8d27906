from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.vllm_tier import FACTS, ROW, TIMEOUT_S, DictChunks, HostMemory, offload_key
from tests.support.waiting import wait_until
from unified_cache.integrations.vllm import moving as module
from unified_cache.integrations.vllm.moving import ChunkJob, Direction, JobEnd, MovedChunk, Moving
from unified_cache.integrations.vllm.names import ChunkNames
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Answer, Level

ROWS = 16
NAMES = ChunkNames.of(FACTS, ROW)
CONFIG = TierSettings(url="memory:", load_threads=1, store_threads=1, store_share=8 / ROWS)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    host = HostMemory(ROWS)
    yield host
    host.close()


@pytest.fixture
def store() -> DictChunks:
    return DictChunks.opened()


@pytest.fixture
def moving(memory: HostMemory, store: DictChunks) -> Iterator[Moving]:
    rows = memory.rows()
    running = Moving(store, rows, CONFIG)
    yield running
    store.gate.set()
    assert running.close(TIMEOUT_S)
    assert running.jobs_count == 0
    rows.release()


def chunk(number: int, row: int) -> MovedChunk:
    key = offload_key(number)
    return MovedChunk(key, NAMES.label(key), row)


def job(number: int, direction: Direction, *chunks: MovedChunk) -> ChunkJob:
    return ChunkJob(number, direction, chunks)


def drained(moving: Moving) -> list[JobEnd]:
    moving.drain(TIMEOUT_S)
    return moving.ended()


def stored(memory: HostMemory, moving: Moving, *numbers: int) -> None:
    for row, number in enumerate(numbers):
        memory.fill(row, number)
    moving.submit(job(0, Direction.STORE, *(chunk(number, row) for row, number in enumerate(numbers))))
    assert all(not end.failed for end in drained(moving))


def test_what_was_stored_from_one_row_is_loaded_into_another(memory: HostMemory, moving: Moving) -> None:
    stored(memory, moving, 1, 2)
    moving.submit(job(7, Direction.LOAD, chunk(2, 5), chunk(1, 6)))
    (end,) = drained(moving)
    assert (end.job.number, end.failed) == (7, ())
    assert (memory.row(5), memory.row(6)) == (memory.payload(2), memory.payload(1))


def test_a_load_that_failed_in_part_says_which_chunks_came(memory: HostMemory, moving: Moving) -> None:
    stored(memory, moving, 1, 2)
    moving.submit(job(7, Direction.LOAD, chunk(1, 5), chunk(9, 6), chunk(2, 7)))
    (end,) = drained(moving)
    assert end.moved == (offload_key(1), offload_key(2))
    assert end.failed == (offload_key(9),)
    assert end.answers == (Answer.HIT, Answer.MISS, Answer.HIT)


def test_a_load_overtakes_stores_between_two_pieces(
    memory: HostMemory, store: DictChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", ROW.payload_bytes)
    rows = memory.rows()
    # One thread that stores, and would be alone with both.
    alone = Moving(store, rows, CONFIG.model_copy(update={"load_threads": 0}))
    store.gate.clear()
    alone.submit(job(0, Direction.STORE, chunk(1, 0), chunk(2, 1), chunk(3, 2)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    alone.submit(job(1, Direction.LOAD, chunk(9, 5)))
    store.gate.set()
    ends = drained(alone)
    assert [call for call, _ in store.calls] == ["put", "get", "put", "put"]
    assert [end.job.number for end in ends] == [1, 0]
    assert alone.close(TIMEOUT_S)
    rows.release()


def test_a_load_finds_a_thread_that_no_store_is_on(moving: Moving, store: DictChunks) -> None:
    store.gate.clear()
    moving.submit(job(0, Direction.STORE, chunk(1, 0)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    moving.submit(job(1, Direction.LOAD, chunk(9, 5)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    assert [call for call, _ in store.calls] == ["put", "get"]


def test_by_default_a_large_store_goes_on_while_a_part_of_it_waits_for_the_disk(
    memory: HostMemory, store: DictChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", 2 * ROW.payload_bytes)
    rows, settings = memory.rows(), TierSettings(url="file:/kv", store_share=8 / ROWS)
    storing = Moving(store, rows, settings)
    store.gate.clear()
    storing.submit(job(0, Direction.STORE, *(chunk(number, number) for number in range(8))))
    for _ in range(2):
        assert store.begun.acquire(timeout=TIMEOUT_S)
    # Both threads that store are waiting, and the one that only loads is there for loads.
    storing.submit(job(1, Direction.LOAD, chunk(9, 9)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    assert store.calls == [("put", 2), ("put", 2), ("get", 1)]
    store.gate.set()
    assert sorted(end.job.number for end in drained(storing)) == [0, 1]
    assert storing.close(TIMEOUT_S)
    rows.release()


def test_stores_beyond_their_share_of_the_rows_end_at_once(moving: Moving, store: DictChunks) -> None:
    store.gate.clear()
    moving.submit(job(0, Direction.STORE, *(chunk(number, number) for number in range(8))))
    moving.submit(job(1, Direction.STORE, chunk(9, 9)))
    (end,) = moving.ended()
    assert (end.job.number, end.moved) == (1, ())
    assert moving._rows_out[Direction.STORE] == 8


def test_a_job_larger_than_its_share_is_taken_where_no_other_waits(moving: Moving, store: DictChunks) -> None:
    moving.submit(job(0, Direction.STORE, *(chunk(number, number) for number in range(12))))
    (end,) = drained(moving)
    assert not end.failed


def test_a_store_that_does_not_answer_is_not_asked_for_the_rest_of_a_job(
    moving: Moving, store: DictChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", ROW.payload_bytes)
    store.away = True
    moving.submit(job(0, Direction.LOAD, *(chunk(number, number) for number in range(5))))
    (end,) = drained(moving)
    assert end.answers == (Answer.UNAVAILABLE,) * 5
    # Each thread may have had a piece in hand before the first one was answered.
    assert 1 <= len(store.calls) <= CONFIG.load_threads + CONFIG.store_threads < 5


def test_a_drain_that_takes_too_long_drops_what_has_not_begun(moving: Moving, store: DictChunks) -> None:
    store.gate.clear()
    moving.submit(job(0, Direction.STORE, chunk(1, 1)))
    assert store.begun.acquire(timeout=TIMEOUT_S)
    moving.submit(job(1, Direction.STORE, chunk(2, 2)))
    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(moving.drain, 0.0)
        assert wait_until(lambda: moving.jobs_count == 1, TIMEOUT_S)
        assert [(end.job.number, end.moved) for end in moving.ended()] == [(1, ())]
        store.gate.set()
        draining.result(TIMEOUT_S)
    (end,) = moving.ended()
    assert (end.job.number, end.failed) == (0, ())


def test_every_job_ends_when_moving_is_closed(memory: HostMemory, store: DictChunks) -> None:
    rows = memory.rows()
    running = Moving(store, rows, CONFIG)
    running.submit(job(0, Direction.STORE, chunk(1, 1)))
    assert running.close(TIMEOUT_S)
    running.submit(job(1, Direction.LOAD, chunk(1, 2)))
    assert {end.job.number: bool(end.moved) for end in running.ended()} == {0: True, 1: False}
    rows.release()


def test_a_job_without_chunks_ends(moving: Moving) -> None:
    moving.submit(job(3, Direction.STORE))
    (end,) = moving.ended()
    assert (end.job.number, end.moved, end.failed) == (3, (), ())


def test_the_store_is_told_what_is_in_use(moving: Moving, store: DictChunks) -> None:
    label = NAMES.label(offload_key(1))
    moving.touch([label])
    assert store.begun.acquire(timeout=TIMEOUT_S)
    assert store.touched == [label]


def test_a_large_load_is_shared_among_the_threads_that_load(
    memory: HostMemory, moving: Moving, store: DictChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARED_BYTES_MIN", 2 * ROW.payload_bytes)
    for count, calls in ((2, [2]), (3, [1, 2]), (8, [4, 4])):
        store.calls.clear()
        moving.submit(job(0, Direction.LOAD, *(chunk(number, number) for number in range(count))))
        drained(moving)
        assert sorted(store.calls) == [("get", size) for size in calls]


def test_a_durable_put_takes_more_chunks_than_another_one(
    memory: HostMemory, store: DictChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", ROW.payload_bytes)
    monkeypatch.setattr(module, "BATCH_BYTES", 3 * ROW.payload_bytes)
    for level, calls in ((Level.CACHED, [1, 1, 1]), (Level.DURABLE, [3])):
        store.calls.clear()
        rows = memory.rows()
        alone = Moving(store, rows, CONFIG.model_copy(update={"level": level}))
        first = 10 * len(calls)
        alone.submit(job(0, Direction.STORE, *(chunk(first + number, number) for number in range(3))))
        drained(alone)
        assert [size for call, size in store.calls if call == "put"] == calls
        assert alone.close(TIMEOUT_S)
        rows.release()
