"""Prefetches: what came is used to the longest end that it allows, and what one brings no other reads again."""

import sys
from collections.abc import Sequence
from types import FrameType

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.clock import ManualClock
from tests.support.components import every_hybrid, every_layout, recurrent_state, sliding_window
from tests.support.conversations import ROOM, HostModel, pages_on, store_turns
from tests.support.operations import FULL as FULL_LAYOUT
from tests.support.operations import (
    HYBRID,
    Stepped,
    UnreturnedCall,
    engine,
    filled,
    head_of,
    out_pages,
    over,
    present,
    prompt_of_pages,
    serve,
    started,
    tokens,
)
from tests.support.ranks import ThreadRanks, digest_of, in_threads, same
from tests.support.store_calls import ScriptedStorage, at, raising
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full
from unified_cache.controller import (
    LeftOut,
    Operation,
    OperationState,
    ThreadWorkers,
    TransferKind,
    Workers,
)
from unified_cache.controller.ranks.group import LocalRanks, RankGroup
from unified_cache.core.config import Prefetching
from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, ModelLayout, PoolSpec, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Store
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.tree import RadixTree

TURNS = (4, 8, 12, 16)
"""Pages of the conversation after each turn: where windows and states are kept."""


def stored(layout: ModelLayout, turns: tuple[int, ...] = TURNS) -> ScriptedStorage:
    store = ScriptedStorage()
    store_turns(layout, store, turns)
    store.take()
    return store


def opened(layout: ModelLayout, turns: tuple[int, ...] = TURNS) -> tuple[ScriptedStorage, UnifiedCache]:
    store = stored(layout, turns)
    return store, engine(store, layout=layout, device=ROOM).cache


def prefetched(cache: UnifiedCache, pages: int) -> Operation:
    return over(cache, cache.prefetch(prompt_of_pages(cache, pages)))


def labels_of(cache: UnifiedCache, page: int, component: int) -> list[Label]:
    tier = present(cache._storage)
    key = prompt_of_pages(cache, page + 1).keys[page]
    return [label for number, pool in tier.read_order if number == component for label in tier.labels([key], pool)]


@every_layout
def test_a_flawed_page_is_a_page_that_did_not_come_and_is_taken_out_of_storage(layout: ModelLayout) -> None:
    store, cache = opened(layout, (6, 8))
    (label, *_) = labels_of(cache, 7, len(layout.components) - 1)
    store.pages[label] = store.pages[label][:-1] + bytes([store.pages[label][-1] ^ 1])
    came = set(store.pages) - {label}
    model = HostModel.of(layout, prompt_of_pages(cache, 8), came, [set() for _ in layout.components])
    assert prefetched(cache, 8).pages_count == model.end >= 6
    assert cache.stats().flawed_pages == 1
    assert store.exists([label]) == [Answer.MISS]


def test_a_page_that_the_store_itself_found_flawed_counts_as_one_that_the_cache_did() -> None:
    store, cache = opened(FULL_LAYOUT)
    store.answers[Method.GET] = Answer.FLAWED  # as a service answers, which verifies too
    assert prefetched(cache, 8).pages_count == 0
    assert cache.stats().flawed_pages == 8


@every_layout
def test_a_hit_below_the_threshold_is_not_read(layout: ModelLayout) -> None:
    store = stored(layout, (4,))
    for threshold, gained in ((5, 0), (4, 4)):
        store.take()
        prefetching = Prefetching(threshold_tokens=threshold * layout.page_size)
        cache = engine(store, layout=layout, device=ROOM, prefetching=prefetching).cache
        operation = prefetched(cache, 8)
        assert (operation.state, operation.pages_count) == (OperationState.DONE, gained)
        assert (Method.GET in store.calls) is bool(gained)


