"""Explanation of a prompt's hit, as a value: by tier and component how far it goes, and why the rest is missing."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.cache.explain.miss_reason import MissReason
from unified_cache.cache.explain.stored import NearMatch, pages_text
from unified_cache.core.config import WritePolicy
from unified_cache.core.pool import Component, ModelLayout, Pages
from unified_cache.core.window import SPAN_UNKNOWN, last_end, restorable_ends, window

__all__ = ["ComponentExplanation", "Explanation", "MissingRun", "TierExplanation", "TierPages", "explanation_of"]

LINE_COLUMNS = 48
"""Characters of a line at most; a longer prompt has several pages in each."""

Reasons = npt.NDArray[np.uint8]
"""``MissReason`` by page; of no meaning where the page is held."""


@dataclass(frozen=True, slots=True)
class MissingRun:
    """Pages [start, end) that are missing for one reason, and the component that lacks them."""

    component: str
    start: int
    end: int
    why: MissReason


@dataclass(frozen=True, slots=True)
class ComponentExplanation:
    """Pages of a prompt that one component holds on one tier alone, and those it lacks."""

    component: str
    held: tuple[tuple[int, int], ...]
    """Runs [start, end) of pages."""
    window_start: int
    """First page that a resume at the tier's end needs of this component."""
    next_page: int | None
    """First page that it lacks, on this tier and those above it, for one page more to be resumed; None for none."""
    missing: tuple[MissingRun, ...]


