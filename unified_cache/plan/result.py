"""Result of a plan: every combination, the recommended one, what the next 64 GiB would bring, and the curves' knees."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from unified_cache.byte_sizes import bytes_text
from unified_cache.plan.evaluate import PlanPoint
from unified_cache.plan.hardware import Hardware
from unified_cache.plan.sweep import PlannedModel, TierBytes

__all__ = [
    "STEP_BYTES",
    "TIERS",
    "Checked",
    "NextStep",
    "PlanResult",
    "ToldByReplays",
    "knee",
    "next_steps",
    "recommended",
]

STEP_BYTES = 64 << 30
"""The next step whose worth is told."""

BUSY_SHARE_MAX = 0.9
"""Queues that are busy for more of the time are no plan to buy."""

TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class NextStep:
    """Worth of 64 GiB more in one tier, the others as recommended."""

    tier: str
    hit_ratio_gain: float
    prefill_hours_saved: float
    """Over the trace."""
    cost_change: float
    """Of a million tokens of prompts."""


@dataclass(frozen=True, slots=True)
class ToldByReplays:
    """Replays of some sizes of device and host memory, from which the others were told."""

    count: int
    disorder: float
    """Largest share of the tokens by which one with more memory handed back less than one with less."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A combination replayed in full, beside what the plan says of it."""

    sizes: TierBytes
    planned_ratio: float
    open_ratio: float
    """Share of the tokens that the plan left open beyond its ratio."""
    replayed_ratio: float
    seconds: float
    """Time of the replay."""

    @property
    def error(self) -> float:
        """Share of the tokens by which the replay is outside of what was planned, with what was left open."""
        return max(
            self.planned_ratio - self.replayed_ratio, self.replayed_ratio - self.planned_ratio - self.open_ratio, 0
        )


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
    steps: Sequence[NextStep]
    told_by: ToldByReplays | None
    """None where distances in a stack tell all sizes, for ``lru``."""
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
        keeps_up = "" if keeps_up_at(best) else "; no combination keeps up with the trace"
        return f"{', '.join(parts)}: {ratio} at {cost}{keeps_up}."

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names, for ``json.dump``."""
        return {
            "sentence": self.sentence,
            "trace": self.trace,
            "model": self.model.name,
            "devices": self.model.devices,
            "engines": self.model.engines,
            "retention": asdict(self.model.retention),
            "page_size": self.model.sized.layout.page_size,
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "seen_token_ratio": self.seen_ratio,
            "policies": self.model.policies.as_json(),
            "replays": 0 if self.told_by is None else self.told_by.count,
            "disorder": 0.0 if self.told_by is None else self.told_by.disorder,
            "complete": self.is_complete,
            "best": point_as_json(self.best),
            "next_64gib": {step.tier: _without_tier(step) for step in self.steps},
            "knees": self.knees(),
            "combinations": [point_as_json(point) for point in self.points],
            "checked": [
                {
                    **_sizes_as_json(each.sizes),
                    "planned": each.planned_ratio,
                    "open": each.open_ratio,
                    "replayed": each.replayed_ratio,
                }
                for each in self.checked
            ],
            "hardware": self.hardware.as_json(),
            "seconds": self.seconds,
        }


def keeps_up_at(point: PlanPoint) -> bool:
    """Tell whether no queue is busy for more of the time than is wise."""
    costs = point.costs
    return max(costs.prefill_share, costs.bus_share, costs.storage_share) <= BUSY_SHARE_MAX


def recommended(points: Sequence[PlanPoint]) -> PlanPoint:
    """Return the cheapest point per token of those that keep up; of all points, the fastest, if none does."""
    able = [point for point in points if keeps_up_at(point)]
    if not able:
        return min(points, key=lambda point: (point.costs.prefill_share, point.costs.price_per_hour))
    return min(able, key=lambda point: (point.costs.cost_per_million_tokens, point.sizes))


def next_steps(best: PlanPoint, at: Callable[[TierBytes], PlanPoint]) -> list[NextStep]:
    """Return what 64 GiB more would bring in each tier that can have them; ``at`` evaluates a combination."""
    steps: list[NextStep] = []
    for tier in TIERS:
        sizes = replace(best.sizes, **{tier: best.sizes.by_tier()[tier] + STEP_BYTES})
        if sizes.storage and not sizes.host:
            continue
        point = at(sizes)
        steps.append(
            NextStep(
                tier,
                point.hit_ratio - best.hit_ratio,
                point.costs.prefill_hours_saved - best.costs.prefill_hours_saved,
                point.costs.cost_per_million_tokens - best.costs.cost_per_million_tokens,
            )
        )
    return steps


def knee(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """Return the size at which a rising curve is farthest above the line from its first point to its last.

    As V. Satopaa et al., "Finding a Kneedle in a Haystack" (2011); the smallest size where the curve does not rise.
    """
    rise, run = ratios[-1] - ratios[0], sizes[-1] - sizes[0]
    if rise <= 0 or run <= 0:
        return sizes[0]
    above = [(ratio - ratios[0]) / rise - (size - sizes[0]) / run for size, ratio in zip(sizes, ratios, strict=True)]
    return sizes[above.index(max(above))]


def point_as_json(point: PlanPoint) -> dict[str, object]:
    """Return a point under stable names."""
    return {
        **_sizes_as_json(point.sizes),
        "token_hit_ratio": point.hit_ratio,
        "by_tier": dict(point.tier_ratios),
        "standard_error": point.error,
        "open_ratio": point.open_ratio,
        "clairvoyant_ratio": point.bound_ratio,
        **point.costs.as_json(),
    }


def _sizes_as_json(sizes: TierBytes) -> dict[str, object]:
    return {f"{tier}_bytes": size for tier, size in sizes.by_tier().items()}


def _without_tier(step: NextStep) -> dict[str, object]:
    return {name: value for name, value in asdict(step).items() if name != "tier"}
