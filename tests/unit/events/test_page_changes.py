"""Changes of a cache's pages, as a watcher takes them: replayed, they are what the tiers hold."""

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from tests.support.operations import Stepped, engine, filled, over, serve, started, tokens
from unified_cache.controller import InlineWorkers
from unified_cache.controller.page_changes import (
    MemoryCleared,
    ObjectsEvicted,
    PageChange,
    PagesHeld,
    SlotsLeft,
)
from unified_cache.core.errors import ConfigError, OwnerThreadError, StateError
from unified_cache.core.page import MediaItem, Namespace, PageKey, Prompt
from unified_cache.core.pool import Tier
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.observe.events.slot_keys import EVENT_PAGES_MAX, SlotKeys
from unified_cache.observe.events.values import ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent
from unified_cache.storage_backends.memory import MemoryStorage

Lanes = dict[tuple[Medium, int], set[PageKey]]


class ToldPages:
    """Pages that events tell of, and what would contradict itself on the way."""

    def __init__(self, toy: ToyEngine) -> None:
        self.cache = toy.cache
        self.slot_keys = SlotKeys(toy.cache.changes, toy.layout, IDENTITY.owners(toy.layout))
        self.lanes: Lanes = {}
        self.events: list[KvEvent] = []

    def take(self) -> "ToldPages":
        """Apply what has changed since the last call, or, where that is not known, all that memory holds."""
        taken = self.cache.changes.take()
        runs = self.cache.changes.held_runs() if taken is None else []
        self.events = list(self.slot_keys.announcement(runs) if taken is None else self.slot_keys.events(taken))
        for event in self.events:
            self.apply(event)
        return self

    def apply(self, event: KvEvent) -> None:
        match event:
            case ClearedEvent():
                self.lanes.clear()
            case RemovedEvent():
                lane = self.lanes.setdefault((event.medium, event.group), set())
                if event.medium is not Medium.STORAGE:
                    assert lane >= set(event.hashes), "a page was removed that had not been stored"
                lane -= set(event.hashes)
            case StoredEvent():
                self.lanes.setdefault((event.medium, event.group), set()).update(event.hashes)

    def memory(self) -> Lanes:
        return {lane: keys for lane, keys in self.lanes.items() if lane[0] is not Medium.STORAGE and keys}


def held(toy: ToyEngine, prompts: Iterable[Prompt]) -> Lanes:
    """Ask the cache which pages of these prompts each lane holds."""
    tree = toy.cache._ledger.tree
    lanes: Lanes = {}
    for prompt in prompts:
        found = tree.peek(prompt)
        for tier in Tier:
            for component in range(len(toy.layout.components)):
                slots = found.slots(tier, component, 0, found.tree_end)
                keys = {prompt.keys[page] for page in np.flatnonzero(slots >= 0).tolist()}
                if keys:
                    lanes.setdefault((Medium(tier), component), set()).update(keys)
    return lanes


def watched(toy: ToyEngine, pages_max: int = 1 << 18) -> ToldPages:
    toy.cache.changes.watch(pages_max)
    return ToldPages(toy).take()


def test_nothing_is_recorded_nor_asked_of_the_store_before_somebody_watches_and_afterwards() -> None:
    store = MemoryStorage()
    toy = engine(store)
    serve(toy, 4)
    assert toy.cache.changes._recorded_pages == 0
    told = watched(toy)
    assert told.memory() == held(toy, [toy.cache.prompt(tokens(4))])
    assert store._removed.has_subscribers
    toy.cache.changes.unwatch()
    assert not store._removed.has_subscribers
    serve(toy, 3, first=1000)
    assert toy.cache.changes._recorded is None


def test_replayed_changes_are_what_the_tiers_hold_whatever_happens() -> None:
    toy = engine(MemoryStorage())
    told = watched(toy)
    prompts = [toy.cache.prompt(tokens(4, first)) for first in (0, 1000, 2000, 3000)]
    for round_number in range(12):
        prompt = prompts[round_number * 7 % 4].head(1 + round_number % 4)
        lock = toy.serve(prompt)
        assert lock is not None
        toy.cache.release(lock)
        assert told.take().memory() == held(toy, prompts)
        operation = toy.cache.backup(prompt) if round_number % 2 else toy.cache.load(prompts[round_number % 4])
        started(operation)
        toy.cache.wait_all(1)
        assert told.take().memory() == held(toy, prompts)
    assert any(isinstance(event, RemovedEvent) for event in told.events) or told.lanes
    toy.cache.reset()
    assert told.take().memory() == {}
    assert not any(isinstance(event, ClearedEvent) for event in told.events), "storage keeps its pages"
    assert told.lanes[Medium.STORAGE, 0]
    toy.cache.check()


