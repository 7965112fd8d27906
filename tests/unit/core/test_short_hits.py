"""Short hits are explained while somebody looks, by the owner, at the lock, and within a small part of its time."""

import threading

import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.operations import PAGE, configured, engine, serve
from unified_cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers
from unified_cache.explain.explanation import Explanation
from unified_cache.explain.short_hits import (
    EXPLAINED_EVERY_S,
    EXPLAINING_SHARE,
    LOOKED_AT_S,
    SAVED_S,
    SHORT_HITS_MAX,
    ShortHit,
    ShortHits,
)
from unified_cache.page import Prompt
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.window import SPAN_ALL


class SlowExplainer:
    """Explains prompts, and takes time for it by a clock of its own."""

    def __init__(self, explanation: Explanation, took_s: float) -> None:
        self.now_s = 0.0
        self.count = 0
        self._explanation = explanation
        self._took_s = took_s

    def clock(self) -> float:
        return self.now_s

    def explain(self, prompt: Prompt) -> Explanation:
        self.count += 1
        self.now_s += self._took_s
        return self._explanation


def looked_at(cache: UnifiedCache) -> UnifiedCache:
    """Have hits explained from now on."""
    cache.look_at_explanations()
    cache.wait_all(1)
    return cache


def short_hit(cache: UnifiedCache) -> ShortHit:
    (found,) = cache.recent_explanations()
    return found


def test_a_short_hit_is_explained_as_it_was_when_it_was_locked() -> None:
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), None, InlineWorkers())
    cache = configured(toy, forgotten_pages_max=4_096)
    serve(toy, 10)
    serve(toy, 8, first=10_000)
    looked_at(cache)
    serve(toy, 10)
    hit = short_hit(cache)
    assert (hit.pages, hit.found.device, hit.found.host, hit.missed) == (10, 4, 0, 6)
    assert hit.bound_by == ("toy0",)
    assert hit.reason == "toy0 [4, 10): not backed up: the write policy on_call backs up what the engine asks for alone"
    assert "[4, 10) evicted just now by lru, to make room for toy0" in hit.picture
    assert "4 pages of 10 can be resumed" in hit.picture


def test_a_hit_is_not_short_where_nothing_else_was_ever_computed() -> None:
    toy = engine()
    cache = looked_at(configured(toy, forgotten_pages_max=4_096))
    serve(toy, 10)
    assert cache.recent_explanations() == ()


def test_a_short_hit_tells_where_its_pages_were_before_they_were_loaded() -> None:
    store = MemoryStorage()
    toy = engine(store)
    cache = toy.cache
    for first in (0, 10_000):
        prompt = serve(toy, 6, first)
        cache.backup(prompt)
        cache.wait_all(1)
    serve(toy, 8, 20_000)
    looked_at(cache)
    longer = cache.prompt(range(8 * 16))
    found = cache.match(longer)
    ends = (found.device_end, found.host_end)
    cache.load(longer)
    cache.wait_all(1)
    cache.release(cache.lock(cache.match(longer)))
    hit = short_hit(cache)
    assert (hit.found.device, hit.found.device + hit.found.host) == ends
    assert ends[0] < ends[1] == 6


def test_nothing_is_explained_and_nobody_is_told_of_requests_while_nobody_looks() -> None:
    toy = engine()
    for first in (0, 10_000, 0):
        serve(toy, 8, first)
    toy.cache.wait_all(1)
    assert toy.cache.recent_explanations() == ()
    assert toy.cache._watchers == ()


def test_a_look_from_another_thread_has_the_owner_explain_at_its_next_lock() -> None:
    toy = engine()
    looker = threading.Thread(target=toy.cache.look_at_explanations)
    looker.start()
    looker.join()
    assert toy.cache._watchers == (), "the owner has not polled since"
    toy.cache.wait_all(1)
    serve(toy, 8)
    assert short_hit(toy.cache).missed == 8


