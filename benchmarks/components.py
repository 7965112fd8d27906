"""Cost of more components: match, lock and release of a request with Full alone, with SWA, and with SWA and Mamba.

The three trees hold the same prompts and take turns, so the ratios do not depend on the machine's load. Windows are
kept where an engine keeps them: before the end of every prompt.
"""

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from benchmarks.trees import PAGE_SIZE, Tokens
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, PoolSpec, Tier
from unified_cache.core.window import needed_pages
from unified_cache.tree import RadixTree

PROMPT_PAGES = 512
TURNS = (16, 64)
"""Prompts that continue each other, each a node of the path that is matched."""
CONVERSATIONS = 60

FULL = Full((PoolSpec("kv", 0),))
WINDOWS = (SlidingWindow(127, PAGE_SIZE, (PoolSpec("swa", 0),)), SlidingWindow(4095, PAGE_SIZE, (PoolSpec("swa", 0),)))
"""A window of two pages, as gpt-oss has it, and one of 64 pages."""
STATE = RecurrentState((PoolSpec("mamba", 0),))

SWA_RATIO_MAX = 1.3
SWA_MAMBA_RATIO_MAX = 1.6


def components_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Time one request's match, lock and release."""
    for turns in TURNS:
        for window in WINDOWS:
            sets = ((FULL,), (FULL, window), (FULL, window, STATE))
            prompt, *others = _conversations(turns)
            subjects = [timed(_request(_grown(components, turns, [prompt, *others]), prompt)) for components in sets]
            taken = interleaved(subjects, plan.effort.match_rounds, calls=10, warm=3)
            full, swa, mamba = (Spread.of([ns / 1e3 for ns in values]) for values in taken)
            name = f"match, lock, unlock 32k tokens, {turns} turns"
            section = f"Full, SWA of {window.span}, Mamba"
            yield Figure(section, f"{name}: Full", "us", full)
            yield Figure(section, f"{name}: Full + SWA", "us", swa, (_ratio(swa, full, SWA_RATIO_MAX),))
            yield Figure(
                section, f"{name}: Full + SWA + Mamba", "us", mamba, (_ratio(mamba, full, SWA_MAMBA_RATIO_MAX),)
            )


def _ratio(spread: Spread, full: Spread, at_most: float) -> Comparison:
    return Comparison("Full alone", full.median, spread.median / full.median, at_most=at_most)


def _conversations(turns: int) -> list[Tokens]:
    """Draw prompts; the others leave the first one at the end of some turn."""
    random = np.random.default_rng(11)
    step = PROMPT_PAGES // turns * PAGE_SIZE
    prompts = [random.integers(0, 150_000, PROMPT_PAGES * PAGE_SIZE, dtype=np.int32) for _ in range(CONVERSATIONS)]
    for number, prompt in enumerate(prompts[1:]):
        shared = number % turns * step
        prompt[:shared] = prompts[0][:shared]
    return prompts


def _grown(components: tuple[Component, ...], turns: int, prompts: list[Tokens]) -> RadixTree:
    """Insert every prompt turn by turn."""
    tree = RadixTree(components, PAGE_SIZE)
    next_slot = 1
    step = PROMPT_PAGES // turns
    for tokens in prompts:
        for end in range(step, PROMPT_PAGES + 1, step):
            prompt = Prompt.of(tokens[: end * PAGE_SIZE], PAGE_SIZE)
            start = tree.match(prompt).device_end
            slots = []
            for component in components:
                given = np.full(end - start, -1, np.int32)
                needed = needed_pages([end], component.span, start, end)
                count = int(np.count_nonzero(needed))
                given[needed] = np.arange(next_slot, next_slot + count, dtype=np.int32)
                next_slot += count
                slots.append(given)
            tree.insert(prompt, start, slots, Tier.DEVICE)
    return tree


def _request(tree: RadixTree, tokens: Tokens) -> Callable[[], object]:
    """Return what a request does with a tree that holds its whole prompt, whose tokens were converted before."""
    prompt = Prompt.of(tokens, PAGE_SIZE)
    assert tree.match(prompt).device_end == PROMPT_PAGES

    def request() -> None:
        found = tree.match(prompt)
        tree.unlock(tree.lock(found, found.device_end, Tier.DEVICE))

    return request