def test_a_backup_tells_what_storage_has_and_clearing_it_tells_that_nothing_is_known() -> None:
    toy = engine(MemoryStorage())
    told = watched(toy)
    prompt = serve(toy, 4)
    started(toy.cache.backup(prompt))
    toy.cache.wait_all(1)
    told.take()
    assert told.lanes[Medium.STORAGE, 0] == set(prompt.keys)
    assert told.lanes[Medium.STORAGE, 1] == set(prompt.keys[2:]), "the window of two pages"
    started(toy.cache.clear_storage())
    toy.cache.wait_all(1)
    told.take()
    assert told.events == [ClearedEvent()]
    assert told.slot_keys.needs_announcement, "memory still holds its pages"
    toy.cache.changes.forget()
    assert told.take().memory() == held(toy, [prompt])
    assert (Medium.STORAGE, 0) not in told.lanes


def test_a_prefetch_tells_what_came_to_the_host_and_is_in_storage() -> None:
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    told = watched(toy)
    prompt = toy.cache.prompt(tokens(6))
    started(toy.cache.prefetch(prompt))
    toy.cache.wait_all(1)
    told.take()
    assert told.lanes[Medium.HOST, 0] == told.lanes[Medium.STORAGE, 0] == set(prompt.keys)
    assert told.memory() == held(toy, [prompt])


def test_more_changes_than_there_is_room_for_are_said_to_be_lost_and_announced_again() -> None:
    toy = engine()
    told = watched(toy, pages_max=3)
    prompt = serve(toy, 4)
    assert toy.cache.changes.lost_count == 1
    assert toy.cache.changes._recorded is None
    serve(toy, 2, first=1000)
    assert told.take().events[0] == ClearedEvent()
    assert told.memory() == held(toy, [prompt, toy.cache.prompt(tokens(2, 1000))])
    serve(toy, 2, first=5000)
    assert toy.cache.changes.lost_count == 2, "Full's pages and the window's"


def test_an_announcement_names_pages_in_the_middle_of_a_tree_by_the_same_keys() -> None:
    toy = engine()
    stem, salted = tokens(2), Namespace(cache_salt="pepper", lora_id="style")
    prompts = [
        toy.cache.prompt(np.concatenate([stem, tokens(2, first)]), namespace)
        for first in (1000, 2000)
        for namespace in (Namespace(bigrams=True), salted)
    ]
    prompts = [each.head(2) if each.first else each for each in prompts]
    for prompt in prompts[:3]:
        lock = toy.serve(prompt)
        assert lock is not None
        toy.cache.release(lock)
    told = watched(toy)
    assert told.memory() == held(toy, prompts)
    above: dict[PageKey, PageKey | None] = {
        key: over for each in prompts for over, key in zip((None, *each.keys), each.keys, strict=False)
    }
    for event in told.events[1:]:
        assert isinstance(event, StoredEvent)
        assert event.parent == above[event.hashes[0]]
        per_page = len(event.tokens) // len(event.hashes)
        assert per_page in (event.page_size, 2 * event.page_size)


def test_a_page_is_reported_after_the_page_before_it_and_with_its_tokens() -> None:
    toy = engine()
    told = watched(toy)
    prompt = serve(toy, 4)
    known: set[PageKey] = set()
    told.take()
    for event in told.events:
        assert isinstance(event, StoredEvent)
        assert event.parent is None or event.parent in known or event.group
        start = prompt.keys.index(event.hashes[0])
        page = toy.layout.page_size
        assert event.tokens == tuple(tokens(4)[start * page : (start + len(event.hashes)) * page].tolist())
        known.update(event.hashes)


def test_pages_that_two_requests_computed_at_a_time_are_reported_once() -> None:
    toy = engine()
    told = watched(toy)
    cache, prompt = toy.cache, toy.cache.prompt(tokens(3))
    locks = [cache.lock(cache.match(prompt)) for _ in range(2)]
    for number, lock in enumerate(locks):
        computed = cache.allocate(cache.pages_to_allocate(0, 3, [3]))
        assert computed is not None
        for component, slots in enumerate(computed):
            toy.write_pages(component, slots, prompt, 0)
        cache.release(cache.insert(prompt, computed, lock))
        assert bool(told.take().events) is (number == 0)
    assert told.memory() == held(toy, [prompt])


