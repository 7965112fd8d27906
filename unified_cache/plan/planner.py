"""Makes a plan: numbers a trace once, evaluates a sweep, recommends, and replays some combinations where asked to."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unified_cache.errors import ConfigError
from unified_cache.plan.costs import PricedSystem
from unified_cache.plan.evaluate import Evaluator, PlanPoint
from unified_cache.plan.hardware import Hardware
from unified_cache.plan.policy_hits import PolicyHits, ServePlan
from unified_cache.plan.result import Checked, PlanResult, ToldByReplays, next_steps, recommended
from unified_cache.plan.sweep import PlannedModel, TierBytes
from unified_cache.plan.tier_hits import LruHits, TierHits
from unified_cache.replay.trace import Tell, iterate_trace
from unified_cache.replay.trace_pages import TracePages

__all__ = ["CHECK_SEED", "Planner"]

CHECK_SEED = 17
"""Chooses the combinations that are replayed: the same ones every time."""


@dataclass(frozen=True, slots=True)
class Planner:
    """A trace, a model and the hardware that it is to run on."""

    trace: Path
    limit: int | None
    model: PlannedModel
    hardware: Hardware

    def plan(
        self, combinations: Sequence[TierBytes], tell: Tell, checks: int = 0, serve: ServePlan | None = None
    ) -> PlanResult:
        """Evaluate combinations, recommend one, and replay ``checks`` of them.

        ``serve`` replays the trace: for checks, and some sizes of memory where policies have no stack. Interrupted, it
        returns what it has, if that is any combination at all.

        Raises:
            ConfigError: a tier is too small for the model, or nothing replays what has to be replayed.
            TraceError: the trace cannot be read.
            KeyboardInterrupt: no combination was evaluated by then.
        """
        began_s = time.monotonic()
        page_size = self.model.sized.layout.page_size
        pages = TracePages.of(iterate_trace(self.trace, self.limit), page_size, padded=False)
        by_distance = LruHits(pages)
        by_replay = None if self.model.has_stack else self._replayed(by_distance, combinations, tell, serve)
        hits: TierHits = by_distance if by_replay is None else by_replay
        evaluator = Evaluator(self.model, hits, PricedSystem.of(self.model, self.hardware))
        points: list[PlanPoint] = []
        checked: list[Checked] = []
        is_complete = False
        with suppress(KeyboardInterrupt):
            for sizes in combinations:
                points.append(evaluator.point(sizes))
                tell(len(points), f"hit ratio {points[-1].hit_ratio:.2%}")
            if checks and serve is not None:
                for each in self._checked(points, checks, pages, serve):
                    checked.append(each)
                    note = f"replayed {each.replayed_ratio:.2%}, planned {each.planned_ratio:.2%}"
                    tell(len(points) + len(checked), note)
            is_complete = True
        if not points:
            raise KeyboardInterrupt
        best = recommended(points)
        steps = next_steps(best, evaluator.point)
        return PlanResult(
            trace=self.trace.name,
            model=self.model,
            hardware=self.hardware,
            requests=pages.requests_count,
            input_tokens=int(pages.input_tokens.sum()),
            seen_ratio=evaluator.seen_ratio,
            points=points,
            best=best,
            steps=steps,
            told_by=None if by_replay is None else ToldByReplays(by_replay.replays_count, by_replay.disorder),
            checked=checked,
            is_complete=is_complete,
            seconds=time.monotonic() - began_s,
        )

    def _replayed(
        self, lru: LruHits, combinations: Sequence[TierBytes], tell: Tell, serve: ServePlan | None
    ) -> PolicyHits:
        """Replay those sizes of memory from which the others are told.

        Raises:
            ConfigError: there is nothing that replays them.
        """
        if serve is None:
            raise ConfigError("policies without a stack need replays of some sizes, found nothing to replay with")
        hits = PolicyHits(lru, serve)
        hits.prepare((self.model.settings(sizes).plan for sizes in combinations), lambda note: tell(0, note))
        return hits

    def _checked(
        self, points: Sequence[PlanPoint], checks: int, trace: TracePages, serve: ServePlan
    ) -> Iterator[Checked]:
        """Replay some combinations in full, and hold each against its plan."""
        chosen = random.Random(CHECK_SEED).sample(points, min(checks, len(points)))  # noqa: S311  # no secret
        for point in chosen:
            began_s = time.monotonic()
            hits = serve(self.model.settings(point.sizes).plan)
            ratio = trace.token_ratio(np.array([hit.total for hit in hits], np.int64))
            yield Checked(point.sizes, point.hit_ratio, point.open_ratio, ratio, time.monotonic() - began_s)
