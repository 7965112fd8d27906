"""The breaker: a store that keeps failing is absent, and one call at a time finds out whether it is back."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.clock import ManualClock
from tests.support.faulty_storage import FaultyStorage, StorageFault
from tests.support.wrappers import PATIENCE_S, blank, breaking, scripted, sealed
from unified_cache.core.errors import ClosedError, ConfigError, InputError, StorageError, StorageFullError
from unified_cache.storage_backends.common.breaker import Backoff, BreakerState, CircuitBreaker
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Scan
from unified_cache.storage_backends.wrappers import Method, StorageGuard
from unified_cache.testing.storage_contract import LAYOUT, MODEL, label

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
    assert storage.remove([label(1)]) == 0
    with pytest.raises(StorageError, match="left alone after 2 failures") as raised:
        storage.scan(label(1).identity)
    assert raised.value.retryable
    with pytest.raises(StorageError, match="left alone"):
        storage.register(manifest_of(MODEL, LAYOUT), {})
    assert storage.capability().name == "memory"
    assert (faulty.calls_count, storage.breaker.refused_count, storage.breaker.changes_count) == (4, 6, 1)


def test_while_open_nothing_is_touched_and_a_touch_that_fails_counts() -> None:
    clock = ManualClock()
    faulty = scripted({0: StorageFault.FAIL})
    storage = breaking(faulty, 1, clock)
    with pytest.raises(StorageError, match="on purpose"):
        storage.touch([label(1)])
    storage.touch([label(1)])
    assert (storage.breaker.state, faulty.calls_count) == (BreakerState.OPEN, 1)
    clock.sleep(10.0)
    storage.touch([label(1)])
    assert (storage.breaker.state, faulty.calls_count) == (BreakerState.CLOSED, 2)


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


class ReadsFail(MemoryStorage):
    """A store that finds every page, and fails to read it for as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        if self.fails:
            raise StorageError("cannot read", retryable=True)
        return super().get(pages)


def test_look_ups_that_succeed_do_not_keep_it_closed_while_every_read_fails() -> None:
    store = ReadsFail()
    store.put(sealed([1]), Level.CACHED)
    clock = ManualClock()
    storage = breaking(store, 3, clock)
    for _ in range(3):
        assert storage.exists([label(1)]) == [Answer.HIT]
        with pytest.raises(StorageError, match="cannot read"):
            storage.get(blank([1]))
    assert storage.breaker.state is BreakerState.OPEN
    assert storage.exists([label(1)]) == [Answer.UNAVAILABLE]
    clock.sleep(10.0)
    assert storage.exists([label(1)]) == [Answer.HIT]
    assert storage.breaker.state is BreakerState.OPEN
    store.fails = False
    assert (storage.get(blank([1])), storage.breaker.state) == ([Answer.HIT], BreakerState.CLOSED)


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


def test_timeouts_open_it_and_then_nobody_waits_for_the_deadline() -> None:
    faulty = scripted({0: StorageFault.HANG, 1: StorageFault.HANG})
    storage = breaking(faulty, 2, ManualClock(), deadline_s=0.02)
    failing(storage, 2)
    assert storage.exists([label(1)]) == [Answer.UNAVAILABLE]
    assert faulty.wait_until_hung(2, PATIENCE_S)
    assert faulty.calls_count == 2
    faulty.release()
    storage.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (StorageError("gone", retryable=False), True),
        (OSError("what a third party's store lets through"), True),
        (KeyboardInterrupt(), True),
        (StorageFullError("full"), False),
        (InputError("a cursor that is none"), False),
    ],
)
def test_only_what_speaks_against_the_store_is_a_failure(error: BaseException, is_failure: bool) -> None:
    class Raising(MemoryStorage):
        def scan(self, identity: bytes, cursor: str = "") -> Scan:
            raise error

    storage = breaking(Raising(), 1, ManualClock())
    with pytest.raises(type(error)):
        storage.scan(label(1).identity)
    assert (storage.breaker.state is BreakerState.OPEN) == is_failure


def test_a_closed_store_is_closed_in_every_state() -> None:
    storage = breaking(scripted({0: StorageFault.FAIL}), 1, ManualClock())
    failing(storage, 1)
    storage.close()
    with pytest.raises(ClosedError):
        storage.exists([label(1)])
    with pytest.raises(ClosedError):
        storage.capability()


def test_a_backoff_doubles_up_to_its_bound_however_often() -> None:
    assert [Backoff(1.0, 5.0).pause_s(count) for count in (1, 2, 3, 4, 10_000)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    for make in (lambda: Backoff(-1.0, 1.0), lambda: Backoff(2.0, 1.0), lambda: CircuitBreaker(0, PAUSES)):
        with pytest.raises(ConfigError):
            make()


class Switched:
    """A plan whose next call goes wrong or not as the test says."""

    def __init__(self) -> None:
        self.fails = False

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        return StorageFault.FAIL if self.fails else None


class BreakerMachine(RuleBasedStateMachine):
    """The breaker against a model of three numbers: failures in a row, openings in a row, and when to probe."""

    @initialize(failures_max=st.integers(1, 4))
    def begin(self, failures_max: int) -> None:
        self.clock = ManualClock()
        self.plan = Switched()
        self.faulty = FaultyStorage(MemoryStorage(), self.plan, random.Random(0))
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
        self.plan.fails = fails
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
        with pytest.raises(StorageError, match="on purpose"):
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
        assert self.faulty.calls_count == self.asked


TestBreakerAgainstItsModel = BreakerMachine.TestCase
TestBreakerAgainstItsModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
