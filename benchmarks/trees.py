"""Trees of any size for benchmarks, timed in turns with SGLang's by ``make bench-sglang``, and the time of a lock."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Figure, Spread, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, PoolSpec, Slots, Tier
from unified_cache.tree import RadixTree

PAGE_SIZE = 64

Tokens = npt.NDArray[np.int32]

PROMPT_TOKENS = 32_768
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE
WINDOW_PAGES = 64
FILL_TOKENS = 128
"""Length of the leaves that bring a tree to its size."""
VOCABULARY = 150_000
LEAVES_HELD = 8
"""Prompts that share their first half in the tree that is inserted into."""


@dataclass(frozen=True, slots=True)
class TreeSetting:
    """Components of the trees that are compared."""

    name: str
    spans: tuple[int, ...]
    """Spans of the components beside Full, in pages."""


SETTINGS = (TreeSetting("Full", ()), TreeSetting(f"Full + window of {WINDOW_PAGES}", (WINDOW_PAGES,)))


class TimedTree:
    """A ``RadixTree`` of Full and sliding windows, whose inserts and evictions are timed.

    Token ids come as int32 arrays; slots go out as one array.
    """

    def __init__(self, spans: Sequence[int]) -> None:
        components: list[Component] = [Full((PoolSpec("kv", 0),))]
        components += [SlidingWindow(span * PAGE_SIZE, PAGE_SIZE, (PoolSpec("swa", 0),)) for span in spans]
        self.tree = RadixTree(components, PAGE_SIZE)

    def match(self, tokens: Tokens) -> Slots:
        """Match a prompt; return the slots of Full that can be resumed from. Converts token ids, matches, gathers."""
        tree = self.tree
        found = tree.match(Prompt.of(tokens, PAGE_SIZE))
        return found.slots(Tier.DEVICE, 0, 0, found.device_end)

    def insert(self, tokens: Tokens, slots: Sequence[Slots], start: int) -> int:
        """Insert pages from ``start`` on and return the nanoseconds; ``slots`` are given from the first page."""
        started = perf_counter_ns()
        self.tree.insert(Prompt.of(tokens, PAGE_SIZE), start, [given[start:] for given in slots], Tier.DEVICE)
        return perf_counter_ns() - started

    def evict(self, pages: int) -> int:
        """Evict pages of Full and return the nanoseconds; what was evicted is counted outside of the timed part.

        Raises:
            AssertionError: other than ``pages`` were evicted.
        """
        started = perf_counter_ns()
        freed = self.tree.evict(Tier.DEVICE, 0, pages)
        elapsed = perf_counter_ns() - started
        assert sum(map(len, freed.slots[0])) == pages
        return elapsed

    def lock_and_unlock(self, tokens: Tokens) -> Callable[[], object]:
        """Match a prompt once; return what locks all of it and unlocks it again.

        The lock ends where a node ends, so that nothing is split and the match stays valid.
        """
        tree = self.tree
        found = tree.match(Prompt.of(tokens, PAGE_SIZE))
        end = found.device_end
        assert end == len(tokens) // PAGE_SIZE
        return lambda: tree.unlock(tree.lock(found, end, Tier.DEVICE))


class Workload:
    """Random tokens and fresh slots; equal for equal seeds, so that every tree is given the same."""

    def __init__(self, setting: TreeSetting) -> None:
        self._components_count = 1 + len(setting.spans)
        self._random = np.random.default_rng(7)
        self._next_slot = 1

    def tokens(self, count: int, first: int | None = None) -> Tokens:
        """Draw tokens; ``first`` replaces the first of them, to make it one of a kind."""
        drawn = self._random.integers(0, VOCABULARY, count, dtype=np.int32)
        if first is not None:
            drawn[0] = VOCABULARY + first
        return drawn

    def slots(self, pages: int) -> list[Slots]:
        """Take fresh slots of every component."""
        taken: list[Slots] = []
        for _ in range(self._components_count):
            taken.append(np.arange(self._next_slot, self._next_slot + pages, dtype=np.int32))
            self._next_slot += pages
        return taken

    def below(self, limit: int) -> int:
        """Draw a number in [0, limit)."""
        return int(self._random.integers(limit))


def grow(tree: TimedTree, setting: TreeSetting, nodes: int, path: int) -> Tokens:
    """Fill a tree to about ``nodes`` nodes, among them one prompt on a path of ``path`` nodes; return the prompt.

    Half of the other leaves hang below the root, half below some node of the path.
    """
    work = Workload(setting)
    hot = work.tokens(PROMPT_TOKENS)
    hot_slots = work.slots(PROMPT_PAGES)
    step = PROMPT_PAGES // path
    for end in range(step, PROMPT_PAGES + 1, step):
        tree.insert(hot[: end * PAGE_SIZE], [given[:end] for given in hot_slots], end - step)
    for number in range(nodes - path):
        tail, tail_slots = work.tokens(FILL_TOKENS, first=number), work.slots(FILL_TOKENS // PAGE_SIZE)
        depth = step * (1 + work.below(path)) if number % 2 else 0
        tokens = np.concatenate([hot[: depth * PAGE_SIZE], tail])
        slots = [np.concatenate(pair) for pair in zip([s[:depth] for s in hot_slots], tail_slots, strict=True)]
        tree.insert(tokens, slots, depth)
    assert np.array_equal(tree.match(hot), hot_slots[0])
    return hot


def lock_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Lock a prompt that was matched, and unlock it."""
    for setting in SETTINGS:
        tree = TimedTree(setting.spans)
        hot = grow(tree, setting, 1_000, 16)
        (taken,) = interleaved([timed(tree.lock_and_unlock(hot))], plan.effort.match_rounds, calls=10, warm=3)
        yield Figure(setting.name, "lock + unlock, 16-node path", "us", Spread.of([ns / 1e3 for ns in taken]))
