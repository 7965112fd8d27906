"""Eviction by predictor, against a naive search of the whole tree at every victim."""

import math
import random

import numpy as np
import pytest

from tests.support.budget import examples
from tests.support.clock import ManualClock
from tests.support.components import toy_components
from tests.support.operations import present
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Slots, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock, RadixTree, adaptive_queues, reuse_predictor
from unified_cache.tree.adaptive_queues import AdaptiveQueues
from unified_cache.tree.node import Node

PAGES = (24, 12)
"""Pages that the device may hold of Full and of the windowed component."""


class WatchedTree:
    """A tree that goes by the predictor, requests under way, and counts of the victims that were looked at."""

    def __init__(self, spans: tuple[int, ...], seed: int) -> None:
        self.rng = random.Random(seed)
        config = EvictionConfig(device=(EvictionPolicy.ADAPTIVE,) * len(spans), preferred_share=0.3)
        pages = PAGES[: len(spans)]
        self.clock = ManualClock()
        self.tree = RadixTree(toy_components(spans), 1, config, (pages, (0,) * len(spans)), self.clock)
        self.components = len(spans)
        self.slots_count = 0
        self.held = [0] * len(spans)
        self.locks: list[tuple[Prompt, Lock]] = []
        self.by_prediction = 0
        self.all_victims = 0

    def fresh(self, count: int) -> Slots:
        self.slots_count += count
        return np.arange(self.slots_count - count + 1, self.slots_count + 1, dtype=np.int32)

    def begin(self, tokens: list[int]) -> None:
        prompt = Prompt.of(tokens, 1, session=f"s{self.rng.randrange(5)}" if self.rng.random() < 0.5 else None)
        found = self.tree.match(prompt)
        request = self.tree.use(found, found.device_end)
        self.locks.append((prompt, self.tree.lock(found, found.device_end, Tier.DEVICE, request)))

    def end(self) -> None:
        """Insert what a request under way computed, perhaps nothing, and release it."""
        prompt, lock = self.locks.pop(self.rng.randrange(len(self.locks)))
        if self.rng.random() < 0.9 and prompt.pages_count > lock.end:
            given = [self.fresh(prompt.pages_count - lock.end) for _ in range(self.components)]
            inserted = self.tree.insert(prompt, lock.end, given, Tier.DEVICE, request=lock.request)
            for component, slots in enumerate(given):
                self.held[component] += len(slots) - len(inserted.duplicates[component])
        self.tree.unlock(lock)

    def hint(self) -> None:
        """Say something of a session, true or not, at times by a clock that jumps."""
        session, what = f"s{self.rng.randrange(6)}", self.rng.random()
        if what < 0.05:
            self.clock.now_s += self.rng.choice([0.0, 1.0, 50.0, -3.0])
        if what < 0.2:
            self.tree.session_returns(session, self.rng.choice([0.5, 20.0]))

    def evict(self, component: int) -> bool:
        """Evict a page, and see that no other had a lower score; return whether there was any."""
        queues = self.tree._state.queues
        assert isinstance(queues, AdaptiveQueues)
        queues._score_at[component] = 0
        self.tree._sessions.lapse()
        victim = self.tree.next_victim(Tier.DEVICE, component)
        if victim is None:
            return False
        self.all_victims += 1
        candidates = [node for node in self.tree._state.nodes() if queues.evictable(node, component)]
        assert victim.node in candidates
        plain = [node for node in candidates if not _is_preferred(node, component)]
        if plain:
            assert victim.node in plain, "a preferred page went before others"
            self._see_turn(victim.node, plain, component)
        freed = self.tree.evict_from(victim, 1)
        for number in range(self.components):
            self.held[number] -= sum(map(len, freed.slots[number]))
        return True

    def _see_turn(self, victim: Node, candidates: list[Node], tier_component: int) -> None:
        queues = self.tree._state.queues
        assert isinstance(queues, AdaptiveQueues)
        oldest: dict[int, int] = {}
        classes = {node: _class_of(node, tier_component) for node in candidates}
        for node in candidates:
            oldest[classes[node]] = min(
                oldest.get(classes[node], node.stamps[tier_component]), node.stamps[tier_component]
            )
        is_tail = victim is queues._next_tail(tier_component)
        is_young = victim is queues._node_at(~queues.queue_id(victim, tier_component), tier_component)
        if not is_tail and not is_young:
            assert victim.stamps[tier_component] == oldest[classes[victim]], (
                "neither the oldest nor the youngest of its class"
            )
        heads = [node for node in candidates if node.stamps[tier_component] == oldest[classes[node]]]
        if is_tail:
            assert victim.end == victim.asked_end, "more than the last page of a prompt would go"
        elif queues._by_prediction[tier_component]:
            assert queues._unlearned_pages[tier_component] <= 0
            self.by_prediction += 1
            score = {node: self._score(node, tier_component) for node in {*heads, victim}}
            # Heads of one class may have one stamp: parts of a prompt. Then any of them may stand first.
            least = {
                classes[node]: max(score[other] for other in heads if classes[other] == classes[node]) for node in heads
            }
            assert score[victim] <= min(least.values()) * (1 + 1e-9), "a node that is worth more went first"
        else:
            assert victim.stamps[tier_component] == min(oldest.values()), (
                "not the least recent one, and nothing to go by"
            )

    def _score(self, node: Node, tier_component: int) -> float:
        """Score a page of Full as the predictor does, a window by the requests that resume at its end, page by page."""
        queues = self.tree._state.queues
        assert isinstance(queues, AdaptiveQueues)
        predicted = queues.predictor.score(node.request_class, node.request)
        if tier_component == 0:
            return predicted
        slots = present(node.slots[tier_component])
        if (slots[-self.tree.components[tier_component].span :] < 0).any():
            return 0.0
        shares, held_pages = queues.shares, int((slots >= 0).sum())
        chance = 1.0
        if reuse_predictor.in_session(node.request_class) and node.moved_past:
            chance = shares.moved_past.part
        elif reuse_predictor.in_session(node.request_class):
            left = [offset for offset in range(len(shares._counts)) if node.asked_end - offset <= node.end]
            chance = sum(shares._counts[offset] for offset in left[:held_pages]) / shares._total
        return predicted * chance * math.sqrt(node.end) / held_pages


