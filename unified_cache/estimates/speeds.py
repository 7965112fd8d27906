"""Speeds of one cache's transfers and of its engine, and the choices that follow from them.

Ranks of a group have measured each their own. A transfer is over when the slowest rank has its pages, and so they agree
on the slowest figure of each kind before they choose (``ranks.largest_of_all``); all then choose from the same.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.config import CacheConfig
from unified_cache.controller import LeftAlone, LeftAloneReason, TransferKind
from unified_cache.estimates.choice import ExpectedTimes, soonest
from unified_cache.estimates.leg import LegStats, TransferLeg
from unified_cache.estimates.prefill import PREFILL_PARTS, MeasuredPrefill, prefill_parts
from unified_cache.estimates.reads import ReadTimes, pages_to_read
from unified_cache.pool import ModelLayout
from unified_cache.ranks import LocalRanks, RankGroup, largest_of_all
from unified_cache.transfer_policy import TransferPolicy

__all__ = ["Candidates", "LoadingStats", "TransferSpeeds"]

LEGS: tuple[TransferKind, ...] = (TransferKind.PREFETCH, TransferKind.LOAD)
"""Ways up to the device."""

TRIAL_EVERY = 8
"""Times in a row that all of storage is left alone, until a little is read to see whether it has become faster."""

TRIAL_S = 0.1
"""Time that this little may take, as expected."""

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ends of a prompt that a transfer could bring up, ascending; the first is what is there without it."""

    ends: Counts
    """In pages."""
    pages_count: int
    """Pages of the prompt."""
    read_pages: Sequence[Counts]
    """By component: pages to be read from storage for each end."""
    copy_pages: Sequence[Counts]
    """By component: pages to be copied to the device for each end."""


@dataclass(frozen=True, slots=True)
class LoadingStats:
    """Loading against computing: what was left alone, and how good the expectations were."""

    legs: dict[TransferKind, LegStats]
    """PREFETCH and LOAD."""
    left_alone_tokens: dict[TransferKind, int]
    """Tokens that storage (PREFETCH) or the host (LOAD) had and that were computed, because that is faster."""
    past_deadline_tokens: dict[TransferKind, int]
    """Tokens that were computed because bringing them would have taken longer than their request could wait."""


@dataclass(frozen=True, slots=True)
class AgreedFigures:
    """Figures that a choice is made of, the same on every rank."""

    steps: Sequence[Sequence[float]]
    """By step: seconds before the first page, then for a page of each component, then the relative error."""
    prefill: Sequence[float]
    """Seconds of each part, then the relative error."""
    left_s: float