@every_hybrid
@pytest.mark.parametrize("fails", [False, True])
def test_windows_that_a_prefetch_counts_on_stay_while_it_reads(layout: ModelLayout, fails: bool) -> None:
    """Once it has said one page more, and four pages that could be resumed became none."""
    store = stored(layout, (4, 8))
    workers = Stepped()
    toy = engine(store, layout=layout, device=ROOM, workers=workers)
    cache, prompt = toy.cache, prompt_of_pages(toy.cache, 8)
    windows = range(1, len(layout.components))

    def finish() -> Operation:
        operation = started(cache.prefetch(prompt))
        while workers.waiting:
            workers.run()
            cache.poll()
        return operation

    assert finish().pages_count == 8
    toy.forget(Tier.HOST, components=windows)
    for component in windows:
        store.remove([label for page in range(4, 8) for label in labels_of(cache, page, component)])
    assert finish().pages_count == 4
    store_turns(layout, store, (5,))
    operation = started(cache.prefetch(prompt))
    workers.run()
    cache.poll()
    toy.forget(Tier.HOST, components=windows)
    if fails:
        cache.finish_early(operation)
    workers.run()
    cache.poll()
    assert (operation.state, operation.pages_count) == (
        (OperationState.PARTIAL, 0) if fails else (OperationState.DONE, 1)
    )
    assert cache.match(prompt).host_end == 4 + operation.pages_count
    cache.check()


@every_layout
def test_a_prefetch_asks_the_tree_for_its_prompt_three_times(layout: ModelLayout) -> None:
    cache = engine(stored(layout), layout=layout, device=ROOM).cache
    prompt = prompt_of_pages(cache, 16)
    asked: list[str] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is RadixTree.peek.__code__:
            asked.append(present(frame.f_back).f_code.co_name)

    sys.setprofile(count)
    try:
        operation = started(cache.prefetch(prompt))
        cache.wait_all(5)
    finally:
        sys.setprofile(None)
    assert operation.pages_count == 16
    assert len(asked) <= 3, asked


@every_hybrid
def test_windows_of_ends_in_between_at_most_double_what_is_read(layout: ModelLayout) -> None:
    store, cache = opened(layout, tuple(range(1, 25)))
    assert prefetched(cache, 24).pages_count == 24
    sizes = {pool.name: pool.page_bytes for pool in layout.pools}
    full_pools = {pool.name for pool in layout.components[0].pools}
    full_bytes = sum(sizes[label.pool] for label in store.came if label.pool in full_pools)
    windows = layout.components[1:]
    last_bytes = sum(
        min(component.span, 24) * sum(sizes[pool.name] for pool in component.pools) for component in windows
    )
    assert sum(sizes[label.pool] for label in store.came) <= 2 * full_bytes + last_bytes


@every_layout
@pytest.mark.parametrize("losing_rank", [0, 1])
def test_what_did_not_come_on_one_rank_is_done_without_on_all(layout: ModelLayout, losing_rank: int) -> None:
    def live(ranks: ThreadRanks) -> tuple[str, int, int, list[set[int]]]:
        store = ScriptedStorage()
        store_turns(layout, store, range(1, 9), head_of(ranks))
        cache = engine(store, layout=layout, device=ROOM, ranks=ranks).cache
        if ranks.rank == losing_rank:
            store.vanishing = {labels_of(cache, 7, len(layout.components) - 1)[-1]}
        operation = over(cache, cache.prefetch(prompt_of_pages(cache, 8)))
        kept = pages_on(cache, prompt_of_pages(cache, 8), Tier.HOST)
        return digest_of(cache), operation.pages_count, out_pages(cache), kept

    _, gained, out, kept = same(in_threads(2, live))
    assert (gained, out) == (7, 0)
    assert kept[0] == set(range(7 if len(layout.components) == 1 else 8))


# ---- single flight: pages that one prefetch brings are not read again by another -------------------------------------


WAIT_S = 10.0


