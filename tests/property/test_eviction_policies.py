"""Order of eviction, against a naive cache that remembers every page's uses by itself.

It takes two things from the tree: where nodes begin and end, since a windowed component is touched by whole nodes, and
which of equals a tie fell on. Everything else, who was used when, it keeps in a dict entry per page.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.budget import examples, fresh_seeds
from tests.support.components import toy_components
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Slots, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import RadixTree
from unified_cache.tree.check import check
from unified_cache.tree.node import Node

PAGES = 24
"""Full's pages the tree may hold, and about half as many of the windowed component."""

Page = tuple[int, ...]
"""A page and everything before it."""


@dataclass
class Record:
    """History of one page of one component, as the naive cache knows it."""

    slot: int | None = None
    touched: int = 0
    priority: int = -100


@dataclass
class Naive:
    """A tree, and the naive cache beside it. Pages lie on the device alone."""

    spans: tuple[int, ...]
    kind: EvictionPolicy
    touches: int = 0
    slots_count: int = 0
    tree: RadixTree = field(init=False)
    tier_components: list[dict[Page, Record]] = field(init=False)
    victims_count: int = 0
    """Evictions so far, each of which was compared with the naive order."""

    def __post_init__(self) -> None:
        config = EvictionConfig(device=(self.kind,) * len(self.spans))
        self.tree = RadixTree(toy_components(self.spans), 1, config)
        self.tier_components = [{} for _ in self.spans]

    # ---- what happens ----------------------------------------------------------------------------------------

    def match(self, tokens: list[int], priority: int = 0) -> int:
        found = self.tree.match(Prompt.of(tokens, 1), priority)
        self._touch(tokens[: found.device_end], priority)
        return found.device_end

    def insert(self, tokens: list[int], priority: int) -> None:
        end = self.match(tokens, priority)
        given = [self._fresh(len(tokens) - end) for _ in self.spans]
        inserted = self.tree.insert(Prompt.of(tokens, 1), end, given, Tier.DEVICE, priority)
        for tier_component, slots in enumerate(given):
            refused = set(inserted.duplicates[tier_component].tolist())
            for pages in self._path(tokens):
                records = [self.tier_components[tier_component].setdefault(page, Record()) for page in pages]
                came = [
                    (record, int(slots[len(page) - 1 - end]))
                    for page, record in zip(pages, records, strict=True)
                    if len(page) > end and slots[len(page) - 1 - end] not in refused
                ]
                for record, slot in came:
                    record.slot = slot
        self._touch(tokens, priority)

    def evict(self, tier_component: int) -> None:
        """Evict one page, and see that it was its turn."""
        records = self.tier_components[tier_component]
        candidates = self._candidates(tier_component)
        freed = self.tree.evict(Tier.DEVICE, tier_component, 1)
        (slot,) = freed.slots[tier_component][0].tolist()
        turns = {
            records[self._next(tier_component, pages)].slot: self._rank(records[pages[0]])
            for pages in candidates.values()
        }
        assert turns[slot] == pytest.approx(min(turns.values()), rel=1e-9), "a page went before its turn"
        self.victims_count += 1
        lost = {slot for arrays in freed.slots for array in arrays for slot in array.tolist()}
        for tier_component_records in self.tier_components:
            for record in tier_component_records.values():
                record.slot = None if record.slot in lost else record.slot
        self._forget_what_left()

    # ---- what should go --------------------------------------------------------------------------------------

    def _candidates(self, tier_component: int) -> dict[Node, list[Page]]:
        """Return the nodes of which something may go, with their pages."""
        records = self.tier_components[tier_component]
        parents = {page[:-1] for page, record in records.items() if record.slot is not None}
        return {
            node: pages
            for node, pages in self._nodes()
            if any(records[page].slot is not None for page in pages)
            and (tier_component or self._next(tier_component, pages) not in parents)
        }

    def _next(self, tier_component: int, pages: list[Page]) -> Page:
        """Return what goes first of a node: Full's last page, the oldest of a window."""
        held = [page for page in pages if self.tier_components[tier_component][page].slot is not None]
        return held[0] if tier_component else held[-1]

    def _rank(self, record: Record) -> float:
        match self.kind:
            case EvictionPolicy.LRU:
                return record.touched
            case EvictionPolicy.PRIORITY:
                return record.priority * 10**5 + record.touched

    # ---- who is who ------------------------------------------------------------------------------------------

    def _touch(self, tokens: list[int], priority: int) -> None:
        covered = self._covered(tokens)
        self.touches += bool(covered)
        for tier_component, page in covered:
            record = self.tier_components[tier_component][page]
            record.touched = self.touches
            record.priority = max(record.priority, priority)

    def _covered(self, tokens: list[int]) -> list[tuple[int, Page]]:
        """Return what a touch makes recent: all of Full; of a component the nodes in its window and one page more."""
        path = self._path(tokens)
        end = len(path[-1][-1]) if path else 0
        return [
            (tier_component, page)
            for tier_component, span in enumerate(self.spans)
            for pages in path
            if len(pages[-1]) > end - span - 1
            for page in pages
        ]

    def _path(self, tokens: list[int]) -> list[list[Page]]:
        """Return by node the pages of the nodes that lie in ``tokens`` whole, root first."""
        return sorted(
            (pages for _, pages in self._nodes() if pages[-1] == tuple(tokens[: len(pages[-1])])),
            key=lambda pages: len(pages[0]),
        )

    def _nodes(self) -> list[tuple[Node, list[Page]]]:
        """Return every node with its pages."""
        found: list[tuple[Node, list[Page]]] = []
        todo: list[tuple[Node, Page]] = [(root, ()) for root in self.tree.roots.values()]
        while todo:
            node, above = todo.pop()
            run = np.frombuffer(node.key, "<u4").tolist() if node.parent is not None else []
            if run:
                found.append((node, [(*above, *run[: i + 1]) for i in range(len(run))]))
            todo += [(child, (*above, *run)) for child in node.children.values()]
        return found

    def _forget_what_left(self) -> None:
        """Pages that no node stands for any more have no history; a split gave both halves the same."""
        alive = {page for _, pages in self._nodes() for page in pages}
        self.tier_components = [
            {page: record for page, record in records.items() if page in alive} for records in self.tier_components
        ]

    def _fresh(self, count: int) -> Slots:
        self.slots_count += count
        return np.arange(self.slots_count - count + 1, self.slots_count + 1, dtype=np.int32)

    def held(self, tier_component: int) -> int:
        return sum(record.slot is not None for record in self.tier_components[tier_component].values())