def test_a_prompt_that_is_found_whole_is_not_short() -> None:
    toy = engine()
    serve(toy, 6)
    looked_at(toy.cache)
    serve(toy, 6)
    assert toy.cache.recent_explanations() == ()


@pytest.mark.parametrize("took_s", [0.0001, 0.1])
def test_explaining_takes_a_small_part_of_the_owners_time_and_is_bounded_in_number(took_s: float) -> None:
    toy = engine()
    prompt = toy.cache.prompt(range(96))
    slow = SlowExplainer(toy.cache.explain(prompt), took_s)
    hits = ShortHits(slow.explain, slow.clock, slow.clock)
    lock = toy.cache.lock(toy.cache.match(prompt))
    hits.look()
    requests = 100_000
    for _ in range(requests):
        slow.now_s += 0.01
        if hits.are_wanted():
            hits.matched(prompt, 0, 0)
            hits.locked(prompt, lock, (0,))
        hits.look()
    assert slow.count * took_s <= EXPLAINING_SHARE * (slow.now_s + SAVED_S) + took_s
    every_s = max(EXPLAINED_EVERY_S, took_s / EXPLAINING_SHARE)
    assert 0.98 * slow.now_s <= slow.count * every_s <= slow.now_s + SAVED_S + every_s
    assert len(hits.latest) == SHORT_HITS_MAX
    slow.now_s += LOOKED_AT_S
    hits.are_wanted()
    slow.now_s += LOOKED_AT_S
    assert not hits.are_wanted(), "nobody has looked since"


def test_who_opens_a_page_sees_short_hits_soon_even_where_each_takes_long() -> None:
    toy = engine()
    prompt = toy.cache.prompt(range(96))
    slow = SlowExplainer(toy.cache.explain(prompt), SAVED_S * EXPLAINING_SHARE / SHORT_HITS_MAX)
    hits = ShortHits(slow.explain, slow.clock, slow.clock)
    lock = toy.cache.lock(toy.cache.match(prompt))
    for _ in range(SHORT_HITS_MAX):
        slow.now_s += EXPLAINED_EVERY_S
        hits.matched(prompt, 0, 0)
        hits.locked(prompt, lock, (0,))
    assert slow.count == SHORT_HITS_MAX, "the share of the minute before"
    before_s = slow.now_s
    while slow.count == SHORT_HITS_MAX:
        slow.now_s += EXPLAINED_EVERY_S
        hits.matched(prompt, 0, 0)
        hits.locked(prompt, lock, (0,))
    assert slow.now_s - before_s <= SAVED_S / SHORT_HITS_MAX + EXPLAINED_EVERY_S, "and then at its pace"


def test_a_prompt_that_was_looked_up_before_it_was_time_is_passed_since_its_tiers_are_no_longer_known() -> None:
    toy = engine()
    prompt, other = toy.cache.prompt(range(96)), toy.cache.prompt(range(96))
    slow = SlowExplainer(toy.cache.explain(prompt), 0.0001)
    hits = ShortHits(slow.explain, slow.clock, slow.clock)
    lock = toy.cache.lock(toy.cache.match(prompt))
    hits.matched(prompt, 0, 0)
    hits.locked(prompt, lock, ())
    assert slow.count == 1
    hits.matched(prompt, 0, 0)
    slow.now_s += EXPLAINED_EVERY_S
    hits.matched(prompt, 4, 4)
    hits.locked(prompt, lock, ())
    assert slow.count == 1, "a transfer may have brought these four pages since"
    hits.matched(other, 2, 3)
    hits.locked(other, lock, ())
    hits.matched(prompt, 1, 1)
    slow.now_s += EXPLAINED_EVERY_S
    hits.locked(prompt, lock, ())
    assert slow.count == 2
    hits.matched(prompt, 1, 2)
    hits.locked(prompt, lock, ())
    assert slow.count == 3, "another request with the same prompt"
