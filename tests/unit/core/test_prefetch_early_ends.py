"""Prefetches that end early, or of which part did not come: what came is used to the longest end that it allows."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.components import LAYOUTS, every_hybrid, every_layout
from tests.support.conversations import (
    HostModel,
    VanishingStorage,
    compute,
    conversation,
    pages_on,
    remembered,
    store_turns,
)
from tests.support.operations import Stepped, over, present, started
from tests.support.ranks import ThreadRanks, digest_of, head_of, in_threads, out_pages, ranked, same
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller import InlineWorkers, Operation, OperationState, TransferKind
from unified_cache.core.config import Prefetching
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, ModelLayout, PoolSpec, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer

TURNS = (4, 8, 12, 16)
"""Pages of the conversation after each turn: where windows and states are kept."""


def stored(layout: ModelLayout, turns: tuple[int, ...] = TURNS) -> VanishingStorage:
    store = VanishingStorage()
    store_turns(layout, store, turns)
    return store


def opened(layout: ModelLayout, turns: tuple[int, ...] = TURNS) -> tuple[VanishingStorage, UnifiedCache]:
    store = stored(layout, turns)
    return store, remembered(layout, store).cache


def prefetched(cache: UnifiedCache, pages: int) -> Operation:
    return over(cache, cache.prefetch(conversation(cache, pages)))


def labels_of(cache: UnifiedCache, page: int, component: int) -> list[Label]:
    tier = present(cache._storage)
    key = conversation(cache, page + 1).keys[page]
    return [label for pool in tier.pools(component) for label in tier.labels([key], pool)]


@every_layout
def test_pages_travel_in_the_order_of_the_prompt_all_pools_of_one_together_kv_first(layout: ModelLayout) -> None:
    store, cache = opened(layout)
    assert prefetched(cache, 16).pages_count == 16
    page_of = {key: page for page, key in enumerate(conversation(cache, 16).keys)}
    order = [pool.name for _, pool in layout.transfer_order]
    came = [(page_of[label.key], order.index(label.pool)) for label in store.came]
    assert came == sorted(came)
    kept = pages_on(cache, conversation(cache, 16), Tier.HOST)
    for end in TURNS[:-1]:
        for held, component in zip(kept, layout.components, strict=True):
            assert set(range(max(0, end - component.span), end)) <= held, "windows of ends in between come too"


@every_layout
def test_a_flawed_page_is_a_page_that_did_not_come_and_is_taken_out_of_storage(layout: ModelLayout) -> None:
    store, cache = opened(layout, (6, 8))
    (label, *_) = labels_of(cache, 7, len(layout.components) - 1)
    store._pages[label] = store._pages[label][:-1] + bytes([store._pages[label][-1] ^ 1])
    came = set(store._pages) - {label}
    model = HostModel.of(layout, conversation(cache, 8), came, [set() for _ in layout.components])
    assert prefetched(cache, 8).pages_count == model.end >= 6
    assert cache.stats().flawed_pages == 1
    assert store.exists([label]) == [Answer.MISS]


@every_layout
def test_storage_that_lacks_only_what_the_device_holds_adds_all_the_rest(layout: ModelLayout) -> None:
    store = stored(layout, (8,))
    toy = remembered(layout, store)
    cache = toy.cache
    compute(toy, 4)
    store.remove(
        [
            label
            for page in range(4)
            for number in range(len(layout.components))
            for label in labels_of(cache, page, number)
        ]
    )
    assert prefetched(cache, 8).pages_count == 4
    assert cache.match(conversation(cache, 8)).host_end == 8
    cache.check()


@every_layout
def test_a_hit_below_the_threshold_is_not_read(layout: ModelLayout) -> None:
    store = stored(layout, (4,))
    for threshold, gained in ((5, 0), (4, 4)):
        store.calls_count = 0
        cache = remembered(layout, store).cache
        cache.config = replace(cache.config, prefetching=Prefetching(threshold_tokens=threshold * layout.page_size))
        operation = prefetched(cache, 8)
        assert (operation.state, operation.pages_count) == (OperationState.DONE, gained)
        assert bool(store.calls_count) is bool(gained)


@every_hybrid
@pytest.mark.parametrize("fails", [False, True])
def test_windows_that_a_prefetch_counts_on_stay_while_it_reads(layout: ModelLayout, fails: bool) -> None:
    """Once it has said one page more, and four pages that could be resumed became none."""
    store = stored(layout, (4, 8))
    workers = Stepped()
    toy = remembered(layout, store, workers)
    cache, prompt = toy.cache, conversation(toy.cache, 8)
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


def test_progress_of_a_prefetch_is_what_it_would_gain_if_it_ended_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", 1)
    layout = LAYOUTS["full-swa"]
    store = stored(layout)
    workers = Stepped()
    cache = remembered(layout, store, workers).cache
    operation = started(cache.prefetch(conversation(cache, 16)))
    assert cache.prefetch_progress(operation) is None, "storage has not been asked"
    workers.run()
    cache.poll()
    seen: list[tuple[int, int]] = []

    def note(number: int) -> None:
        progress = present(cache.prefetch_progress(operation))
        seen.append((progress.gained_pages, progress.expected_pages))

    note(0)
    store.before_get = note
    workers.run()
    note(0)
    cache.poll()
    assert cache.prefetch_progress(operation) is None, "it is over"
    assert [*dict.fromkeys(seen)] == [(gained, 16) for gained in (0, *TURNS)]
    assert cache.traffic()[TransferKind.PREFETCH].component_pages[0] == 16


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


@every_hybrid
@pytest.mark.parametrize("losing_rank", [0, 1])
def test_what_did_not_come_on_one_rank_is_done_without_on_all(layout: ModelLayout, losing_rank: int) -> None:
    def live(ranks: ThreadRanks) -> tuple[str, int, int, list[set[int]]]:
        store = VanishingStorage()
        store_turns(layout, store, range(1, 9), head_of(ranks))
        cache = ranked(remembered(layout, MemoryStorage()), ranks, store)
        if ranks.rank == losing_rank:
            store.vanishing = {labels_of(cache, 7, 1)[-1]}
        operation = over(cache, cache.prefetch(conversation(cache, 8)))
        kept = pages_on(cache, conversation(cache, 8), Tier.HOST)
        return digest_of(cache), operation.pages_count, out_pages(cache), kept

    _, gained, out, kept = same(in_threads(2, live))
    assert (gained, out, kept[0]) == (7, 0, set(range(8)))


@every_layout
def test_a_prefetch_without_any_room_gains_nothing_and_is_no_failure(layout: ModelLayout) -> None:
    store, cache = opened(layout)
    ledger = cache._ledger
    taken = present(ledger.allocate(Tier.HOST, 0, ledger.capacity(Tier.HOST, 0)))
    store.calls_count = 0
    operation = prefetched(cache, 16)
    assert (operation.state, operation.pages_count, store.calls_count) == (OperationState.PARTIAL, 0, 0)
    ledger.free(Tier.HOST, 0, taken)
    assert prefetched(cache, 16).pages_count == 16


# ---- windows that memory has lost while Full stayed ----------------------------------------------------------------


PAGE = 16
FULL = Full((PoolSpec("kv", 64),))
WINDOW = SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 32), PoolSpec("swa_scale", 24)))
STATE = RecurrentState((PoolSpec("mamba", 48),))


def small_engine(*components: Component) -> ToyEngine:
    layout = ModelLayout(PAGE, (FULL, *components))
    sizes = (16, *(8 for _ in components))
    return ToyEngine(layout, sizes, sizes, MemoryStorage(), InlineWorkers())


def prompt_of(toy: ToyEngine, *contents: int) -> Prompt:
    return toy.cache.prompt(np.concatenate([np.arange(PAGE, dtype=np.int32) + 1000 * number for number in contents]))


def served_and_stored(toy: ToyEngine, *contents: int) -> Prompt:
    prompt = toy.run(prompt_of(toy, *contents))
    over(toy.cache, toy.cache.backup(prompt))
    return prompt


def bring(toy: ToyEngine, prompt: Prompt) -> int:
    """Bring a prompt up and verify it; return how many of its pages can be resumed from."""
    for leg in (toy.cache.prefetch, toy.cache.load):
        assert over(toy.cache, leg(prompt)).error is None
    return toy.read_back(prompt)


@pytest.mark.parametrize("components", [(WINDOW,), (STATE,), (WINDOW, STATE)])
def test_a_window_that_memory_lost_comes_back_while_full_stays(
    components: tuple[Component, ...],
) -> None:
    toy = small_engine(*components)
    prompt = served_and_stored(toy, 1, 2, 3, 4)
    for component in range(1, len(components) + 1):
        toy.forget(*Tier, components=[component])
    assert toy.cache.match(prompt).host_end == 0
    assert bring(toy, prompt) == 4
    fetched = toy.cache.stats().traffic[TransferKind.PREFETCH].component_pages
    assert fetched == [0, *(component.span for component in components)], "of Full, nothing was missing"


def test_a_window_in_the_middle_comes_back_for_a_prompt_that_goes_on_otherwise() -> None:
    toy = small_engine(WINDOW)
    served_and_stored(toy, 1, 2, 3)
    served_and_stored(toy, 1, 2, 3, 4, 5, 6)
    toy.forget(*Tier, components=[1])
    assert bring(toy, prompt_of(toy, 1, 2, 3, 9, 9)) == 3


def test_tombstones_and_the_rest_of_the_prefix_come_together() -> None:
    toy = small_engine(WINDOW)
    prompt = served_and_stored(toy, 1, 2, 3, 4, 5)
    toy.forget(*Tier, components=[1])
    ledger = toy.cache._ledger
    for tier in Tier:
        ledger._take_back(ledger.tree.evict(tier, 0, 1))
    assert bring(toy, prompt) == 5
    assert toy.cache.stats().traffic[TransferKind.PREFETCH].component_pages == [1, 2]


def test_where_storage_has_lost_the_window_too_nothing_is_brought() -> None:
    toy = small_engine(WINDOW)
    prompt = served_and_stored(toy, 1, 2, 3, 4)
    toy.forget(*Tier, components=[1])
    assert toy.cache._storage is not None
    tier = toy.cache._storage
    for pool in WINDOW.pools:
        tier.backend.remove(tier.labels(prompt.keys, pool))
    assert bring(toy, prompt) == 0
    assert all(occupancy.out == 0 for occupancy in toy.cache.stats().occupancy)
