"""Explanations of a prompt's hit: how far each tier and component goes, and why what is missing is missing.

A silent hit ratio of 0 % is most often a near match: another salt, another adapter, another dtype, another generation.
``UnifiedCache.explain`` looks at a cache as it is now; the command line asks a store alone, without torch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np

from unified_cache.core.config import WritePolicy
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, ModelLayout, Pages, all_pages
from unified_cache.core.seal import Label
from unified_cache.core.window import last_end, restorable_ends, window
from unified_cache.storage_backends.manifest import Description, described_by
from unified_cache.storage_backends.protocol import Answer, Store

ALIKE_MAX = 64
"""Other names of the same tokens that a store is asked for at most."""

_StoredUnder = tuple[Prompt, bytes, str, tuple[str, ...]]
"""Another name that a store may have a prompt's pages under: owner and pool, and what it has otherwise."""


def stored_pages(
    storage: Store, layout: ModelLayout, owners: Mapping[str, bytes], prompt: Prompt
) -> list[Pages] | None:
    """Ask a store, in one call, which pages it has of every pool, by component; None where it does not say.

    ``owners`` names by pool whose pages the prompt's own are.
    """
    pools = [[pool.name for pool in component.pools if pool.page_bytes] for component in layout.components]
    labels = [Label(owners[name], key, name) for names in pools for name in names for key in prompt.keys]
    answers = storage.exists(labels)
    if Answer.UNAVAILABLE in answers and Answer.HIT not in answers:
        return None
    hits = np.array([answer is Answer.HIT for answer in answers], np.bool_)
    rows = iter(hits.reshape(sum(map(len, pools)), prompt.pages_count))
    present: list[Pages] = []
    for names in pools:  # one without objects has all that Full has, and Full all
        without = present[0].copy() if present else all_pages(prompt.pages_count)
        present.append(np.logical_and.reduce([next(rows) for _ in names]) if names else without)
    return present


@dataclass(frozen=True, slots=True)
class NearMatch:
    """The same tokens under another name, and how many pages there are of them."""

    place: str
    """memory or storage."""
    pages: int
    differs: tuple[str, ...]
    """What the other name has otherwise, as in ``cache_salt`` or ``dtype (float8 there, bfloat16 here)``."""

    @property
    def text(self) -> str:
        """The match in words."""
        pages = pages_text(self.pages)
        return f"{self.place} has {pages} of the same tokens under another {', '.join(self.differs)}"


def pages_text(pages: int) -> str:
    """Return a number of pages in words."""
    return "1 page" if pages == 1 else f"{pages:,} pages"


def near_in_store(
    storage: Store,
    prompt: Prompt,
    here: Description,
    owners: Mapping[str, bytes],
    alike: Iterable[Prompt] = (),
) -> list[NearMatch]:
    """Ask a store for a prompt's tokens under other identities and namespaces; nothing where it does not answer.

    ``alike`` are the same tokens in other namespaces that are known; that without a name is always asked for.
    """
    pool = next((pool.name for pool in here.layout.components[0].pools if pool.page_bytes), None)
    if pool is None:
        return []  # a store has no first page of a prompt that only windows are kept of
    named = {other.root: other for other in alike}
    if prompt.root and not prompt.first:
        named[b""] = Prompt(prompt.tokens, prompt.page_size, b"", media=prompt.media)
    others: list[_StoredUnder] = [(other, owners[pool], pool, prompt.differences(other)) for other in named.values()]
    try:
        for digest, manifest in (storage.manifests() or {}).items():
            if digest in owners.values() or manifest is None:
                continue
            with suppress(StorageError):  # nobody knows what its pages are
                there = described_by(manifest)
                pools = [each.name for each in there.layout.components[0].pools if each.page_bytes]
                if pools and there.layout.page_size == prompt.page_size:
                    others.append((prompt, digest, pools[0], here.differences(there)))
        return list(_asked(storage, [other for other in others[:ALIKE_MAX] if other[0].pages_count]))
    except StorageError:
        return []


def _asked(storage: Store, others: Sequence[_StoredUnder]) -> Iterator[NearMatch]:
    firsts = storage.exists([Label(owner, prompt.keys[0], pool) for prompt, owner, pool, _ in others])
    for (prompt, owner, pool, differs), answer in zip(others, firsts, strict=True):
        if answer is Answer.HIT:
            answers = storage.exists([Label(owner, key, pool) for key in prompt.keys])
            pages = next((page for page, each in enumerate(answers) if each is not Answer.HIT), len(answers))
            yield NearMatch("storage", max(pages, 1), differs)


LINE_COLUMNS = 48
"""Characters of a line at most; a longer prompt has several pages in each."""


class MissReason(Enum):
    """Reason why a page is missed, in words for people; JSON has its name."""

    IN_NO_TIER = "in no tier: never computed here, or gone since"
    NOT_KEPT = "not kept: windows and states are kept where prompts end and branch"
    NOT_FETCHED = "held by a slower tier, and not brought here"
    STORE_UNAVAILABLE = "the store is not available now"
    NOT_IN_STORE = "not in the store"
    """Asked of a store alone."""
    TOO_LONG = "longer than the device can hold"
    PART_OF_PAGE = "part of a page, behind the last whole one"


