"""A request may end at any step: nothing leaks, nothing stays locked, and whoever comes later is served exactly."""

import itertools
import random
from dataclasses import dataclass

import pytest

from tests.support.budget import LONG, examples
from tests.support.exactness import (
    FAMILIES,
    L3,
    TIGHT,
    CacheSizes,
    assert_at_rest,
    engine,
    page_size_of,
    prompt_of,
    serve_exactly,
)
from tests.support.operations import Stepped
from unified_cache.integrations.transformers import Sequence, Stage
from unified_cache.testing.tiny_models import VOCABULARY

ABORTS = examples(50, 1000) // len(FAMILIES)
UNDER_WAY_MAX = 3
STEPS_MAX = 24


@dataclass(eq=False)
class Doomed:
    """A request that will be aborted: when it comes to a stage, and after so many steps at the latest."""

    sequence: Sequence
    stage: Stage | None
    steps_left: int

    @property
    def is_due(self) -> bool:
        return not self.steps_left or (self.stage is not None and self.sequence.stage is self.stage)

    def advance(self, rng: random.Random) -> None:
        self.steps_left -= 1
        if self.sequence.stage is Stage.READY:
            self.sequence.feed(rng.randrange(VOCABULARY))
        else:
            self.sequence.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_aborted_at_any_step_leave_nothing_behind(family: str) -> None:
    rng = random.Random(f"aborts of {family}")
    shared = prompt_of(family, 1, is_aligned=False)
    others = [prompt_of(family, seed, is_aligned=False) for seed in range(2, 7)]
    tails = [other[: rng.randrange(3 * page_size_of(family))] for other in others]
    prompts = [shared, *(shared[: rng.randrange(1, len(shared))] + tail for tail in tails)]
    shape = CacheSizes(device_pages=TIGHT, host_pages=2 * TIGHT)
    stages = itertools.cycle(Stage)
    aborted_at: set[Stage | None] = set()
    with engine(family, L3("memory:", is_shared=False), shape, Stepped(dice=rng)) as ours:
        under_way: list[Doomed] = []
        for number in range(ABORTS):
            while len(under_way) < UNDER_WAY_MAX:
                sequence = ours.start(rng.choice(prompts))
                stage = next(stages) if number % 2 else None
                under_way.append(Doomed(sequence, stage, STEPS_MAX if stage else rng.randrange(STEPS_MAX)))
            while not any(each.is_due for each in under_way):
                rng.choice(under_way).advance(rng)
            due = next(each for each in under_way if each.is_due)
            under_way.remove(due)
            aborted_at.add(due.sequence.stage)
            due.sequence.abort()
            ours.cache.check()
            ours.prefill(rng.choice(prompts)[: rng.randrange(1, len(shared))]).finish()
        for each in under_way:
            each.sequence.abort()
        assert_at_rest(ours)
        serve_exactly(ours, family, shared)
        assert_at_rest(ours)
    assert aborted_at >= (set(Stage) if LONG else {Stage.COMPUTE})
