"""Engine stores over a store that hangs, fails, damages pages or is away: right answers in time, no late write."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from socket import AF_INET, SOCK_STREAM, socket
from threading import Event, Thread, current_thread
from threading import enumerate as living_threads

import pytest

from tests.support.clock import ManualClock
from tests.support.engine_rows import IDENTITY, LAYOUT, EngineRows, label_of, opened_store, payload_of
from tests.support.running_service import running
from tests.support.service import wait_for
from tests.support.store_calls import ScriptedStorage, StorageFault, at, raising
from tests.support.wrappers import PATIENCE_S, scripted
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES, seal_buffers
from unified_cache.integrations.engine_store import EngineStore, EngineStoreConfig, Unavailable
from unified_cache.storage_backends.common.breaker import Backoff, BreakerState, Retries
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.wrappers import Method

SOON = GuardConfig(deadline_s=0.05, calls_max=2, retry_rounds_max=1, breaker_failures_max=100)
SOON_LATE = EngineStoreConfig(guard=SOON, bounce_bytes=8192, piece_bytes=8192)
"""Bounce buffers for one call of a page or two, and for another beside it."""

HANG = StorageFault.HANG


def stored(numbers: Sequence[int]) -> MemoryStorage:
    """Return a store that holds these pages."""
    backend = MemoryStorage()
    for number in numbers:
        store_page(backend, number)
    return backend


def store_page(backend: Store, number: int) -> None:
    """Put the page of that number."""
    page = memoryview(bytearray(HEADER_BYTES) + payload_of(number))
    seal_buffers((page,), label_of(number))
    backend.put([PageIO(label_of(number), (page,))], Level.CACHED)


def test_a_get_that_hangs_ends_at_its_deadline_and_never_touches_the_rows_again() -> None:
    backend = scripted({1: HANG}, stored([1, 2]))
    store = opened_store(backend, SOON_LATE)
    rows = EngineRows.holding([7, 8])  # what the engine has there for somebody else
    assert store.get(rows.pages([1, 2])) == [Answer.UNAVAILABLE] * 2
    counts = store.counts()
    assert counts.unavailable == {(Method.GET, Unavailable.LATE): 2}
    assert (counts.late_calls_count, counts.late_now_count) == (1, 1)
    assert counts.quarantined_bytes == 8192
    release(backend, store)
    assert [rows.payload(0), rows.payload(1)] == [payload_of(7), payload_of(8)]
    assert store.counts().quarantined_bytes == 0
    target = EngineRows(2)
    assert store.get(target.pages([1, 2])) == [Answer.HIT] * 2
    store.close()
    rows.close()


def test_a_put_that_hangs_stores_what_the_rows_held_when_it_was_called() -> None:
    backend = scripted({2: HANG})
    store = opened_store(backend, SOON_LATE)
    rows = EngineRows.holding([1])
    assert store.put(rows.pages([1])) == [Answer.UNAVAILABLE]
    rows.rows(0)[0][:] = bytes(3000)  # the engine's next request
    release(backend, store)
    target = EngineRows(1)
    assert store.get(target.pages([1])) == [Answer.HIT]
    assert target.payload(0) == payload_of(1)
    store.close()


def test_a_put_whose_look_up_hangs_ends_at_its_deadline_and_reads_no_row_afterwards() -> None:
    backend = scripted({1: HANG})
    store = opened_store(backend, SOON_LATE)
    rows = EngineRows.holding([1])
    assert store.put(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {(Method.PUT, Unavailable.LATE): 1}
    rows.close()  # BufferError, had the store's thread a view of it
    release(backend, store)
    assert store.exists([label_of(1)]) == [Answer.MISS]
    store.close()


def test_with_all_threads_lost_pages_are_unavailable_at_once() -> None:
    backend = scripted({1: HANG, 2: HANG}, stored([1]))
    store = opened_store(backend, SOON_LATE)
    for _ in range(2):
        store.exists([label_of(1)])
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {
        (Method.EXISTS, Unavailable.LATE): 2,
        (Method.EXISTS, Unavailable.BUSY): 1,
    }
    release(backend, store)
    assert store.exists([label_of(1)]) == [Answer.HIT]
    store.close()


def test_the_pages_of_the_pieces_before_a_hang_are_hits() -> None:
    backend = scripted({2: HANG}, stored([1, 2, 3]))
    store = opened_store(backend, EngineStoreConfig(guard=SOON, bounce_bytes=8192, piece_bytes=1))
    rows = EngineRows.holding([7, 8, 9])
    assert store.get(rows.pages([1, 2, 3])) == [Answer.HIT, Answer.UNAVAILABLE, Answer.UNAVAILABLE]
    release(backend, store)
    assert [rows.payload(slot) for slot in range(3)] == [payload_of(number) for number in (1, 8, 9)]
    store.close()


class PartlyLockedStorage(MemoryStorage):
    """A store of which nobody has the keys for page 1."""

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        answers = zip(pages, super().get(pages), strict=True)
        return [Answer.UNAVAILABLE if page.label == label_of(1) else answer for page, answer in answers]


def test_a_piece_of_which_nothing_can_be_had_costs_the_pieces_after_it_nothing() -> None:
    backend = PartlyLockedStorage()
    for number in (1, 2, 3):
        store_page(backend, number)
    store = opened_store(backend, EngineStoreConfig(bounce_bytes=8192, piece_bytes=1))
    rows = EngineRows(3)
    assert store.get(rows.pages([1, 2, 3])) == [Answer.UNAVAILABLE, Answer.HIT, Answer.HIT]
    assert [rows.payload(slot) for slot in (1, 2)] == [payload_of(2), payload_of(3)]
    assert store.counts().unavailable == {(Method.GET, Unavailable.REFUSED): 1}
    store.close()


def test_calls_that_hang_open_the_breaker_of_gets_although_look_ups_work() -> None:
    backend = scripted({2: HANG, 4: HANG}, stored([1]))
    guard = GuardConfig(deadline_s=0.5, breaker_failures_max=2, retry_rounds_max=1)
    store = opened_store(backend, EngineStoreConfig(guard=guard))
    for _ in range(2):
        assert store.exists([label_of(1)]) == [Answer.HIT]
        assert store.get(EngineRows(1).pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().breaker is BreakerState.OPEN
    assert store.get(EngineRows(1).pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable[Method.GET, Unavailable.REFUSED] == 1
    store.close(0.0)
    backend.release()


def test_a_store_that_fails_and_recovers_is_asked_again() -> None:
    backend = scripted({1: StorageFault.FAIL, 2: StorageFault.FAIL, 3: StorageFault.FAIL}, stored([1]))
    store = opened_store(backend, SOON_LATE)
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]
    rows = EngineRows.holding([1])
    assert store.put(rows.pages([1])) == store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {
        (method, Unavailable.FAILED): 1 for method in (Method.EXISTS, Method.PUT, Method.GET)
    }
    assert "fails on purpose" in store.counts().last_error
    assert store.get(rows.pages([1])) == [Answer.HIT]
    store.close()


def test_a_store_that_is_away_is_opened_by_a_later_call_and_told_what_was_registered() -> None:
    clock = ManualClock()
    watched, away = ScriptedStorage(), [StorageError("the server is away", retryable=True)] * 2
    store_page(watched, 1)

    def make() -> Store:
        if away:
            raise away.pop()
        return watched

    store = EngineStore.opened_by(make, EngineStoreConfig(guard=GuardConfig(breaker_pause_s=1.0)), clock=clock)
    store.register(IDENTITY, LAYOUT)
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]
    assert not store.counts().is_registered
    assert "the server is away" in store.counts().last_error
    clock.now_s += 1.0
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]  # tried, and away still
    clock.now_s += 1.0
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]  # not tried: the pause is longer now
    clock.now_s += 1.0
    assert store.exists([label_of(1)]) == [Answer.HIT]
    assert watched.calls.count(Method.REGISTER) == 1
    assert store.counts().is_registered
    assert store.counts().unavailable == {(Method.EXISTS, Unavailable.AWAY): 3}
    store.close()


def test_a_registration_that_fails_is_made_up_after_a_pause() -> None:
    clock = ManualClock()
    store_below = ScriptedStorage()
    store_below.before[Method.REGISTER] = at(0, raising(StorageError("not now", retryable=True)))
    store = opened_store(store_below, clock=clock)
    assert not store.counts().is_registered
    rows = EngineRows.holding([1])
    assert store.put(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {(Method.PUT, Unavailable.UNREGISTERED): 1}
    clock.now_s += 1.0
    assert store.put(rows.pages([1])) == [Answer.STORED]
    assert store.counts().is_registered
    store.close()


@pytest.mark.parametrize("is_opening", [True, False], ids=["opening", "registering"])
def test_what_is_refused_for_good_is_said_once_tried_each_minute_and_done_when_it_is_mended(
    is_opening: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock, backend, tries = ManualClock(), ScriptedStorage(), list[float]()
    refusals = [StorageError("tenant acme may not come here: ask its owner", retryable=False)]

    def refuse() -> None:
        tries.append(clock())
        if refusals:
            raise refusals[0]

    def make() -> Store:
        if is_opening:
            refuse()
        return backend

    if not is_opening:
        backend.before[Method.REGISTER] = refuse
    caplog.set_level(logging.INFO, logger="unified_cache")
    with EngineStore.opened_by(make, clock=clock) as store:
        store.register(IDENTITY, LAYOUT)
        for _ in range(110):
            assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]
            clock.now_s += 1.0
        assert len(tries) == 2  # at once and after a minute, not every few seconds
        (said,) = caplog.records
        assert said.levelname == "ERROR"
        assert "tenant acme may not come here: ask its owner" in said.getMessage()
        assert "until its cause is mended" in said.getMessage()
        refusals.clear()
        clock.now_s += 60.0
        assert store.exists([label_of(1)]) == [Answer.MISS]
        assert "succeeded after 2 failures" in caplog.messages[-1]


def test_a_store_that_is_away_is_said_once_until_it_was_there(caplog: pytest.LogCaptureFixture) -> None:
    retries = Retries("opening a store", Backoff(1.0, 4.0), ManualClock())
    away = StorageError("away", retryable=True)
    assert [retries.record_failure(away) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    retries.record_success()
    assert retries.record_failure(away) == 1.0
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_a_server_that_starts_late_or_again_is_found_and_told_what_was_registered() -> None:
    with socket(AF_INET, SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    guard = GuardConfig(breaker_pause_s=0.01, breaker_pause_s_max=0.01, retry_rounds_max=1)
    store = EngineStore.open(f"grpc://127.0.0.1:{port}?timeout_s=1", EngineStoreConfig(guard=guard))
    store.register(IDENTITY, LAYOUT)
    rows = EngineRows.holding([1])
    assert store.put(rows.pages([1])) == store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
    for _ in range(2):  # a server that was not there yet, and one that has forgotten everything
        with running(listen=f"127.0.0.1:{port}"):
            started_s = time.monotonic()
            while store.put(rows.pages([1])) != [Answer.STORED]:
                assert time.monotonic() < started_s + PATIENCE_S, store.counts()
            target = EngineRows(1)
            assert store.get(target.pages([1])) == [Answer.HIT]
            assert target.payload(0) == payload_of(1)
            assert store.counts().is_registered
        assert store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
    store.close()
    rows.close()


def test_opening_that_hangs_holds_nobody_up_for_longer_than_a_deadline() -> None:
    may_open = Event()
    backend = stored([1])

    def make() -> Store:
        assert may_open.wait(PATIENCE_S)
        return backend

    store = EngineStore.opened_by(make, SOON_LATE)
    store.register(IDENTITY, LAYOUT)
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]
    store.close()
    may_open.set()


def test_a_store_that_is_open_keeps_no_thread_that_opens_it() -> None:
    before = set(living_threads())
    store = EngineStore.opened_by(MemoryStorage)
    wait_for(lambda: not set(living_threads()) - before)
    store.close()


def test_a_call_whose_time_is_over_answers_for_the_pages_it_reached() -> None:
    clock, backend = ManualClock(), ScriptedStorage()
    backend.before[Method.GET] = lambda: clock.sleep(10.0)
    config = EngineStoreConfig(guard=GuardConfig(deadline_s=60.0), piece_bytes=1, call_timeout_s=15.0)
    store = opened_store(backend, config, clock)
    rows = EngineRows.holding(range(4))
    store.put(rows.pages(range(4)))
    answers = store.get(rows.pages(range(4)))
    assert answers == [Answer.HIT, Answer.HIT, Answer.UNAVAILABLE, Answer.UNAVAILABLE]
    assert store.counts().unavailable == {(Method.GET, Unavailable.CALL_OVER): 2}
    store.close()


def test_close_sends_callers_away_whose_store_hangs() -> None:
    backend = scripted({1: HANG}, stored([1]))
    store = opened_store(backend, EngineStoreConfig(guard=GuardConfig(deadline_s=3600.0)))
    rows = EngineRows(1)
    answers: list[Answer] = []
    caller = Thread(target=lambda: answers.extend(store.get(rows.pages([1]))))
    caller.start()
    assert backend.wait_until_hung(1, PATIENCE_S)
    store.close(0.0)
    caller.join(PATIENCE_S)
    assert answers == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {(Method.GET, Unavailable.CLOSED): 1}
    rows.close()
    backend.release()


def test_what_a_store_raises_against_all_rules_is_an_answer_too() -> None:
    backend = ScriptedStorage()
    backend.before[Method.GET] = raising(BaseException("a native library panicked"))
    with opened_store(backend, SOON_LATE) as store:
        assert store.get(EngineRows(1).pages([1])) == [Answer.UNAVAILABLE]
        assert store.counts().unavailable == {(Method.GET, Unavailable.FAILED): 1}


def release(backend: ScriptedStorage, store: EngineStore) -> None:
    """Let the calls go on that hang, and wait until the threads have left them."""
    backend.release()
    assert store.wait_for_late_calls(PATIENCE_S)


@pytest.mark.parametrize("method", [Method.GET, Method.PUT])
def test_a_late_call_that_nobody_waits_for_is_given_up_by_who_looks_and_its_rows_are_the_engines(
    method: Method,
) -> None:
    backend = scripted({1: HANG}, stored([1]))
    store = opened_store(backend, SOON_LATE)
    rows = EngineRows.holding([7])
    ends: list[list[Answer]] = []
    store.start(method, rows.pages([1]), ends.append)
    assert backend.wait_until_hung(1, PATIENCE_S)
    assert store.wait_until(lambda: bool(ends), PATIENCE_S)
    assert ends == [[Answer.UNAVAILABLE]]
    assert store.counts().unavailable == {(method, Unavailable.LATE): 1}
    assert store.counts().late_now_count == 1
    rows.close()  # BufferError, had the store's thread a view of it
    release(backend, store)
    store.close()


def test_look_ups_that_run_on_a_thread_of_the_stores_need_no_other_one_and_are_given_up_with_it() -> None:
    threads, watched = set[str](), ScriptedStorage()
    watched.before[Method.EXISTS] = lambda: threads.add(current_thread().name)
    backend = scripted({2: HANG}, watched)
    store = opened_store(backend, SOON_LATE)
    ends: list[bool] = []

    def has_ended(count: int) -> bool:
        return len(ends) == count

    for count in (1, 2):
        store.run(lambda: store.exists([label_of(1)]), lambda: ends.append(True))
        assert store.wait_until(partial(has_ended, count), PATIENCE_S)
    assert threads == {"engine-store-0"}
    assert store.counts().late_now_count == 1
    release(backend, store)
    store.close()
