"""The trees that are measured, behind one face: ours, and a second implementation that lies elsewhere.

The second one is a module ``tree.py`` in a folder that the environment names. It is loaded as it is; the
protocols below are all that is asked of it. Both are driven with the same tokens and slots in the same order.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter_ns
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from unified_cache.components import Full, SlidingWindow
from unified_cache.errors import ConfigError
from unified_cache.page import Prompt
from unified_cache.pool import Component, PoolSpec, Slots, Tier
from unified_cache.tree import RadixTree
from unified_cache.window import SPAN_ALL

__all__ = ["PAGE_SIZE", "RadixTreeSubject", "Sketch", "SketchFactory", "Tokens", "Tree", "load_sketch"]

PAGE_SIZE = 64

Tokens = npt.NDArray[np.int32]


class Tree(Protocol):
    """One tree under measurement. Tokens go in as int32 arrays, slots come out as one array."""

    def match(self, tokens: Tokens) -> Slots:
        """Match a prompt and return the slots of component 0 that can be resumed from."""
        ...

    def path_nodes(self, tokens: Tokens) -> int:
        """Count the nodes of a prompt's path."""
        ...

    def insert(self, tokens: Tokens, slots: Sequence[Slots], start: int) -> int:
        """Insert pages from ``start`` on; ``slots`` are given from the first page. Nanoseconds."""
        ...

    def evict(self, pages: int) -> int:
        """Evict pages of component 0. Nanoseconds.

        Raises:
            AssertionError: other than ``pages`` were evicted.
        """
        ...

    def lock_and_unlock(self, tokens: Tokens) -> Callable[[], object]:
        """Match a prompt once; return what locks all of it and unlocks it again."""
        ...


class RadixTreeSubject:
    """``unified_cache.tree``."""

    def __init__(self, spans: Sequence[int]) -> None:
        components: list[Component] = [Full((PoolSpec("kv", 0),))]
        components += [SlidingWindow(span * PAGE_SIZE, PAGE_SIZE, (PoolSpec("swa", 0),)) for span in spans]
        self.tree = RadixTree(components, PAGE_SIZE)

    def match(self, tokens: Tokens) -> Slots:
        """Convert, match, gather."""
        tree = self.tree
        found = tree.match(Prompt.of(tokens, PAGE_SIZE))
        return tree.slots(found, Tier.DEVICE, 0, 0, found.device_end)

    def path_nodes(self, tokens: Tokens) -> int:
        """Count the nodes of a prompt's path."""
        return len(self.tree.match(Prompt.of(tokens, PAGE_SIZE)).path)

    def insert(self, tokens: Tokens, slots: Sequence[Slots], start: int) -> int:
        """Convert and insert."""
        started = perf_counter_ns()
        self.tree.insert(Prompt.of(tokens, PAGE_SIZE), start, [given[start:] for given in slots], Tier.DEVICE)
        elapsed = perf_counter_ns() - started
        self.tree.take_map_changes()
        return elapsed

    def evict(self, pages: int) -> int:
        """Evict, and count outside of the timed part."""
        started = perf_counter_ns()
        freed = self.tree.evict(Tier.DEVICE, 0, pages)
        elapsed = perf_counter_ns() - started
        assert sum(map(len, freed[0])) == pages
        self.tree.take_map_changes()
        return elapsed

    def lock_and_unlock(self, tokens: Tokens) -> Callable[[], object]:
        """Lock at the end of a node, so that the structure, and with it the match, stays."""
        tree = self.tree
        found = tree.match(Prompt.of(tokens, PAGE_SIZE))
        end = found.device_end
        assert end == len(tokens) // PAGE_SIZE
        return lambda: tree.unlock(tree.lock(found, end, Tier.DEVICE))


class _SketchNode(Protocol):
    parent: "_SketchNode | None"
    sl: list[Slots]


class _SketchMatch(Protocol):
    dev_end: int
    node: _SketchNode


class _SketchTree(Protocol):
    mapops: list[object]
    swa: int | None

    def match(self, toks: Tokens) -> _SketchMatch: ...
    def insert(self, toks: Tokens, slots: Sequence[Slots], prev: int) -> object: ...
    def evict(self, t: int, c: int, want: int) -> list[list[Slots]]: ...
    def lock(self, node: _SketchNode, end: int, t: int) -> object: ...
    def unlock(self, r: object) -> None: ...


SketchFactory = Callable[[list[int], int], _SketchTree]
"""Spans and page size in, tree out."""


class Sketch:
    """The second implementation."""

    def __init__(self, factory: SketchFactory, spans: Sequence[int]) -> None:
        self.tree = factory([SPAN_ALL, *spans], PAGE_SIZE)

    def match(self, tokens: Tokens) -> Slots:
        """Match, then gather along the path."""
        node = self.tree.match(tokens).node
        runs: list[Slots] = []
        while node.parent is not None:
            runs.append(node.sl[0])
            node = node.parent
        return np.concatenate(runs[::-1])

    def path_nodes(self, tokens: Tokens) -> int:
        """Count the nodes of a prompt's path."""
        node = self.tree.match(tokens).node
        count = 0
        while node.parent is not None:
            count += 1
            node = node.parent
        return count

    def insert(self, tokens: Tokens, slots: Sequence[Slots], start: int) -> int:
        """Insert; slots and tokens as they are."""
        started = perf_counter_ns()
        self.tree.insert(tokens, slots, start)
        return perf_counter_ns() - started

    def evict(self, pages: int) -> int:
        """Evict; what it queues for an allocator is dropped outside of the timed part."""
        started = perf_counter_ns()
        freed = self.tree.evict(0, 0, pages)
        elapsed = perf_counter_ns() - started
        assert sum(map(len, freed[0])) == pages
        self.tree.mapops.clear()
        return elapsed

    def lock_and_unlock(self, tokens: Tokens) -> Callable[[], object]:
        """Lock at the end of a node."""
        tree = self.tree
        found = tree.match(tokens)
        node, end = found.node, found.dev_end
        assert end == len(tokens) // PAGE_SIZE
        return lambda: tree.unlock(tree.lock(node, end, 0))


def load_sketch(folder: Path) -> SketchFactory:
    """Load ``tree.py`` from a folder and leave nothing behind there.

    Raises:
        ConfigError: there is no such file, or it does not hold a tree.
    """
    path = folder / "tree.py"
    spec = spec_from_file_location("sketch_tree", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"expected a second implementation of the tree in {path}, found no such file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write_bytecode
    factory: object = vars(module).get("Tree")
    if not callable(factory):
        raise ConfigError(f"{path} must hold a class Tree")
    return cast("SketchFactory", factory)