def forgetful(
    store: Store,
    workers: Workers | None = None,
    *,
    layout: ModelLayout = FULL_LAYOUT,
    ranks: RankGroup = LocalRanks(),
    clock: ManualClock | None = None,
) -> ToyEngine:
    """Return a cache whose prompts lie in storage and nowhere else: ten pages, and ten that leave them after six."""
    writer = engine(store, layout=layout, device=40, identity=None if ranks.size == 1 else head_of(ranks))
    for contents in (tokens(10), branch()):
        over(writer.cache, writer.cache.backup(writer.run(writer.cache.prompt(contents))))
    return engine(
        store,
        layout=layout,
        device=40,
        workers=workers,
        ranks=ranks,
        clock=clock,
        operation_timeout_s=2.0 if clock else 60.0,
        close_timeout_s=0.05 if isinstance(workers, Stepped) else 60.0,
    )


def cold(clock: ManualClock | None = None) -> tuple[ScriptedStorage, Stepped, UnifiedCache, Prompt]:
    store, workers = ScriptedStorage(), Stepped()
    cache = forgetful(store, workers, clock=clock).cache
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


@pytest.mark.parametrize("layout", [FULL_LAYOUT, HYBRID])
def test_four_prefetches_of_one_cold_prompt_read_it_once_and_all_are_served(layout: ModelLayout) -> None:
    store, workers = ScriptedStorage(), Stepped()
    cache = forgetful(store, workers, layout=layout).cache
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
    read_count = len(store.came)
    store.take()
    alone = forgetful(store, layout=layout).cache
    alone.prefetch(prompt)
    alone.wait_all(WAIT_S)
    assert read_count == len(store.came), "as one of them alone reads"
    assert cache.traffic()[TransferKind.PREFETCH] == alone.traffic()[TransferKind.PREFETCH]
    assert cache.match(prompt).host_end == 10
    cache.check()
    assert (out_pages(cache), cache.close()) == (0, [])


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
    cache = forgetful(MemoryStorage(), workers).cache
    first, second = cache.prompt(tokens(10)), cache.prompt(branch())
    operations = [started(cache.prefetch(prompt)) for prompt in (first, second)]
    finish(cache, workers)
    assert [operation.pages_count for operation in operations] == [10, 10]
    assert cache.stats().traffic[TransferKind.PREFETCH].pages == 10 + 4
    assert [cache.match(prompt).host_end for prompt in (first, second)] == [10, 10]
    cache.check()


def test_prompts_with_nothing_in_common_wait_for_nobody() -> None:
    store, workers = MemoryStorage(), Stepped()
    cache = forgetful(store, workers).cache
    other = engine(store, layout=FULL_LAYOUT, device=40)
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


CALL = UnreturnedCall("get")


@pytest.mark.parametrize("error", [StorageError("once", retryable=False), StorageTimeoutError("hangs", CALL)], ids=str)
def test_where_the_first_fails_or_is_in_quarantine_another_takes_over(error: StorageError) -> None:
    CALL.returned = False
    store, workers, cache, prompt = cold()
    operations = waiting(cache, workers, [prompt] * 3)
    store.before[Method.GET] = at(0, raising(error))
    finish(cache, workers)
    assert [operation.state.value for operation in operations] == ["failed", "done", "done"]
    assert [operation.pages_count for operation in operations] == [0, 10, 10]
    assert operations[0].is_released is not isinstance(error, StorageTimeoutError)
    assert len(store.came) == 10
    CALL.returned = True
    cache.wait_all(1)
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


def test_one_that_waits_can_be_cancelled_and_finished_early() -> None:
    _, workers, cache, prompt = cold()
    first, second, third = waiting(cache, workers, [prompt] * 3)
    assert cache.cancel(second)
    cache.finish_early(third)
    assert cache.poll() == [second, third]
    assert (second.state, second.is_released) == (OperationState.CANCELLED, True)
    assert (third.state, third.pages_count) == (OperationState.PARTIAL, 0), "nothing had come"
    assert third.is_released
    finish(cache, workers)
    assert first.pages_count == 10
    cache.check()


