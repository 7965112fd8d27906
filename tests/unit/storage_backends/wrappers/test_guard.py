"""The guard of a store: retries of faults that pass, deadlines, and a breaker before a store that keeps failing."""

import gc
import logging
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.clock import ManualClock
from tests.support.store_calls import ScriptedStorage, StorageFault, raising
from tests.support.wrappers import OF_ANY_SPEED, PATIENCE_S, blank, bounded, breaking, retrying, scripted, sealed
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import (
    ClosedError,
    ConfigError,
    InputError,
    NotOfferedError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from unified_cache.storage_backends.common.bounded_call import CallThreads, run_here, time_left_s
from unified_cache.storage_backends.common.breaker import Backoff, BreakerState, CircuitBreaker
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.wrappers import Method, StorageGuard
from unified_cache.testing.storage_contract import LAYOUT, MODEL, blank_page, bytes_of, label, sealed_page


@pytest.mark.parametrize("may_wait", [False, True])
def test_a_store_that_never_waits_is_called_by_who_asks_and_any_other_by_a_thread_of_the_guard(may_wait: bool) -> None:
    store, asking = ScriptedStorage(), list[int]()
    store.before[Method.EXISTS] = lambda: asking.append(threading.get_ident())
    storage = StorageGuard(store, replace(store.capability(), bounded=not may_wait), GuardConfig())
    assert storage.exists([label(0)]) == [Answer.MISS]
    assert (asking != [threading.get_ident()]) is may_wait
    storage.close()


def test_a_fault_that_passes_is_not_seen() -> None:
    clock = ManualClock()
    faulty = scripted({0: StorageFault.FAIL, 3: StorageFault.FAIL, 5: StorageFault.FAIL})
    storage = retrying(faulty, 2, clock)
    assert storage.put(sealed(range(4)), Level.CACHED) == [Answer.STORED] * 4
    assert storage.exists([label(9)]) == [Answer.MISS]
    found = blank([0, 9, 3])
    assert storage.get(found) == [Answer.HIT, Answer.MISS, Answer.HIT]
    assert [bytes_of(found[0]), bytes_of(found[2])] == [bytes_of(page) for page in sealed([0, 3])]
    assert storage.exists([label(2)]) == [Answer.HIT]
    assert faulty.calls_count == 7
    assert (storage.retries_count, len(clock.sleeps_s)) == (3, 3)


@pytest.mark.parametrize("rounds_max", [1, 2, 4])
def test_a_store_that_always_fails_is_asked_so_often_and_then_its_error_is_raised(rounds_max: int) -> None:
    clock = ManualClock()
    faulty = scripted(dict.fromkeys(range(100), StorageFault.FAIL))
    storage = retrying(faulty, rounds_max, clock)
    with pytest.raises(StorageError, match=f"call {rounds_max - 1}, get, fails"):
        storage.get(blank(range(64)))
    assert faulty.calls_count == rounds_max
    assert storage.retries_count == len(clock.sleeps_s) == rounds_max - 1


def slow_to_fail(clock: ManualClock, own_s: float) -> tuple[ScriptedStorage, list[float]]:
    """Make a store whose tries fail when the time of their caller is over, or their own; return what each had, too."""
    store, left_s = ScriptedStorage(), list[float]()

    def fail() -> None:
        left_s.append(time_left_s())
        clock.sleep(min(own_s, left_s[-1]))
        raise StorageError("no answer in time", retryable=True)

    store.before[Method.GET] = fail
    return store, left_s


@pytest.mark.parametrize("own_s", [0.4, 1.0, 5.0])
def test_all_tries_of_a_call_share_its_deadline_and_each_is_told_what_is_left(own_s: float) -> None:
    clock = ManualClock()
    slow, left_s = slow_to_fail(clock, own_s * PATIENCE_S)
    storage = retrying(slow, 10, clock)
    started_s = clock()
    with pytest.raises(StorageError, match="in time"):
        storage.get(blank(range(8)))
    assert clock() - started_s <= PATIENCE_S
    assert left_s[0] == PATIENCE_S
    assert left_s == sorted(left_s, reverse=True)


def test_a_guard_within_the_call_of_another_has_no_more_time_than_is_left_to_that() -> None:
    clock = ManualClock()
    slow, left_s = slow_to_fail(clock, PATIENCE_S / 3)
    inner = StorageGuard(slow, OF_ANY_SPEED, GuardConfig(deadline_s=5 * PATIENCE_S, retry_rounds_max=1), clock)
    with pytest.raises(StorageError, match="in time"):
        retrying(inner, 1, clock).get(blank([1]))
    assert left_s == [PATIENCE_S]


def test_pauses_double_shortened_by_up_to_a_half_as_the_seed_says() -> None:
    def pauses_s(seed: int) -> list[float]:
        clock = ManualClock()
        with pytest.raises(StorageError):
            retrying(scripted(dict.fromkeys(range(9), StorageFault.FAIL)), 5, clock, seed).get(blank([1]))
        return clock.sleeps_s

    assert pauses_s(1) == pauses_s(1)
    assert pauses_s(1) != pauses_s(2)
    for slept_s, longest_s in zip(pauses_s(3), (1.0, 2.0, 4.0, 8.0), strict=True):
        assert longest_s / 2 <= slept_s <= longest_s


def test_a_put_that_was_declined_and_a_miss_are_answers() -> None:
    faulty = scripted({}, MemoryStorage(bytes_max=10))
    storage = retrying(faulty, 5)
    assert storage.put(sealed([1]), Level.CACHED) == [Answer.DECLINED]
    assert storage.get(blank([1])) == [Answer.MISS]
    assert (faulty.calls_count, storage.retries_count) == (2, 0)


@pytest.mark.parametrize(
    "error", [StorageError("it cannot pass", retryable=False), StorageTimeoutError("too late", run_here(lambda: None))]
)
def test_what_cannot_pass_and_a_timeout_are_not_tried_again(error: StorageError) -> None:
    store, clock = ScriptedStorage(), ManualClock()
    errors = [error, StorageError("once more", retryable=True)]

    def fail() -> None:
        raise errors.pop()

    store.before[Method.GET] = fail
    storage = retrying(store, 5, clock)
    with pytest.raises(StorageError) as raised:
        storage.get(blank([3]))
    assert raised.value is error
    assert (store.calls.count(Method.GET), storage.retries_count, len(clock.sleeps_s)) == (2, 1, 1)


def test_other_methods_are_tried_once() -> None:
    faulty = scripted(dict.fromkeys(range(4), StorageFault.FAIL))
    storage = retrying(faulty, 5)
    for call in (
        lambda: storage.register(manifest_of(MODEL, LAYOUT), {}),
        lambda: storage.touch([label(1)]),
        lambda: storage.remove([label(1)]),
        lambda: storage.scan(label(1).identity),
    ):
        with pytest.raises(StorageError, match="on purpose"):
            call()
    assert (faulty.calls_count, storage.retries_count) == (4, 0)


@given(pages_count=st.integers(0, 20), rounds_max=st.integers(1, 5), fails=st.sets(st.integers(0, 40)))
def test_whatever_fails_calls_are_bounded_and_every_page_said_to_be_stored_is(
    pages_count: int, rounds_max: int, fails: set[int]
) -> None:
    clock = ManualClock()
    backend = MemoryStorage()
    faulty = scripted(dict.fromkeys(fails, StorageFault.FAIL), backend)
    storage = retrying(faulty, rounds_max, clock)
    try:
        stored = storage.put(sealed(range(pages_count)), Level.CACHED)
    except StorageError:
        stored = [Answer.UNAVAILABLE] * pages_count
    assert list(map(bool, stored)) == list(map(bool, backend.exists([label(number) for number in range(pages_count)])))
    assert storage.retries_count == faulty.calls_count - 1 == len(clock.sleeps_s) < rounds_max
    storage.close()


# Deadlines: no caller waits long, and what still hangs says so until it has let go


SHORT_S = 0.1
"""A deadline that only calls that hang are given."""


def filled(backend: Store) -> Store:
    backend.put(sealed(range(3)), Level.CACHED)
    return backend


def timed_out(storage: StorageGuard, page: PageIO) -> StorageTimeoutError:
    with pytest.raises(StorageTimeoutError) as raised:
        storage.get([page])
    return raised.value


def let_go(faulty: ScriptedStorage, calls_count: int) -> None:
    """Release so many calls; each may have timed out before it came to hang."""
    assert faulty.wait_until_hung(calls_count, PATIENCE_S)
    faulty.release()


def test_calls_that_timed_out_are_named_until_they_return_and_once_every_thread_is_stuck_none_is_started() -> None:
    faulty = scripted({0: StorageFault.HANG, 1: StorageFault.HANG}, filled(MemoryStorage()))
    clock = ManualClock(100.0)
    storage = bounded(faulty, SHORT_S, calls_max=2, clock=clock)
    page = blank_page(label(1))
    errors = [timed_out(storage, page)]
    clock.now_s = 105.0
    errors.append(timed_out(storage, page))
    clock.now_s = 106.0
    calls = [error.call for error in errors]
    assert [(call.name, call.started_s, call.returned) for call in calls] == [
        ("get", 100.0, False),
        ("get", 105.0, False),
    ]
    assert storage.stuck_count == 2
    assert faulty.wait_until_hung(2, PATIENCE_S)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("storage-call"))
    with pytest.raises(StorageError, match=r"exists was not started.*get for 6\.0 s, get for 1\.0 s") as raised:
        storage.exists([label(1)])
    assert not isinstance(raised.value, StorageTimeoutError)
    assert all(error.retryable for error in (*errors, raised.value))
    assert faulty.calls_count == 2
    assert not any(bytes_of(page))
    let_go(faulty, 2)
    assert all(call.wait(PATIENCE_S) and call.returned for call in calls)
    assert bytes_of(page) == bytes_of(sealed_page(label(1)))
    assert storage.stuck_count == 0
    storage.close(PATIENCE_S)