@pytest.mark.parametrize("went", ["left", "cleared", "evicted"])
@pytest.mark.parametrize("tier", Tier)
def test_pages_that_come_and_go_are_reported_of_their_own_tier_and_component_a_bounded_number_at_a_time(
    tier: Tier, went: str
) -> None:
    toy = engine()
    numbers = np.arange(EVENT_PAGES_MAX + 1)
    prompt = Prompt.of(tokens(len(numbers)), toy.layout.page_size)
    slot_keys = SlotKeys(toy.cache.changes, toy.layout, IDENTITY.owners(toy.layout))
    slots = numbers.astype(np.int32)
    came = list(slot_keys.events([PagesHeld(tier, 1, prompt, numbers, slots)]))
    assert [(type(event), len(event.hashes)) for event in came if not isinstance(event, ClearedEvent)] == [
        (StoredEvent, EVENT_PAGES_MAX),
        (StoredEvent, 1),
    ]
    pool = toy.layout.components[1].pools[0]
    owner = IDENTITY.owners(toy.layout)[pool.name]
    labels = [Label(bytes(32), prompt.keys[0], pool.name), *(Label(owner, each, pool.name) for each in prompt.keys)]
    changes: dict[str, PageChange] = {
        "left": SlotsLeft(tier, 1, slots),
        "cleared": MemoryCleared(),
        "evicted": ObjectsEvicted((*labels, labels[1])),
    }
    events = list(slot_keys.events([changes[went]]))
    medium = Medium.STORAGE if went == "evicted" else Medium(tier)
    assert events == [
        RemovedEvent(medium, 1, prompt.keys[:EVENT_PAGES_MAX]),
        RemovedEvent(medium, 1, prompt.keys[EVENT_PAGES_MAX:]),
    ]
    assert went == "evicted" or not list(slot_keys.events([changes[went]]))
    assert not list(slot_keys.events([ObjectsEvicted(tuple(labels[:1]))])), "an object of somebody else"


def test_media_are_reported_with_the_pages_they_reach_into_now_and_when_announced() -> None:
    toy = engine()
    told = watched(toy)
    page_size = toy.layout.page_size
    media = [MediaItem(2, 3, "cat"), MediaItem(page_size + 5, 2 * page_size, "dog")]
    salted = Namespace(cache_salt="pepper", lora_id="style")
    for last in ([8] * page_size, [9] * page_size):  # so that the node with the second picture ends inside it
        toy.run(toy.cache.prompt([7] * (3 * page_size) + last, salted, media=media))
    first = told.take().events[0]
    assert isinstance(first, StoredEvent)
    expected = (
        ("style", ("cat", 2), "pepper"),
        ("style", ("dog", 5)),
        ("style", ("dog", 5 - page_size)),
        ("style", ("dog", 5 - 2 * page_size)),
    )
    assert (first.lora_name, first.extra_keys) == ("style", expected)
    toy.cache.changes.forget()
    announced = [event for event in told.take().events if isinstance(event, StoredEvent) and event.group == 0]
    by_key = {key: extra for event in announced for key, extra in zip(event.hashes, event.extra_keys, strict=True)}
    assert tuple(by_key[key] for key in first.hashes) == expected
    assert told.memory() == held(
        toy, [toy.cache.prompt([7] * (3 * page_size) + [n] * page_size, salted, media=media) for n in (8, 9)]
    )


def salts_of(told: ToldPages) -> set[str | None]:
    """Return the salts of the prompts whose first pages were told of, None for the bare model."""
    firsts = [event for event in told.events if isinstance(event, StoredEvent) and event.parent is None]
    return {None if event.extra_keys == () else str((event.extra_keys[0] or ("",))[-1]) for event in firsts}


@pytest.mark.parametrize("is_early", [True, False])
def test_pages_are_told_of_by_their_salt_however_many_there_are_and_whenever_the_watcher_came(is_early: bool) -> None:
    toy = ToyEngine(toy_layout((SPAN_ALL,), 1), (6_000,), (6_000,), None, InlineWorkers())
    told = watched(toy) if is_early else None
    salts = [f"salt {number}" for number in range(5_000)]
    for salt in salts:
        toy.run(toy.cache.prompt([7], Namespace(cache_salt=salt)))
    told = watched(toy) if told is None else told
    if is_early:
        told.take()
    assert salts_of(told) == set(salts)
    toy.cache.changes.forget()
    assert salts_of(told.take()) == set(salts)


