"""Explanations of a hit: each cause of a missing page is planted, and named right."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine, WholePromptCache, toy_layout
from tests.support.components import toy_components
from tests.support.faulty_storage import FaultyStorage, StorageFault
from tests.support.offline import ListedMemory
from tests.support.operations import PAGE, SPANS, Stepped, over, serve, started, tokens
from unified_cache.cache.explain.explanation import ComponentExplanation, Explanation, Reason
from unified_cache.controller import InlineWorkers, NotStarted, Workers
from unified_cache.core.config import CacheConfig, EvictionConfig, EvictionPolicy, Retention, WritePolicy
from unified_cache.core.miss_reason import HISTORY_PAGE_BYTES, EvictionHistory, MissReason
from unified_cache.core.page import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    Namespace,
    PageDigests,
    Prompt,
    chained_digests,
    prompt_digests,
)
from unified_cache.core.pool import Identity, Tier
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, StorageBackend
from unified_cache.storage_backends.removals import SUBSCRIBERS_MAX, removals_of
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.tree import RadixTree

REMEMBERED = 4_096


class Sizes(NamedTuple):
    device: int = 12
    host: int = 12


def remembering(
    storage: StorageBackend | None = None,
    *,
    sizes: Sizes = Sizes(),
    spans: tuple[int, ...] = (SPAN_ALL,),
    workers: Workers | None = None,
    identity: Identity = IDENTITY,
    **fields: object,
) -> ToyEngine:
    """Return an engine whose cache remembers what has gone."""
    layout = toy_layout(spans, PAGE)
    device, host = (tuple(pages for _ in spans) for pages in sizes)
    toy = ToyEngine(layout, device, host, None, InlineWorkers(), identity)
    toy.cache.close()
    config = CacheConfig(device, host, write=WritePolicy.ON_CALL, guard=None, forgotten_pages_max=REMEMBERED)
    toy.cache = WholePromptCache.open(
        layout,
        replace(config, **fields),  # type: ignore[arg-type]  # fields of CacheConfig by name
        list(toy.pools.values()),
        identity=identity,
        storage=storage,
        workers=InlineWorkers() if workers is None else workers,
    )
    return toy


def explained(toy: ToyEngine, pages: int, first: int = 0, namespace: Namespace = Namespace()) -> Explanation:
    return toy.cache.explain(toy.cache.prompt(tokens(pages, first), namespace))


def tier_component(explanation: Explanation, tier: str, component: int = 0) -> ComponentExplanation:
    return next(each for each in explanation.tiers if each.name == tier).components[component]


def reasons(explanation: Explanation, tier: str, component: int = 0) -> Mapping[tuple[int, int], Reason]:
    return {(run.start, run.end): run.reason for run in tier_component(explanation, tier, component).missing}


def whys(explanation: Explanation, tier: str, component: int = 0) -> Mapping[tuple[int, int], MissReason]:
    return {run: reason.why for run, reason in reasons(explanation, tier, component).items()}


def back_up(toy: ToyEngine, pages: int, first: int = 0) -> None:
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(pages, first))))


# ---- one test for each cause ---------------------------------------------------------------------------------------


def test_what_nobody_asked_for_was_never_computed() -> None:
    toy = remembering()
    serve(toy, 4)
    explanation = explained(toy, 6)
    assert whys(explanation, "device") == {(4, 6): MissReason.NEVER_COMPUTED}
    assert whys(explanation, "host") == {(0, 4): MissReason.NOT_BACKED_UP, (4, 6): MissReason.NEVER_COMPUTED}
    assert explanation.end == 4


def test_a_prompt_that_two_requests_compute_at_once_was_computed_twice() -> None:
    toy = remembering(sizes=Sizes(device=24))
    cache, prompt = toy.cache, toy.cache.prompt(tokens(6))
    locks = [cache.lock(cache.match(prompt)) for _ in range(2)]
    computed = [cache.allocate(cache.pages_to_allocate(0, 6, (6,))) for _ in locks]
    for slots, lock in zip(computed, locks, strict=True):
        assert slots is not None
        cache.release(cache.insert(prompt, slots, lock))
    explanation = explained(toy, 6)
    assert tier_component(explanation, "device").repeated == ((0, 6),)
    assert "[0, 6) computed twice" in str(explanation)


def test_what_the_device_evicts_is_named_with_policy_and_beneficiary() -> None:
    toy = remembering(eviction=EvictionConfig(device=(EvictionPolicy.PRIORITY,)))
    serve(toy, 10)
    serve(toy, 6, first=10_000)
    reason = reasons(explained(toy, 10), "device")[6, 10]
    assert reason.why is MissReason.EVICTED
    assert (reason.policy, reason.room_for) == (EvictionPolicy.PRIORITY, "toy0")


def test_a_window_that_goes_with_its_page_was_evicted_for_the_first_component() -> None:
    toy = remembering(spans=SPANS)
    serve(toy, 10)
    serve(toy, 8, first=10_000)
    windows = reasons(explained(toy, 10), "device", 1)
    evicted = [reason for reason in windows.values() if reason.why is MissReason.EVICTED]
    assert [reason.room_for for reason in evicted] == ["toy0"]


def test_evictions_of_the_host_are_distinguished_from_those_of_the_device() -> None:
    toy = remembering(sizes=Sizes(device=12, host=6))
    serve(toy, 6)
    back_up(toy, 6)
    serve(toy, 4, first=10_000)
    back_up(toy, 4, first=10_000)
    explanation = explained(toy, 6)
    assert whys(explanation, "host") == {(2, 6): MissReason.EVICTED}
    assert whys(explanation, "device") == {}


@pytest.mark.parametrize("policy", [WritePolicy.ON_CALL, WritePolicy.SELECTIVE])
def test_what_the_write_policy_leaves_out_was_not_backed_up(policy: WritePolicy) -> None:
    toy = remembering(write=policy)
    serve(toy, 6)
    assert reasons(explained(toy, 6), "host") == {(0, 6): Reason(MissReason.NOT_BACKED_UP, policy=policy)}


def test_a_backup_that_was_declined_is_named() -> None:
    toy = remembering(workers=Stepped(), operations_max=1)
    serve(toy, 4)
    serve(toy, 4, first=10_000)
    assert toy.cache.backup(toy.cache.prompt(tokens(4)))
    assert toy.cache.backup(toy.cache.prompt(tokens(4, 10_000))) is NotStarted.TOO_MANY
    assert whys(explained(toy, 4, 10_000), "host") == {(0, 4): MissReason.BACKUP_DECLINED}
    assert whys(explained(toy, 4), "host") == {(0, 4): MissReason.ARRIVING}


def test_a_backup_that_was_cancelled_is_named() -> None:
    workers = Stepped()
    toy = remembering(workers=workers)
    prompt = serve(toy, 4)
    assert toy.cache.cancel(started(toy.cache.backup(prompt)))
    workers.run()
    toy.cache.poll()
    assert whys(explained(toy, 4), "host") == {(0, 4): MissReason.BACKUP_FAILED}


def test_a_host_full_of_pins_is_named() -> None:
    toy = remembering(sizes=Sizes(device=12, host=4))
    serve(toy, 6)
    back_up(toy, 6)
    assert whys(explained(toy, 6), "host") == {(4, 6): MissReason.HOST_FULL}


def stored_and_forgotten(toy: ToyEngine, pages: int = 6) -> None:
    """Have a prompt in storage alone."""
    serve(toy, pages)
    back_up(toy, pages)
    toy.cache.reset()


def test_a_page_is_not_stored_and_then_forgotten_by_a_reset_and_then_cleared_from_storage() -> None:
    toy = remembering(MemoryStorage())
    serve(toy, 3)
    assert reasons(explained(toy, 3), "storage") == {(0, 3): Reason(MissReason.NOT_STORED, policy=WritePolicy.ON_CALL)}
    stored_and_forgotten(toy)
    explanation = explained(toy, 6)
    assert whys(explanation, "device") == whys(explanation, "host") == {(0, 6): MissReason.RESET}
    over(toy.cache, toy.cache.clear_storage())
    assert whys(explained(toy, 6), "storage") == {(0, 6): MissReason.STORE_CLEARED}


def test_what_only_storage_has_was_not_fetched() -> None:
    store = MemoryStorage()
    stored_and_forgotten(remembering(store))
    explanation = explained(remembering(store), 6)
    assert whys(explanation, "device") == whys(explanation, "host") == {(0, 6): MissReason.NOT_FETCHED}
    assert explanation.end == 6


def test_what_the_store_evicts_is_named_by_every_cache_over_it() -> None:
    store = MemoryStorage()
    toys = [remembering(store) for _ in range(3)]
    for toy in toys:
        stored_and_forgotten(toy)
    store.remove([Label(toys[0].digest, key, "toy0") for key in toys[0].cache.prompt(tokens(6)).keys])
    for toy in toys:
        assert whys(explained(toy, 6), "storage") == {(0, 6): MissReason.STORE_EVICTED}


def test_what_a_silent_store_has_lost_is_named() -> None:
    store = MemoryStorage()
    others = [removals_of(store) for _ in range(SUBSCRIBERS_MAX)]  # so that the next one is told nothing
    toy = remembering(store)
    stored_and_forgotten(toy)
    store.clear(toy.digest)
    assert whys(explained(toy, 6), "storage") == {(0, 6): MissReason.STORE_LOST}
    assert all(others)


class FaultsOf:
    """A plan that gives every call of one method a fault, while it is on."""

    def __init__(self, method: Method, fault: StorageFault) -> None:
        self.is_on = False
        self._of = method, fault

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        return self._of[1] if self.is_on and method is self._of[0] else None


def faulty(store: StorageBackend, plan: FaultsOf) -> FaultyStorage:
    return FaultyStorage(store, plan, random.Random(1))


def test_what_proves_flawed_is_named_and_not_taken_for_evicted() -> None:
    plan = FaultsOf(Method.GET, StorageFault.FLIPPED_BIT)
    toy = remembering(faulty(MemoryStorage(), plan))
    stored_and_forgotten(toy, 3)
    plan.is_on = True
    over(toy.cache, toy.cache.prefetch(toy.cache.prompt(tokens(3))))
    assert MissReason.FLAWED in whys(explained(toy, 3), "storage").values()


def test_a_store_that_fails_is_unavailable_and_what_it_did_not_take_is_named_later() -> None:
    puts = FaultsOf(Method.PUT, StorageFault.FAIL)
    asks = FaultsOf(Method.EXISTS, StorageFault.FAIL)
    puts.is_on = asks.is_on = True
    toy = remembering(faulty(faulty(MemoryStorage(), puts), asks))
    serve(toy, 3)
    back_up(toy, 3)
    assert whys(explained(toy, 3), "storage") == {(0, 3): MissReason.STORE_UNAVAILABLE}
    asks.is_on = False
    assert whys(explained(toy, 3), "storage") == {(0, 3): MissReason.STORE_FAILED}


def test_what_the_store_has_no_room_for_is_named() -> None:
    toy = remembering(MemoryStorage(bytes_max=0))
    serve(toy, 3)
    back_up(toy, 3)
    assert whys(explained(toy, 3), "storage") == {(0, 3): MissReason.STORE_DECLINED}


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (Namespace(cache_salt="a"), Namespace(cache_salt="b"), ("cache_salt",)),
        (Namespace(lora_id="french"), Namespace(), ("lora_id",)),
        (Namespace(), Namespace(tenant="us", extra_key="x"), ("extra_key", "tenant")),
        (Namespace(bigrams=True), Namespace(), ("bigrams",)),
    ],
)
def test_the_same_tokens_in_another_namespace_are_a_near_match(
    theirs: Namespace, ours: Namespace, named: tuple[str, ...]
) -> None:
    toy = remembering()
    toy.run(toy.cache.prompt(np.arange(6 * PAGE + 1, dtype=np.int32), theirs))
    explanation = explained(toy, 6, namespace=ours)
    (near,) = explanation.near
    assert (near.place, near.differs) == ("memory", named)
    assert near.pages == (5 if theirs.bigrams else 6)
    assert explanation.end == 0
    assert "near match: memory has" in str(explanation)


@pytest.mark.parametrize(
    ("theirs", "namespace", "named"),
    [
        (Identity("toy", dtype="float8_e4m3"), Namespace(), "dtype (float8_e4m3 there, none here)"),
        (Identity("toy", generation=3), Namespace(), "generation (3 there, 0 here)"),
        (Identity("other"), Namespace(), "model (other there, toy here)"),
        (IDENTITY, Namespace(cache_salt="b"), "cache_salt"),
    ],
)
def test_the_same_tokens_stored_under_another_identity_or_namespace_are_a_near_match(
    theirs: Identity, namespace: Namespace, named: str
) -> None:
    store = ListedMemory()
    stored_and_forgotten(remembering(store, identity=theirs), 5)
    (near,) = explained(remembering(store), 6, namespace=namespace).near
    assert (near.place, near.pages, near.differs) == ("storage", 5, (named,))


def test_windows_that_no_end_needed_were_not_kept() -> None:
    toy = remembering(spans=SPANS, retention=Retention(branches=False))
    serve(toy, 8)
    explanation = explained(toy, 6)
    assert whys(explanation, "device", 1) == {(0, 6): MissReason.NOT_KEPT}
    device = explanation.tiers[0]
    assert device.end == 0
    assert device.bound_by == ("toy1",)
    assert device.components[0].reach == 6
    (loss,) = explanation.losses
    assert (loss.component, loss.pages, loss.reason.why) == ("toy1", 6, MissReason.NOT_KEPT)


def test_what_was_recorded_too_long_ago_is_not_called_never_computed() -> None:
    toy = remembering(forgotten_pages_max=8)
    serve(toy, 12)
    serve(toy, 12, first=10_000)
    serve(toy, 12, first=20_000)
    explanation = explained(toy, 12)
    assert set(whys(explanation, "device").values()) == {MissReason.NOT_REMEMBERED}
    assert "the last 8 pages" in str(explanation)


def test_a_cache_that_remembers_nothing_explains_what_it_sees() -> None:
    toy = remembering(forgotten_pages_max=0)
    serve(toy, 4)
    explanation = explained(toy, 6)
    assert explanation.end == 4
    assert whys(explanation, "device") == {(4, 6): MissReason.NOT_REMEMBERED}
    assert "forgotten_pages_max" in str(explanation)


# ---- the whole -----------------------------------------------------------------------------------------------------


def test_an_explanation_agrees_with_match_and_changes_nothing() -> None:
    toy = remembering(MemoryStorage(), spans=SPANS, sizes=Sizes(device=12, host=10))
    for first in (0, 10_000, 20_000, 0):
        serve(toy, 8, first)
        back_up(toy, 8, first)
    for first in (0, 10_000, 20_000):
        explanation = explained(toy, 9, first)
        found = toy.cache._ledger.tree.peek(toy.cache.prompt(tokens(9, first)))
        device, host, storage = explanation.tiers
        assert (device.end, host.end) == (found.device_end, found.host_end)
        assert storage.end == explanation.end >= host.end
        assert sum(loss.pages for loss in explanation.losses) == 9 - explanation.end
        assert explained(toy, 9, first).tiers[0].end == device.end
    toy.cache.check()


def test_the_picture_has_a_line_for_each_component_and_tier() -> None:
    toy = remembering(MemoryStorage(), spans=SPANS)
    serve(toy, 8)
    lines = str(explained(toy, 10)).splitlines()
    assert lines[0] == "8 pages of 10 can be resumed (16 tokens each)"
    assert lines[1] == "device: 8 pages; for one more, toy0 lacks page 8, toy1 lacks page 8"
    assert lines[2].split("  ")[1:4] == ["toy0", "|========..|", "[8, 10) never computed here"]
    assert lines[3].split("|")[1] == "......==.."
    assert len(lines) == 1 + 3 * 3


def test_an_empty_prompt_is_explained() -> None:
    assert explained(remembering(MemoryStorage()), 0).end == 0


def test_an_answer_of_a_store_that_is_not_asked_is_no_miss() -> None:
    class Away(MemoryStorage):
        def exists(self, labels: Sequence[Label]) -> list[Answer]:
            return [Answer.UNAVAILABLE] * len(labels)

    toy = remembering(Away())
    assert whys(explained(toy, 3), "storage") == {(0, 3): MissReason.STORE_UNAVAILABLE}


# ---- memory of pages that have gone --------------------------------------------------------------------------------


def some(*digests: int) -> PageDigests:
    return np.array(digests, np.uint64).tobytes()


def digests_in(digests: PageDigests) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


@pytest.mark.parametrize("pages_max", [1, 7, 64, 20_000])
@pytest.mark.parametrize("seed", range(5))
def test_the_ring_finds_what_a_list_of_all_notes_finds(pages_max: int, seed: int) -> None:
    rng = random.Random(seed)
    time_s = 0.0
    eviction_history = EvictionHistory(pages_max, lambda: time_s)
    notes: list[tuple[int, int, MissReason, int, float]] = []
    for _ in range(200):
        time_s += 1.0
        tier_component, reason, component = rng.randrange(3), MissReason(rng.randrange(1, 13)), rng.randrange(4)
        digests = rng.sample(range(100), rng.randrange(1, 40))
        eviction_history.record(tier_component, some(*digests), reason, component)
        notes += [(tier_component, digest, reason, component, time_s) for digest in digests]
        if rng.random() < 0.2:
            asked = rng.randrange(3)
            found = eviction_history.find(asked, some(*range(100)))
            latest = {note[1]: note for note in notes[-pages_max:] if note[0] == asked}
            for digest in range(100):
                _, _, expected, of, recorded_s = latest.get(digest, (0, 0, MissReason.NOT_REMEMBERED, 0, 0.0))
                assert found.reasons[digest] == expected
                if expected is not MissReason.NOT_REMEMBERED:
                    assert (found.components[digest], found.recorded_s[digest]) == (of, recorded_s)
    assert eviction_history.is_complete == (len(notes) <= pages_max)


def test_a_remembered_page_takes_no_more_memory_than_is_said() -> None:
    eviction_history = EvictionHistory(10_000)
    eviction_history.record(0, some(*range(10_000)), MissReason.EVICTED)
    eviction_history.find(0, some(1))
    eviction_history._sort()
    arrays = (
        eviction_history._digests,
        eviction_history._recorded_s,
        eviction_history._codes,
        eviction_history._sorted,
        eviction_history._order,
    )
    assert sum(array.nbytes for array in arrays) == 10_000 * HISTORY_PAGE_BYTES
    assert HISTORY_PAGE_BYTES <= 32


def test_digests_of_a_prompt_depend_on_all_before_and_on_the_namespace() -> None:
    one, other = (Prompt.of(list(range(first, first + 8)), 4) for first in (0, 1))
    salted = Prompt.of(list(range(8)), 4, Namespace(cache_salt="x"))
    digests = [digests_in(prompt_digests(prompt)) for prompt in (one, other, salted)]
    assert len({digest for each in digests for digest in each}) == 6
    first, second = digests[0]
    assert chained_digests(first, one.tokens[4 * TOKEN_BYTES :], 4 * TOKEN_BYTES) == second


@pytest.mark.parametrize("seed", range(8))
def test_every_page_that_a_tree_evicts_is_remembered_and_no_other(seed: int) -> None:
    rng = random.Random(seed)
    eviction_history = EvictionHistory(1 << 16)
    tree = RadixTree(toy_components((SPAN_ALL, 2)), 1, eviction_history=eviction_history)
    prompts = [Prompt.of([rng.randrange(2) for _ in range(rng.randrange(1, 12))], 1) for _ in range(30)]
    next_slot = 1
    for prompt in prompts:
        count = prompt.pages_count
        slots = [np.arange(next_slot + part * count, next_slot + (part + 1) * count, dtype=np.int32) for part in (0, 1)]
        next_slot += 2 * count
        tree.insert(prompt, 0, slots, Tier.DEVICE)
        tree.check()
        if rng.random() < 0.6:
            tree.evict(Tier.DEVICE, rng.randrange(2), rng.randrange(1, 8))
    for prompt in prompts:
        found = tree.peek(prompt)
        for component in (0, 1):
            held = np.zeros(prompt.pages_count, np.bool_)
            held[: found.tree_end] = tree.slots(found, Tier.DEVICE, component, 0, found.tree_end) >= 0
            reasons = eviction_history.find(component, prompt_digests(prompt)).reasons
            assert (reasons[~held] == MissReason.EVICTED).all(), "what is missing was there, and has gone"
    fresh = Prompt.of([7, 7, 7], 1)
    assert not eviction_history.find(0, prompt_digests(fresh)).reasons.any()