def test_closing_over_a_call_that_hangs_ends_names_it_and_leaves_the_store_open_until_it_returns() -> None:
    backend = ScriptedStorage()
    faulty = scripted({0: StorageFault.HANG}, filled(backend))
    storage = bounded(faulty, SHORT_S, calls_max=1)
    error = timed_out(storage, blank_page(label(1)))
    for _ in range(2):
        with pytest.raises(StorageTimeoutError, match="not closed within 0 s: get for ") as raised:
            storage.close(0)
        assert raised.value.call is error.call
    assert backend.exists([label(1)]) == [Answer.HIT]
    with pytest.raises(ClosedError):
        storage.exists([label(1)])
    assert Method.CLOSE not in backend.calls
    let_go(faulty, 1)
    storage.close(PATIENCE_S)
    with pytest.raises(ClosedError):
        backend.exists([label(1)])


def test_a_store_that_hangs_in_close_is_named_too() -> None:
    backend, may_close = ScriptedStorage(), Event()
    backend.before[Method.CLOSE] = may_close.wait
    storage = bounded(backend, SHORT_S, calls_max=1)
    with pytest.raises(StorageTimeoutError, match="close for ") as raised:
        storage.close()
    assert raised.value.call.name == "close"
    may_close.set()
    storage.close(PATIENCE_S)
    assert raised.value.call.returned
    assert backend.calls == [Method.CLOSE]


