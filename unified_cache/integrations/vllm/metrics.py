"""Figures of the tier under vLLM's names: ``vllm:unified_cache_*`` beside vLLM's own of its tiers.

vLLM asks for the increase since the last time, and sums it in its front end, which may be another process.
"""

from collections.abc import Mapping
from typing import NamedTuple

from unified_cache.integrations.engine_store import EngineStoreCounts
from unified_cache.integrations.vllm.chunks import TierCounts
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

PREFIX = "vllm:unified_cache"


class TierFigure(NamedTuple):
    """One metric, as vLLM wants to know it at its start: a counter, unless it is a gauge."""

    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False


class Reading(NamedTuple):
    """A figure's value: what was added since the last reading, or what a gauge says now."""

    figure: TierFigure
    labels: tuple[str, ...]
    value: float


_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lookup_chunks": (
        "Chunks that the store was asked for, by answer; unavailable: not asked, since too many waited.",
        ("answer",),
    ),
    "load_chunks": (
        "Chunks that were to be loaded from the store, by answer: hit was verified and loaded, all others recomputed.",
        ("answer",),
    ),
    "store_chunks": ("Chunks that were to be stored, by answer: stored is there now, or was before.", ("answer",)),
    "load_bytes": ("Bytes of KV loaded from the store.", ()),
    "store_bytes": ("Bytes of KV stored, or found in the store.", ()),
    "flawed_chunks": ("Chunks that the store returned and that did not verify, by flaw: never used.", ("flaw",)),
    "unavailable_chunks": ("Chunks that the store did not answer for, by method and reason.", ("method", "reason")),
    "unstable_keys": ("Look-ups under a key that no other process finds: run vLLM with a SHA-256 prefix hash.", ()),
}
_GAUGES: Mapping[str, str] = {
    "quarantined_bytes": "Bounce buffers that calls which are late may still write.",
    "breaker_open": "1 while the store is paused after failures, or is away; else 0.",
    "registered": "1 once the store knows this engine's identity; else 0.",
}

_FIGURES = {
    **{name: TierFigure(f"{PREFIX}_{name}", text, labels) for name, (text, labels) in _COUNTERS.items()},
    **{name: TierFigure(f"{PREFIX}_{name}", text, is_gauge=True) for name, text in _GAUGES.items()},
}

FIGURES = tuple(_FIGURES.values())
"""Every metric of the tier."""


class TierFigures:
    """Readings of one tier, each of what was added since the reading before."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, tuple[str, ...]], float] = {}

    def readings(self, tier: TierCounts, store: EngineStoreCounts) -> list[Reading]:
        """Return what changed since the last call; gauges that are as they were are left out."""
        changed: list[Reading] = []
        for name, totals in _totals(tier, store).items():
            figure = _FIGURES[name]
            for labels, total in totals.items():
                before = self._read.get((name, labels))
                if total != before and (total or figure.is_gauge):
                    self._read[name, labels] = total
                    changed.append(Reading(figure, labels, float(total - (0 if figure.is_gauge else before or 0))))
        return changed


def _totals(tier: TierCounts, store: EngineStoreCounts) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    """Return every figure now, by its name after the prefix and its labels."""
    loaded = {answer: count for (method, answer), count in store.answers.items() if method is Method.GET}
    stored = {answer: count for (method, answer), count in store.answers.items() if method is Method.PUT}
    if tier.dropped_count:
        stored[Answer.UNAVAILABLE] = stored.get(Answer.UNAVAILABLE, 0) + tier.dropped_count
    return {
        "lookup_chunks": {(answer.value,): count for answer, count in list(tier.looked_up.items())},
        "load_chunks": {(str(answer.value),): count for answer, count in loaded.items()},
        "store_chunks": {(str(answer.value),): count for answer, count in stored.items()},
        "load_bytes": {(): tier.chunk_bytes * loaded.get(Answer.HIT, 0)},
        "store_bytes": {(): tier.chunk_bytes * stored.get(Answer.STORED, 0)},
        "flawed_chunks": {(flaw.name.lower(),): count for flaw, count in store.flaws.items()},
        "unavailable_chunks": {
            (method.value, reason.name.lower()): count for (method, reason), count in store.unavailable.items()
        },
        "unstable_keys": {(): tier.unstable_count},
        "quarantined_bytes": {(): store.quarantined_bytes},
        "breaker_open": {(): store.breaker is not BreakerState.CLOSED},
        "registered": {(): store.is_registered},
    }
