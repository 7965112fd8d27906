"""Makes a plan: numbers a trace once, evaluates a sweep, recommends, and replays some combinations where asked to."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unified_cache.plan.costs import PricedSystem
from unified_cache.plan.evaluate import Evaluator, PlanPoint
from unified_cache.plan.hardware import Hardware
from unified_cache.plan.result import Checked, PlanResult, next_steps, recommended
from unified_cache.plan.sweep import PlannedModel, TierBytes
from unified_cache.plan.tier_hits import LruHits
from unified_cache.plan.trace_pages import TracePages
from unified_cache.replay.model_settings import ModelSettings
from unified_cache.replay.trace import iterate_trace

__all__ = ["CHECK_SEED", "Planner", "ReplayRatio", "Tell"]

CHECK_SEED = 17
"""Chooses the combinations that are replayed: the same ones every time."""

Tell = Callable[[int, str], None]
"""Told how many combinations are done, and a note beside it."""

ReplayRatio = Callable[[ModelSettings], float]
"""Replays a trace in full at some settings, and returns the share of its tokens that was handed back."""


@dataclass(frozen=True, slots=True)
class Planner:
    """A trace, a model and the hardware that it is to run on."""

    trace: Path
    limit: int | None
    model: PlannedModel
    hardware: Hardware

    def plan(
        self, combinations: Sequence[TierBytes], tell: Tell, checks: int = 0, replay_ratio: ReplayRatio | None = None
    ) -> PlanResult:
        """Evaluate combinations, recommend one, and replay ``checks`` of them.

        Interrupted, it returns what it has, if that is any combination at all.

        Raises:
            ConfigError: a tier is too small for the model, or its policies have no stack.
            TraceError: the trace cannot be read.
            KeyboardInterrupt: no combination was evaluated by then.
        """
        began_s = time.monotonic()
        page_size = self.model.sized.layout.page_size
        pages = TracePages.of(iterate_trace(self.trace, self.limit), page_size, padded=False)
        evaluator = Evaluator(self.model, LruHits(pages), PricedSystem.of(self.model, self.hardware))
        points: list[PlanPoint] = []
        checked: list[Checked] = []
        is_complete = False
        with suppress(KeyboardInterrupt):
            for sizes in combinations:
                points.append(evaluator.point(sizes))
                tell(len(points), f"hit ratio {points[-1].hit_ratio:.2%}")
            if checks and replay_ratio is not None:
                self._check(points, checks, replay_ratio, checked, tell)
            is_complete = True
        if not points:
            raise KeyboardInterrupt
        best = recommended(points)
        return PlanResult(
            trace=self.trace.name,
            model=self.model,
            hardware=self.hardware,
            requests=pages.requests_count,
            input_tokens=int(pages.input_tokens.sum()),
            seen_ratio=evaluator.seen_ratio,
            points=points,
            best=best,
            steps=next_steps(best, evaluator.point),
            checked=checked,
            is_complete=is_complete,
            seconds=time.monotonic() - began_s,
        )

    def _check(
        self,
        points: Sequence[PlanPoint],
        checks: int,
        replay_ratio: ReplayRatio,
        checked: list[Checked],
        tell: Tell,
    ) -> None:
        chosen = random.Random(CHECK_SEED).sample(points, min(checks, len(points)))  # noqa: S311  # no secret
        for point in chosen:
            began_s = time.monotonic()
            ratio = replay_ratio(self.model.settings(point.sizes))
            checked.append(Checked(point.sizes, point.hit_ratio, ratio, time.monotonic() - began_s))
            tell(len(points) + len(checked), f"replayed {ratio:.2%}, planned {point.hit_ratio:.2%}")