def test_an_error_of_close_is_raised_once() -> None:
    backend = ScriptedStorage()
    backend.failing = {Method.CLOSE}
    storage = bounded(backend, PATIENCE_S, calls_max=1)
    with pytest.raises(StorageError, match="close is out of order"):
        storage.close()
    storage.close()


def test_a_caller_that_waits_for_a_thread_finds_the_store_closed() -> None:
    faulty = scripted({0: StorageFault.HANG}, filled(MemoryStorage()))
    storage = bounded(faulty, PATIENCE_S, calls_max=1)
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(storage.exists, [label(1)])
        assert faulty.wait_until_hung(1, PATIENCE_S)
        second = callers.submit(storage.exists, [label(2)])
        with pytest.raises(StorageTimeoutError):
            storage.close(0)
        assert isinstance(second.exception(PATIENCE_S), ClosedError)
        let_go(faulty, 1)
        assert first.result(PATIENCE_S) == [Answer.HIT]
    storage.close(PATIENCE_S)


@pytest.mark.parametrize("level", [Level.CACHED, Level.DURABLE])
def test_nothing_of_a_call_is_kept_once_it_has_been_answered(level: Level) -> None:
    storage = bounded(MemoryStorage(), PATIENCE_S, calls_max=1)
    view = memoryview(bytearray(bytes_of(sealed_page(label(1)))))
    seen = weakref.ref(view)
    gc.disable()
    try:
        storage.put([PageIO(label(1), (view,))], level)
    except StorageError:
        assert level is Level.DURABLE
    finally:
        gc.enable()
    del view
    assert seen() is None
    storage.close()


