"""One exhaustive grid: match against the definition, over page sizes, windows, lengths, tombstones and tiers."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from unified_cache.components import Full, SlidingWindow
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, PoolSpec, Tier
from unified_cache.tree import RadixTree

PAGE_SIZES = (1, 2, 16, 64, 256)

NODES_MAX = 10
"""Prompts of fewer pages are tried in many nodes, too."""

Presence = list[frozenset[Tier]]
"""Tiers that hold the window's state of each page."""


def windows(page_size: int) -> list[int]:
    candidates = {1, page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 127, 128}
    return sorted(window for window in candidates if window > 0)


def lengths(page_size: int, window: int) -> list[int]:
    around_window = {window - 1, window, window + 1}
    around_pages = {pages * page_size + step for pages in (1, 2, 3) for step in (-1, 0, 1)}
    beyond = window + 2 * page_size + 1
    return sorted(length for length in around_window | around_pages | {beyond} if length >= page_size)


def presences(pages: int) -> Iterator[Presence]:
    """Yield every single tombstone, and none, over each way of spreading the pages over tiers."""
    device, host, both = frozenset({Tier.DEVICE}), frozenset({Tier.HOST}), frozenset(Tier)
    spreads: list[Presence] = [
        [device] * pages,
        [host] * pages,
        [both] * pages,
        [(device, host)[page % 2] for page in range(pages)],
        [device if page < pages // 2 else host for page in range(pages)],
        [host if page < pages // 2 else device for page in range(pages)],
    ]
    for spread in spreads:
        yield spread
        for tombstone in range(pages):
            yield [*spread[:tombstone], frozenset(), *spread[tombstone + 1 :]]


def build(components: Sequence[Component], prompt: Prompt, presence: Presence, node_pages: int) -> RadixTree:
    """Put a prompt into a new tree, in nodes of ``node_pages`` pages, held where ``presence`` says."""
    tree = RadixTree(components, prompt.page_size)
    slots = np.arange(1, prompt.pages_count + 1, dtype=np.int32)
    for tier in Tier:
        held = np.where([tier in tiers for tiers in presence], slots, -1).astype(np.int32)
        for start in range(0, prompt.pages_count, node_pages):
            end = min(start + node_pages, prompt.pages_count)
            tree.insert(prompt.head(end), start, [slots[start:end], held[start:end]], tier)
    return tree


def by_definition(presence: Presence, page_size: int, window: int, tiers: frozenset[Tier]) -> int:
    """Return the longest whole-page prefix whose last ``window`` tokens, or all if fewer, have their state."""
    is_held = [bool(each & tiers) for each in presence]
    for end in range(len(presence), 0, -1):
        first_needed = max(0, end * page_size - window) // page_size
        if all(is_held[first_needed:end]):
            return end
    return 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_match_is_the_longest_prefix_that_the_definition_allows(page_size: int) -> None:
    tried = 0
    for window in windows(page_size):
        components = (Full((PoolSpec("kv", 0),)), SlidingWindow(window, page_size, (PoolSpec("swa", 0),)))
        for length in lengths(page_size, window):
            prompt = Prompt.of(np.arange(length, dtype=np.int32), page_size)
            for presence in presences(prompt.pages_count):
                device_end = by_definition(presence, page_size, window, frozenset({Tier.DEVICE}))
                host_end = by_definition(presence, page_size, window, frozenset(Tier))
                for node_pages in (
                    (1, 2, prompt.pages_count) if prompt.pages_count < NODES_MAX else (prompt.pages_count,)
                ):
                    found = build(components, prompt, presence, node_pages).match(prompt)
                    assert (found.device_end, found.host_end) == (device_end, host_end), (window, length, presence)
                    tried += 1
    assert tried > 500
