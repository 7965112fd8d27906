"""Windows that memory has lost while Full stayed are read back from storage, each for the resume that needs it."""

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.operations import over, present
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller import InlineWorkers, TransferKind
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, ModelLayout, PoolSpec, Tier
from unified_cache.storage_backends.memory import MemoryStorage

PAGE = 16
FULL = Full((PoolSpec("kv", 64),))
WINDOW = SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 32), PoolSpec("swa_scale", 24)))
STATE = RecurrentState((PoolSpec("mamba", 48),))


def engine(*components: Component) -> ToyEngine:
    layout = ModelLayout(PAGE, (FULL, *components))
    sizes = (16, *(8 for _ in components))
    return ToyEngine(layout, sizes, sizes, MemoryStorage(), InlineWorkers())


def prompt_of(toy: ToyEngine, *contents: int) -> Prompt:
    return toy.cache.prompt(np.concatenate([np.arange(PAGE, dtype=np.int32) + 1000 * number for number in contents]))


def served_and_stored(toy: ToyEngine, *contents: int) -> Prompt:
    prompt = prompt_of(toy, *contents)
    lock = present(toy.serve(prompt))
    over(toy.cache, toy.cache.backup(prompt))
    toy.cache.release(lock)
    return prompt


def lose(toy: ToyEngine, component: int, tiers: tuple[Tier, ...] = tuple(Tier)) -> None:
    """Have others need all the room of a component."""
    ledger = toy.cache._ledger
    for tier in tiers:
        slots = present(ledger.allocate(tier, component, ledger.capacity(tier, component)))
        ledger.free(tier, component, slots)


def bring(toy: ToyEngine, prompt: Prompt) -> int:
    """Bring a prompt up and verify it; return how many of its pages can be resumed from."""
    for leg in (toy.cache.prefetch, toy.cache.load):
        operation = leg(prompt)
        toy.cache.wait_all(5)
        assert operation
        assert operation.error is None
    return toy.read_back(prompt)


@pytest.mark.parametrize("components", [(WINDOW,), (STATE,), (WINDOW, STATE)])
def test_a_window_that_memory_lost_comes_back_while_full_stays(
    components: tuple[Component, ...],
) -> None:
    toy = engine(*components)
    prompt = served_and_stored(toy, 1, 2, 3, 4)
    for component in range(1, len(components) + 1):
        lose(toy, component)
    assert toy.cache.match(prompt).host_end == 0
    assert bring(toy, prompt) == 4
    fetched = toy.cache.stats().traffic[TransferKind.PREFETCH].component_pages
    assert fetched == [0, *(component.span for component in components)], "of Full, nothing was missing"


def test_a_window_in_the_middle_comes_back_for_a_prompt_that_goes_on_otherwise() -> None:
    toy = engine(WINDOW)
    served_and_stored(toy, 1, 2, 3)
    served_and_stored(toy, 1, 2, 3, 4, 5, 6)
    lose(toy, 1)
    assert bring(toy, prompt_of(toy, 1, 2, 3, 9, 9)) == 3


def test_tombstones_and_the_rest_of_the_prefix_come_together() -> None:
    toy = engine(WINDOW)
    prompt = served_and_stored(toy, 1, 2, 3, 4, 5)
    lose(toy, 1)
    ledger = toy.cache._ledger
    for tier in Tier:
        ledger._take_back(ledger.tree.evict(tier, 0, 1))
    assert bring(toy, prompt) == 5
    assert toy.cache.stats().traffic[TransferKind.PREFETCH].component_pages == [1, 2]


def test_where_storage_has_lost_the_window_too_nothing_is_brought() -> None:
    toy = engine(WINDOW)
    prompt = served_and_stored(toy, 1, 2, 3, 4)
    lose(toy, 1)
    assert toy.cache._storage is not None
    tier = toy.cache._storage
    for pool in WINDOW.pools:
        tier.backend.remove(tier.labels(prompt.keys, pool))
    assert bring(toy, prompt) == 0
    assert all(occupancy.out == 0 for occupancy in toy.cache.stats().occupancy)