# The breaker: a store that keeps failing is absent, and one call at a time finds out whether it is back


PAUSES = Backoff(10.0, 35.0)


def failing(storage: StorageGuard, times: int) -> None:
    for _ in range(times):
        with pytest.raises(StorageError):
            storage.exists([label(1)])


def test_after_failures_in_a_row_the_store_is_absent() -> None:
    backend = MemoryStorage()
    backend.put(sealed([1]), Level.CACHED)
    faulty = scripted({0: StorageFault.FAIL, 2: StorageFault.FAIL, 3: StorageFault.FAIL}, backend)
    storage = breaking(faulty, 2, ManualClock())
    failing(storage, 1)
    assert storage.exists([label(1)]) == [Answer.HIT]
    failing(storage, 2)
    assert storage.breaker.state is BreakerState.OPEN
    assert storage.exists([label(1), label(2)]) == [Answer.UNAVAILABLE, Answer.UNAVAILABLE]
    assert storage.get(blank([1])) == [Answer.UNAVAILABLE]
    assert storage.put(sealed([1, 2]), Level.CACHED) == [Answer.UNAVAILABLE, Answer.UNAVAILABLE]
    storage.touch([label(1)])
    with pytest.raises(StorageError, match="paused"):
        storage.remove([label(1)])
    with pytest.raises(StorageError, match="paused after 2 failures") as raised:
        storage.scan(label(1).identity)
    assert raised.value.retryable
    with pytest.raises(StorageError, match="paused"):
        storage.register(manifest_of(MODEL, LAYOUT), {})
    assert storage.capability() == OF_ANY_SPEED
    assert (faulty.calls_count, storage.breaker.refused_count, storage.breaker.changes_count) == (4, 7, 1)
    storage.close()
    with pytest.raises(ClosedError):
        storage.exists([label(1)])
    with pytest.raises(ClosedError):
        storage.capability()


def test_while_the_probe_is_out_every_other_call_finds_the_store_absent() -> None:
    backend = MemoryStorage()
    backend.put(sealed([1]), Level.CACHED)
    clock = ManualClock()
    faulty = scripted({0: StorageFault.FAIL, 1: StorageFault.HANG}, backend)
    storage = breaking(faulty, 1, clock)
    failing(storage, 1)
    clock.sleep(10.0)
    with ThreadPoolExecutor(1) as caller:
        probe = caller.submit(storage.exists, [label(1)])
        assert faulty.wait_until_hung(1, PATIENCE_S)
        during = storage.breaker.state
        clock.sleep(1000.0)
        assert storage.exists([label(1)]) == [Answer.UNAVAILABLE]
        faulty.release()
        assert probe.result(PATIENCE_S) == [Answer.HIT]
    assert (during, storage.breaker.state) == (BreakerState.HALF_OPEN, BreakerState.CLOSED)
    assert storage.exists([label(1)]) == [Answer.HIT]
    assert faulty.calls_count == 3


