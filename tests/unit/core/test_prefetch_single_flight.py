"""Prefetches are single flight: pages that one brings from storage are not read again by another."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from tests.support.clock import ManualClock
from tests.support.operations import (
    PAGE,
    SPANS,
    Stepped,
    UnreturnedCall,
    out_pages,
    over,
    present,
    serve,
    started,
    tokens,
)
from tests.support.ranks import ThreadRanks, digest_of, head_of, in_threads, ranked, same
from tests.support.ranks import out_pages as ranked_out_pages
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, Operation, OperationState, ThreadWorkers, TransferKind, Workers
from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO

WAIT_S = 10.0


class CountingStorage(MemoryStorage):
    """Counts the objects read, and fails a get when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.read_count = 0
        self.error: StorageError | None = None
        """What the next get raises."""

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.read_count += len(pages)
        return super().get(pages)


def forgetful(
    store: MemoryStorage, workers: Workers, spans: tuple[int, ...] = (SPAN_ALL,), identity: Identity = IDENTITY
) -> ToyEngine:
    """Return a cache whose prompts lie in storage and nowhere else: ten pages, and ten that leave them after six."""
    layout = toy_layout(spans, PAGE)
    room = tuple(40 for _ in spans)
    writer = ToyEngine(layout, room, room, store, InlineWorkers(), identity)
    for contents in (tokens(10), branch()):
        prompt = writer.cache.prompt(contents)
        lock = present(writer.serve(prompt))
        over(writer.cache, writer.cache.backup(prompt))
        writer.cache.release(lock)
    return ToyEngine(layout, room, room, store, workers, identity)


def cold() -> tuple[CountingStorage, Stepped, UnifiedCache, Prompt]:
    store, workers = CountingStorage(), Stepped()
    cache = forgetful(store, workers).cache
    return store, workers, cache, cache.prompt(tokens(10))


