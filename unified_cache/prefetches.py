"""Prefetch: what storage adds to a prompt, read to the host, and used whatever came of it.

                 0            known_end     host_full_end   full_end                 end       pages_count
    Full         |---- on the host -----------|-- copied ------|======= read ==========|.............|
    windows            |- w -|                           |copied|     |= w =|     |= w =|
                     of known_end                        before     of an end     of the
                     (pinned)                            full_end   in between    longest end

A page that the device holds is copied from there, as by a backup, so that the host's Full prefix stays without a hole;
storage is asked for the rest. Pages are read in the order of the prompt, all pools of a page together, with the windows
of the ends in between at which the prompt can be resumed too: wherever it ends early, what came is a prefix.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.controller import Operation, OperationState, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, FetchJob, ProbeJob
from unified_cache.controller.operation import Job, Steps, WaitFor
from unified_cache.errors import CacheError, RankError, StorageError
from unified_cache.forgotten import Cause
from unified_cache.ledger import HostReservation, Ledger
from unified_cache.memory import PageMemory
from unified_cache.page import PageKey, Prompt
from unified_cache.pool import PageCopies, PageNumbers, Pages, Slots, Tier
from unified_cache.ranks import RankGroup, held_by_all, true_for_all
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Lock, Match
from unified_cache.window import needed_pages, restorable_ends, window, window_counts

__all__ = ["PrefetchProgress", "Prefetches"]

READS_MAX = 4
"""Times that one prefetch reads: again only where pages that storage said it had did not come, for what they leave."""

ENDS_BETWEEN_MAX = 64
"""Ends in between, at most, whose windows one prefetch reads: evenly apart, so one that ends early loses little."""


@dataclass(frozen=True, slots=True)
class PrefetchProgress:
    """Progress of a prefetch under way, as seen by this rank."""

    gained_pages: int
    """Pages by which the prompt could be resumed further, had the prefetch ended now."""
    expected_pages: int
    """Pages by which it can be resumed further once all has come."""


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
    to_copy: Sequence[Pages]
    """On the device alone."""
    to_read: Sequence[Pages]
    """On neither, nor found missing in storage, and of use for a longer resume."""

    @property
    def page_numbers(self) -> list[PageNumbers]:
        """Numbers of the pages ``to_read``, ascending."""
        return [np.flatnonzero(pages) for pages in self.to_read]

    def reads(self, ends: Sequence[int]) -> list[PageNumbers]:
        """Return by component the pages to read for a resume at any of ``ends``, ascending."""
        needed = (needed_pages(ends, span, 0, len(held)) for span, held in zip(self.spans, self.held, strict=True))
        return [np.flatnonzero(pages & mask) for pages, mask in zip(self.to_read, needed, strict=True)]

    def copies(self, end: int) -> bool:
        """Tell whether the device holds a page that a resume at ``end`` needs and the host lacks."""
        return any(pages[window(end, span) : end].any() for pages, span in zip(self.to_copy, self.spans, strict=True))

    def ends(self, coming: Sequence[Pages]) -> Pages:
        """Tell for each end after ``known_end`` whether it can be resumed from once these pages have come."""
        holes = [~(held | pages) for held, pages in zip(self.held, coming, strict=True)]
        ends = restorable_ends(self.spans, holes, 0, len(holes[0]), [0 for _ in self.spans])
        return ends[self.known_end :]

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


@dataclass(frozen=True, slots=True)
class FetchUnderWay:
    """A prefetch that reads."""

    missing: MissingPages
    plan: FetchPlan
    job: FetchJob

    def progress(self) -> PrefetchProgress:
        """Look at what has come by now."""
        coming = [np.zeros(len(held), np.bool_) for held in self.missing.held]
        for mask, pages, arrived in zip(coming, self.plan.reads, self.job.arrived, strict=True):
            mask[pages[arrived]] = True
        return PrefetchProgress(_last(self.missing.ends(coming)), self.plan.end - self.missing.known_end)


class Prefetches:
    """Prefetches over one ledger and one memory."""

    __slots__ = (
        "_fetching",
        "_host_pages_left",
        "_ledger",
        "_memory",
        "_ranks",
        "_traffic",
        "_under_way",
    )

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        host_pages_max: int,
        ranks: RankGroup,
        traffic: TrafficCounts,
    ) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time."""
        self._ledger = ledger
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._host_pages_left = host_pages_max
        self._fetching = FetchedPages(len(ledger.layout.components))
        self._under_way: dict[Operation, FetchUnderWay] = {}

    def prefetch(self, prompt: Prompt, storage: StorageTier, worth_pages: int) -> Steps:
        """Read from storage what memory lacks for the longest resume that both together allow, and graft what came.

        Each rank says at which ends it could resume; the last that all could, and that there is room for, is read for.
        Ends that add fewer than ``worth_pages`` are not worth it. What came is kept however the reading ends, Full
        pages also without a window to resume from; where a page that storage said it had did not come, what is left is
        read for. Prefetches are single flight: while another one fetches any of these pages, this one waits, and then
        looks again at what is still missing. Returns the pages by which the prompt can be resumed further, whoever has
        brought them.
        """
        tree = self._ledger.tree
        first_end = tree.match(prompt).host_end
        lost = [np.zeros(prompt.pages_count, np.bool_) for _ in self._ledger.layout.components]
        reads_left = READS_MAX
        while reads_left:
            missing = self._missing(prompt, lost)
            if missing.known_end + worth_pages > prompt.pages_count:
                break
            with self._pinned(prompt, missing.full_end):
                probe = ProbeJob(storage, prompt, missing.page_numbers)
                operation = yield probe
            missing = self._missing(prompt, lost)  # others may have brought or evicted some of it meanwhile
            ends = self._ranks.agree(missing.ends(_masks(probe.among(missing.page_numbers), missing.to_read)))
            worth_end = missing.known_end + worth_pages
            stored_end = missing.known_end + _last(ends)
            if stored_end < worth_end:
                break
            plan = self._plan(missing, ends)
            other = self._fetching.find(prompt, missing.reads([stored_end])) or self._fetching.find(prompt, plan.reads)
            if other is not None:
                yield WaitFor(other)
                continue
            if plan.end < worth_end:
                break
            reads_left -= 1
            missed = yield from self._fetch(operation, prompt, storage, missing, plan)
            reached = tree.match(prompt).host_end >= plan.end
            if reached or operation.is_stopping or not any(len(pages) for pages in missed):
                break
            for mask, pages in zip(lost, missed, strict=True):
                mask[pages] = True
        return max(tree.match(prompt).host_end - first_end, 0)

    def progress(self, operation: Operation) -> PrefetchProgress | None:
        """Return the progress of a prefetch; None while it reads nothing, or if it is over or no prefetch."""
        fetch = self._under_way.get(operation)
        return None if fetch is None or operation.state is not OperationState.RUNNING else fetch.progress()

    def _missing(self, prompt: Prompt, lost: Sequence[Pages]) -> MissingPages:
        """Look at what memory has of a prompt, and what it lacks for any longer resume."""
        tree = self._ledger.tree
        found = tree.match(prompt)
        spans = [component.span for component in self._ledger.layout.components]
        held, to_copy, to_read = [], [], []
        for component, span in enumerate(spans):
            on_host, on_device = np.zeros((2, prompt.pages_count), np.bool_)
            on_host[: found.tree_end] = tree.slots(found, Tier.HOST, component, 0, found.tree_end) >= 0
            on_device[: found.tree_end] = tree.slots(found, Tier.DEVICE, component, 0, found.tree_end) >= 0
            held.append(on_host | on_device)
            to_copy.append(on_device & ~on_host)
            to_read.append(~(on_host | on_device | lost[component]))
            to_read[component][: window(found.host_end + 1, span)] = False
        return MissingPages(found, spans, found.host_end, int(held[0].sum()), held, to_copy, to_read)

    def _plan(self, missing: MissingPages, ends: Pages) -> FetchPlan:
        """Choose the last of ``ends`` that the host has room for, and earlier ones that are worth their windows.

        Each page to come takes a slot, and each that is there and gets pinned one of what could be evicted; the windows
        of ``known_end`` stay pinned too, so that a prefetch that fails takes nothing away.
        """
        known_end, full_end = missing.known_end, missing.full_end
        numbers = np.arange(known_end + 1, known_end + 1 + len(ends))
        anchors = np.minimum(numbers, full_end)
        fits = ends.copy()
        rooms: list[npt.NDArray[np.int64]] = []
        for component, span in enumerate(missing.spans):
            pinned = self._ledger.tree.evictable_mask(missing.found, Tier.HOST, component)[:full_end]
            known = slice(window(known_end, span), known_end)
            room = self._ledger.available_pages(Tier.HOST, component) - np.count_nonzero(pinned[known])
            pinned[known] = False
            reads = window_counts(missing.to_read[component], span)[numbers]
            if component == 0:
                fits &= reads <= self._host_pages_left
            rooms.append(room - reads - window_counts(pinned | missing.to_copy[component][:full_end], span)[anchors])
            fits &= rooms[component] >= 0
        length = _last(fits)
        if not length:
            return FetchPlan(known_end, copies=False, reads=missing.reads([]))
        end = known_end + length
        left = [int(room[length - 1]) for room in rooms]
        between = self._ends_between(missing, ends[: length - 1], end, left)
        return FetchPlan(end, missing.copies(end), missing.reads([end, *between]))

    def _ends_between(self, missing: MissingPages, ends: Pages, end: int, rooms: list[int]) -> list[int]:
        """Choose of the ends before ``end`` those whose windows are read too, for a prefetch that ends early.

        Last first: one is chosen if its windows have no more bytes than the pages of Full between it and the one chosen
        before, which it would save, and if there is room for them.
        """
        page_bytes = [sum(pool.page_bytes for pool in each.pools) for each in self._ledger.layout.components]
        before = [np.concatenate([[0], np.cumsum(pages)]) for pages in missing.to_read]
        windowed = range(1, len(missing.spans))
        apart_pages = max(1, (end - missing.known_end) // ENDS_BETWEEN_MAX)
        earlier = np.flatnonzero(ends) + missing.known_end + 1
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
            last = _last(is_worth)
            if not last:
                break
            rooms = [room - int(pages[last - 1]) for room, pages in zip(rooms, extra, strict=True)]
            end = int(earlier[last - 1])
            chosen.append(end)
        return chosen

    def _fetch(
        self, operation: Operation, prompt: Prompt, storage: StorageTier, missing: MissingPages, plan: FetchPlan
    ) -> Generator[Job | WaitFor, Operation, list[PageNumbers]]:
        """Bring what a plan says and graft what came; return by component the pages that did not."""
        anchor = missing.anchor(plan.end)
        with (
            self._fetching.marked(prompt, plan.reads, operation),
            self._pinned(prompt, missing.known_end),
            self._pinned(prompt, anchor),
        ):
            if plan.copies:
                yield from self._copy(prompt, storage, anchor)
            with (
                self._budgeted(len(plan.reads[0])),
                self._ledger.reserving(Tier.HOST, [len(pages) for pages in plan.reads]) as held,
            ):
                staging = held_by_all(self._ranks, held)
                if staging is None:
                    return []
                moved = enumerate(zip(plan.reads, staging.slots, strict=True))
                parts = [PageCopies(component, pages, slots, slots) for component, (pages, slots) in moved]
                fetch = FetchJob(storage, prompt, parts)
                failure: CacheError | None = None
                clears_count = self._ledger.stored.clears_count
                changes = self._ledger.changes
                since = changes.evictions_count
                self._under_way[operation] = FetchUnderWay(missing, plan, fetch)
                try:
                    yield fetch
                except (StorageError, RankError) as error:  # what came before it is as good as ever
                    failure = error
                finally:
                    del self._under_way[operation]
                arrived = true_for_all(self._ranks, fetch.arrived)
                grafted = self._graft(
                    prompt, staging, [part.where(mask) for part, mask in zip(parts, arrived, strict=True)]
                )
                self._remember(prompt, parts, arrived, fetch)
                if clears_count == self._ledger.stored.clears_count:
                    for part in grafted:
                        self._ledger.stored.add(part.component, part.target)
                        if changes.is_watched:
                            changes.note_stored(part.component, prompt, part.pages, since)
                if failure is not None:
                    raise failure
                return [part.pages[~mask] for part, mask in zip(parts, arrived, strict=True)]

    def _remember(self, prompt: Prompt, parts: Sequence[PageCopies], arrived: Sequence[Pages], fetch: FetchJob) -> None:
        """Remember what storage had of the pages that were read."""
        for part, came, flawed in zip(parts, arrived, fetch.flawed, strict=True):
            self._ledger.fates.note_stored(part.component, prompt, part.pages[came], Cause.STORED)
            self._ledger.fates.note_stored(part.component, prompt, part.pages[flawed], Cause.FLAWED)

    def _copy(self, prompt: Prompt, storage: StorageTier, end: int) -> Generator[Job | WaitFor, Operation, None]:
        """Copy to the host what it lacks of the first ``end`` pages and the device holds, as a backup does."""
        with self._ledger.moving(self._ledger.tree.match(prompt), end, Tier.DEVICE, Tier.HOST) as held:
            moving = held_by_all(self._ranks, held)
            if moving is not None and moving.parts:
                layout = self._ledger.layout
                yield BackupJob(self._memory, layout, storage.owners, prompt, moving.parts, is_urgent=True)
                self._traffic.add(TransferKind.BACKUP, moving.publish())

    def _graft(self, prompt: Prompt, staging: HostReservation, came: Sequence[PageCopies]) -> Sequence[PageCopies]:
        """Put what came into the tree: Full as far as it continues the host's prefix, the rest where Full is.

        Returns what that is.
        """
        tree = self._ledger.tree
        full_end = tree.full_end(tree.match(prompt), Tier.HOST)
        new = came[0].pages[came[0].pages >= full_end]
        full_end += int(np.count_nonzero(new == full_end + np.arange(len(new))))
        kept = [part.where(part.pages < full_end) for part in came]
        if not any(len(part) for part in kept):
            return ()
        start = min(int(part.pages[0]) for part in kept if len(part))
        end = max(int(part.pages[-1]) + 1 for part in kept if len(part))
        slots: list[Slots] = []
        for part in kept:
            given = np.full(end - start, -1, np.int32)
            given[part.pages - start] = part.target
            slots.append(given)
        staging.insert(prompt.head(end), start, slots)
        self._traffic.add(TransferKind.PREFETCH, kept)
        return kept

    def _pinned(self, prompt: Prompt, end: int) -> AbstractContextManager[Lock]:
        """Keep what a resume of a prompt at ``end`` needs on the host, and the place of what the host lacks of it."""
        return self._ledger.pinned(self._ledger.tree.match(prompt), end, Tier.HOST)

    @contextmanager
    def _budgeted(self, pages: int) -> Iterator[None]:
        """Reserve host pages out of the budget of prefetches, for the length of a ``with`` block."""
        self._host_pages_left -= pages
        try:
            yield
        finally:
            self._host_pages_left += pages


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
    def marked(self, prompt: Prompt, wanted: Sequence[PageNumbers], operation: Operation) -> Iterator[None]:
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


def _masks(chosen: Sequence[Pages], pages: Sequence[Pages]) -> list[Pages]:
    """Return by component ``pages`` without those that are not chosen; ``chosen[c]`` says it of each that is True."""
    masks = [each.copy() for each in pages]
    for mask, kept in zip(masks, chosen, strict=True):
        mask[mask] = kept
    return masks


def _last(ends: Pages) -> int:
    """Return how many pages the last end takes that is True, counted from where ``ends`` begin; 0 if there is none."""
    found = np.flatnonzero(ends)
    return int(found[-1]) + 1 if found.size else 0
