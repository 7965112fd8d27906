"""Outlook of the forecast: what explanations and statistics say of it, that it comes true and changes nothing."""

import json
import random

import numpy as np
import pytest

from tests.support.cache import WholePromptCache, toy_layout
from unified_cache.config import CacheConfig, EvictionConfig, EvictionPolicy
from unified_cache.controller import InlineWorkers
from unified_cache.explain.explanation import Explanation
from unified_cache.memory import NoBytes
from unified_cache.pool import Identity, Tier
from unified_cache.tree import Guide, VictimReason, forecast
from unified_cache.tree.cell_words import cell_text
from unified_cache.tree.window_worth import WINDOW_CELLS
from unified_cache.window import SPAN_ALL, needed_pages

PAGES = 40


class ForeseenCache:
    """A cache on the device alone, without bytes, that serves one request at a time."""

    def __init__(self, policy: EvictionPolicy = EvictionPolicy.ADAPTIVE, spans: tuple[int, ...] = (SPAN_ALL,)) -> None:
        self.spans = spans
        eviction = EvictionConfig(device=(policy,) * len(spans), preferred_share=0.25)
        config = CacheConfig((PAGES,) * len(spans), (0,) * len(spans), eviction=eviction)
        self.cache = WholePromptCache(toy_layout(spans, 1), config, NoBytes(), InlineWorkers(), Identity("m"))

    def serve(self, tokens: list[int]) -> int:
        cache, prompt = self.cache, self.cache.prompt(tokens)
        lock = cache.lock(cache.match(prompt))
        hits = lock.end
        if prompt.pages_count > hits:
            needed = [needed_pages([prompt.pages_count], span, hits, prompt.pages_count) for span in self.spans]
            slots = cache.allocate(needed)
            assert slots is not None
            lock = cache.insert(prompt, slots, lock)
        cache.release(lock)
        return hits

    def evict_one(self) -> None:
        """Have one page evicted."""
        slots = self.cache.allocate([np.ones(1 + self.cache.stats().occupancy[0].free, np.bool_)])
        assert slots is not None
        self.cache.free(slots)

    def learn(self, sessions: int = 40) -> None:
        """Serve sessions of two turns until there is a forecast to go by."""
        for session in range(sessions):
            tokens = [10_000 + 100 * session + page for page in range(4)]
            self.serve(tokens)
            self.serve([*tokens, *(tokens[0] + 50 + page for page in range(3))])

    def explain(self, tokens: list[int]) -> Explanation:
        return self.cache.explain(self.cache.prompt(tokens))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the log often, so that little has to be served before there is a forecast."""
    monkeypatch.setattr(forecast, "REFRESH_REQUESTS", (16, 16))
    monkeypatch.setattr(forecast, "COLUMN_TOKENS", 1)


def test_an_explanation_says_of_pages_held_who_used_them_how_long_ago_and_what_they_are_worth(soon: None) -> None:
    served = ForeseenCache()
    served.learn()
    system = [1, 2]
    served.serve([*system, 11, 12, 13])
    served.serve([*system, 21, 22, 23])
    served.serve([500, 501, 502])
    (outlook,) = served.explain([*system, 21, 22, 23, 24]).outlooks
    assert (outlook.tier, outlook.component, outlook.guide) == (Tier.DEVICE, 0, Guide.FORECAST)
    shared, own = outlook.runs
    assert (shared.start, shared.end, shared.cell, shared.age) == (0, 2, "prefix of 2 sessions", 1)
    assert (own.start, own.end, own.age) == (2, 5, 2), "the log has the shared prefix, too"
    assert own.cell == "first turn, 2 to 3 new tokens, 2 and more known"
    tree = served.cache._ledger.tree
    node = next(node for node in tree._state.nodes() if node.start == 2 and node.key[:4] == (21).to_bytes(4, "little"))
    assert own.index == tree._state.queues.forecast.worth(node.cell, node.request)  # type: ignore[attr-defined]


def test_what_is_said_to_go_next_goes_next(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "DEVIATIONS", -1e9)  # whatever is seen counts as a difference
    monkeypatch.setattr(forecast, "EXPECTED_MIN", 1e-9)
    served = ForeseenCache()
    rng = random.Random(5)
    reasons = set()
    prompts = [[1]]
    tree = served.cache._ledger.tree
    for request in range(400):
        tokens = [*rng.choice(prompts[-15:]), *(rng.randrange(10**6) for _ in range(rng.randrange(1, 4)))][:12]
        served.serve(tokens if rng.random() < 0.8 else tokens[-3:])
        prompts.append(tokens)
        if request % 3 == 0:
            (outlook,) = served.explain(tokens).outlooks
            victim = outlook.next_victim
            assert victim is not None
            reasons.add(victim.reason)
            before = {node: node.held_count[0] for node in tree._state.nodes()}
            served.evict_one()
            changed = [node for node, held in before.items() if node.held_count[0] != held]
            pages = [(node.start, node.start + before[node]) for node in changed]
            assert pages == [(victim.pages.start, victim.pages.end)]
    assert reasons == {VictimReason.LEAST_WORTH, VictimReason.LEAST_RECENT}


def test_windows_are_told_by_the_end_at_which_they_stand(soon: None) -> None:
    served = ForeseenCache(spans=(SPAN_ALL, 2))
    served.learn()
    served.serve([1, 2, 3])
    served.serve([1, 2, 3, 4, 5])
    full, window = served.explain([1, 2, 3, 4, 5]).outlooks
    assert (full.component, window.component) == (0, 1)
    assert [(run.start, run.end) for run in full.runs] == [(0, 3), (3, 5)], "by node: another request used each last"
    assert [(run.start, run.end) for run in window.runs] == [(1, 3), (3, 5)]
    assert window.runs[0].cell == "end that its session has gone on from"
    assert window.next_victim is not None


def test_asking_changes_no_victim(soon: None) -> None:
    asked, unasked = ForeseenCache(), ForeseenCache()
    rng = random.Random(7)
    for _ in range(500):
        tokens = [rng.randrange(9), *range(rng.randrange(1, 9)), *range(100, 100 + rng.randrange(4))]
        assert asked.serve(tokens) == unasked.serve(tokens)
        asked.explain(tokens)
        asked.explain([])
    assert asked.cache.stats().occupancy == unasked.cache.stats().occupancy


def test_until_it_goes_by_the_forecast_a_lane_says_why_not(soon: None) -> None:
    served = ForeseenCache()
    served.serve([1, 2, 3])
    (outlook,) = served.explain([1, 2, 3]).outlooks
    assert outlook.guide is Guide.UNTOLD
    assert [run.index for run in outlook.runs] == [None]
    assert outlook.next_victim is not None
    assert outlook.next_victim.is_of_prompt
    assert outlook.next_victim.reason is VictimReason.LEAST_RECENT


def test_the_text_and_the_json_of_an_explanation_say_the_outlook(soon: None) -> None:
    served = ForeseenCache()
    served.learn()
    served.serve([1, 2, 3])
    explanation = served.explain([1, 2, 3, 4])
    text = str(explanation)
    assert "device toy0 goes by the forecast" in text
    assert "[0, 3)  first turn, 2 to 3 new tokens, fewer than 2 known, in the latest request, worth " in text
    assert "next to go: [" in text
    (said,) = json.loads(json.dumps(explanation.as_json()))["forecast"]
    assert said["tier"] == "device"
    assert said["component"] == "toy0"
    assert said["guide"] == "forecast"
    assert said["pages"][0].keys() == {"start", "end", "cell", "age_requests", "index"}
    assert said["next"].keys() == {"start", "end", "cell", "age_requests", "index", "is_of_prompt", "reason"}


def test_statistics_show_the_forecast_as_a_whole(soon: None) -> None:
    served = ForeseenCache()
    before = served.cache.stats().forecast
    assert before is not None
    assert before.cells == ()
    assert before.index_range is None
    served.learn()
    figures = served.cache.stats().forecast
    assert figures is not None
    assert figures.requests == 80
    assert [(each.tier, each.component, each.guide) for each in figures.lanes] == [(Tier.DEVICE, 0, Guide.FORECAST)]
    assert sum(cell.requests for cell in figures.cells) == 79, "all but the latest when the log was looked at last"
    assert sum(cell.continued for cell in figures.cells) == 40
    first = figures.cells[0]
    assert first.text.startswith("first turn, ")
    assert first.continued == first.requests
    assert figures.index_range == (
        min(cell.least or 0 for cell in figures.cells),
        max(cell.most or 0 for cell in figures.cells),
    )
    assert first.text in str(figures)
    assert "by the forecast" in str(figures)


def test_other_policies_have_no_outlook() -> None:
    served = ForeseenCache(EvictionPolicy.LRU)
    served.serve([1, 2, 3])
    assert served.explain([1, 2, 3]).outlooks == ()
    assert served.cache.stats().forecast is None


def test_every_cell_has_words_of_its_own() -> None:
    texts = [cell_text(cell, 512) for cell in range(WINDOW_CELLS)]
    assert len(set(texts)) == WINDOW_CELLS
    assert texts[-1] == "end that its session has gone on from"
    assert texts[0] == "first turn, 0 to 1,023 new tokens, fewer than 1,024 known"