@pytest.mark.parametrize("late", [StorageFault.FAIL, None])
def test_what_began_before_the_breaker_opened_neither_closes_it_nor_counts_against_the_probe(
    late: StorageFault | None,
) -> None:
    clock = ManualClock()
    backend = MemoryStorage()
    faulty = scripted({0: StorageFault.HANG, 1: StorageFault.FAIL}, backend)
    storage = breaking(faulty, 1, clock)
    with ThreadPoolExecutor(1) as caller:
        slow = caller.submit(storage.put, sealed([1]), Level.DURABLE if late else Level.CACHED)
        assert faulty.wait_until_hung(1, PATIENCE_S)
        failing(storage, 1)
        faulty.release()
        assert (slow.exception(PATIENCE_S) is not None) == (late is not None)
    assert (storage.breaker.state, storage.breaker.changes_count) == (BreakerState.OPEN, 1)
    clock.sleep(10.0)
    assert storage.exists([label(2)]) == [Answer.MISS]
    assert storage.breaker.state is BreakerState.CLOSED


def test_look_ups_that_succeed_do_not_keep_it_closed_while_every_read_fails() -> None:
    store = ScriptedStorage()
    store.put(sealed([1]), Level.CACHED)
    store.failing = {Method.GET}
    clock = ManualClock()
    storage = breaking(store, 3, clock)
    for _ in range(3):
        assert storage.exists([label(1)]) == [Answer.HIT]
        with pytest.raises(StorageError, match="get is out of order"):
            storage.get(blank([1]))
    assert storage.breaker.state is BreakerState.OPEN
    assert storage.exists([label(1)]) == [Answer.UNAVAILABLE]
    clock.sleep(10.0)
    assert storage.exists([label(1)]) == [Answer.HIT]
    assert storage.breaker.state is BreakerState.OPEN
    store.failing = set()
    assert (storage.get(blank([1])), storage.breaker.state) == ([Answer.HIT], BreakerState.CLOSED)


def test_calls_that_never_return_open_it_at_their_deadline() -> None:
    faulty = scripted({0: StorageFault.HANG, 1: StorageFault.HANG}, filled(MemoryStorage()))
    storage = breaking(faulty, 2, ManualClock(), SHORT_S)
    for _ in range(2):
        timed_out(storage, blank_page(label(1)))
    assert storage.breaker.state is BreakerState.OPEN
    assert storage.get(blank([1])) == [Answer.UNAVAILABLE]
    assert faulty.calls_count == 2
    let_go(faulty, 2)
    storage.close(PATIENCE_S)


def test_failures_of_all_kinds_add_up_and_probes_of_others_close_it_where_no_kind_that_failed_comes_again() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(2, PAUSES, clock)
    for method in (Method.PUT, Method.SCAN):
        assert breaker.state is BreakerState.CLOSED
        admission = breaker.admit(method)
        assert admission is not None
        breaker.record_outcome(admission, failed=True)
    clock.sleep(10.0)
    for state in (BreakerState.OPEN, BreakerState.CLOSED):
        admission = breaker.admit(Method.GET)
        assert admission is not None
        assert breaker.admit(Method.GET) is None
        breaker.record_outcome(admission, failed=False)
        assert breaker.state is state


def test_an_outcome_counts_once() -> None:
    breaker = CircuitBreaker(2, PAUSES, ManualClock())
    admission = breaker.admit()
    assert admission is not None
    for _ in range(3):
        breaker.record_outcome(admission, failed=True)
    assert breaker.state is BreakerState.CLOSED


def test_who_has_others_to_ask_lets_one_rest_longer_each_time_and_once_for_calls_that_fail_together() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(1, PAUSES, clock)
    for pause_s in (10.0, 20.0, 35.0):
        for _ in range(4):
            breaker.record_failure()
        clock.sleep(pause_s - 0.5)
        assert breaker.is_resting
        clock.sleep(0.5)
        assert not breaker.is_resting
    breaker.record_failure()
    breaker.record_success()
    assert (breaker.is_resting, breaker.state, breaker.has_failures) == (False, BreakerState.CLOSED, False)