class TransferSpeeds:
    """Measured speeds of one cache, and the choices between loading and computing. Belongs to the owner's thread."""

    __slots__ = (
        "_curve",
        "_declined_run",
        "_left_alone",
        "_page_bytes",
        "_page_size",
        "_policy",
        "_ranks",
        "legs",
        "prefill",
        "reads",
    )

    def __init__(
        self,
        layout: ModelLayout,
        config: CacheConfig,
        ranks: RankGroup = LocalRanks(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_size = layout.page_size
        self._page_bytes = [sum(pool.page_bytes for pool in component.pools) for component in layout.components]
        self._policy = config.transfer
        self._curve = config.prefill
        self._ranks = ranks
        self._declined_run = 0
        """Times in a row that all of storage was left alone."""
        self._left_alone: dict[LeftAloneReason, dict[TransferKind, int]] = {
            reason: dict.fromkeys(LEGS, 0) for reason in LeftAloneReason
        }
        self.legs = {kind: TransferLeg(clock, expects=self.is_choosing) for kind in LEGS}
        self.prefill = MeasuredPrefill(clock)
        self.reads = ReadTimes()
        """Of prefetches under every policy, for those with a deadline."""

    @property
    def is_choosing(self) -> bool:
        """Whether anything may be left alone."""
        return self._policy is TransferPolicy.FASTEST

    @property
    def measures_prefill(self) -> bool:
        """Whether anybody asks how long computing takes, and the engine has not said so."""
        return self._policy is TransferPolicy.FASTEST and self._curve is None

    def payload_bytes(self, pages: Sequence[int]) -> int:
        """Return the bytes of so many pages of each component."""
        return sum(count * size for count, size in zip(pages, self._page_bytes, strict=True))

    def choose(
        self, kind: TransferKind, candidates: Candidates, left_s: float = math.inf
    ) -> tuple[int, LeftAlone | None]:
        """Return which of the candidates to bring up, by number, and what is left alone for that.

        On every rank the same. ``left_s`` is the time until the deadline.
        """
        chosen, left_alone = self._chosen(kind, candidates, left_s, self._ranks)
        if kind is TransferKind.PREFETCH and chosen:
            self._declined_run = 0
        return chosen, left_alone

    def note(self, left_alone: LeftAlone | None) -> None:
        """Count what a transfer has left alone in the end."""
        if left_alone is not None:
            self._left_alone[left_alone.reason][left_alone.kind] += left_alone.tokens

    def look(self, kind: TransferKind, candidates: Candidates) -> LeftAlone | None:
        """Return what this rank would leave alone by its own figures; counts nothing."""
        return self._chosen(kind, candidates, math.inf, LocalRanks())[1]

    def is_trial_due(self) -> bool:
        """Count that all of storage is left alone once more; tell whether to read a little of it, for its speed."""
        self._declined_run += 1
        return self._declined_run % TRIAL_EVERY == 0

    def trial_pages(self, left_alone: LeftAlone) -> int:
        """Return how many pages to read for that, one at least."""
        pages = left_alone.end - left_alone.start
        return max(1, min(pages, int(pages * TRIAL_S / left_alone.load_s)))

    def pages_to_read(self, pages_count: int, call_pages: int, page_bytes: float, left_s: float, wait_s: float) -> int:
        """Return how many of ``pages_count`` pages of ``page_bytes`` to read next before a deadline.

        On every rank the same, by the figures of the slowest. ``left_s`` of ``wait_s`` are left, and ``call_pages`` go
        into a call.
        """
        own = [self.reads.call_s, self.reads.byte_s * page_bytes, -call_pages, -left_s, wait_s]
        call_s, page_s, call_pages_min, left_s_min, wait_s = largest_of_all(self._ranks, own)
        return pages_to_read(pages_count, int(-call_pages_min), call_s, page_s, -left_s_min, wait_s)

    def stats(self) -> LoadingStats:
        """Return the figures of this moment."""
        return LoadingStats(
            {kind: leg.stats() for kind, leg in self.legs.items()},
            dict(self._left_alone[LeftAloneReason.COMPUTING_IS_FASTER]),
            dict(self._left_alone[LeftAloneReason.PAST_DEADLINE]),
        )

    def _chosen(
        self, kind: TransferKind, candidates: Candidates, left_s: float, ranks: RankGroup
    ) -> tuple[int, LeftAlone | None]:
        last = len(candidates.ends) - 1
        if self._policy is not TransferPolicy.FASTEST or not last:
            return last, None
        pages = [candidates.read_pages] if kind is TransferKind.PREFETCH else []
        figures = self._agreed(candidates, left_s, ranks, kind)
        steps_s = [
            _step_s(step, counts) for step, counts in zip(figures.steps, [*pages, candidates.copy_pages], strict=True)
        ]
        compute_s = self._compute_s(candidates, figures.prefill)
        errors = [*(step[-1] for step in figures.steps), figures.prefill[-1]]
        expected = ExpectedTimes(steps_s, compute_s, errors, figures.left_s)
        chosen, reason = soonest(expected)
        if reason is None:
            return chosen, None
        start, end = (int(candidates.ends[number]) for number in (chosen, last))
        load_s = expected.load_s[last] - expected.load_s[chosen]
        saved_s = compute_s[chosen] - compute_s[last]
        return chosen, LeftAlone(kind, start, end, self._page_size, reason, float(load_s), float(saved_s))

    def _agreed(self, candidates: Candidates, left_s: float, ranks: RankGroup, kind: TransferKind) -> AgreedFigures:
        """Agree on the slowest figures of all ranks; not a number where one of them knows too little."""
        width = len(self._page_bytes) + 2
        own = self._step(TransferKind.PREFETCH, candidates.read_pages) if kind is TransferKind.PREFETCH else []
        own += self._step(TransferKind.LOAD, candidates.copy_pages)
        steps_width = len(own)
        own += [*self._prefill(candidates), -left_s]
        agreed = largest_of_all(ranks, own)
        steps = [agreed[start : start + width] for start in range(0, steps_width, width)]
        return AgreedFigures(steps, agreed[steps_width:-1], -agreed[-1])

    def _step(self, kind: TransferKind, pages: Sequence[Counts]) -> list[float]:
        """Return this rank's figures of one step: before the first page, for each component's page, relative error."""
        leg = self.legs[kind]
        fitted = leg.fitted
        if fitted is None:
            return [math.nan] * (len(self._page_bytes) + 2)
        begin_s, byte_s = fitted.weights
        step = [begin_s + byte_s * leg.in_flight_bytes, *(byte_s * size for size in self._page_bytes), 0.0]
        step[-1] = fitted.error_at(float(_step_s(step, pages)[-1]))
        return step

    def _prefill(self, candidates: Candidates) -> list[float]:
        """Return this rank's figures of computing: seconds of each part, and their relative error."""
        if self._curve is not None:
            return [0.0] * (PREFILL_PARTS + 1)
        fitted = self.prefill.fitted
        if fitted is None:
            return [math.nan] * (PREFILL_PARTS + 1)
        longest_s = self._compute_s(candidates, [*fitted.weights, 0.0])[0]
        return [*fitted.weights, fitted.error_at(float(longest_s))]

    def _compute_s(self, candidates: Candidates, prefill: Sequence[float]) -> Floats:
        """Return by candidate the seconds that computing the rest of the prompt takes."""
        end = candidates.pages_count * self._page_size
        starts = (candidates.ends * self._page_size).tolist()
        if self._curve is not None:
            whole_s, *done_s = self._curve.seconds([end, *starts])
            return np.array([whole_s - each_s for each_s in done_s])
        parts = np.array([prefill_parts(start, end) for start in starts])
        seconds: Floats = parts @ np.array(prefill[:-1])
        return seconds


def _step_s(step: Sequence[float], pages: Sequence[Counts]) -> Floats:
    """Return by candidate the seconds of a step; none for a candidate that it has no page for."""
    counts = np.array(pages, np.float64)
    return np.where(counts.any(axis=0), step[0] + np.array(step[1:-1]) @ counts, 0.0)