def history(naive: Naive, rng: random.Random, steps: int) -> None:
    """Match, insert and evict at random; the tree holds more than fits only within a step."""
    prompts: list[list[int]] = [[0]]
    for _ in range(steps):
        tokens = rng.choice(prompts[-12:])
        if rng.random() < 0.4:
            tokens = tokens[: rng.randrange(len(tokens) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
            tokens = tokens[:9]
            prompts.append(tokens)
        what = rng.random()
        if what < 0.4:
            naive.match(tokens, rng.randrange(-2, 3))
        else:
            naive.insert(tokens, rng.randrange(-2, 3))
        for tier_component in range(len(naive.spans)):
            while naive.held(tier_component) > PAGES // (tier_component + 1) or (
                rng.random() < 0.2 and naive.held(tier_component)
            ):
                naive.evict(tier_component)
        check(naive.tree, [])


@pytest.mark.parametrize("spans", [(SPAN_ALL,), (SPAN_ALL, 1), (SPAN_ALL, 3)], ids=str)
@pytest.mark.parametrize("kind", EvictionPolicy, ids=lambda kind: kind.value)
def test_every_victim_is_the_one_that_the_policy_names(kind: EvictionPolicy, spans: tuple[int, ...]) -> None:
    for seed in fresh_seeds(examples(2, 30)):
        naive = Naive(spans, kind)
        history(naive, random.Random(seed), steps=120)
        assert naive.victims_count >= 20, "a history that evicts little proves little"
