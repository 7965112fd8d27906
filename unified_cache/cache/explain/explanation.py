"""Explanation of a prompt's hit, as a value: by tier and component how far it goes, and what became of the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unified_cache.cache.explain.near import NearMatch
from unified_cache.core.config import CacheConfig, EvictionPolicy, WritePolicy
from unified_cache.core.miss_reason import MissReason
from unified_cache.core.pool import Component, Pages, Tier, all_pages
from unified_cache.core.window import SPAN_UNKNOWN, last_end, restorable_ends, window
from unified_cache.storage_backends.protocol import Answer

if TYPE_CHECKING:  # the controller needs torch, and a store alone is explained without it
    from unified_cache.controller import RecomputeDecision

__all__ = [
    "LINE_COLUMNS",
    "ComponentExplanation",
    "Explainer",
    "Explanation",
    "Loss",
    "MissingRun",
    "NextPage",
    "PageHistory",
    "Reason",
    "StoreSilence",
    "StoredPages",
    "TierExplanation",
    "ago_text",
    "held_line",
    "pages_text",
    "present_pages",
    "stored_history",
]


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages of a prompt that a store says it has, by component."""

    present: Sequence[Pages]


class StoreSilence:
    """A store that does not say what it has: it is not asked now, or does not know."""


@dataclass(frozen=True, slots=True)
class PageHistory:
    """History of a prompt's pages in one component on a tier; arrays of one entry a page."""

    held: Pages
    reasons: npt.NDArray[np.uint8]
    """``MissReason``; of no meaning where the page is held."""
    components: npt.NDArray[np.uint8]
    """Component that room was made for, where the page was evicted."""
    recorded_s: npt.NDArray[np.float64]
    """Time of what has happened, where something has."""
    is_repeated: Pages
    """Computed again while it was held, and the second copy dropped."""

    @classmethod
    def without_records(cls, held: Pages, reason: MissReason) -> "PageHistory":
        """Return the histories of pages that all lack for one reason."""
        count = len(held)
        reasons = np.full(count, reason, np.uint8)
        nothing = np.zeros(count, np.bool_)
        return cls(held, reasons, np.zeros(count, np.uint8), np.zeros(count, np.float64), nothing)


def present_pages(answers: Sequence[Answer], pools: Sequence[int], pages: int) -> StoredPages | StoreSilence:
    """Return by component which pages a store has in every pool, of its answers pool by pool.

    ``pools[c]`` are the pools of a component that have objects; one without has all that Full has.
    """
    if Answer.UNAVAILABLE in answers and Answer.HIT not in answers:
        return StoreSilence()
    hits = np.array([answer is Answer.HIT for answer in answers], np.bool_)
    present: list[Pages] = []
    start = 0
    for count in pools:
        end = start + count * pages
        whole: Pages = all_pages(pages) if count or not present else present[0].copy()
        if count:
            whole &= np.logical_and.reduce(hits[start:end].reshape(count, pages))
        present.append(whole)
        start = end
    return StoredPages(present)


def stored_history(stored: StoredPages | StoreSilence, components: int, pages: int) -> list[PageHistory]:
    """Return the histories in a store of which nothing else is known, by component."""
    if isinstance(stored, StoreSilence):
        nothing = np.zeros(pages, np.bool_)
        return [PageHistory.without_records(nothing, MissReason.STORE_UNAVAILABLE) for _ in range(components)]
    return [PageHistory.without_records(present, MissReason.NOT_IN_STORE) for present in stored.present]


