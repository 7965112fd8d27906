"""A transfer's life: cancelled, late, stopped, in quarantine, detached; and what the policies start by themselves."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
import pytest

from tests.cache_fixture import ToyEngine, toy_layout
from unified_cache.cache import UnifiedCache
from unified_cache.config import CacheConfig, Prefetching, StorageGuard, WritePolicy
from unified_cache.controller import InlineWorkers, Leg, Operation, OperationState
from unified_cache.controller.operation import Job
from unified_cache.controller.workers import Finished, run_job
from unified_cache.errors import (
    CancelledError,
    ConfigError,
    OperationTimeoutError,
    SettleTimeoutError,
    StateError,
    StorageError,
    StorageTimeoutError,
)
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.window import SPAN_ALL

PAGE = 16
SPANS = (SPAN_ALL, 2)


def tokens(pages: int, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(first, first + pages * PAGE, dtype=np.int32)


@dataclass
class Stepped:
    """Workers that run a job when the test says so."""

    waiting: deque[tuple[Operation, Job]] = field(default_factory=deque)
    ended: list[Finished] = field(default_factory=list)

    def submit(self, operation: Operation, job: Job) -> None:
        self.waiting.append((operation, job))

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            operation, job = self.waiting.popleft()
            self.ended.append((operation, run_job(job)))

    def finished(self, timeout_s: float) -> list[Finished]:
        ended, self.ended = self.ended, []
        return ended

    def close(self, timeout_s: float) -> list[str]:
        self.waiting.clear()
        return []


@dataclass
class Clock:
    """Time that passes when the test says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Call:
    """A call that a store does not return from until the test says so."""

    name: str
    started_s: float = 0.0
    returned: bool = False

    def wait(self, timeout_s: float) -> bool:
        return self.returned


