"""The comparison bites: whatever is wrong with what is restored shows in the logits."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.budget import one_in_every_run
from tests.support.exactness import (
    EVERYWHERE,
    FAMILIES,
    TIGHT,
    CacheSizes,
    all_but_last,
    crowd_out,
    engine,
    is_equal,
    kept_by,
    page_ends,
    prompt_of,
    run_on,
    serve,
    untouched,
)
from unified_cache.core.pool import Slots
from unified_cache.integrations.transformers import DevicePages, PrefixCachedModel
from unified_cache.tree import Lock

POOLS = [(family, pool.name) for family in FAMILIES for pool in kept_by(family).layout.pools if pool.page_bytes]
WINDOWED = [family for family, pool in POOLS if pool == "swa"]
INTEGERS = {2: torch.int16, 4: torch.int32}
EXPONENT_BITS = {2: (7, 14), 4: (23, 30)}
"""The lowest and the highest bit of the exponent, by bytes of a value."""
FLIPS_MAX = 32
READ_COUNTS = {("tiny-deepseek-v4", "swa"): 1}
"""Tensors of a pool that the model reads, where it is not all: a plain window of a model whose keys are its values
keeps both, and only the keys are read. The windows of its other layers lie behind."""
CHECKPOINTS = [(family, pool) for family, pool in POOLS if pool == "mamba" or pool.endswith("_state")]


@dataclass
class LockedPrompt:
    """A prompt that the device holds, pinned."""

    family: str
    tokens: tuple[int, ...]
    engine: PrefixCachedModel
    lock: Lock

    @property
    def pages(self) -> DevicePages:
        return self.engine.pages

    def component_of(self, pool: str) -> int:
        components = self.pages.layout.components
        return next(at for at, each in enumerate(components) if pool in {spec.name for spec in each.pools})

    def slots(self) -> list[Slots]:
        return [self.engine.cache.slots(self.lock, number) for number in range(len(self.pages.layout.components))]

    def is_exact(self, slots: list[Slots]) -> bool:
        """Restore the prompt from these slots, go on, and compare."""
        past = self.pages.restore(slots, self.lock.end)
        ends = page_ends(self.family, len(self.tokens), all_but_last(self.tokens, self.family))
        return is_equal(run_on(self.family, past, self.tokens, ends), untouched(self.family, self.tokens))


def locked(engine: PrefixCachedModel, tokens: tuple[int, ...], family: str) -> Lock:
    lock = engine.cache.lock(
        engine.cache.match(engine.cache.prompt(tokens[: all_but_last(tokens, family)], whole=True))
    )
    assert lock.end
    return lock


@contextmanager
def served(family: str) -> Iterator[LockedPrompt]:
    tokens = prompt_of(family, 1, is_aligned=False)
    with engine(family, shape=CacheSizes(retention=EVERYWHERE)) as ours:
        serve(ours, tokens)
        yield LockedPrompt(family, tokens, ours, locked(ours, tokens, family))


def flip(values: torch.Tensor, at: tuple[int, ...], bit: int) -> None:
    values.view(INTEGERS[values.element_size()])[at] ^= 1 << bit


def flips(row: torch.Tensor, *, is_selecting: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield value and bit: the lowest bit of the exponent of the largest value, which doubles or halves.

    Of rows that only select others the highest bit of any value, one after another: what selects may change and still
    select the same. A convolution does not look back on the first column.
    """
    lowest, highest = EXPONENT_BITS[row.element_size()]
    columns = row[..., 1:]
    if not is_selecting:
        *at, column = np.unravel_index(int(columns.float().abs().argmax()), columns.shape)
        yield (*map(int, at), int(column) + 1), lowest
        return
    rng = random.Random(0)
    for _ in range(FLIPS_MAX):
        yield tuple(rng.randrange(size) for size in row.shape), highest


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_as_they_were_captured_are_exact(family: str) -> None:
    with served(family) as found:
        assert found.is_exact(found.slots())


@pytest.mark.parametrize(("family", "pool"), one_in_every_run(POOLS))
def test_one_flipped_bit_in_one_page_shows(family: str, pool: str) -> None:
    with served(family) as found:
        slots = found.slots()
        last = int(slots[found.component_of(pool)][-1])
        for tensor in found.pages.tensors(pool)[: READ_COUNTS.get((family, pool))]:
            newest = tensor[last, -1]
            shown = False
            for at, bit in flips(newest, is_selecting="indexer" in pool):
                flip(newest, at, bit)
                shown = not found.is_exact(slots)
                flip(newest, at, bit)
                if shown:
                    break
            assert shown
        assert found.is_exact(slots)


@pytest.mark.parametrize("family", one_in_every_run(WINDOWED))
def test_a_window_short_by_one_token_shows(family: str) -> None:
    with served(family) as found:
        for strand, tensor in zip(kept_by(family).strands, found.pages._tensors, strict=True):
            if strand.pool == "swa":
                assert strand.rows_max is not None
                slots = found.slots()[found.component_of("swa")].tolist()
                page, row = divmod(len(slots) * strand.page_rows - strand.rows_max, strand.page_rows)
                tensor[slots[page], row] = 0
        assert not found.is_exact(found.slots())


@pytest.mark.parametrize(("family", "pool"), one_in_every_run(CHECKPOINTS))
def test_state_of_another_boundary_shows(family: str, pool: str) -> None:
    with served(family) as found:
        component = found.component_of(pool)
        earlier = locked(found.engine, found.tokens[: all_but_last(found.tokens, family)], family)
        assert earlier.end == found.lock.end - 1
        right = int(found.slots()[component][-1])
        wrong = int(found.engine.cache.slots(earlier, component)[-1])
        for tensor in found.pages.tensors(pool):
            tensor[right] = tensor[wrong]
        assert not found.is_exact(found.slots())


@pytest.mark.parametrize("family", one_in_every_run(WINDOWED))
def test_a_stale_map_from_full_to_window_slots_shows(family: str) -> None:
    tokens = prompt_of(family, 1, is_aligned=False)
    with engine(family, shape=CacheSizes(device_pages=TIGHT)) as ours:
        paired = ours.cache.pairing
        assert paired is not None
        serve(ours, tokens)
        stale = paired.map.table.copy()
        crowd_out(ours, family)
        serve(ours, tokens)
        found = LockedPrompt(family, tokens, ours, locked(ours, tokens, family))
        full, peers = found.slots()
        assert found.is_exact([full, peers])
        window = full[-len(peers) :]
        assert (paired.map.peers(window) == peers).all()
        assert (stale[window] != peers).any()
        assert not found.is_exact([full, stale[window]])
