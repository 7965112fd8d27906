"""A store that evicts and pages that memory hands out: it hears of their use, seldom, bounded, and ahead of a put."""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.operations import engine, filled, needed_labels, over, present, tokens
from tests.support.ranks import ThreadRanks, digest_of, in_threads, same
from tests.support.store_calls import ScriptedStorage
from unified_cache.controller import HintCounts
from unified_cache.controller.storage_tier import HINTS_MAX
from unified_cache.core.config import WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.slots import StoredSlots
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method

DOCUMENT_PAGES = 4 + 2
"""Pages that a resume after four needs, of both components."""

WRITES = [WritePolicy.THROUGH, WritePolicy.SELECTIVE, WritePolicy.BACK]
STORES: dict[str, Callable[[Path, int], Store]] = {
    "memory": lambda _path, bytes_max: MemoryStorage(bytes_max),
    "file": lambda path, bytes_max: FileStorage.open(path, bytes_max=bytes_max),
    "packed": lambda path, bytes_max: PackedStorage.open(path, bytes_max=bytes_max),
}


def bytes_of(pages: int, taken_bytes: Callable[[int], int] = int) -> int:
    """Return what a prompt of so many pages takes of a store, each object ``taken_bytes`` of its length."""
    store = MemoryStorage()
    filled(store, pages)
    return sum(taken_bytes(len(page)) for page in store._pages.values())


def ask(toy: ToyEngine, prompt: Prompt) -> None:
    toy.run(prompt)
    toy.cache.wait_all(5)


# ---- what is lost without ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.value)
def test_what_memory_hands_out_at_each_turn_stays_in_a_store_that_evicts(
    write: WritePolicy, kind: str, tmp_path: Path
) -> None:
    with closing(STORES[kind](tmp_path, 0)) as same:
        taken_bytes = same.capability().taken_bytes
    store = STORES[kind](tmp_path, 6 * bytes_of(4, taken_bytes))
    toy = engine(store, host=16, write=write, dirty_share=0.25)
    document = toy.cache.prompt(tokens(4))
    ask(toy, document)
    for number in range(16):
        for pages in (2, 3):
            ask(toy, toy.cache.prompt(tokens(pages, 10_000 + 1_000 * number)))
            assert toy.cache.match(document).device_end == 4, "memory hands out all of it"
            ask(toy, document)
    assert all(store.exists(needed_labels(toy.cache, document)))
    toy.cache.close()


def test_a_prefix_that_is_computed_again_is_in_use_too() -> None:
    store = MemoryStorage(5 * bytes_of(4))
    toy = engine(store, host=16, write=WritePolicy.THROUGH)
    document = toy.cache.prompt(tokens(4))
    for first in range(1_000, 16_000, 1_000):
        prompt = toy.cache.prompt(np.concatenate([tokens(3), tokens(2, first)]))
        found = toy.cache.match(prompt)
        assert (found.tree_end, found.device_end) == ((3, 0) if first > 1_000 else (0, 0))
        lock = toy.cache.lock(found)
        needed = [np.ones(5, np.bool_), np.arange(5) >= 3]  # no window is kept where the prompts part
        slots = present(toy.cache.allocate(needed))
        toy.cache.release(toy.cache.insert(prompt, slots, lock))
        toy.cache.wait_all(5)
    assert all(store.exists(needed_labels(toy.cache, document.head(3))[:3]))


@pytest.mark.parametrize("seed", range(8))
def test_storage_that_is_larger_than_the_host_has_all_full_pages_of_what_was_asked_for_lately(seed: int) -> None:
    rng = random.Random(seed)
    lately_max, pages_max, host = 6, 4, 12
    store = MemoryStorage(12 * bytes_of(pages_max))
    toy = engine(store, host=host, write=WritePolicy.THROUGH)
    lately: list[Prompt] = []
    for _ in range(200):
        document = 1_000 * min(int(rng.expovariate(0.4)), 30)
        prompt = toy.cache.prompt(tokens(rng.randint(1, pages_max), document))
        ask(toy, prompt)
        lately = [*(other for other in lately if other.keys != prompt.keys), prompt][-lately_max:]
        for other in lately:
            assert all(store.exists(needed_labels(toy.cache, other)[: other.pages_count]))