@dataclass(frozen=True, slots=True)
class TierExplanation:
    """Reach of a prompt on one tier."""

    tier: str
    """device, host or storage."""
    end: int
    """Pages that can be resumed from this tier and those above it together."""
    components: tuple[ComponentExplanation, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a prompt's hit; ``str()`` draws it. Every figure is in pages of ``page_size`` tokens."""

    pages: int
    page_size: int
    end: int
    """Pages that can be resumed with the help of all tiers."""
    tiers: tuple[TierExplanation, ...]
    """Fastest first, those that there are."""
    losses: tuple[MissingRun, ...]
    """The pages after the longest end of all tiers, each counted once, for the component to blame."""
    near: tuple[NearMatch, ...]
    """Prompts of the same tokens that are known under another name."""
    write: WritePolicy | None
    """Write policy in force; None for a store alone."""

    def as_json(self) -> dict[str, object]:
        """Return it under the names of its fields, for ``json.dump``."""
        value: dict[str, object] = asdict(self, dict_factory=_as_json)
        return value

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        policy = "" if self.write is None else f"; write policy {self.write.value}"
        yield f"{pages_text(self.end)} of {self.pages:,} can be resumed ({self.page_size} tokens each{policy})"
        width = max((len(each.component) for tier in self.tiers for each in tier.components), default=0)
        for tier in self.tiers:
            bound = [each for each in tier.components if each.next_page is not None]
            lacking = ", ".join(f"{each.component} lacks page {each.next_page}" for each in bound)
            yield f"{tier.tier}: {pages_text(tier.end)}{'; for one more, ' if lacking else ''}{lacking}"
            for each in tier.components:
                missing = "; ".join(f"[{run.start}, {run.end}) {run.why.text}" for run in each.missing)
                marks = _drawn(each.held, (each.window_start, tier.end), self.pages)
                yield f"  {each.component:{width}}  |{marks}|  {missing}".rstrip()
        yield from (f"near match: {near.text}" for near in self.near)


def _as_json(fields: list[tuple[str, object]]) -> dict[str, object]:
    """Return the fields of a dataclass as JSON has them."""
    return {
        name: value.key if isinstance(value, MissReason) else value.value if isinstance(value, Enum) else value
        for name, value in fields
    }


def _drawn(held: Sequence[tuple[int, int]], needed: tuple[int, int], pages: int) -> str:
    """Draw the pages of a prompt: ``=`` held and needed for the resume, ``#`` held, ``+`` held in part, ``.`` missing.

    ``held`` are runs [start, end), ascending; ``needed`` is the window of the resume.
    """
    columns = min(pages, LINE_COLUMNS)
    line = ""
    for column in range(columns):
        start, end = column * pages // columns, (column + 1) * pages // columns
        count = sum(max(min(end, last) - max(start, first), 0) for first, last in held)
        if count == end - start:
            line += "=" if needed[0] < end and start < needed[1] else "#"
        else:
            line += "+" if count else "."
    return line


class TierPages(NamedTuple):
    """Pages of a prompt on one tier, by component: what it holds, and what is on its way there."""

    name: str
    held: Sequence[Pages] | None
    """None for a store that does not say."""
    arriving: Sequence[Pages] = ()


def explanation_of(
    layout: ModelLayout,
    pages: int,
    tiers: Sequence[TierPages],
    near: Sequence[NearMatch],
    write: WritePolicy | None = None,
) -> Explanation:
    """Return the explanation of a prompt of so many pages, of what its tiers hold; no ``write`` for a store alone."""
    components, nothing = layout.components, np.zeros(pages, np.bool_)
    held = [[nothing for _ in components] if tier.held is None else tier.held for tier in tiers]
    absent = MissReason.NOT_IN_STORE if write is None else MissReason.IN_NO_TIER
    if tiers[-1].held is None:
        absent = MissReason.STORE_UNAVAILABLE
    is_known = tiers[-1].held is not None and any(pool.page_bytes for pool in components[0].pools)
    kept = MissReason.NOT_KEPT if is_known else absent  # a store has every page of a Full without bytes
    full = np.logical_or.reduce([each[0] for each in held])
    down: list[Pages] = [nothing for _ in components]
    explained: list[TierExplanation] = []
    whys: list[Reasons] = []
    end = 0
    for number, tier in enumerate(tiers):
        whys = [np.where(full, kept, absent).astype(np.uint8) for _ in down]
        for component, why in enumerate(whys):
            if tier.held is not None:
                why[down[component]] = MissReason.NOT_COPIED
            for below in held[number + 1 :]:
                why[below[component]] = MissReason.NOT_FETCHED
            if tier.arriving:
                why[tier.arriving[component]] = MissReason.ARRIVING
        down = [above | here for above, here in zip(down, held[number], strict=True)]
        end = _end(components, down)
        rows = zip(components, held[number], down, whys, strict=True)
        explained.append(TierExplanation(tier.name, end, tuple(_component(end, *row) for row in rows)))
    losses = tuple(_losses(components, down, whys, end))
    return Explanation(pages, layout.page_size, end, tuple(explained), losses, tuple(near), write)


def _component(end: int, component: Component, here: Pages, whole: Pages, reasons: Reasons) -> ComponentExplanation:
    """Explain a component that holds ``here`` on a tier, and together with those above it ``whole``."""
    needed = window(end + 1, component.span)
    lacking = np.flatnonzero(~whole[needed : end + 1])
    is_bound = end < len(whole) and component.span != SPAN_UNKNOWN and lacking.size
    runs = _runs_alike(np.where(here, -1, reasons.astype(np.int64)))
    return ComponentExplanation(
        component.name,
        tuple((start, stop) for why, start, stop in runs if why < 0),
        window(end, component.span),
        needed + int(lacking[0]) if is_bound else None,
        tuple(MissingRun(component.name, start, stop, MissReason(why)) for why, start, stop in runs if why >= 0),
    )


def _losses(
    components: Sequence[Component], held: Sequence[Pages], whys: Sequence[Reasons], end: int
) -> Iterator[MissingRun]:
    """Yield the component to blame for each page after ``end``: a window up to where Full goes, then Full."""
    pages = len(held[0])
    full_end = pages if held[0].all() else int(np.argmin(held[0]))
    for component, whole, reasons in zip(components, held, whys, strict=True):
        start = window(full_end, component.span)
        lacking = np.flatnonzero(~whole[start:full_end])
        if full_end > end and component.span != SPAN_UNKNOWN and lacking.size:
            yield MissingRun(component.name, end, full_end, MissReason(reasons[start + lacking[-1]]))
            break
    if full_end < pages:  # what lies behind may be held; it is missed for this page
        yield MissingRun(components[0].name, full_end, pages, MissReason(whys[0][full_end]))


def _end(components: Sequence[Component], held: Sequence[Pages]) -> int:
    known = [number for number, component in enumerate(components) if component.span != SPAN_UNKNOWN]
    spans, lacking = [components[number].span for number in known], [~held[number] for number in known]
    return last_end(restorable_ends(spans, lacking, 0, len(held[0]), [0] * len(known)))


def _runs_alike(values: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return each run of equal values: its value, start and end."""
    bounds = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(int(values[start]), start, end) for start, end in pairwise(bounds) if start < end]
