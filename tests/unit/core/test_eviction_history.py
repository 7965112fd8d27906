"""Memory of pages that have gone: the latest note of each, whatever was noted since, as long as the ring has it."""

import random

import numpy as np
import pytest

from tests.support.components import toy_components
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
from unified_cache.core.pool import Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import RadixTree


def some(*digests: int) -> PageDigests:
    return np.array(digests, np.uint64).tobytes()


def split(digests: PageDigests) -> list[bytes]:
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


def test_renaming_a_reason_leaves_the_others() -> None:
    eviction_history = EvictionHistory(8)
    eviction_history.record(0, some(1), MissReason.STORE_LOST)
    eviction_history.record(0, some(2), MissReason.FLAWED)
    eviction_history.rename(MissReason.STORE_LOST, MissReason.STORE_CLEARED)
    assert eviction_history.find(0, some(1, 2, 3)).reasons.tolist() == [
        MissReason.STORE_CLEARED,
        MissReason.FLAWED,
        MissReason.NOT_REMEMBERED,
    ]


def test_digests_of_a_prompt_depend_on_all_before_and_on_the_namespace() -> None:
    one, other = (Prompt.of(list(range(first, first + 8)), 4) for first in (0, 1))
    salted = Prompt.of(list(range(8)), 4, Namespace(cache_salt="x"))
    digests = [split(prompt_digests(prompt)) for prompt in (one, other, salted)]
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