def _class_of(node: Node, tier_component: int) -> int:
    """Tell apart windows at a prompt's end, windows before it, and those that a session has moved past."""
    if tier_component == 0 or not reuse_predictor.in_session(node.request_class):
        return node.request_class
    if node.moved_past:
        return reuse_predictor.CLASSES_COUNT + reuse_predictor.SESSION_CLASSES
    return node.request_class + (reuse_predictor.CLASSES_COUNT if node.end != node.asked_end else 0)


def _is_preferred(node: Node, tier_component: int) -> bool:
    history = (node.history or {}).get(tier_component)
    return history is not None and history.preferences > 0


@pytest.mark.parametrize("spans", [(SPAN_ALL,), (SPAN_ALL, 2)], ids=str)
def test_every_victim_has_the_least_score_of_the_oldest_of_each_class(
    spans: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_predictor, "REFRESH_REQUESTS", (8, 8))
    monkeypatch.setattr(reuse_predictor, "COLUMN_TOKENS", 1)
    monkeypatch.setattr(reuse_predictor, "EVICTED_RUNS_MAX", 8)
    monkeypatch.setattr(reuse_predictor, "LOG_MAX", 64)
    monkeypatch.setattr(reuse_predictor, "DEVIATIONS", -1e9)  # whatever is seen counts as a difference
    monkeypatch.setattr(reuse_predictor, "EXPECTED_MIN", 1e-9)
    monkeypatch.setattr(adaptive_queues, "SCORE_REQUESTS", 1)
    for seed in range(examples(4, 60)):
        watched = WatchedTree(spans, seed)
        rng = watched.rng
        prompts: list[list[int]] = [[0]]
        preferences = []
        for _ in range(150):
            tokens = rng.choice(prompts[-12:])
            if rng.random() < 0.5:
                tokens = tokens[: rng.randrange(len(tokens) + 1)] + [
                    rng.randrange(4) for _ in range(rng.randrange(1, 5))
                ]
                tokens = tokens[:9]
                prompts.append(tokens)
            what = rng.random()
            if what < 0.5 and len(watched.locks) < 3:
                watched.begin(tokens)
            elif what < 0.9 and watched.locks:
                watched.end()
            elif what < 0.95:
                found = watched.tree.match(Prompt.of(tokens, 1))
                made = watched.tree.prefer(found, found.device_end, Tier.DEVICE)
                preferences += [] if made is None else [made]
            elif preferences:
                watched.tree.unprefer(preferences.pop())
            watched.hint()
            for component in range(len(spans)):
                while watched.held[component] > PAGES[component] and watched.evict(component):
                    pass
            watched.tree.check([lock for _, lock in watched.locks])
        assert watched.by_prediction >= 10, "a history that the predictor hardly decides proves little"
