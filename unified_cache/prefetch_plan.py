"""Plan of a prefetch: which pages of a prompt memory lacks, and which of them to read for which end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.controller import Operation, OperationState
from unified_cache.controller.jobs import batch_pages
from unified_cache.ledger import Ledger
from unified_cache.page import PageKey, Prompt
from unified_cache.pool import PageNumbers, Pages, Tier, numbers_of
from unified_cache.tree import Match
from unified_cache.window import needed_pages, restorable_ends, window, window_counts

__all__ = ["FetchPlan", "FetchPlanner", "FetchedPages", "MissingPages", "last_end"]

ENDS_BETWEEN_MAX = 64
"""Ends in between, at most, whose windows one prefetch reads: evenly apart, so one that ends early loses little."""


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Pages of a prompt by component, each a mask over all its pages, and where what there is of it ends."""

    found: Match
    spans: Sequence[int]
    known_end: int
    """Pages that can be resumed from without storage."""
    full_end: int
    """Pages of Full on either tier. What is read of Full goes on from there."""
    held: Sequence[Pages]
    """On the host or on the device."""
    on_device: Sequence[Pages]
    to_copy: Sequence[Pages]
    """On the device alone."""
    to_read: Sequence[Pages]
    """On neither, nor found missing in storage, and of use for a longer resume."""

    @property
    def page_numbers(self) -> list[PageNumbers]:
        """Numbers of the pages ``to_read``, ascending."""
        return [numbers_of(pages) for pages in self.to_read]

    def reads(self, ends: Sequence[int]) -> list[PageNumbers]:
        """Return by component the pages to read for a resume at any of ``ends``, ascending."""
        needed = (needed_pages(ends, span, 0, len(held)) for span, held in zip(self.spans, self.held, strict=True))
        return [numbers_of(pages & mask) for pages, mask in zip(self.to_read, needed, strict=True)]

    def copies(self, end: int) -> bool:
        """Tell whether the device holds a page that a resume at ``end`` needs and the host lacks."""
        return any(pages[window(end, span) : end].any() for pages, span in zip(self.to_copy, self.spans, strict=True))

    def ends(self, coming: Sequence[Pages]) -> Pages:
        """Tell for each end after ``known_end`` whether it can be resumed from once these pages have come."""
        holes = [~(held | pages) for held, pages in zip(self.held, coming, strict=True)]
        ends = restorable_ends(self.spans, holes, 0, len(holes[0]), [0 for _ in self.spans])
        return ends[self.known_end :]

    def stored_ends(self, stored: Sequence[Pages]) -> Pages:
        """Tell what ``ends`` does of what storage has; ``stored[c]`` says that of each page of ``to_read[c]``."""
        if not any(np.count_nonzero(pages) for pages in stored):  # as mostly: there is no end beyond what is known
            return np.zeros(len(self.held[0]) - self.known_end, np.bool_)
        return self.ends(_masks_of(stored, self.to_read))

    def anchor(self, end: int) -> int:
        """Return how far memory holds Full of the pages before ``end``."""
        return min(end, self.full_end)


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Pages that one prefetch reads, and the end that it reads them for."""

    end: int
    copies: bool
    """Whether the device holds some that the host lacks."""
    reads: Sequence[PageNumbers]
    """By component, ascending."""
    tier: Tier = Tier.HOST
    """Where they go: to the device, through the host, where the host has no room for them."""


class FetchPlanner:
    """Chooses what prefetches read, by what the host has room for and what is worth its time."""

    __slots__ = ("_batch_pages", "_ledger", "host_pages_left")

    def __init__(self, ledger: Ledger, host_pages_max: int) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time."""
        self._ledger = ledger
        self.host_pages_left = host_pages_max
        self._batch_pages = batch_pages(ledger.layout)

    def plan(self, missing: MissingPages, ends: Pages) -> FetchPlan:
        """Choose the last of ``ends`` that the host has room for, and earlier ones that are worth their windows.

        Each page to come takes a slot, and each that is there and gets pinned one of what could be evicted; the windows
        of ``known_end`` stay pinned too, so that a prefetch that fails takes nothing away.
        """
        known_end = missing.known_end
        fits, rooms = self._fitting(missing, ends)
        length = last_end(fits)
        end = known_end + length
        if not length:
            return FetchPlan(known_end, copies=False, reads=missing.reads([]))
        left = [int(room[length - 1]) for room in rooms]
        between = self._ends_between(missing, ends[: length - 1], end, left)
        return FetchPlan(end, missing.copies(end), missing.reads([end, *between]))

    def plan_through(self, missing: MissingPages, ends: Pages, plan: FetchPlan) -> FetchPlan:
        """Choose the last of ``ends`` that the device has room for, if that is longer than a plan for the host."""
        numbers = np.arange(missing.known_end + 1, missing.known_end + 1 + len(ends))
        fits = ends.copy()
        for component, span in enumerate(missing.spans):
            takes = ~missing.on_device[component]
            evictable = self._ledger.tree.evictable_mask(missing.found, Tier.DEVICE, component)
            takes[: len(evictable)] |= evictable
            known = slice(window(missing.known_end, span), missing.known_end)
            room = self._ledger.available_pages(Tier.DEVICE, component) - int(np.count_nonzero(takes[known]))
            takes[known] = False
            fits &= window_counts(takes, span)[numbers] <= room
        end = missing.known_end + last_end(fits)
        return FetchPlan(end, copies=False, reads=missing.reads([end]), tier=Tier.DEVICE) if end > plan.end else plan

    def piece_end(self, plan: FetchPlan, start: int) -> int:
        """Return the end of the piece from page ``start`` on that the host has room for now; ``start`` if for none."""
        end = plan.end
        for component, pages in enumerate(plan.reads):
            left = pages[pages >= start]
            room = self._ledger.available_pages(Tier.HOST, component)
            room = min(room, self._batch_pages, *([self.host_pages_left] if component == 0 else []))
            if len(left) > room:
                end = min(end, int(left[room]))
        return end

    def _fitting(self, missing: MissingPages, ends: Pages) -> tuple[Pages, list[PageNumbers]]:
        """Return which of ``ends`` the host has room for, and by component the room that each of them leaves."""
        known_end, full_end = missing.known_end, missing.full_end
        numbers = np.arange(known_end + 1, known_end + 1 + len(ends))
        anchors = np.minimum(numbers, full_end)
        fits = ends.copy()
        rooms: list[PageNumbers] = []
        for component, span in enumerate(missing.spans):
            pinned = self._ledger.tree.evictable_mask(missing.found, Tier.HOST, component)[:full_end]
            known = slice(window(known_end, span), known_end)
            room = self._ledger.available_pages(Tier.HOST, component) - np.count_nonzero(pinned[known])
            pinned[known] = False
            reads = window_counts(missing.to_read[component], span)[numbers]
            if component == 0:
                fits &= reads <= self.host_pages_left
            rooms.append(room - reads - window_counts(pinned | missing.to_copy[component][:full_end], span)[anchors])
            fits &= rooms[component] >= 0
        return fits, rooms

    def trial(self, missing: MissingPages, plan: FetchPlan, pages_count: int) -> FetchPlan:
        """Choose the first pages of a plan, to read them for their time; no window, nothing to resume from."""
        first, *others = plan.reads
        count = min(pages_count, self.host_pages_left)
        return FetchPlan(missing.known_end, copies=False, reads=[first[:count], *(pages[:0] for pages in others)])

    def _ends_between(self, missing: MissingPages, ends: Pages, end: int, rooms: list[int]) -> list[int]:
        """Choose of the ends before ``end`` those whose windows are read too, for a prefetch that ends early.

        Last first: one is chosen if its windows have no more bytes than the pages of Full between it and the one chosen
        before, which it would save, and if there is room for them.
        """
        page_bytes = [sum(pool.page_bytes for pool in each.pools) for each in self._ledger.layout.components]
        before = [np.concatenate([[0], np.cumsum(pages)]) for pages in missing.to_read]
        windowed = range(1, len(missing.spans))
        apart_pages = max(1, (end - missing.known_end) // ENDS_BETWEEN_MAX)
        earlier = numbers_of(ends) + missing.known_end + 1
        chosen: list[int] = []
        while windowed and (earlier := earlier[earlier <= end - apart_pages]).size:
            extra = [
                before[number][np.minimum(earlier, window(end, span))] - before[number][np.maximum(earlier - span, 0)]
                for number, span in enumerate(missing.spans)
            ]
            is_worth = (before[0][end] - before[0][earlier]) * page_bytes[0] >= sum(
                extra[number] * page_bytes[number] for number in windowed
            )
            for number in windowed:
                is_worth &= extra[number] <= rooms[number]
            last = last_end(is_worth)
            if not last:
                break
            rooms = [room - int(pages[last - 1]) for room, pages in zip(rooms, extra, strict=True)]
            end = int(earlier[last - 1])
            chosen.append(end)
        return chosen


class FetchedPages:
    """Pages on their way from storage: which operation fetches each."""

    __slots__ = ("_by_component",)

    def __init__(self, components_count: int) -> None:
        self._by_component: list[dict[PageKey, Operation]] = [{} for _ in range(components_count)]

    def find(self, prompt: Prompt, wanted: Sequence[PageNumbers]) -> Operation | None:
        """Return an operation that fetches any of a prompt's pages, ``wanted[c]`` of component ``c``; None if none.

        One that has failed or was cancelled brings nothing any more, though it may still hold its slots.
        """
        keys = prompt.keys
        for fetched, pages in zip(self._by_component, wanted, strict=True):
            for page in pages.tolist() if fetched else ():
                operation = fetched.get(keys[page])
                if operation is not None and operation.state is OperationState.RUNNING:
                    return operation
        return None

    @contextmanager
    def marked(self, prompt: Prompt, wanted: Sequence[npt.NDArray[np.int64]], operation: Operation) -> Iterator[None]:
        """Mark pages as fetched by an operation, for the length of a ``with`` block."""
        keys = prompt.keys
        marked = [[keys[page] for page in pages.tolist()] for pages in wanted]
        for fetched, ours in zip(self._by_component, marked, strict=True):
            fetched.update(dict.fromkeys(ours, operation))
        try:
            yield
        finally:
            for fetched, ours in zip(self._by_component, marked, strict=True):
                for key in ours:
                    if fetched.get(key) is operation:  # where it has failed, another may have taken over
                        del fetched[key]


def _masks_of(chosen: Sequence[Pages], pages: Sequence[Pages]) -> list[Pages]:
    """Return by component ``pages`` without those that are not chosen; ``chosen[c]`` says it of each that is True."""
    masks = [each.copy() for each in pages]
    for mask, kept in zip(masks, chosen, strict=True):
        mask[mask] = kept
    return masks


def last_end(ends: Pages) -> int:
    """Return how many pages the last end takes that is True, counted from where ``ends`` begin; 0 if there is none."""
    found = numbers_of(ends)
    return int(found[-1]) + 1 if found.size else 0
