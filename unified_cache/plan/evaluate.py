"""Evaluates combinations of tier sizes, and what no policy could beat with as much memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from unified_cache.errors import ConfigError
from unified_cache.plan.costs import Costs, PricedSystem
from unified_cache.plan.resume_points import NEVER
from unified_cache.plan.sweep import PlannedModel, TierBytes
from unified_cache.plan.tier_hits import TierEnds, TierHits
from unified_cache.replay.clairvoyant import FutureUses
from unified_cache.replay.plan import component_bytes
from unified_cache.replay.trace_pages import TracePages

__all__ = ["ClairvoyantBound", "Evaluator", "PlanPoint"]

BOUND_SIZES = 24
"""Sizes at which the clairvoyant bound is computed; between two of them that of the larger holds."""

NORMAL_95 = 1.96
"""Half the interval of 95 %, in standard errors."""

BLOCKS = 10
"""Parts of the trace whose hit ratios tell how much the whole one's could have come out otherwise."""


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One combination of sizes, and what it brings. Ratios are shares of all tokens of all prompts."""

    sizes: TierBytes
    tier_ratios: Mapping[str, float]
    """Handed back from each tier, the device first."""
    error: float
    """Standard error of the whole ratio, from ten parts of the trace."""
    open_ratio: float
    """Share of the tokens that may be handed back beyond these, where others than these sizes were replayed; else 0."""
    bound_ratio: float
    """What no policy can exceed with as many bytes."""
    costs: Costs

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens handed back from anywhere."""
        return sum(self.tier_ratios.values())

    @property
    def uncertainty(self) -> float:
        """Half the interval of 95 %: what another trace of its kind could have said, and what is left open."""
        return math.hypot(NORMAL_95 * self.error, self.open_ratio)


class ClairvoyantBound:
    """Upper bound on the hits in so many bytes, full attention alone: windows and states take room and add no hit."""

    def __init__(self, trace: TracePages, page_bytes: int) -> None:
        self._trace = trace
        self._page_bytes = page_bytes
        self._future = FutureUses.of(trace)
        top = max(2.0, float(trace.distinct_count))
        self._sizes = sorted({math.ceil(top ** (step / (BOUND_SIZES - 1))) for step in range(BOUND_SIZES)})
        self._ratios: dict[int, float] = {}

    def ratio(self, total_bytes: int) -> float:
        """Return the largest share of the tokens that any policy could have handed back."""
        pages = total_bytes // self._page_bytes
        size = next((size for size in self._sizes if size >= pages), self._sizes[-1])
        if size not in self._ratios:
            self._ratios[size] = self._trace.token_ratio(self._future.ends(size))
        return self._ratios[size]


class Evaluator:
    """Evaluates combinations of sizes for one model, trace and system."""

    def __init__(self, model: PlannedModel, hits: TierHits, priced: PricedSystem) -> None:
        """Take parts that fit each other.

        Raises:
            ConfigError: no prompt of the trace has a token.
        """
        if not int(hits.trace.input_tokens.sum()):
            raise ConfigError("a plan needs a trace with prompts, found none of any token")
        self._model = model
        self._hits = hits
        self._priced = priced
        self._bound = ClairvoyantBound(hits.trace, component_bytes(model.sized.layout.components[0]))

    @property
    def seen_ratio(self) -> float:
        """Share of the tokens that stand in a prefix which was asked for before: what a cache without end would hit."""
        return self._bound.ratio(NEVER)

    def point(self, sizes: TierBytes) -> PlanPoint:
        """Evaluate one combination.

        Raises:
            ConfigError: a tier is too small for the model, or the trace does not answer for the plan.
        """
        model, trace = self._model, self._hits.trace
        ends = self._hits.ends(model.settings(sizes).plan)
        device, host, storage = (trace.token_ratio(each) for each in (ends.device, ends.host, ends.storage))
        on_devices = sizes.device * (1 if model.is_replicated else model.devices)
        total_bytes = (on_devices + sizes.host) * model.engines + sizes.storage
        return PlanPoint(
            sizes=sizes,
            tier_ratios={"device": device, "host": host - device, "storage": storage - host},
            error=_error(trace, ends),
            open_ratio=trace.token_ratio(ends.at_most) - storage,
            bound_ratio=self._bound.ratio(total_bytes),
            costs=self._priced.costs(trace, ends, sizes),
        )


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