@dataclass(frozen=True, slots=True)
class MissingRun:
    """Pages [start, end) that are missing for one reason, and the component to blame."""

    component: str
    start: int
    end: int
    why: MissReason


@dataclass(frozen=True, slots=True)
class ComponentExplanation:
    """Pages of a prompt that one component holds on one tier alone."""

    component: str
    held: tuple[tuple[int, int], ...]
    """Runs [start, end) of pages."""
    window_start: int
    """First page that a resume at the tier's end needs of this component."""
    next_page: int | None
    """First page that it lacks, on this tier and those above it, for one page more to be resumed; None for none."""


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
        policy = "" if self.write is None else f"; write policy {self.write.value}"
        lines = [f"{pages_text(self.end)} of {self.pages:,} can be resumed ({self.page_size} tokens each{policy})"]
        width = max((len(each.component) for tier in self.tiers for each in tier.components), default=0)
        for tier in self.tiers:
            bound = [each for each in tier.components if each.next_page is not None]
            lacking = ", ".join(f"{each.component} lacks page {each.next_page}" for each in bound)
            lines.append(f"{tier.tier}: {pages_text(tier.end)}{'; for one more, ' if lacking else ''}{lacking}")
            for each in tier.components:
                drawn = _drawn(each.held, (each.window_start, tier.end), self.pages)
                lines.append(f"  {each.component:{width}}  |{drawn}|")
        lines += [f"missed: [{run.start}, {run.end}) for {run.component}, {run.why.value}" for run in self.losses]
        return "\n".join([*lines, *(f"near match: {near.text}" for near in self.near)])


def _as_json(fields: list[tuple[str, object]]) -> dict[str, object]:
    """Return the fields of a dataclass as JSON has them."""
    return {name: value.name.lower() if isinstance(value, Enum) else value for name, value in fields}


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


def explanation_of(
    layout: ModelLayout,
    pages: int,
    tiers: Mapping[str, Sequence[Pages] | None],
    near: Sequence[NearMatch],
    write: WritePolicy | None = None,
) -> Explanation:
    """Return the explanation of a prompt of so many pages; no ``write`` for a store alone.

    ``tiers`` has, fastest first, what each holds of the prompt by component; None of a store that does not say.
    """
    components = layout.components
    whole = [np.zeros(pages, np.bool_) for _ in components]
    explained: list[TierExplanation] = []
    is_known = True
    for name, held in tiers.items():
        is_known = held is not None
        here = [np.zeros(pages, np.bool_) for _ in components] if held is None else held
        whole = [above | below for above, below in zip(whole, here, strict=True)]
        end = _end(components, whole)
        rows = tuple(_component(end, *row) for row in zip(components, here, whole, strict=True))
        explained.append(TierExplanation(name, end, rows))
    absent = MissReason.NOT_IN_STORE if write is None else MissReason.IN_NO_TIER
    if not is_known:
        absent = MissReason.STORE_UNAVAILABLE
    has_full = is_known and any(pool.page_bytes for pool in components[0].pools)
    kept = MissReason.NOT_KEPT if has_full else absent  # a store has every page of a Full without bytes
    end = _end(components, whole)
    losses = tuple(_losses(components, whole, end, absent, kept))
    return Explanation(pages, layout.page_size, end, tuple(explained), losses, tuple(near), write)


def _component(end: int, component: Component, here: Pages, whole: Pages) -> ComponentExplanation:
    """Explain a component that holds ``here`` on a tier, and together with those above it ``whole``."""
    needed = window(end + 1, component.span)
    lacking = np.flatnonzero(~whole[needed : end + 1])
    edges = np.flatnonzero(np.diff(here, prepend=False, append=False)).tolist()
    return ComponentExplanation(
        component.name,
        tuple(zip(edges[::2], edges[1::2], strict=True)),
        window(end, component.span),
        needed + int(lacking[0]) if end < len(whole) and lacking.size else None,
    )


def _losses(
    components: Sequence[Component], whole: Sequence[Pages], end: int, absent: MissReason, kept: MissReason
) -> Iterator[MissingRun]:
    """Yield the component to blame for each page after ``end``: a window up to where Full goes, then Full."""
    pages = len(whole[0])
    full_end = pages if whole[0].all() else int(np.argmin(whole[0]))
    for component, held in zip(components, whole, strict=True):
        is_whole = held[window(full_end, component.span) : full_end].all()
        if full_end > end and not is_whole:
            yield MissingRun(component.name, end, full_end, kept)
            break
    if full_end < pages:  # what lies behind may be held; it is missed for this page
        yield MissingRun(components[0].name, full_end, pages, absent)


def _end(components: Sequence[Component], held: Sequence[Pages]) -> int:
    spans, lacking = [component.span for component in components], [~pages for pages in held]
    return last_end(restorable_ends(spans, lacking, len(held[0])))
