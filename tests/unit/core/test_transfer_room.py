"""Transfers without room for all of a prompt: how far they go is decided in one pass, and nothing is cut for it."""

import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.operations import PAGE, SPANS, over, present, serve, tokens
from unified_cache.controller import InlineWorkers
from unified_cache.core.pool import Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Match, RadixTree, Transfer

PAGES = 60


def conversation(*, device_windows: int, host_windows: int, backed_up: bool) -> ToyEngine:
    """Serve a conversation of sixty pages, a page a turn, each of which left a window to resume at."""
    sizes = (2 * PAGES, device_windows), (2 * PAGES, host_windows)
    toy = ToyEngine(toy_layout(SPANS, PAGE), *sizes, None, InlineWorkers())
    for end in range(1, PAGES + 1):
        prompt = toy.cache.prompt(tokens(end))
        lock = present(toy.serve(prompt))
        if backed_up:
            over(toy.cache, toy.cache.backup(prompt))
        toy.cache.release(lock)
    return toy


def take_windows(toy: ToyEngine, tier: Tier, *, all_but: int) -> None:
    """Have others hold all windows that a tier has room for but so many, which are free."""
    ledger = toy.cache._ledger
    taken = present(ledger.allocate(tier, 1, ledger.capacity(tier, 1)))
    ledger.free(tier, 1, taken[:all_but])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ends of all transfers that the tree has been asked to begin."""
    ends: list[int] = []
    begin = RadixTree.begin

    def noted(self: RadixTree, found: Match, end: int, source: Tier, target: Tier) -> Transfer:
        ends.append(end)
        return begin(self, found, end, source, target)

    monkeypatch.setattr(RadixTree, "begin", noted)
    return ends


REACHED = {0: [], 1: [1], 2: [PAGES]}
"""By windows left: the ends begun. A window of one page is enough after one page alone."""


@pytest.mark.parametrize("windows_left", REACHED)
def test_a_load_without_room_for_windows_begins_once_and_cuts_nothing(windows_left: int, begun: list[int]) -> None:
    toy = conversation(device_windows=8, host_windows=2 * PAGES, backed_up=True)
    take_windows(toy, Tier.DEVICE, all_but=windows_left)
    tree, prompt = toy.cache._ledger.tree, toy.cache.prompt(tokens(PAGES))
    found = tree.match(prompt)
    assert (found.device_end, found.host_end) == (0, PAGES)
    begun.clear()
    nodes_count = tree.nodes_count()
    operation = over(toy.cache, toy.cache.load(prompt))
    assert begun == REACHED[windows_left]
    assert (operation.error, operation.pages_count, tree.nodes_count()) == (None, windows_left, nodes_count)
    assert tree.match(prompt).device_end == sum(begun)


@pytest.mark.parametrize("windows_left", REACHED)
def test_a_backup_without_room_for_windows_begins_once_and_cuts_nothing(windows_left: int, begun: list[int]) -> None:
    toy = conversation(device_windows=2 * PAGES, host_windows=8, backed_up=False)
    take_windows(toy, Tier.HOST, all_but=windows_left)
    tree, prompt = toy.cache._ledger.tree, toy.cache.prompt(tokens(PAGES))
    nodes_count = tree.nodes_count()
    operation = over(toy.cache, toy.cache.backup(prompt))
    assert begun[:1] == REACHED[windows_left], "after that come the windows that were kept at other ends"
    assert (operation.error, tree.nodes_count()) == (None, nodes_count)
    assert tree.full_end(tree.match(prompt), Tier.HOST) == sum(begun[:1])


def test_pages_that_are_there_already_are_no_room_for_those_to_come(begun: list[int]) -> None:
    """Of a prompt of six pages the device holds two, which could be evicted, and has room for two more."""
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (6,), (6,), None, InlineWorkers())
    cache, prompt = toy.cache, serve(toy, 6)
    over(cache, cache.backup(prompt))
    ledger = cache._ledger
    taken = present(ledger.allocate(Tier.DEVICE, 0, 4))
    ledger.free(Tier.DEVICE, 0, taken[:2])
    assert (ledger.available_pages(Tier.DEVICE, 0), cache.match(prompt).device_end) == (4, 2)
    begun.clear()
    operation = over(cache, cache.load(prompt))
    assert (begun, operation.pages_count, cache.match(prompt).device_end) == ([4], 2, 4)
    cache.check()