_POLICIES = {
    WritePolicy.ON_CALL: "the write policy on_call backs up what the engine asks for alone",
    WritePolicy.SELECTIVE: "the write policy selective waits for a second use",
    WritePolicy.BACK: "the write policy back has put it off",
    WritePolicy.THROUGH: "the backup has not come to it",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a run of pages is missing."""

    why: MissReason
    ago_s: float | None = None
    """Seconds since it happened to the last of the pages; None where nothing happened that is remembered."""
    policy: EvictionPolicy | WritePolicy | None = None
    """Policy that evicted the pages, or that has not copied them to the tier."""
    room_for: str = ""
    """Component that room was made for, where the pages were evicted."""

    @property
    def text(self) -> str:
        """The reason in words."""
        if isinstance(self.policy, WritePolicy):
            return f"{self.why.text}: {_POLICIES[self.policy]}"
        if self.ago_s is None:
            return self.why.text
        if self.policy is None:
            return f"{self.why.text}, {ago_text(self.ago_s)}"
        return f"{self.why.text} {ago_text(self.ago_s)} by {self.policy.value}, to make room for {self.room_for}"

    def as_json(self) -> dict[str, object]:
        """Return it under stable names."""
        value: dict[str, object] = {"why": self.why.key, "text": self.text}
        if self.ago_s is not None:
            value["ago_s"] = self.ago_s
        if self.policy is not None:
            value["policy"] = self.policy.value
        if self.room_for:
            value["room_for"] = self.room_for
        return value


_STEPS: Sequence[tuple[float, str]] = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago_text(ago_s: float) -> str:
    """Return a time ago in words."""
    for seconds, unit in _STEPS:
        if ago_s >= seconds:
            return f"{ago_s / seconds:,.1f} {unit} ago"
    return "just now"


LINE_COLUMNS = 48
"""Characters of a line at most; a longer prompt has several pages in each."""

_HELD, _PARTLY, _MISSING, _WINDOW = "#", "+", ".", "="


def held_line(held: Sequence[tuple[int, int]], needed: tuple[int, int], pages: int) -> str:
    """Draw the pages of a prompt: ``=`` held and needed for the resume, ``#`` held, ``+`` held in part, ``.`` missing.

    ``held`` are runs [start, end), ascending; ``needed`` is the window of the resume.
    """
    columns = min(pages, LINE_COLUMNS)
    line: list[str] = []
    for column in range(columns):
        start, end = column * pages // columns, (column + 1) * pages // columns
        count = sum(max(min(end, last) - max(start, first), 0) for first, last in held)
        if count == end - start:
            line.append(_WINDOW if needed[0] < end and start < needed[1] else _HELD)
        else:
            line.append(_PARTLY if count else _MISSING)
    return "".join(line)


def pages_text(pages: int) -> str:
    """Return a number of pages in words."""
    return "1 page" if pages == 1 else f"{pages:,} pages"


@dataclass(frozen=True, slots=True)
class MissingRun:
    """Pages [start, end) that a component lacks on a tier, all for one reason."""

    start: int
    end: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class NextPage:
    """The first page that a component lacks, on a tier and those above it, for one page more to be resumed."""

    component: str
    page: int


@dataclass(frozen=True, slots=True)
class ComponentExplanation:
    """Pages of a prompt that one component holds on one tier alone, and those it lacks."""

    name: str
    held: tuple[tuple[int, int], ...]
    """Runs [start, end) of pages."""
    reach: int
    """Pages that could be resumed if this component alone counted, on this tier and those above it."""
    window_start: int
    """First page that a resume at the tier's end needs of this component."""
    missing: tuple[MissingRun, ...]
    repeated: tuple[tuple[int, int], ...]
    """Runs of pages that were computed again while they were held; the second copies were dropped."""


@dataclass(frozen=True, slots=True)
class TierExplanation:
    """Reach of a prompt on one tier."""

    name: str
    """device, host or storage."""
    end: int
    """Pages that can be resumed from this tier and those above it together."""
    next_pages: tuple[NextPage, ...]
    """For each component that lacks a page for one page more, the first; empty where the prompt ends."""
    components: tuple[ComponentExplanation, ...]

    @property
    def bound_by(self) -> tuple[str, ...]:
        """Components that lack a page for one page more."""
        return tuple(each.component for each in self.next_pages)


@dataclass(frozen=True, slots=True)
class Loss:
    """Missed pages of a prompt that one component is to blame for, for one reason: that of the lowest tier."""

    component: str
    start: int
    end: int
    reason: Reason

    @property
    def pages(self) -> int:
        """Pages missed."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a prompt's hit; ``str()`` draws it. Every figure is in pages of ``page_size`` tokens."""

    pages_count: int
    page_size: int
    tiers: tuple[TierExplanation, ...]
    """Fastest first, those that there are."""
    losses: tuple[Loss, ...]
    """The pages after the longest end of all tiers, each counted once."""
    near: tuple[NearMatch, ...]
    """Prompts of the same tokens that are known under another name."""
    remembers: str
    """How far back what has gone is remembered, in words."""
    recompute: "RecomputeDecision | None" = None
    """Pages that would not be read if they were asked for now, because computing them is faster."""

    @property
    def end(self) -> int:
        """Pages that can be resumed with the help of all tiers."""
        return self.tiers[-1].end

    def as_json(self) -> dict[str, object]:
        """Return it under stable names, for ``json.dump``."""
        return {
            "pages": self.pages_count,
            "page_size": self.page_size,
            "end": self.end,
            "tiers": [
                {
                    "tier": tier.name,
                    "end": tier.end,
                    "bound_by": list(tier.bound_by),
                    "next_pages": [{"component": each.component, "page": each.page} for each in tier.next_pages],
                    "components": [_component_as_json(component) for component in tier.components],
                }
                for tier in self.tiers
            ],
            "losses": [
                {"component": loss.component, "start": loss.start, "end": loss.end, **loss.reason.as_json()}
                for loss in self.losses
            ],
            "near": [{"place": near.place, "pages": near.pages, "differs": list(near.differs)} for near in self.near],
            "remembers": self.remembers,
            "recompute": None if self.recompute is None else self.recompute.as_json(),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        size = self.page_size
        yield f"{pages_text(self.end)} of {self.pages_count:,} can be resumed ({size} tokens each)"
        width = max((len(each.name) for tier in self.tiers for each in tier.components), default=0)
        for tier in self.tiers:
            bound = ", ".join(f"{each.component} lacks page {each.page}" for each in tier.next_pages)
            yield f"{tier.name}: {pages_text(tier.end)}{f'; for one more, {bound}' if bound else ''}"
            for component in tier.components:
                missing = "; ".join(f"[{run.start}, {run.end}) {run.reason.text}" for run in component.missing)
                repeated = "; ".join(f"[{start}, {end}) computed twice" for start, end in component.repeated)
                marks = held_line(component.held, (component.window_start, tier.end), self.pages_count)
                said = "; ".join(part for part in (missing, repeated) if part)
                yield f"  {component.name:{width}}  |{marks}|  {said}".rstrip()
        if self.recompute is not None:
            yield self.recompute.text
        for near in self.near:
            yield f"near match: {near.text}"
        if any(loss.reason.why is MissReason.NOT_REMEMBERED for loss in self.losses):
            yield f"remembered: {self.remembers}"


def _component_as_json(component: ComponentExplanation) -> dict[str, object]:
    return {
        "component": component.name,
        "held": [list(run) for run in component.held],
        "reach": component.reach,
        "window_start": component.window_start,
        "missing": [{"start": run.start, "end": run.end, **run.reason.as_json()} for run in component.missing],
        "repeated": [list(run) for run in component.repeated],
    }


@dataclass(frozen=True, slots=True)
class Explainer:
    """Makes explanations of histories: what the arrays say, in the words of one cache."""

    components: Sequence[Component]
    page_size: int
    config: CacheConfig | None
    """None for a store without a cache: its reasons name no policy."""
    now_s: float

    def explain(
        self,
        tiers: Sequence[tuple[str, Sequence[PageHistory]]],
        pages: int,
        near: Sequence[NearMatch],
        remembers: str,
    ) -> Explanation:
        """Return the explanation of a prompt from the histories of its pages, by tier and component."""
        held: list[Pages] = [np.zeros(pages, np.bool_) for _ in self.components]
        explained: list[TierExplanation] = []
        for name, histories in tiers:
            held = [above | history.held for above, history in zip(held, histories, strict=True)]
            explained.append(self._tier(name, histories, held, pages))
        lowest_name, lowest = tiers[-1]
        losses = self._losses(lowest_name, lowest, held, explained[-1].end, pages)
        return Explanation(pages, self.page_size, tuple(explained), losses, tuple(near), remembers)

    def _tier(self, name: str, histories: Sequence[PageHistory], held: Sequence[Pages], pages: int) -> TierExplanation:
        end = self._end(held, pages)
        next_pages: list[NextPage] = []
        components: list[ComponentExplanation] = []
        for number, (component, history) in enumerate(zip(self.components, histories, strict=True)):
            start = window(end, component.span)
            if end < pages and component.span != SPAN_UNKNOWN:
                needed = window(end + 1, component.span)
                lacking = np.flatnonzero(~held[number][needed : end + 1])
                if lacking.size:
                    next_pages.append(NextPage(component.name, needed + int(lacking[0])))
            components.append(
                ComponentExplanation(
                    component.name,
                    tuple(_runs(history.held)),
                    self._reach(held[number], component.span),
                    start,
                    tuple(self._missing(name, number, history, ~history.held)),
                    tuple(_runs(history.is_repeated)),
                )
            )
        return TierExplanation(name, end, tuple(next_pages), tuple(components))

    def _losses(
        self, name: str, lowest: Sequence[PageHistory], held: Sequence[Pages], end: int, pages: int
    ) -> tuple[Loss, ...]:
        """Return the component to blame for each page after ``end``: a window up to where Full goes, then Full."""
        missing = np.flatnonzero(~held[0])
        full_end = int(missing[0]) if missing.size else pages
        losses: list[Loss] = []
        if full_end > end:
            losses.append(self._window_loss(name, lowest, held, end, full_end))
        after = np.arange(pages) >= max(full_end, end)
        # What lies behind a tombstone of Full may be held; it is missed for the tombstone.
        reasons = self._missing(name, 0, lowest[0], after & ~held[0])
        for number, run in enumerate(reasons):
            upto = reasons[number + 1].start if number + 1 < len(reasons) else pages
            losses.append(Loss(self.components[0].name, run.start, upto, run.reason))
        return tuple(losses)

    def _window_loss(
        self, name: str, lowest: Sequence[PageHistory], held: Sequence[Pages], end: int, full_end: int
    ) -> Loss:
        for number in range(1, len(self.components)):
            span = self.components[number].span
            start = window(full_end, span)
            lacking = np.flatnonzero(~held[number][start:full_end])
            if span != SPAN_UNKNOWN and lacking.size:
                page = start + int(lacking[-1])
                reason = self._reason(name, number, lowest[number], page, page + 1)
                return Loss(self.components[number].name, end, full_end, reason)
        raise AssertionError("a prefix that Full holds is bound by another component")

    def _end(self, held: Sequence[Pages], pages: int) -> int:
        known = [number for number, component in enumerate(self.components) if component.span != SPAN_UNKNOWN]
        spans = [self.components[number].span for number in known]
        return last_end(restorable_ends(spans, [~held[number] for number in known], 0, pages, [0] * len(known)))

    def _reach(self, held: Pages, span: int) -> int:
        return 0 if span == SPAN_UNKNOWN else last_end(restorable_ends([span], [~held], 0, len(held), [0]))

    def _missing(self, tier: str, number: int, history: PageHistory, wanted: Pages) -> list[MissingRun]:
        """Return the runs of wanted pages that are missing for one reason each."""
        codes = np.where(wanted, history.reasons.astype(np.int64) << 8 | history.components, -1)
        return [
            MissingRun(start, end, self._reason(tier, number, history, start, end))
            for start, end in _runs_alike(codes)
            if wanted[start]
        ]

    def _reason(self, tier: str, number: int, history: PageHistory, start: int, end: int) -> Reason:
        why = MissReason(history.reasons[start])
        if self.config is None:
            return Reason(why)
        if why in (MissReason.NOT_BACKED_UP, MissReason.NOT_STORED):
            return Reason(why, policy=self.config.write)
        if why not in _HAPPENED:
            return Reason(why)
        ago_s = max(self.now_s - float(history.recorded_s[start:end].max()), 0.0)
        if why is not MissReason.EVICTED:
            return Reason(why, ago_s)
        return Reason(why, ago_s, self._policy(tier, number), self.components[int(history.components[start])].name)

    def _policy(self, tier: str, number: int) -> EvictionPolicy:
        assert self.config is not None, "only a cache evicts"
        return self.config.eviction.policy(Tier.DEVICE if tier == Tier.DEVICE.name.lower() else Tier.HOST, number)


_HAPPENED = frozenset(
    {
        MissReason.EVICTED,
        MissReason.DUPLICATE,
        MissReason.RESET,
        MissReason.BACKUP_DECLINED,
        MissReason.BACKUP_FAILED,
        MissReason.HOST_FULL,
        MissReason.STORE_DECLINED,
        MissReason.STORE_FAILED,
        MissReason.STORE_EVICTED,
        MissReason.STORE_LOST,
        MissReason.STORE_CLEARED,
        MissReason.FLAWED,
    }
)


def _runs(mask: Pages) -> list[tuple[int, int]]:
    return [(start, end) for start, end in _runs_alike(mask.astype(np.int64)) if mask[start]]


def _runs_alike(values: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    if not len(values):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(bounds))
