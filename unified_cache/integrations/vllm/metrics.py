"""Figures of the tier under vLLM's names: ``vllm:unified_cache_*`` beside vLLM's own of its tiers.

vLLM asks for what came since the last time, and adds it up in its front end, which may be another process.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

from unified_cache.integrations.engine_store import EngineStoreCounts
from unified_cache.integrations.vllm.chunks import TierCounts
from unified_cache.storage_backends.common.breaker import BreakerState

__all__ = ["FIGURES", "Reading", "TierFigure", "TierFigureKind", "TierFigures"]

PREFIX = "vllm:unified_cache"


class TierFigureKind(Enum):
    """Kind of a metric, in Prometheus's words."""

    COUNTER = "counter"
    GAUGE = "gauge"


class TierFigure(NamedTuple):
    """One metric, as vLLM wants to know it at its start."""

    name: str
    kind: TierFigureKind
    documentation: str
    labels: tuple[str, ...] = ()


class Reading(NamedTuple):
    """A figure's value: what was added since the last reading, or what a gauge says now."""

    figure: TierFigure
    labels: tuple[str, ...]
    value: float


LOOKED_UP = TierFigure(
    f"{PREFIX}_lookup_chunks",
    TierFigureKind.COUNTER,
    "Chunks that the store was asked for, by answer; later: not asked, since too many waited.",
    ("answer",),
)
LOADED = TierFigure(
    f"{PREFIX}_load_chunks",
    TierFigureKind.COUNTER,
    "Chunks that were to be loaded from the store, by answer: hit was verified and loaded, all others are recomputed.",
    ("answer",),
)
STORED = TierFigure(
    f"{PREFIX}_store_chunks",
    TierFigureKind.COUNTER,
    "Chunks that were to be stored, by answer: stored is there now, or was before.",
    ("answer",),
)
LOADED_BYTES = TierFigure(f"{PREFIX}_load_bytes", TierFigureKind.COUNTER, "Bytes of KV loaded from the store.")
STORED_BYTES = TierFigure(f"{PREFIX}_store_bytes", TierFigureKind.COUNTER, "Bytes of KV stored, or found in the store.")
FLAWED = TierFigure(
    f"{PREFIX}_flawed_chunks",
    TierFigureKind.COUNTER,
    "Chunks that the store returned and that did not verify, by flaw: never used.",
    ("flaw",),
)
UNAVAILABLE = TierFigure(
    f"{PREFIX}_unavailable_chunks",
    TierFigureKind.COUNTER,
    "Chunks that the store did not answer for, by method and reason.",
    ("method", "reason"),
)
UNSTABLE = TierFigure(
    f"{PREFIX}_unstable_keys",
    TierFigureKind.COUNTER,
    "Look-ups under a key that no other process finds: run vLLM with a SHA-256 prefix hash.",
)
QUARANTINED = TierFigure(
    f"{PREFIX}_quarantined_bytes", TierFigureKind.GAUGE, "Bounce buffers that calls which are late may still write."
)
BREAKER_OPEN = TierFigure(
    f"{PREFIX}_breaker_open",
    TierFigureKind.GAUGE,
    "1 while the store is left alone after failures, or is away; else 0.",
)
REGISTERED = TierFigure(
    f"{PREFIX}_registered", TierFigureKind.GAUGE, "1 once the store knows this engine's identity; else 0."
)

FIGURES = (
    LOOKED_UP, LOADED, STORED, LOADED_BYTES, STORED_BYTES, FLAWED, UNAVAILABLE, UNSTABLE, QUARANTINED, BREAKER_OPEN,
    REGISTERED,
)  # fmt: skip
"""Every metric of the tier."""


class TierFigures:
    """Readings of one tier, each of what was added since the reading before."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, tuple[str, ...]], float] = {}

    def readings(self, tier: TierCounts, store: EngineStoreCounts) -> list[Reading]:
        """Return what changed since the last call; gauges that are as they were are left out."""
        changed: list[Reading] = []
        for figure, labels, value in _totals(tier, store):
            before = self._read.get((figure.name, labels), 0.0)
            if value == before and (figure.kind is TierFigureKind.COUNTER or (figure.name, labels) in self._read):
                continue
            self._read[figure.name, labels] = value
            changed.append(Reading(figure, labels, value - before if figure.kind is TierFigureKind.COUNTER else value))
        return changed


def _totals(tier: TierCounts, store: EngineStoreCounts) -> Iterator[Reading]:
    yield from _by_value(LOOKED_UP, tier.looked_up)
    yield from _by_value(LOADED, tier.loaded)
    yield from _by_value(STORED, tier.stored)
    yield Reading(LOADED_BYTES, (), tier.loaded_bytes)
    yield Reading(STORED_BYTES, (), tier.stored_bytes)
    yield Reading(UNSTABLE, (), tier.unstable_count)
    for flaw, count in store.flaws.items():
        yield Reading(FLAWED, (flaw.name.lower(),), count)
    for (method, reason), count in store.unavailable.items():
        yield Reading(UNAVAILABLE, (method.value, reason.name.lower()), count)
    yield Reading(QUARANTINED, (), store.quarantined_bytes)
    yield Reading(BREAKER_OPEN, (), float(store.breaker is not BreakerState.CLOSED))
    yield Reading(REGISTERED, (), float(store.is_registered))


_Told = TypeVar("_Told", bound=Enum)


def _by_value(figure: TierFigure, counts: Mapping[_Told, int]) -> Iterator[Reading]:
    for answer, count in list(counts.items()):
        yield Reading(figure, (str(answer.value),), count)