def test_pages_of_a_namespace_that_nobody_knows_are_not_told_of_as_the_bare_models() -> None:
    toy = engine()
    told = watched(toy)
    known = toy.cache.prompt(tokens(3), Namespace(cache_salt="pepper"))
    unknown = toy.run(Prompt(known.tokens, known.page_size, known.seed))
    toy.cache.attach(MemoryStorage())
    assert over(toy.cache, toy.cache.backup(unknown)).pages_count
    assert not any(isinstance(event, StoredEvent) for event in told.take().events)
    toy.cache.changes.forget()
    assert [type(event) for event in told.take().events] == [ClearedEvent]
    toy.run(known)
    toy.cache.changes.forget()
    assert salts_of(told.take()) == {"pepper"}


def test_a_namespace_is_forgotten_with_its_last_page() -> None:
    toy = engine()
    toy.run(toy.cache.prompt(tokens(3), Namespace(cache_salt="pepper")))
    toy.forget(Tier.DEVICE)
    assert not toy.cache._ledger.tree.roots


def test_changes_have_one_watcher_on_the_owners_thread() -> None:
    toy = engine()
    with pytest.raises(ConfigError):
        toy.cache.changes.watch(0)
    toy.cache.changes.watch()
    with pytest.raises(StateError):
        toy.cache.changes.watch()
    failures: list[BaseException] = []

    def take() -> None:
        try:
            toy.cache.changes.take()
        except OwnerThreadError as error:
            failures.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(10)
    assert len(failures) == 1


def test_what_a_store_evicts_is_reported_and_not_announced_again() -> None:
    prompt_bytes = 2 * sum(pool.page_bytes + HEADER_BYTES for pool in engine().layout.pools if pool.page_bytes)
    toy = engine(MemoryStorage(bytes_max=2 * prompt_bytes - 1))
    told = watched(toy)
    prompts = [serve(toy, 2, first) for first in (0, 1000, 2000)]
    stored: set[PageKey] = set()
    for prompt in prompts:
        started(toy.cache.backup(prompt))
        toy.cache.wait_all(1)
        stored |= told.take().lanes[Medium.STORAGE, 0]
    left = told.lanes[Medium.STORAGE, 0]
    assert left < stored, "the cap has evicted some"
    there = {key for prompt in prompts for key in prompt.keys if holds(toy, key)}
    assert left == there
    toy.cache.changes.forget()
    assert told.take().lanes[Medium.STORAGE, 0] == there


def test_what_a_store_evicts_while_it_is_being_stored_is_not_reported_as_stored() -> None:
    workers = Stepped()
    store = MemoryStorage()
    toy = engine(store, workers=workers)
    told = watched(toy)
    prompt = serve(toy, 2)
    started(toy.cache.backup(prompt))
    workers.run()  # the copy
    toy.cache.poll()
    workers.run()  # the puts
    gone = Label(IDENTITY.digest(toy.layout), prompt.keys[1], toy.layout.components[0].pools[0].name)
    assert store.remove([gone]) == 1
    told.take()
    toy.cache.poll()
    assert told.take().lanes[Medium.STORAGE, 0] == {prompt.keys[0]}


@pytest.mark.parametrize("how", ["does not know what it has dropped", "detached"])
def test_a_store_that_does_not_know_what_it_has_dropped_or_is_gone_is_not_believed_any_more(how: str) -> None:
    store = MemoryStorage()
    toy = engine(store)
    told = watched(toy)
    prompt = serve(toy, 2)
    started(toy.cache.backup(prompt))
    toy.cache.wait_all(1)
    assert told.take().lanes[Medium.STORAGE, 0]
    if how == "detached":
        toy.cache.detach()
    else:
        store._removed.lose()
    assert told.take().events == [ClearedEvent()]
    toy.cache.changes.forget()
    assert told.take().memory() == held(toy, [prompt])
    assert (Medium.STORAGE, 0) not in told.lanes


def holds(toy: ToyEngine, key: bytes) -> bool:
    """Tell whether the store has every object of a Full page."""
    storage = toy.cache._storage
    assert storage is not None
    return all(
        all(storage.backend.exists(storage.labels([key], pool))) for number, pool in storage.read_order if number == 0
    )
