"""Prefetches that end early, or of which part did not come: what came is used to the longest end that it allows."""

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.components import COMPONENT_SETS
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
from unified_cache.core.config import CacheConfig, Prefetching, WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, ModelLayout, PoolSpec, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.memory import MemoryStorage

LAYOUTS = {name: layouts[-1] for name, layouts in COMPONENT_SETS.items()}
HYBRID = {name: layout for name, layout in LAYOUTS.items() if name != "full"}
TURNS = (4, 8, 12, 16)
"""Pages of the conversation after each turn: where windows and states are kept."""

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_hybrid = pytest.mark.parametrize("layout", HYBRID.values(), ids=HYBRID)


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


def one_object_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", 1)


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
@pytest.mark.parametrize("share", [0.3, 0.6, 8 / 9, 0.99])
def test_a_prefetch_that_is_concluded_gains_the_longest_turn_that_came(
    layout: ModelLayout, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_object_a_call(monkeypatch)
    store = stored(layout)
    whole = remembered(layout, store).cache
    assert prefetched(whole, 16).pages_count == 16
    calls_max = int(store.calls_count * share)
    workers = Stepped()
    toy = remembered(layout, store, workers)
    cache = toy.cache
    store.came.clear()
    store.calls_count = 0
    operation = started(cache.prefetch(conversation(cache, 16)))
    store.before_get = lambda number: cache.finish_early(operation) if number == calls_max - 1 else None
    while workers.waiting:
        workers.run()
        cache.poll()
    assert len(store.came) == calls_max
    nothing: list[set[int]] = [set() for _ in layout.components]
    model = HostModel.of(layout, conversation(cache, 16), store.came, nothing)
    assert model.end >= max((turn for turn in (0, *TURNS) if turn <= 16 * share - 2), default=0)
    state = OperationState.DONE if model.end == 16 else OperationState.PARTIAL
    assert (operation.state, operation.pages_count) == (state, model.end)
    assert pages_on(cache, conversation(cache, 16), Tier.HOST) == model.pages
    cache.check()


@every_hybrid
def test_a_flawed_page_is_a_page_that_did_not_come(layout: ModelLayout) -> None:
    store, cache = opened(layout, (6, 8))
    (label, *_) = labels_of(cache, 7, 1)
    store._pages[label] = store._pages[label][:-1] + bytes([store._pages[label][-1] ^ 1])
    came = set(store._pages) - {label}
    model = HostModel.of(layout, conversation(cache, 8), came, [set() for _ in layout.components])
    assert prefetched(cache, 8).pages_count == model.end >= 6
    assert cache.stats().flawed_pages == 1


@every_hybrid
def test_full_pages_without_a_window_stay_and_are_not_read_again(layout: ModelLayout) -> None:
    store, cache = opened(layout, (8,))
    store.vanishing = {labels_of(cache, 7, 1)[-1]}
    assert prefetched(cache, 8).pages_count == 0
    assert cache._ledger.tree.full_end(cache.match(conversation(cache, 8)), Tier.HOST) == 8
    store.vanishing = set()
    store.came.clear()
    assert prefetched(cache, 8).pages_count == 8
    anchors = {pool.name for pool in layout.components[0].pools}
    assert not [label for label in store.came if label.pool in anchors]


@every_layout
def test_what_the_device_holds_is_not_read_again(layout: ModelLayout) -> None:
    store = stored(layout, (8,))
    toy = remembered(layout, store)
    cache = toy.cache
    compute(toy, 4)
    on_device = pages_on(cache, conversation(cache, 4), Tier.DEVICE)
    operation = prefetched(cache, 8)
    assert (operation.error, operation.pages_count) == (None, 4)
    read = {(label.key, label.pool) for label in store.came}
    for number, pages in enumerate(on_device):
        for page in pages:
            assert not {(label.key, label.pool) for label in labels_of(cache, page, number)} & read
    prompt = conversation(cache, 8)
    assert cache._ledger.tree.full_end(cache.match(prompt), Tier.HOST) == 8, "the device's pages were copied"
    over(cache, cache.load(prompt))
    assert toy.read_back(prompt) == 8


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


def with_threshold(layout: ModelLayout, store: MemoryStorage, pages: int) -> UnifiedCache:
    toy = remembered(layout, store)
    config = CacheConfig(
        toy.device_pages,
        toy.host_pages,
        write=WritePolicy.ON_CALL,
        guard=None,
        prefetching=Prefetching(threshold_tokens=pages * layout.page_size),
    )
    toy.cache.config = config
    return toy.cache


@every_layout
def test_a_hit_below_the_threshold_is_not_read(layout: ModelLayout) -> None:
    store = stored(layout, (4,))
    for threshold, gained in ((5, 0), (4, 4)):
        store.calls_count = 0
        cache = with_threshold(layout, store, threshold)
        operation = prefetched(cache, 8)
        assert (operation.state, operation.pages_count, store.calls_count > 0) == (
            OperationState.DONE,
            gained,
            gained > 0,
        )


def squeeze(cache: UnifiedCache, component: int) -> None:
    """Have others need all the host's room for a component."""
    ledger = cache._ledger
    slots = present(ledger.allocate(Tier.HOST, component, ledger.available_pages(Tier.HOST, component)))
    ledger.free(Tier.HOST, component, slots)


@every_hybrid
@pytest.mark.parametrize("fails", [False, True])
def test_windows_that_a_prefetch_counts_on_stay_while_it_reads(layout: ModelLayout, fails: bool) -> None:
    """Once it has said one page more, and four pages that could be resumed became none."""
    store = stored(layout, (4, 8))
    workers = Stepped()
    cache = remembered(layout, store, workers).cache
    prompt = conversation(cache, 8)
    windows = range(1, len(layout.components))

    def finish() -> Operation:
        operation = started(cache.prefetch(prompt))
        while workers.waiting:
            workers.run()
            cache.poll()
        return operation

    assert finish().pages_count == 8
    for component in windows:
        squeeze(cache, component)
        store.remove([label for page in range(4, 8) for label in labels_of(cache, page, component)])
    assert finish().pages_count == 4
    store_turns(layout, store, (5,))
    operation = started(cache.prefetch(prompt))
    workers.run()
    cache.poll()
    for component in windows:
        squeeze(cache, component)
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
    one_object_a_call(monkeypatch)
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
def test_without_room_for_windows_of_ends_in_between_the_longest_end_is_reached_all_the_same(
    layout: ModelLayout,
) -> None:
    store = stored(layout)
    room = (16, *(component.span for component in layout.components[1:]))
    toy = ToyEngine(layout, room, room, store, InlineWorkers())
    assert prefetched(toy.cache, 16).pages_count == 16
    kept = pages_on(toy.cache, conversation(toy.cache, 16), Tier.HOST)
    assert kept[1:] == [set(range(16 - component.span, 16)) for component in layout.components[1:]]


@every_hybrid
def test_a_prefetch_without_room_for_the_longest_end_reads_for_the_longest_that_there_is_room_for(
    layout: ModelLayout,
) -> None:
    store = stored(layout)
    room = (14, *(component.span + 4 for component in layout.components[1:]))
    toy = ToyEngine(layout, room, room, store, InlineWorkers())
    operation = prefetched(toy.cache, 16)
    assert (operation.error, operation.pages_count) == (None, 12)
    toy.cache.check()


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