# ---- what it costs -----------------------------------------------------------------------------------------------


def test_a_store_that_never_evicts_and_one_that_is_backed_up_to_on_call_get_no_hints() -> None:
    for write, bytes_max in ((WritePolicy.THROUGH, None), (WritePolicy.ON_CALL, 10 * bytes_of(4))):
        store = ScriptedStorage(MemoryStorage(bytes_max))
        toy = engine(store, host=16, write=write, dirty_share=0.25)
        for number in range(10):
            ask(toy, toy.cache.prompt(tokens(4)))
            ask(toy, toy.cache.prompt(tokens(2, 1_000 * (number + 1))))
            if write is WritePolicy.ON_CALL:
                over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(4))))
        assert not store.touched
        assert toy.cache.stats().recency_hints == HintCounts()


def test_a_page_in_use_is_reported_once_for_a_32nd_of_the_bytes_that_the_host_holds() -> None:
    store = ScriptedStorage(MemoryStorage(100 * bytes_of(4)))
    toy = engine(store, host=128, write=WritePolicy.THROUGH)
    document = toy.cache.prompt(tokens(4))
    ask(toy, document)
    for number in range(40):
        for _ in range(5):
            ask(toy, document)
        ask(toy, toy.cache.prompt(tokens(1, 1_000 * (number + 1))))
    (times,) = {store.touched.count(label) for label in needed_labels(toy.cache, document)}
    assert times in (9, 10), "41 pages were given, 4 for each time, of 200 uses"
    assert toy.cache.stats().recency_hints == HintCounts(hinted_pages=times * DOCUMENT_PAGES)


def test_the_store_learns_of_uses_before_it_is_given_pages_and_of_a_prompt_the_first_page_most() -> None:
    store = ScriptedStorage(MemoryStorage(100 * bytes_of(4)))
    toy = engine(store, host=8, write=WritePolicy.THROUGH)
    document = toy.cache.prompt(tokens(4))
    ask(toy, document)
    ask(toy, toy.cache.prompt(tokens(2, 1_000)))
    ask(toy, document)
    store.take()
    ask(toy, toy.cache.prompt(tokens(1, 5_000)))
    assert [call for call in store.calls if call in (Method.TOUCH, Method.PUT)] == [Method.TOUCH, Method.PUT]
    assert [document.keys.index(label.key) for label in store.touched] == [0, 1, 2, 2, 2, 3, 3, 3]


def test_a_prefix_in_memory_is_in_use_though_its_tail_has_just_come_from_storage() -> None:
    store = ScriptedStorage(MemoryStorage(100 * bytes_of(4)))
    filled(store, 8)
    store.take()
    toy = engine(store, host=32, write=WritePolicy.THROUGH)
    cache, whole = toy.cache, toy.cache.prompt(tokens(8))
    for pages in (4, 8):
        over(cache, cache.prefetch(whole.head(pages)))
        over(cache, cache.load(whole.head(pages)))
        ask(toy, whole.head(pages))
        ask(toy, cache.prompt(tokens(2, 1_000 * pages)))
    assert whole.keys.index(store.touched[0].key) == 0
    assert {whole.keys.index(label.key) for label in store.touched} >= {0, 1, 2, 3}


def waiting_hints(prompts_count: int) -> tuple[ScriptedStorage, ToyEngine, list[Prompt]]:
    """Have uses of so many prompts of a page each wait for the next put."""
    store = ScriptedStorage(MemoryStorage(1_000 * bytes_of(4)))
    toy = engine(store, host=256, write=WritePolicy.THROUGH)
    prompts = [toy.cache.prompt(tokens(1, 1_000 * number)) for number in range(prompts_count)]
    for prompt in prompts:
        ask(toy, prompt)
    toy.cache._ledger.stored.record_given(1_000 * bytes_of(4))
    storage = present(toy.cache._storage)
    for prompt in prompts:
        toy.cache._backups.record_use(toy.cache.match(prompt), storage)
    return store, toy, prompts


