"""Makes a plan: numbers a trace once, evaluates a sweep, recommends, and replays some combinations where asked to."""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np

from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Hits
from unified_cache.core.sizes import bytes_text
from unified_cache.sizing.plan.costs import Costs, PricedSystem
from unified_cache.sizing.plan.hardware import Hardware
from unified_cache.sizing.plan.sweep import TIERS, PlannedModel, TierBytes
from unified_cache.sizing.plan.tier_hits import LruHits, TierEnds
from unified_cache.sizing.plan.trace_pages import TracePages
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest

NORMAL_95 = 1.96
"""Half the interval of 95 %, in standard errors."""

BLOCKS = 10
"""Parts of the trace whose hit ratios give the spread of the whole one's."""

CHECK_SEED = 17
"""Chooses the combinations that are replayed: the same ones every time."""

BUSY_SHARE_MAX = 0.9
"""Queues that are busy for more of the time are no plan to buy."""


ServePlan = Callable[[ReplayPlan, Sequence[TraceRequest]], Sequence[Hits]]
"""Serves requests by a cache of a plan; returns the pages handed back of each."""


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One combination of sizes, and what it brings. Ratios are shares of all tokens of all prompts."""

    sizes: TierBytes
    tier_ratios: Mapping[str, float]
    """Handed back from each tier, the device first."""
    error: float
    """Standard error of the whole ratio, from ten parts of the trace."""
    costs: Costs

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens handed back from anywhere."""
        return sum(self.tier_ratios.values())

    @property
    def uncertainty(self) -> float:
        """Half the interval of 95 %: what another trace of its kind could have said."""
        return NORMAL_95 * self.error

    @property
    def keeps_up(self) -> bool:
        """Whether no queue is busy for more of the time than is wise."""
        return max(self.costs.prefill_share, self.costs.bus_share, self.costs.storage_share) <= BUSY_SHARE_MAX

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names."""
        return {
            **self.sizes.as_json(),
            "token_hit_ratio": self.hit_ratio,
            "by_tier": dict(self.tier_ratios),
            "standard_error": self.error,
            **asdict(self.costs),
        }


@dataclass(frozen=True, slots=True)
class Checked:
    """A combination replayed in full, beside what the plan says of it."""

    sizes: TierBytes
    planned: float
    replayed: float


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Everything that a plan found."""

    trace: str
    model: PlannedModel
    hardware: Hardware
    requests: int
    input_tokens: int
    seen_ratio: float
    """Share of the tokens that stand in a prefix which the trace had asked for before."""
    points: Sequence[PlanPoint]
    """In the order of their sizes."""
    best: PlanPoint
    checked: Sequence[Checked]
    is_complete: bool
    """False where the plan was interrupted."""
    seconds: float

    def curve(self, tier: str) -> list[PlanPoint]:
        """Return the points that differ from the recommended one in one tier alone, by its size."""
        best = self.best.sizes
        along = [point for point in self.points if replace(best, **{tier: point.sizes.by_tier()[tier]}) == point.sizes]
        return sorted(along, key=lambda point: point.sizes)

    def knees(self) -> dict[str, int]:
        """Return by tier the size after which its curve flattens most."""
        curves = {tier: self.curve(tier) for tier in TIERS}
        return {
            tier: knee([point.sizes.by_tier()[tier] for point in curve], [point.hit_ratio for point in curve])
            for tier, curve in curves.items()
        }

    @property
    def sentence(self) -> str:
        """Recommend, with what is uncertain about it."""
        best = self.best
        sizes = best.sizes
        parts = [f"{bytes_text(sizes.device)} of each device"]
        of_each = " of each engine" if self.model.engines > 1 else ""
        parts.append(f"{bytes_text(sizes.host)} of host memory{of_each}" if sizes.host else "no host memory")
        parts.append(f"{bytes_text(sizes.storage)} of storage" if sizes.storage else "no storage")
        ratio = f"{best.hit_ratio:.1%} of the tokens would be handed back (± {best.uncertainty:.1%})"
        cost = f"{best.costs.cost_per_million_tokens:.3g} per million tokens of prompts"
        keeps_up = "" if best.keeps_up else "; no combination keeps up with the trace"
        return f"{', '.join(parts)}: {ratio} at {cost}{keeps_up}."

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names, for ``json.dump``."""
        return {
            "sentence": self.sentence,
            "trace": self.trace,
            "model": self.model.name,
            "devices": self.model.devices,
            "engines": self.model.engines,
            "storage_ratio": self.model.storage_ratio,
            "retention": asdict(self.model.retention),
            "page_size": self.model.sized.layout.page_size,
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "seen_token_ratio": self.seen_ratio,
            "complete": self.is_complete,
            "best": self.best.as_json(),
            "knees": self.knees(),
            "combinations": [point.as_json() for point in self.points],
            "checked": [
                {**each.sizes.as_json(), "planned": each.planned, "replayed": each.replayed} for each in self.checked
            ],
            "hardware": self.hardware.model_dump(mode="json"),
            "seconds": self.seconds,
        }


class Evaluator:
    """Evaluates combinations of sizes for one model, trace and system."""

    def __init__(self, model: PlannedModel, hits: LruHits, priced: PricedSystem) -> None:
        """Take parts that fit each other.

        Raises:
            ConfigError: no prompt of the trace has a token.
        """
        if not int(hits.trace.input_tokens.sum()):
            raise ConfigError("a plan needs a trace with prompts, found none of any token")
        self._model = model
        self._hits = hits
        self._priced = priced

    @property
    def seen_ratio(self) -> float:
        """Share of the tokens that stand in a prefix which was asked for before: what a cache without end would hit."""
        trace = self._hits.trace
        return trace.token_ratio(trace.seen_ends())

    def point(self, sizes: TierBytes) -> PlanPoint:
        """Evaluate one combination."""
        model, trace = self._model, self._hits.trace
        ends = self._hits.ends(model.plan(sizes))
        device, host, storage = (trace.token_ratio(each) for each in (ends.device, ends.host, ends.storage))
        return PlanPoint(
            sizes=sizes,
            tier_ratios={"device": device, "host": host - device, "storage": storage - host},
            error=_error(trace, ends),
            costs=self._priced.costs(trace, ends, sizes),
        )


@dataclass(frozen=True, slots=True)
class Planner:
    """A trace, a model and the hardware that it is to run on."""

    trace: str
    """Its name."""
    requests: Sequence[TraceRequest]
    model: PlannedModel
    hardware: Hardware

    def plan(
        self,
        combinations: Sequence[TierBytes],
        on_progress: OnProgress,
        checks: int = 0,
        serve: ServePlan | None = None,
    ) -> PlanResult:
        """Evaluate combinations, recommend one, and replay ``checks`` of them.

        ``serve`` replays the trace for checks. Interrupted, it returns what it has, if that is any combination at all.

        Raises:
            ConfigError: a tier is too small for the model.
            KeyboardInterrupt: no combination was evaluated by then.
        """
        began_s = time.monotonic()
        pages = TracePages.of(self.requests, self.model.sized.layout.page_size, padded=False)
        evaluator = Evaluator(self.model, LruHits(pages), PricedSystem(self.model, self.hardware))
        points: list[PlanPoint] = []
        checked: list[Checked] = []
        is_complete = False
        with suppress(KeyboardInterrupt):
            for sizes in combinations:
                points.append(evaluator.point(sizes))
                on_progress(len(points), f"hit ratio {points[-1].hit_ratio:.2%}")
            if checks and serve is not None:
                for each in self._checked(points, checks, pages, serve):
                    checked.append(each)
                    on_progress(len(points) + len(checked), f"replayed {each.replayed:.2%}, planned {each.planned:.2%}")
            is_complete = True
        if not points:
            raise KeyboardInterrupt
        return PlanResult(
            trace=self.trace,
            model=self.model,
            hardware=self.hardware,
            requests=pages.requests_count,
            input_tokens=int(pages.input_tokens.sum()),
            seen_ratio=evaluator.seen_ratio,
            points=points,
            best=recommended(points),
            checked=checked,
            is_complete=is_complete,
            seconds=time.monotonic() - began_s,
        )

    def _checked(
        self, points: Sequence[PlanPoint], checks: int, trace: TracePages, serve: ServePlan
    ) -> Iterator[Checked]:
        """Replay some combinations in full, and hold each against its plan."""
        chosen = random.Random(CHECK_SEED).sample(points, min(checks, len(points)))  # noqa: S311  # no secret
        for point in chosen:
            hits = serve(self.model.plan(point.sizes), self.requests)
            ratio = trace.token_ratio(np.array([hit.total for hit in hits], np.int64))
            yield Checked(point.sizes, point.hit_ratio, ratio)


def recommended(points: Sequence[PlanPoint]) -> PlanPoint:
    """Return the cheapest point per token of those that keep up; of all points, the fastest, if none does."""
    able = [point for point in points if point.keeps_up]
    if not able:
        return min(points, key=lambda point: (point.costs.prefill_share, point.costs.price_per_hour))
    return min(able, key=lambda point: (point.costs.cost_per_million_tokens, point.sizes))


def knee(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """Return the size at which a rising curve is farthest above the line from its first point to its last.

    As V. Satopaa et al., "Finding a Kneedle in a Haystack" (2011); the smallest size where the curve does not rise.
    """
    rise, run = ratios[-1] - ratios[0], sizes[-1] - sizes[0]
    if rise <= 0 or run <= 0:
        return sizes[0]
    above = [(ratio - ratios[0]) / rise - (size - sizes[0]) / run for size, ratio in zip(sizes, ratios, strict=True)]
    return sizes[above.index(max(above))]


def _error(trace: TracePages, ends: TierEnds) -> float:
    """Return the standard error of the hit ratio by the means of parts of the trace that follow each other."""
    tokens = trace.tokens_of(ends.storage)
    bounds = np.linspace(0, trace.requests_count, BLOCKS + 1).astype(int).tolist()
    ratios = [
        float(tokens[start:end].sum()) / asked
        for start, end in pairwise(bounds)
        if (asked := int(trace.input_tokens[start:end].sum()))
    ]
    return float(np.std(ratios, ddof=1) / math.sqrt(len(ratios))) if len(ratios) > 1 else 0.0