class HangingStorage(MemoryStorage):
    """Hangs in the call of a given number, counted from when ``hang_at`` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.hang_at = -1
        self.hung: list[tuple[Call, Sequence[PageIO]]] = []

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        self._maybe_hang("get", pages)
        return super().get(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        self._maybe_hang("put", pages)
        return super().put(pages, level)

    def _maybe_hang(self, name: str, pages: Sequence[PageIO]) -> None:
        self.hang_at -= 1
        if self.hang_at == -1:
            call = Call(name)
            self.hung.append((call, pages))
            raise StorageTimeoutError(f"{name} hangs", call)

    def scribble_and_return(self) -> None:
        """Write to the buffers of the oldest call, as a store may until it returns, and return."""
        call, pages = self.hung.pop(0)
        for page in pages:
            for buffer in page.buffers:
                buffer[:] = bytes(len(buffer))
        call.returned = True


def engine(storage: MemoryStorage | None = None, *, host: int = 12, workers: Stepped | None = None) -> ToyEngine:
    return ToyEngine(
        toy_layout(SPANS, PAGE), (12, 8), (host, host and 8), storage, InlineWorkers() if workers is None else workers
    )


def configured(toy: ToyEngine, **fields: object) -> UnifiedCache:
    """Return another cache over the same tensors, with a changed configuration."""
    config = replace(toy.cache.config, **fields)  # type: ignore[arg-type]  # fields of CacheConfig by name
    pools = list(toy.pools.values())
    toy.cache = UnifiedCache.open(toy.layout, config, pools, identity=toy.cache.identity, workers=InlineWorkers())
    return toy.cache


def filled(store: MemoryStorage, pages: int = 6) -> None:
    """Have another cache store a prompt."""
    toy = engine(store)
    serve(toy, pages)
    toy.cache.backup(toy.cache.prompt(tokens(pages)))
    toy.cache.settle(1)


def serve(toy: ToyEngine, pages: int, first: int = 0) -> Prompt:
    prompt = toy.cache.prompt(tokens(pages, first))
    lock = toy.serve(prompt)
    assert lock is not None
    toy.cache.release(lock)
    return prompt


def started(operation: Operation | None) -> Operation:
    assert operation is not None
    return operation


def out_pages(cache: UnifiedCache) -> int:
    return sum(occupancy.out for occupancy in cache.stats().occupancy)


# ---- cancel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", list(Leg))
@pytest.mark.parametrize("jobs_run", [0, 1])
def test_a_transfer_cancelled_at_any_job_keeps_nothing_and_gives_all_back(leg: Leg, jobs_run: int) -> None:
    store, workers = MemoryStorage(), Stepped()
    filled(store)
    toy = engine(store, workers=workers)
    cache = toy.cache
    prompt = cache.prompt(tokens(6))
    if leg is not Leg.PREFETCH:
        serve(toy, 6)
    if leg is Leg.LOAD:
        done = started(cache.backup(prompt))
        while done.state is OperationState.RUNNING:
            workers.run()
            cache.poll()
        cache._ledger._take_back(cache._ledger.tree.evict(Tier.DEVICE, 0, 12))
    start = {Leg.BACKUP: cache.backup, Leg.STORE: cache.backup, Leg.LOAD: cache.load, Leg.PREFETCH: cache.prefetch}
    before = cache.stats().traffic
    operation = started(start[leg](prompt))
    if leg is not Leg.LOAD:
        for _ in range(jobs_run):  # queued, or done but unclaimed after the next job
            workers.run()
            cache.poll()
    assert cache.cancel(operation)
    assert operation.state is OperationState.CANCELLED
    assert isinstance(operation.error, CancelledError)
    assert not operation.is_released, "its job may still run"
    assert not cache.cancel(operation), "once is enough"
    assert cache.poll() == [operation]
    workers.run()
    assert cache.poll() == [], "it has been told"
    assert operation.is_released
    assert out_pages(cache) == 0
    cache.check()
    if leg is Leg.LOAD:
        assert cache.match(prompt).device_end == 0
        assert cache.stats().traffic[Leg.LOAD] == before[Leg.LOAD]
    assert cache.close() == []


def test_a_transfer_whose_job_has_ended_unclaimed_can_still_be_cancelled_and_a_claimed_one_cannot() -> None:
    workers = Stepped()
    toy = engine(workers=workers)
    prompt = serve(toy, 4)
    operation = started(toy.cache.backup(prompt))
    workers.run()
    assert toy.cache.cancel(operation)
    toy.cache.poll()
    assert toy.cache.match(prompt).any_end == 4
    assert toy.cache.stats().traffic[Leg.BACKUP].pages == 0
    claimed = started(toy.cache.backup(prompt))
    workers.run()
    assert toy.cache.poll() == [claimed]
    assert not toy.cache.cancel(claimed)
    assert (claimed.state, claimed.pages_count) == (OperationState.DONE, 6)


# ---- time --------------------------------------------------------------------------------------------------------


def with_clock(toy: ToyEngine, clock: Clock, **fields: object) -> UnifiedCache:
    toy.cache.config = replace(toy.cache.config, **fields)  # type: ignore[arg-type]  # fields of CacheConfig by name
    controller = toy.cache._controller
    controller._clock = clock
    controller._timeout_s = toy.cache.config.operation_timeout_s
    return toy.cache


def test_a_transfer_that_takes_too_long_fails_at_once_and_is_released_when_its_job_ends() -> None:
    workers, clock = Stepped(), Clock()
    toy = engine(workers=workers)
    cache = with_clock(toy, clock, operation_timeout_s=2.0)
    operation = started(cache.backup(serve(toy, 4)))
    clock.now_s = 1.9
    assert cache.poll() == []
    clock.now_s = 2.0
    assert cache.poll() == [operation]
    assert isinstance(operation.error, OperationTimeoutError)
    assert out_pages(cache) > 0, "a worker may still be copying"
    workers.run()
    cache.poll()
    assert (operation.is_released, out_pages(cache)) == (True, 0)
    cache.check()


def test_a_prefetch_whose_patience_ends_keeps_what_has_come() -> None:
    store, workers, clock = MemoryStorage(), Stepped(), Clock()
    filled(store)
    toy = engine(store, workers=workers)
    cache = with_clock(toy, clock, prefetching=Prefetching(patience_s=1.0, patience_per_1024_tokens_s=1024.0 / 96))
    prompt = cache.prompt(tokens(6))
    operation = started(cache.prefetch(prompt))
    workers.run()
    clock.now_s = 1.99
    cache.poll()
    assert not operation._stopping
    clock.now_s = 2.0
    cache.poll()
    workers.run()
    assert cache.poll() == [operation]
    assert (operation.state, operation.pages_count) == (OperationState.DONE, 0), "the fetch had not begun"
    assert cache.match(prompt).any_end == 0
    cache.check()


def test_a_prefetch_that_is_concluded_keeps_the_batches_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", 1)

    class Concluding(MemoryStorage):
        def get(self, pages: Sequence[PageIO]) -> list[bool]:
            if self.left == 0:
                cache.conclude(operation)
            self.left -= 1
            return super().get(pages)

        left = 99

    store, workers = Concluding(), Stepped()
    filled(store, 6)
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), store, workers)
    store.left = 99
    other = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), store, InlineWorkers())
    serve(other, 6)
    other.cache.backup(other.cache.prompt(tokens(6)))
    other.cache.settle(1)
    cache = toy.cache
    prompt = cache.prompt(tokens(6))
    operation = started(cache.prefetch(prompt))
    workers.run()
    cache.poll()
    store.left = 2
    workers.run()
    assert cache.poll() == [operation]
    assert (operation.state, operation.pages_count) == (OperationState.DONE, 3)
    assert cache.match(prompt).any_end == 3
    cache.check()


# ---- quarantine --------------------------------------------------------------------------------------------------


def test_pages_that_a_hanging_store_may_still_fill_are_nobodys_until_it_returns() -> None:
    store = HangingStorage()
    filled(store)
    toy = engine(store)
    cache = toy.cache
    prompt = cache.prompt(tokens(6))
    store.hang_at = 0
    operation = started(cache.prefetch(prompt))
    over = cache.poll() + cache.poll()
    assert over == [operation]
    assert (operation.state, operation.is_released) == (OperationState.FAILED, False)
    assert isinstance(operation.error, StorageTimeoutError)
    assert cache.stats().calls_quarantined == 1
    held = out_pages(cache)
    assert held > 0
    with pytest.raises(SettleTimeoutError):
        cache.settle(0.05)
    serve(toy, 4, first=1000)
    cache.backup(cache.prompt(tokens(4, 1000)))
    cache.poll()
    store.scribble_and_return()
    cache.settle(1)
    assert (operation.is_released, out_pages(cache), cache.stats().calls_quarantined) == (True, 0, 0)
    cache.load(cache.prompt(tokens(4, 1000)))
    cache.settle(1)
    lock = cache.lock(cache.match(cache.prompt(tokens(4, 1000))))
    assert toy.verify(cache.prompt(tokens(4, 1000)), lock) > 0
    cache.release(lock)
    cache.check()


def test_what_came_before_a_store_hung_is_kept_once_it_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", 2)
    store = HangingStorage()
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), store, InlineWorkers())
    prompt = serve(toy, 6)
    toy.cache.backup(prompt)
    toy.cache.settle(1)
    toy.cache.reset()
    store.hang_at = 2
    operation = started(toy.cache.prefetch(prompt))
    toy.cache.poll()
    toy.cache.poll()
    assert operation.state is OperationState.FAILED
    assert toy.cache.match(prompt).any_end == 0
    store.scribble_and_return()
    toy.cache.poll()
    assert toy.cache.match(prompt).any_end == 4
    toy.cache.check()


def test_closing_names_the_call_that_a_store_does_not_return_from() -> None:
    store = HangingStorage()
    toy = engine(store)
    prompt = serve(toy, 4)
    store.hang_at = 0
    toy.cache.backup(prompt)
    toy.cache.poll()
    toy.cache.poll()
    toy.cache.config = replace(toy.cache.config, close_timeout_s=0.05)
    assert toy.cache.close() == ["put of the store"]


def test_a_guarded_store_that_hangs_costs_misses_and_closes_in_time() -> None:
    let_go = Event()

    class Stuck(MemoryStorage):
        def exists(self, labels: Sequence[object]) -> list[bool]:
            let_go.wait(30)
            return [False] * len(labels)

    guard = StorageGuard(deadline_s=0.05, calls_max=2, failures_max=2)
    toy = engine()
    cache = configured(toy, guard=guard, close_timeout_s=1.0)
    cache.attach(Stuck())
    for first in (0, 1000, 2000, 3000):
        operation = started(cache.prefetch(cache.prompt(tokens(2, first))))
        cache.poll()
        assert operation.state in (OperationState.FAILED, OperationState.DONE)
    serve(toy, 4)
    (stuck,) = cache.detach()
    assert "exists" in stuck
    let_go.set()
    assert cache.close() == []


# ---- storage that comes and goes ---------------------------------------------------------------------------------


def test_a_store_can_be_attached_and_detached_while_the_cache_runs() -> None:
    store, other = MemoryStorage(), MemoryStorage()
    toy = engine()
    cache = toy.cache
    prompt = serve(toy, 4)
    assert cache.prefetch(cache.prompt(tokens(4, 1000))) is None
    cache.attach(store)
    with pytest.raises(StateError, match="detach it first"):
        cache.attach(other)
    cache.backup(prompt)
    cache.settle(1)
    assert store.bytes_used > 0
    assert cache.detach() == []
    assert cache.detach() == []
    cache.attach(other)
    assert started(cache.backup(prompt)).error is None
    cache.settle(1)
    assert other.bytes_used > 0
    assert cache.close() == []


def test_detaching_ends_what_moves_and_keeps_what_has_come() -> None:
    store, workers = MemoryStorage(), Stepped()
    filled(store)
    toy = engine(store, workers=workers)
    cache = toy.cache
    cache.config = replace(cache.config, close_timeout_s=0.05)
    operation = started(cache.prefetch(cache.prompt(tokens(6))))
    cache.detach()
    workers.run(len(workers.waiting))
    cache.poll()
    assert (operation.state, operation.pages_count, out_pages(cache)) == (OperationState.DONE, 0, 0)
    assert cache.prefetch(cache.prompt(tokens(6))) is None
    cache.check()


# ---- prefetching -------------------------------------------------------------------------------------------------


def test_a_prefetch_below_the_threshold_is_not_started() -> None:
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    toy.cache.config = replace(toy.cache.config, prefetching=Prefetching(threshold_tokens=4 * PAGE + 1))
    assert toy.cache.prefetch(toy.cache.prompt(tokens(4))) is None
    assert toy.cache.prefetch(toy.cache.prompt(tokens(5))) is not None


def test_prefetches_share_a_budget_of_host_pages_which_comes_back() -> None:
    store, workers = MemoryStorage(), Stepped()
    filled(store)
    toy = engine(store, workers=workers)
    cache = toy.cache
    cache._transfers._host_pages_left = 4
    prompt = cache.prompt(tokens(6))
    for _ in range(2):
        operation = started(cache.prefetch(prompt))
        workers.run()
        cache.poll()
        if operation.state is OperationState.RUNNING:
            assert cache._transfers._host_pages_left == 4 - 4
            cache.cancel(operation)
            workers.run()
            cache.poll()
        assert cache._transfers._host_pages_left == 4
    cache.check()


@pytest.mark.parametrize(
    "fields", [{"threshold_tokens": -1}, {"patience_s": -1.0}, {"host_share": 0.0}, {"host_share": 1.5}], ids=str
)
def test_prefetching_that_cannot_work_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Prefetching(**fields)  # type: ignore[arg-type]  # fields of Prefetching by name


# ---- when prompts are written ------------------------------------------------------------------------------------


def host_end(cache: UnifiedCache, prompt: Prompt) -> int:
    found = cache.match(prompt)
    return cache._ledger.tree.full_end(found, Tier.HOST)


def test_write_through_backs_up_what_is_inserted() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.THROUGH)
    prompt = serve(toy, 4)
    cache.settle(1)
    assert host_end(cache, prompt) == 4


def test_selective_write_through_waits_for_the_second_use() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.SELECTIVE)
    prompt = serve(toy, 3)
    cache.settle(1)
    assert host_end(cache, prompt) == 0
    longer = serve(toy, 5)
    cache.settle(1)
    assert host_end(cache, longer) == 3, "what was used again, and not what is new"


def test_write_back_backs_up_the_oldest_when_too_much_waits() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.BACK, dirty_share=0.5)
    prompts = [serve(toy, 3, first=1000 * number) for number in range(2)]
    cache.settle(1)
    assert [host_end(cache, prompt) for prompt in prompts] == [0, 0]
    prompts.append(serve(toy, 1, first=5000))
    cache.settle(1)
    assert [host_end(cache, prompt) for prompt in prompts] == [3, 0, 0]


def test_changing_the_policy_backs_up_what_the_old_one_had_put_off() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.BACK)
    prompt = serve(toy, 3)
    cache.set_write_policy(WritePolicy.ON_CALL)
    cache.settle(1)
    assert host_end(cache, prompt) == 3
    other = serve(toy, 3, first=1000)
    cache.settle(1)
    assert host_end(cache, other) == 0


def test_a_policy_that_writes_needs_a_host() -> None:
    toy = engine(host=0)
    with pytest.raises(ConfigError, match="the write policy through needs host pages"):
        configured(toy, write=WritePolicy.THROUGH)
    with pytest.raises(ConfigError, match="the write policy back needs host pages"):
        toy.cache.set_write_policy(WritePolicy.BACK)


def test_a_store_that_fails_in_the_middle_leaves_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", 2)

    class Failing(MemoryStorage):
        left = 99

        def get(self, pages: Sequence[PageIO]) -> list[bool]:
            self.left -= 1
            if self.left < 0:
                raise StorageError("no more", retryable=False)
            return super().get(pages)

    store = Failing()
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), store, InlineWorkers())
    prompt = serve(toy, 6)
    toy.cache.backup(prompt)
    toy.cache.settle(1)
    toy.cache.reset()
    store.left = 1
    operation = started(toy.cache.prefetch(prompt))
    toy.cache.settle(1)
    assert operation.state is OperationState.FAILED
    assert toy.cache.match(prompt).any_end == 2
    toy.cache.check()


def test_unless_somebody_says_otherwise_a_store_is_guarded() -> None:
    assert CacheConfig((1,), (1,)).guard == StorageGuard()
