"""The comparison bites: a bit that is wrong in any pool of what is restored shows in the logits."""

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
    CacheSizes,
    all_but_last,
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
from unified_cache.integrations.transformers import PrefixCachedModel
from unified_cache.tree import Lock

POOLS = [(family, pool.name) for family in FAMILIES for pool in kept_by(family).layout.pools if pool.page_bytes]
INTEGERS = {2: torch.int16, 4: torch.int32}
EXPONENT_BITS = {2: (7, 14), 4: (23, 30)}
"""The lowest and the highest bit of the exponent, by bytes of a value."""
FLIPS_MAX = 32
READ_COUNTS = {("tiny-deepseek-v4", "swa"): 1}
"""Tensors of a pool that the model reads, where it is not all: a plain window of a model whose keys are its values
keeps both, and only the keys are read. The windows of its other layers lie behind."""


@dataclass
class LockedPrompt:
    """A prompt that the device holds, pinned."""

    family: str
    tokens: tuple[int, ...]
    engine: PrefixCachedModel
    lock: Lock

    def component_of(self, pool: str) -> int:
        components = self.engine.pages.layout.components
        return next(at for at, each in enumerate(components) if pool in {spec.name for spec in each.pools})

    def slots(self) -> list[Slots]:
        return [self.engine.cache.slots(self.lock, at) for at in range(len(self.engine.pages.layout.components))]

    def is_exact(self) -> bool:
        """Restore the prompt, go on, and compare."""
        past = self.engine.pages.restore(self.slots(), self.lock.end)
        ends = page_ends(self.family, len(self.tokens), all_but_last(self.tokens, self.family))
        return is_equal(run_on(self.family, past, self.tokens, ends), untouched(self.family, self.tokens))


@contextmanager
def served(family: str) -> Iterator[LockedPrompt]:
    tokens = prompt_of(family, 1, is_aligned=False)
    with engine(family, shape=CacheSizes(retention=EVERYWHERE)) as ours:
        serve(ours, tokens)
        lock = ours.cache.lock(ours.cache.match(ours.cache.prompt(tokens[: all_but_last(tokens, family)], whole=True)))
        assert lock.end
        yield LockedPrompt(family, tokens, ours, lock)


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


@pytest.mark.parametrize(("family", "pool"), one_in_every_run(POOLS))
def test_one_flipped_bit_in_one_page_shows(family: str, pool: str) -> None:
    with served(family) as found:
        last = int(found.slots()[found.component_of(pool)][-1])
        for tensor in found.engine.pages.tensors(pool)[: READ_COUNTS.get((family, pool))]:
            newest = tensor[last, -1]
            shown = False
            for at, bit in flips(newest, is_selecting="indexer" in pool):
                flip(newest, at, bit)
                shown = not found.is_exact()
                flip(newest, at, bit)
                if shown:
                    break
            assert shown
        assert found.is_exact()