def test_the_warning_of_a_breaker_names_the_store_and_the_calls_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="unified_cache")
    clock, store = ManualClock(), ScriptedStorage()
    store.failing = {Method.GET}
    storage = breaking(store, 2, clock)
    for _ in range(2):
        with pytest.raises(StorageError, match="get is out of order"):
            storage.get(blank([1]))
    clock.sleep(10.0)
    store.failing = set()
    storage.get(blank([1]))
    assert caplog.messages == [
        f"a breaker opens: {OF_ANY_SPEED.name} is paused for 10 s, failures: get 2",
        f"a breaker closes: {OF_ANY_SPEED.name} is asked again",
    ]


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (StorageError("gone", retryable=False), True),
        (OSError("what a third party's store lets through"), True),
        (KeyboardInterrupt(), True),
        (StorageFullError("full"), False),
        (NotOfferedError("it does not list what it has"), False),
        (InputError("a cursor that is none"), False),
    ],
)
def test_only_what_speaks_against_the_store_is_a_failure(error: BaseException, is_failure: bool) -> None:
    store = ScriptedStorage()
    store.before[Method.SCAN] = raising(error)
    storage = breaking(store, 1, ManualClock())
    with pytest.raises(type(error)):
        storage.scan(label(1).identity)
    assert (storage.breaker.state is BreakerState.OPEN) == is_failure


def test_a_backoff_doubles_up_to_its_bound_however_often() -> None:
    assert [Backoff(1.0, 5.0).pause_s(count) for count in (1, 2, 3, 4, 10_000)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    for make in (lambda: Backoff(-1.0, 1.0), lambda: Backoff(2.0, 1.0), lambda: CircuitBreaker(0, PAUSES)):
        with pytest.raises(ConfigError):
            make()


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against a model of three numbers: failures in a row, openings in a row, and when to probe."""

    @initialize(failures_max=st.integers(1, 4))
    def begin(self, failures_max: int) -> None:
        self.clock = ManualClock()
        self.faulty = ScriptedStorage()
        self.storage = breaking(self.faulty, failures_max, self.clock)
        self.failures_max = failures_max
        self.failures = self.openings = self.asked = self.refused = self.changes = 0
        self.probe_at_s: float | None = None

    def teardown(self) -> None:
        self.storage.close()

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 10.0, 20.0, 35.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    @rule(fails=st.booleans())
    def a_page_is_put(self, fails: bool) -> None:
        self.faulty.failing = {Method.PUT} if fails else set()
        if self.probe_at_s is not None and self.clock.now_s < self.probe_at_s:
            assert self.storage.put(sealed([1]), Level.CACHED) == [Answer.UNAVAILABLE]
            self.refused += 1
            return
        probing = self.probe_at_s is not None
        self.asked += 1
        self.changes += probing
        if not fails:
            assert self.storage.put(sealed([1]), Level.CACHED) == [Answer.STORED]
            self.failures = self.openings = 0
            self.probe_at_s = None
            self.changes += probing
            return
        with pytest.raises(StorageError, match="out of order"):
            self.storage.put(sealed([1]), Level.CACHED)
        self.failures += 1
        if probing or self.failures >= self.failures_max:
            self.probe_at_s = self.clock.now_s + min(35.0, 10.0 * 2**self.openings)
            self.openings += 1
            self.changes += 1

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        assert self.storage.breaker.state is (BreakerState.CLOSED if self.probe_at_s is None else BreakerState.OPEN)
        assert self.storage.breaker.changes_count == self.changes
        assert self.storage.breaker.refused_count == self.refused
        assert len(self.faulty.noted) == self.asked


TestBreakerAgainstItsModel = BreakerMachine.TestCase
TestBreakerAgainstItsModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_call_that_its_caller_gives_up_counts_while_it_hangs() -> None:
    faulty = scripted({0: StorageFault.HANG}, filled(MemoryStorage()))
    storage = breaking(faulty, 1, time.monotonic, SHORT_S)
    threads = CallThreads("caller", 1)
    call = threads.submit(lambda: storage.get(blank([1])))
    assert faulty.wait_until_hung(1, PATIENCE_S)
    assert not call.settle(SHORT_S)
    threads.leave(call)
    assert not call.returned
    assert storage.breaker.state is BreakerState.OPEN
    let_go(faulty, 1)
    threads.close(PATIENCE_S)