def branch() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return ten pages, the first six those of ``tokens(10)``."""
    return np.concatenate([tokens(6), tokens(4, 5000)])


def finish(cache: UnifiedCache, workers: Stepped) -> None:
    while workers.waiting:
        workers.run()
        cache.poll()


def host_pages_out(cache: UnifiedCache) -> int:
    return cache._ledger.out_pages(Tier.HOST, 0)


@pytest.mark.parametrize("spans", [(SPAN_ALL,), SPANS])
def test_four_prefetches_of_one_cold_prompt_read_it_once_and_all_are_served(spans: tuple[int, ...]) -> None:
    store, workers = CountingStorage(), Stepped()
    toy = forgetful(store, workers, spans)
    cache = toy.cache
    prompt = cache.prompt(tokens(10))
    operations = [started(cache.prefetch(prompt)) for _ in range(4)]
    told: list[Operation] = []
    out = 0
    while workers.waiting:
        workers.run()
        told += cache.poll()
        out = max(out, host_pages_out(cache))
    assert told == operations, "in one poll, as soon as the first is over"
    assert [(operation.state, operation.pages_count) for operation in operations] == [(OperationState.DONE, 10)] * 4
    assert out == 10, "one set of host slots"
    read_count, store.read_count = store.read_count, 0
    alone = forgetful(store, InlineWorkers(), spans).cache
    alone.prefetch(prompt)
    alone.wait_all(WAIT_S)
    assert read_count == store.read_count, "as one of them alone reads"
    assert cache.traffic()[TransferKind.PREFETCH] == alone.traffic()[TransferKind.PREFETCH]
    assert cache.match(prompt).host_end == 10
    cache.check()
    assert (out_pages(cache), cache.close()) == (0, [])


def test_with_threads_too_each_page_is_read_once() -> None:
    store = CountingStorage()
    cache = forgetful(store, ThreadWorkers.start(storage=4)).cache
    prompt = cache.prompt(tokens(10))
    operations = [started(cache.prefetch(prompt)) for _ in range(8)]
    assert len(cache.wait_all(WAIT_S)) == 8
    assert {operation.pages_count for operation in operations} == {10}
    assert cache.stats().traffic[TransferKind.PREFETCH].pages == 10
    assert cache.close() == []


def test_a_prefetch_that_was_probing_while_another_ended_does_not_read_its_pages_again() -> None:
    _, workers, cache, prompt = cold()
    cache.prefetch(prompt)
    workers.run()
    cache.poll()
    late = started(cache.prefetch(prompt))  # its probe stands behind the fetch of the first
    finish(cache, workers)
    assert (late.state, late.pages_count) == (OperationState.DONE, 10)
    assert cache.stats().traffic[TransferKind.PREFETCH].pages == 10


def test_a_prompt_that_leaves_another_on_its_way_reads_only_its_own_pages() -> None:
    workers = Stepped()
    cache = forgetful(CountingStorage(), workers).cache
    first, second = cache.prompt(tokens(10)), cache.prompt(branch())
    operations = [started(cache.prefetch(prompt)) for prompt in (first, second)]
    finish(cache, workers)
    assert [operation.pages_count for operation in operations] == [10, 10]
    assert cache.stats().traffic[TransferKind.PREFETCH].pages == 10 + 4
    assert [cache.match(prompt).host_end for prompt in (first, second)] == [10, 10]
    cache.check()


def test_prompts_with_nothing_in_common_wait_for_nobody() -> None:
    store, workers = CountingStorage(), Stepped()
    cache = forgetful(store, workers).cache
    other = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (40,), (40,), store, InlineWorkers())
    over(other.cache, other.cache.backup(serve(other, 4, first=9000)))
    for prompt in (cache.prompt(tokens(10)), cache.prompt(tokens(4, 9000))):
        cache.prefetch(prompt)
    workers.run(2)
    cache.poll()
    assert len(workers.waiting) == 2, "both fetch"
    finish(cache, workers)


def waiting(cache: UnifiedCache, workers: Stepped, prompts: Sequence[Prompt]) -> list[Operation]:
    """Start prefetches, up to where the first fetches and the others wait for it."""
    operations = [started(cache.prefetch(prompt)) for prompt in prompts]
    workers.run(len(prompts))
    cache.poll()
    assert len(workers.waiting) == 1
    assert [operation.awaited for operation in operations] == [None, *operations[:1] * (len(prompts) - 1)]
    return operations


def test_where_the_first_fails_another_takes_over() -> None:
    store, workers, cache, prompt = cold()
    operations = waiting(cache, workers, [prompt] * 3)
    store.error = StorageError("once", retryable=False)
    finish(cache, workers)
    assert [operation.state.value for operation in operations] == ["failed", "done", "done"]
    assert [operation.pages_count for operation in operations] == [0, 10, 10]
    assert store.read_count == 10
    assert (out_pages(cache), cache.close()) == (0, [])


def test_where_the_first_is_cancelled_another_takes_over_without_waiting_for_its_store() -> None:
    _, workers, cache, prompt = cold()
    first, second = waiting(cache, workers, [prompt] * 2)
    cache.cancel(first)
    assert cache.poll() == [first]
    assert len(workers.waiting) == 2, "the first still fetches, the second probes again"
    workers.waiting.rotate(-1)
    workers.run()
    cache.poll()
    assert second.awaited is None
    finish(cache, workers)
    assert (second.state, second.pages_count) == (OperationState.DONE, 10)
    assert out_pages(cache) == 0
    cache.check()


def test_where_the_first_is_in_quarantine_another_takes_over() -> None:
    store, workers, cache, prompt = cold()
    first, second = waiting(cache, workers, [prompt] * 2)
    call = UnreturnedCall("get")
    store.error = StorageTimeoutError("get hangs", call)
    finish(cache, workers)
    assert (first.state, first.is_released) == (OperationState.FAILED, False)
    assert (second.state, second.pages_count) == (OperationState.DONE, 10)
    call.returned = True
    cache.wait_all(1)
    assert out_pages(cache) == 0


def test_one_that_waits_can_be_cancelled_and_finished_early() -> None:
    _, workers, cache, prompt = cold()
    first, second, third = waiting(cache, workers, [prompt] * 3)
    assert cache.cancel(second)
    cache.finish_early(third)
    assert cache.poll() == [second]
    assert (second.state, second.is_released) == (OperationState.CANCELLED, True)
    workers.waiting.rotate(-1)
    workers.run()
    assert cache.poll() == [third]
    assert (third.state, third.pages_count) == (OperationState.PARTIAL, 0), "nothing had come"
    finish(cache, workers)
    assert first.pages_count == 10
    cache.check()


def test_one_that_waits_too_long_fails_and_holds_nothing() -> None:
    _, workers, cache, prompt = cold()
    cache._controller._clock = clock = ManualClock()
    cache._controller._timeout_s = 2.0
    first, second = waiting(cache, workers, [prompt] * 2)
    clock.now_s = 2.0
    assert cache.poll() == [first, second]
    assert (first.is_released, second.is_released) == (False, True)
    finish(cache, workers)
    assert out_pages(cache) == 0


def test_closing_and_detaching_end_those_that_wait() -> None:
    for end in ("close", "detach"):
        _, workers, cache, prompt = cold()
        cache.config = replace(cache.config, close_timeout_s=0.05)
        _, second = waiting(cache, workers, [prompt] * 2)
        if end == "detach":
            cache.detach()
            finish(cache, workers)
            cache.poll()
            assert (second.state, out_pages(cache)) == (OperationState.PARTIAL, 0)
        assert cache.close() == []
        assert second.is_released


def test_the_budget_of_prefetches_does_not_keep_one_from_waiting() -> None:
    _, workers, cache, prompt = cold()
    cache._prefetches.host_pages_left = 10
    operations = waiting(cache, workers, [prompt] * 2)
    finish(cache, workers)
    assert [operation.pages_count for operation in operations] == [10, 10]


@pytest.mark.parametrize("failing_rank", [None, 0, 1])
def test_ranks_wait_and_take_over_alike(failing_rank: int | None) -> None:
    def live(rank_group: ThreadRanks) -> tuple[str, list[tuple[str, int]], int]:
        store = CountingStorage()
        toy = forgetful(store, InlineWorkers(), identity=head_of(rank_group))
        cache = ranked(toy, rank_group, store, ThreadWorkers.start())
        prompt = cache.prompt(tokens(10))
        store.error = StorageError("once", retryable=False) if rank_group.rank == failing_rank else None
        operations = [started(cache.prefetch(each)) for each in (prompt, prompt, cache.prompt(branch()))]
        cache.wait_all(WAIT_S)
        # Whoever's look-up ends first on all ranks reads first, and fails there.
        ends = sorted((operation.state.value, operation.pages_count) for operation in operations)
        found = digest_of(cache), ends, ranked_out_pages(cache)
        cache.close()
        return found

    _, ends, out = same(in_threads(2, live))
    first = ("done", 10) if failing_rank is None else ("failed", 0)
    assert ends == [("done", 10), ("done", 10), first]
    assert out == 0