def test_uses_that_wait_for_a_put_are_bounded_and_those_dropped_are_counted() -> None:
    store, toy, prompts = waiting_hints(HINTS_MAX + 6)
    store.take()
    ask(toy, toy.cache.prompt(tokens(1, 900_000)))
    assert {label.key for label in store.touched} == {prompt.keys[0] for prompt in prompts[6:]}
    pages = sum(min(component.span, 1) for component in toy.layout.components)
    assert toy.cache.stats().recency_hints == HintCounts(HINTS_MAX * pages, 6 * pages)


def test_a_store_that_fails_to_take_a_hint_is_given_pages_all_the_same() -> None:
    store = ScriptedStorage(MemoryStorage(1_000 * bytes_of(4)))
    toy = engine(store, host=8, write=WritePolicy.THROUGH)
    ask(toy, toy.cache.prompt(tokens(4)))
    store.failing = {Method.TOUCH}
    longer = toy.cache.prompt(tokens(6))
    ask(toy, longer)
    assert toy.cache.stats().recency_hints == HintCounts(dropped_pages=4), "its window is superseded"
    assert all(store.exists(needed_labels(toy.cache, longer)))
    assert toy.cache.stats().operations_failed == 0


def test_a_store_that_fails_to_take_a_hint_is_given_no_other_before_the_put_and_all_count_as_dropped() -> None:
    store, toy, _ = waiting_hints(6)
    store.failing = {Method.TOUCH}
    store.take()
    ask(toy, toy.cache.prompt(tokens(1, 900_000)))
    assert store.calls.count(Method.TOUCH) == 1
    pages = sum(min(component.span, 1) for component in toy.layout.components)
    assert toy.cache.stats().recency_hints == HintCounts(dropped_pages=6 * pages)


def test_ranks_whose_stores_differ_in_whether_they_evict_stay_equal() -> None:
    def live(ranks: ThreadRanks) -> str:
        store = ScriptedStorage(MemoryStorage(None if ranks.rank else 6 * bytes_of(4)))
        toy = engine(store, host=16, ranks=ranks, write=WritePolicy.THROUGH)
        cache = toy.cache
        for number in range(12):
            ask(toy, cache.prompt(tokens(4)))
            ask(toy, cache.prompt(tokens(2, 1_000 * (number % 5 + 1))))
        assert bool(store.touched) is not bool(ranks.rank)
        cache.check()
        digest = digest_of(cache)
        cache.close()
        return digest

    same(in_threads(2, live))


@pytest.mark.parametrize("seed", range(4))
def test_when_storage_learned_of_a_page_last_is_counted_in_bytes_given(seed: int) -> None:
    rng = random.Random(seed)
    stored, now = StoredSlots((8,)), 0
    model: dict[int, int] = {}
    for _ in range(300):
        some = np.array(rng.sample(range(1, 9), 3), np.int32)
        match rng.randrange(4):
            case 0:
                stored.add(0, some)
                model |= dict.fromkeys(some.tolist(), now)
            case 1:
                stored.forget(0, some)
                model = {slot: heard for slot, heard in model.items() if slot not in some}
            case 2:
                given = rng.randrange(4)
                stored.record_given(given)
                now += given
            case _ if rng.random() < 0.1:
                stored.forget_all()
                model = {}
        slots = np.array([-1, *range(1, 9)], np.int32)
        pages = rng.randrange(1, 6)
        expected = [False, *(slot in model and now - model[slot] >= pages for slot in range(1, 9))]
        assert stored.unheard_of(0, slots, pages).tolist() == expected
        assert stored.among(0, slots[1:]).tolist() == [slot in model for slot in range(1, 9)]
