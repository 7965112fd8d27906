"""A transfer's life: cancelled, late, stopped, in quarantine behind a store that hangs, detached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Timer

import pytest

from tests.support.operations import (
    FULL,
    Stepped,
    UnreturnedCall,
    engine,
    filled,
    out_pages,
    over,
    serve,
    started,
    tokens,
)
from tests.support.service import wait_for
from tests.support.store_calls import ScriptedStorage, at, raising
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import NotStarted, Operation, OperationState, ThreadWorkers, TransferKind
from unified_cache.controller.ranks.group import LocalRanks
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import (
    ClosedError,
    InternalError,
    StateError,
    StorageError,
    StorageTimeoutError,
    WaitTimeoutError,
)
from unified_cache.core.pool import Pages, Tier
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import PageIO
from unified_cache.storage_backends.wrappers.layer import Method

PATIENCE_S = 30.0
"""Longest wait for what must happen; reached only by a bug."""


class HungCall(UnreturnedCall):
    """A call in which a store hangs, with the pages that it was given."""

    pages: Sequence[PageIO] = ()

    @classmethod
    def of(cls, store: ScriptedStorage, method: Method, number: int) -> "HungCall":
        """Have a store hang in one of its calls from now on, counted from 0."""
        call = cls(method.value)

        def hang() -> None:
            call.pages = store.given
            raise StorageTimeoutError(f"{method.value} hangs", call)

        store.before[method] = at(number, hang)
        return call

    def scribble_and_return(self) -> None:
        """Write to the buffers, as a store may until it returns, and return."""
        for page in self.pages:
            for buffer in page.buffers:
                buffer[:] = bytes(len(buffer))
        self.returned = True


def stuck_in(*methods: Method) -> tuple[ScriptedStorage, Event]:
    """Make a store that does not return from these calls until the event that comes with it is set."""
    store, let_go = ScriptedStorage(), Event()
    store.before = dict.fromkeys(methods, lambda: let_go.wait(PATIENCE_S))
    return store, let_go


def is_closed(store: ScriptedStorage) -> bool:
    try:
        store.backend.capability()
    except ClosedError:
        return True
    return False


# ---- what nobody raises on purpose -------------------------------------------------------------------------------


class Panic(BaseException):
    """As a native library raises it: no ``Exception``."""


@dataclass
class FailingRanks(LocalRanks):
    """A group of one whose agreements raise what nobody expects."""

    error: BaseException

    def agree(self, mine: Pages) -> Pages:
        raise self.error


@pytest.mark.parametrize("kind", [TransferKind.BACKUP, TransferKind.PREFETCH])
def test_a_foreign_exception_in_a_transfer_fails_it_gives_all_back_and_is_reported(kind: TransferKind) -> None:
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    cache = toy.cache
    bug = ZeroDivisionError("out of order")
    cache._backups._ranks = cache._prefetches._ranks = FailingRanks(bug)
    if kind is TransferKind.BACKUP:  # over when it has hardly begun
        operation = started(cache.backup(serve(toy, 4)))
    else:  # with a job behind it
        operation = started(cache.prefetch(cache.prompt(tokens(6))))
        assert operation.state is OperationState.RUNNING
    assert cache.poll() == [operation]
    assert operation.state is OperationState.FAILED
    assert isinstance(operation.error, InternalError)
    assert operation.error.__cause__ is bug
    assert str(operation.error) == f"the {kind.value} raised ZeroDivisionError: out of order"
    assert (operation.is_released, out_pages(cache), cache.stats().operations_live) == (True, 0, 0)
    assert cache.stats().operations_failed == 1
    assert cache.wait_all(0.1) == []
    cache.check()
    assert cache.close() == []


def test_an_interrupt_in_a_transfer_reaches_the_engine_and_leaves_nothing_live() -> None:
    store = MemoryStorage()
    filled(store)
    cache = engine(store).cache
    cache._prefetches._ranks = FailingRanks(KeyboardInterrupt())
    operation = started(cache.prefetch(cache.prompt(tokens(6))))
    with pytest.raises(KeyboardInterrupt):
        cache.wait_all(1)
    assert cache.poll() == [operation]
    assert (operation.state, out_pages(cache), cache.stats().operations_live) == (OperationState.FAILED, 0, 0)
    cache.check()


def test_a_worker_survives_whatever_a_store_raises_and_says_so() -> None:
    store = ScriptedStorage()
    store.before[Method.EXISTS] = raising(Panic("a native library gives up"))
    cache = engine(store, workers=ThreadWorkers.start(storage=1)).cache
    for first in (0, 1000):
        operation = started(cache.prefetch(cache.prompt(tokens(2, first))))
        assert cache.wait_all(5) == [operation]
        assert isinstance(operation.error, StorageError)
        assert isinstance(operation.error.__cause__, Panic)
    assert cache.close() == []


# ---- cancel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", [TransferKind.STORE, TransferKind.PREFETCH])
def test_a_transfer_cancelled_during_a_call_of_the_store_makes_no_other(
    leg: TransferKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", 2)
    workers = Stepped()

    store = ScriptedStorage()
    if leg is TransferKind.PREFETCH:
        filled(store)
    toy = engine(store, workers=workers)
    prompt = toy.cache.prompt(tokens(6)) if leg is TransferKind.PREFETCH else serve(toy, 6)
    operation = started(toy.cache.prefetch(prompt) if leg is TransferKind.PREFETCH else toy.cache.backup(prompt))
    method = Method.GET if leg is TransferKind.PREFETCH else Method.PUT
    store.take()
    store.before[method] = at(1, lambda: toy.cache.cancel(operation))
    while workers.waiting:
        workers.run()
        toy.cache.poll()
    assert (store.calls.count(method), operation.state) == (2, OperationState.CANCELLED)
    toy.cache.check()


def test_a_transfer_whose_job_has_ended_unclaimed_can_still_be_cancelled_and_a_claimed_one_cannot() -> None:
    workers = Stepped()
    toy = engine(workers=workers)
    prompt = serve(toy, 4)
    operation = started(toy.cache.backup(prompt))
    workers.run()
    assert toy.cache.cancel(operation)
    toy.cache.poll()
    assert toy.cache.match(prompt).host_end == 4
    assert toy.cache.stats().traffic[TransferKind.BACKUP].pages == 0
    claimed = started(toy.cache.backup(prompt))
    workers.run()
    assert toy.cache.poll() == [claimed]
    assert not toy.cache.cancel(claimed)
    assert (claimed.state, claimed.pages_count) == (OperationState.DONE, 6)


# ---- quarantine --------------------------------------------------------------------------------------------------


def test_pages_that_a_hanging_store_may_still_fill_are_nobodys_until_it_returns() -> None:
    store = ScriptedStorage()
    filled(store)
    toy = engine(store)
    cache = toy.cache
    call = HungCall.of(store, Method.GET, 0)
    operation = started(cache.prefetch(cache.prompt(tokens(6))))
    assert cache.poll() + cache.poll() == [operation]
    assert (operation.state, operation.is_released) == (OperationState.FAILED, False)
    assert isinstance(operation.error, StorageTimeoutError)
    assert cache.stats().calls_quarantined == 1
    held = out_pages(cache)
    assert held > 0
    with pytest.raises(WaitTimeoutError):
        cache.wait_all(0.05)
    serve(toy, 4, first=1000)
    cache.backup(cache.prompt(tokens(4, 1000)))
    cache.poll()
    call.scribble_and_return()
    cache.wait_all(1)
    assert (operation.is_released, out_pages(cache), cache.stats().calls_quarantined) == (True, 0, 0)
    over(cache, cache.load(cache.prompt(tokens(4, 1000))))
    assert toy.read_back(cache.prompt(tokens(4, 1000))) == 4


def test_a_guarded_store_that_hangs_costs_misses_and_closes_in_time() -> None:
    guard = GuardConfig(deadline_s=0.4, calls_max=2, breaker_failures_max=2)
    store, let_go = stuck_in(Method.EXISTS)
    toy = engine(store, guard=guard, close_timeout_s=2.0)
    cache = toy.cache
    for first in (0, 1000, 2000, 3000):
        operation = started(cache.prefetch(cache.prompt(tokens(2, first))))
        cache.poll()
        assert operation.state in (OperationState.FAILED, OperationState.DONE)
    serve(toy, 4)
    (stuck,) = cache.detach()
    assert "exists" in stuck
    let_go.set()
    assert cache.close() == []


def test_another_worker_takes_the_place_of_one_that_hangs_until_too_many_do_and_none_goes_on_with_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", 1)
    store, let_go = stuck_in(Method.PUT)
    guard = GuardConfig(deadline_s=0.3, calls_max=2, breaker_failures_max=9)
    toy = engine(store, workers=ThreadWorkers.start(storage=1), guard=guard, layout=FULL, device=12)
    cache = toy.cache

    def failed(number: int) -> Operation:
        operation = started(cache.backup(serve(toy, 2, first=1000 * number)))
        wait_for(lambda: bool(cache.poll()), PATIENCE_S)
        return operation

    assert [type(failed(number).error) for number in range(3)] == [StorageTimeoutError] * 2 + [StorageError]
    assert store.calls.count(Method.PUT) == 2, "for the third no thread was free"
    let_go.set()
    cache.wait_all(PATIENCE_S)
    assert store.calls.count(Method.PUT) == 2, "what was late is over"
    assert over(cache, cache.backup(cache.prompt(tokens(2)))).state is OperationState.DONE
    cache.check()
    assert cache.close() == []


def test_workers_have_one_deadline_together_to_end_their_jobs() -> None:
    workers, (store, let_go) = ThreadWorkers.start(copy=1, storage=5), stuck_in(Method.EXISTS)
    toy = engine(store, workers=workers)
    toy.cache.prefetch(toy.cache.prompt(tokens(2)))
    later = Timer(0.3, let_go.set)
    later.start()
    assert workers.close(1.2) == [], "a sixth of the time would not have been enough"
    later.join()


def test_a_store_that_a_worker_hangs_in_is_closed_once_it_has_returned() -> None:
    store, let_go = stuck_in(Method.EXISTS, Method.CLOSE)
    toy = engine(store, workers=ThreadWorkers.start(storage=1), close_timeout_s=0.1)
    toy.cache.prefetch(toy.cache.prompt(tokens(2)))
    assert toy.cache.close() == ["storage-0", "the store did not return from close within 0.1 s"]
    assert not is_closed(store)
    let_go.set()
    wait_for(lambda: is_closed(store), PATIENCE_S)


@pytest.mark.parametrize("leaves", [UnifiedCache.detach, UnifiedCache.close])
def test_a_store_without_a_guard_that_hangs_while_it_is_closed_is_named_in_time(
    leaves: Callable[[UnifiedCache], list[str]],
) -> None:
    store, let_go = stuck_in(Method.CLOSE)
    toy = engine(store, guard=None, close_timeout_s=0.05)
    assert leaves(toy.cache) == ["the store did not return from close within 0.05 s"]
    let_go.set()
    wait_for(lambda: is_closed(store), PATIENCE_S)
    assert toy.cache.close() == []


@pytest.mark.parametrize("guard", [None, GuardConfig()])
@pytest.mark.parametrize("leaves", [UnifiedCache.detach, UnifiedCache.close])
def test_a_store_that_fails_to_close_is_left_and_the_cache_closes(
    leaves: Callable[[UnifiedCache], list[str]], guard: GuardConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = ScriptedStorage()
    store.before[Method.CLOSE] = raising(RuntimeError("no flush"))
    toy = engine(store, guard=guard)
    assert leaves(toy.cache) == []
    assert "failed to close: RuntimeError: no flush" in caplog.text
    assert toy.cache.close() == []


# ---- telling -----------------------------------------------------------------------------------------------------


def test_a_transfer_that_was_over_at_once_is_reported_once() -> None:
    toy = engine(MemoryStorage())
    operation = started(toy.cache.load(toy.cache.prompt(tokens(2))))
    assert operation.state is OperationState.DONE
    assert toy.cache.poll() == [operation]
    assert toy.cache.poll() == []


def test_what_ended_while_the_store_was_detached_is_reported_and_loads_too() -> None:
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    over(toy.cache, toy.cache.backup(serve(toy, 4, first=1000)))
    evicted = toy.cache._ledger.tree.evict(Tier.DEVICE, 0, 12)
    toy.cache._ledger._take_back(evicted)
    load = started(toy.cache.load(toy.cache.prompt(tokens(4, 1000))))
    prefetch = started(toy.cache.prefetch(toy.cache.prompt(tokens(6))))
    toy.cache.detach()
    assert (load.state, load.pages_count > 0) == (OperationState.DONE, True)
    assert toy.cache.poll() == [load, prefetch]
    assert toy.cache.poll() == []


# ---- storage that comes and goes ---------------------------------------------------------------------------------


def test_a_store_can_be_attached_and_detached_while_the_cache_runs() -> None:
    store, other = MemoryStorage(), MemoryStorage()
    toy = engine()
    cache = toy.cache
    prompt = serve(toy, 4)
    assert cache.prefetch(cache.prompt(tokens(4, 1000))) is NotStarted.NO_STORAGE
    cache.attach(store)
    with pytest.raises(StateError, match="detach it first"):
        cache.attach(other)
    over(cache, cache.backup(prompt))
    assert store.bytes_used > 0
    assert cache.detach() == []
    assert cache.detach() == []
    cache.attach(other)
    assert started(cache.backup(prompt)).error is None
    cache.wait_all(1)
    assert other.bytes_used > 0
    assert cache.close() == []
