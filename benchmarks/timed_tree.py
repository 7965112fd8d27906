"""The radix tree as the benchmarks call it: token ids in, nanoseconds of the part that counts out."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from unified_cache.components import Full, SlidingWindow
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, PoolSpec, Slots, Tier
from unified_cache.tree import RadixTree

__all__ = ["PAGE_SIZE", "TimedTree", "Tokens"]

PAGE_SIZE = 64

Tokens = npt.NDArray[np.int32]


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

    def path_nodes(self, tokens: Tokens) -> int:
        """Count the nodes of a prompt's path."""
        return len(self.tree.match(Prompt.of(tokens, PAGE_SIZE)).path)

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