def test_one_that_waits_too_long_fails_and_holds_nothing() -> None:
    clock = ManualClock()
    _, workers, cache, prompt = cold(clock)
    first, second = waiting(cache, workers, [prompt] * 2)
    clock.now_s = 2.0
    assert cache.poll() == [first, second]
    assert (first.is_released, second.is_released) == (False, True)
    finish(cache, workers)
    assert out_pages(cache) == 0


def test_closing_and_detaching_end_those_that_wait() -> None:
    for end in ("close", "detach"):
        _, workers, cache, prompt = cold()
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
        store = ScriptedStorage()
        cache = forgetful(store, ThreadWorkers.start(), ranks=rank_group).cache
        prompt = cache.prompt(tokens(10))
        if rank_group.rank == failing_rank:
            store.before[Method.GET] = at(0, raising(StorageError("once", retryable=False)))
        operations = [started(cache.prefetch(each)) for each in (prompt, prompt, cache.prompt(branch()))]
        cache.wait_all(WAIT_S)
        # Whoever's look-up ends first on all ranks reads first, and fails there.
        ends = sorted((operation.state.value, operation.pages_count) for operation in operations)
        found = digest_of(cache), ends, out_pages(cache)
        cache.close()
        return found

    _, ends, out = same(in_threads(2, live))
    first = ("done", 10) if failing_rank is None else ("failed", 0)
    assert ends == [("done", 10), ("done", 10), first]
    assert out == 0


# ---- room that others hold ---------------------------------------------------------------------------------------


def test_prefetches_that_find_no_room_wait_for_those_under_way() -> None:
    store = MemoryStorage()
    firsts = [1_000 * number for number in range(10)]
    for first in firsts:
        other = engine(store)
        over(other.cache, other.cache.backup(serve(other, 4, first)))
    workers = Stepped()
    cache = engine(store, workers=workers).cache  # a host of 12 pages
    operations = [started(cache.prefetch(cache.prompt(tokens(4, first)))) for first in firsts]
    while workers.waiting:
        workers.run(len(workers.waiting))
        cache.poll()
    assert [(operation.state, operation.pages_count) for operation in operations] == [(OperationState.DONE, 4)] * 10


def test_pages_that_there_is_no_room_for_did_not_fail() -> None:
    store = MemoryStorage()
    filled(store, 4)
    cache = engine(store).cache
    prompt = cache.prompt(tokens(4))
    with cache._ledger.reserving(Tier.HOST, [12, 8]):
        operation = over(cache, cache.prefetch(prompt))
        assert operation.tally.left_out == {LeftOut.HOST_FULL: 4}
        assert cache.match(prompt).device_end == 0
    assert over(cache, cache.prefetch(prompt)).pages_count == 4


# ---- models without full attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("component", [sliding_window(9, 4), recurrent_state()], ids=["windows", "states"])
def test_a_model_without_full_attention_is_resumed_from_storage(component: Component) -> None:
    layout = ModelLayout(4, (Full((PoolSpec("kv", 0),)), component))
    store = stored(layout, (4, 8))
    for lacks, end in ((0, 8), (1, 4)):  # then without the page before the last end
        toy = engine(store, layout=layout, device=ROOM)
        prompt = prompt_of_pages(toy.cache, 8)
        store.vanishing = set(labels_of(toy.cache, 7, 1)) if lacks else set()
        over(toy.cache, toy.cache.prefetch(prompt))
        over(toy.cache, toy.cache.load(prompt))
        lock = toy.cache.lock(toy.cache.match(prompt))
        assert (lock.end, lock.hits.storage) == (end, end)
        toy.verify(prompt, lock)
        assert toy.cache.explain(prompt).end == 8
        toy.cache.release(lock)
        toy.cache.check()
