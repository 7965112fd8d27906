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

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

from unified_cache.controller import LeftAlone, Operation, OperationState, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, FetchJob, ProbeJob
from unified_cache.controller.operation import Job, Steps, WaitFor
from unified_cache.errors import CacheError, RankError, StorageError
from unified_cache.estimates import Candidates, TransferSpeeds
from unified_cache.forgotten import Cause
from unified_cache.ledger import HostReservation, Ledger
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, PageNumbers, Pages, Slots, Tier
from unified_cache.prefetch_plan import FetchedPages, FetchPlan, FetchPlanner, MissingPages, last_end, masks_of
from unified_cache.ranks import RankGroup, held_by_all, true_for_all
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Lock
from unified_cache.window import window

__all__ = ["PrefetchProgress", "Prefetches"]

READS_MAX = 4
"""Times that one prefetch reads: again only where pages that storage said it had did not come, for what they leave."""

SLICES_BY_DEADLINE = 8
"""Parts in which a prefetch reads that is expected to take until its deadline: all but the last come in time."""

SLICE_PAGES_MAX = 64
"""Pages of one part where it is not known how long a page takes; the first has one, and each twice as many."""


@dataclass(frozen=True, slots=True)
class PrefetchProgress:
    """Progress of a prefetch under way, as seen by this rank."""

    gained_pages: int
    """Pages by which the prompt could be resumed further, had the prefetch ended now."""
    expected_pages: int
    """Pages by which it can be resumed further once all has come."""


@dataclass(slots=True)
class FetchUnderWay:
    """A prefetch that reads."""

    missing: MissingPages
    plan: FetchPlan
    arrived: Sequence[Pages]
    """By component: which pages of ``plan.reads`` have come, by the jobs that are over."""
    chosen: Sequence[Pages]
    """By component: which of them the job under way reads."""
    job: FetchJob | None = None

    @classmethod
    def begun(cls, missing: MissingPages, plan: FetchPlan) -> "FetchUnderWay":
        """Return one of which nothing has come."""
        nothing = [np.zeros(len(pages), np.bool_) for pages in plan.reads]
        return cls(missing, plan, nothing, nothing)

    def progress(self) -> PrefetchProgress:
        """Look at what has come by now."""
        coming = [np.zeros(len(held), np.bool_) for held in self.missing.held]
        for mask, pages, arrived in zip(coming, self.plan.reads, self.arrived, strict=True):
            mask[pages[arrived]] = True
        if self.job is not None:
            for mask, pages, chosen, arrived in zip(
                coming, self.plan.reads, self.chosen, self.job.arrived, strict=True
            ):
                mask[pages[chosen][arrived]] = True
        return PrefetchProgress(last_end(self.missing.ends(coming)), self.plan.end - self.missing.known_end)


class Prefetches:
    """Prefetches over one ledger and one memory."""

    __slots__ = ("_fetching", "_ledger", "_memory", "_ranks", "_speeds", "_traffic", "_under_way", "planner")

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        host_pages_max: int,
        ranks: RankGroup,
        traffic: TrafficCounts,
        speeds: TransferSpeeds,
    ) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time."""
        self._ledger = ledger
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._speeds = speeds
        self.planner = FetchPlanner(ledger, host_pages_max, speeds)
        self._fetching = FetchedPages(len(ledger.layout.components))
        self._under_way: dict[Operation, FetchUnderWay] = {}

    def prefetch(self, prompt: Prompt, storage: StorageTier, worth_pages: int) -> Steps:
        """Read from storage what memory lacks for the longest resume that both together allow, and graft what came.

        Each rank says at which ends it could resume; of those that all could, and that there is room for, the last is
        read for, or the one that makes the first token come soonest (``TransferPolicy``). Ends that add fewer than
        ``worth_pages`` are not worth it. What came is kept however the reading ends, Full pages also without a window
        to resume from; where a page that storage said it had did not come, what is left is read for. Prefetches are
        single flight: while another one fetches any of these pages, this one waits, and then looks again at what is
        still missing. Returns the pages by which the prompt can be resumed further, whoever has brought them.
        """
        tree = self._ledger.tree
        first_end = tree.match(prompt).host_end
        lost = [np.zeros(prompt.pages_count, np.bool_) for _ in self._ledger.layout.components]
        left_alone: LeftAlone | None = None
        reads_left = READS_MAX
        while reads_left:
            missing = self._missing(prompt, lost)
            if missing.known_end + worth_pages > prompt.pages_count:
                break
            with self._pinned(prompt, missing.full_end):
                probe = ProbeJob(storage, prompt, missing.page_numbers)
                operation = yield probe
            if operation.state is not OperationState.RUNNING:
                break
            missing = self._missing(prompt, lost)  # others may have brought or evicted some of it meanwhile
            ends = self._ranks.agree(missing.ends(masks_of(probe.among(missing.page_numbers), missing.to_read)))
            worth_end = missing.known_end + worth_pages
            stored_end = missing.known_end + last_end(ends)
            if stored_end < worth_end:
                break
            plan, left_alone = self.planner.plan(missing, ends, self._left_s(operation))
            operation.left_alone = left_alone
            if left_alone is not None and plan.end < worth_end:
                if self._speeds.is_trial_due():
                    operation.tell_done(max(missing.known_end - first_end, 0))
                    trial = self.planner.trial(missing, stored_end, left_alone)
                    yield from self._fetch(operation, prompt, storage, missing, trial)
                break
            other = self._fetching.find(prompt, missing.reads([stored_end])) or self._fetching.find(prompt, plan.reads)
            if other is not None:
                yield WaitFor(other)
                continue
            if plan.end < worth_end:
                break
            reads_left -= 1
            operation.pages_count = max(missing.known_end - first_end, 0)
            missed = yield from self._fetch(operation, prompt, storage, missing, plan)
            reached = tree.match(prompt).host_end >= plan.end
            if reached or operation.is_stopping or not any(len(pages) for pages in missed):
                break
            for mask, pages in zip(lost, missed, strict=True):
                mask[pages] = True
        self._speeds.note(left_alone)
        return max(tree.match(prompt).host_end - first_end, 0)

    def progress(self, operation: Operation) -> PrefetchProgress | None:
        """Return the progress of a prefetch; None while it reads nothing, or if it is over or no prefetch."""
        fetch = self._under_way.get(operation)
        return None if fetch is None or operation.state is not OperationState.RUNNING else fetch.progress()

    def candidates(self, prompt: Prompt, stored_end: int) -> Candidates | None:
        """Return reading nothing of a prompt and all up to an end; None if memory has that. Changes nothing."""
        missing = self._missing(prompt, None)
        if stored_end <= missing.known_end:
            return None
        ends = np.arange(missing.known_end + 1, prompt.pages_count + 1)
        return missing.candidates(ends == stored_end)

    def _missing(self, prompt: Prompt, lost: Sequence[Pages] | None) -> MissingPages:
        """Look at what memory has of a prompt, and what it lacks for any longer resume, but for what is ``lost``.

        Makes the prompt recent, unless ``lost`` is None: then nobody asks for it.
        """
        tree = self._ledger.tree
        found = tree.peek(prompt) if lost is None else tree.match(prompt)
        spans = [component.span for component in self._ledger.layout.components]
        held, device, to_copy, to_read = [], [], [], []
        for component, span in enumerate(spans):
            on_host, on_device = np.zeros((2, prompt.pages_count), np.bool_)
            on_host[: found.tree_end] = tree.slots(found, Tier.HOST, component, 0, found.tree_end) >= 0
            on_device[: found.tree_end] = tree.slots(found, Tier.DEVICE, component, 0, found.tree_end) >= 0
            held.append(on_host | on_device)
            device.append(on_device)
            to_copy.append(on_device & ~on_host)
            to_read.append(~(on_host | on_device) if lost is None else ~(on_host | on_device | lost[component]))
            to_read[component][: window(found.host_end + 1, span)] = False
        return MissingPages(found, spans, found.host_end, int(held[0].sum()), held, device, to_copy, to_read)

    def _fetch(
        self, operation: Operation, prompt: Prompt, storage: StorageTier, missing: MissingPages, plan: FetchPlan
    ) -> Generator[Job | WaitFor, Operation, list[PageNumbers]]:
        """Bring what a plan says and graft what came; return by component the pages that did not."""
        anchor = missing.anchor(plan.end)
        gained_before = operation.pages_count
        fetch = FetchUnderWay.begun(missing, plan)
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
                slots = list(staging.slots)
                self._under_way[operation] = fetch
                try:
                    for chosen in self._slices(operation, plan):
                        fetch.chosen = chosen
                        parts = [
                            PageCopies(component, pages[mask], taken[mask], taken[mask])
                            for component, (pages, taken, mask) in enumerate(
                                zip(plan.reads, slots, chosen, strict=True)
                            )
                        ]
                        yield from self._fetch_slice(prompt, storage, staging, fetch, parts)
                        if operation.is_stopping or operation.answer_s == math.inf:
                            break
                        gained = self._ledger.tree.match(prompt).host_end - missing.known_end
                        operation.pages_count = gained_before + max(gained, 0)
                finally:
                    del self._under_way[operation]
        return [pages[~mask] for pages, mask in zip(plan.reads, fetch.arrived, strict=True)]

    def _slices(self, operation: Operation, plan: FetchPlan) -> Iterator[Sequence[Pages]]:
        """Yield by component the pages of ``plan.reads`` to read next: all, or before a deadline some after the other.

        So many that some parts come in time, by what reading takes, which ranks agree on; in the order of the prompt.
        """
        if operation.answer_s == math.inf:
            yield [np.ones(len(pages), np.bool_) for pages in plan.reads]
            return
        read_s, left_s = self._speeds.read_s([len(pages) for pages in plan.reads], self._left_s(operation))
        numbers = np.unique(np.concatenate(plan.reads))
        is_known = 0 < read_s < math.inf
        count = max(1, int(len(numbers) * left_s / SLICES_BY_DEADLINE / read_s)) if is_known else 1
        start = 0
        while start < len(numbers):
            of_slice = numbers[start : start + count]
            yield [(of_slice[0] <= pages) & (pages <= of_slice[-1]) for pages in plan.reads]
            start += count
            count = count if is_known else min(2 * count, SLICE_PAGES_MAX)

    def _fetch_slice(
        self,
        prompt: Prompt,
        storage: StorageTier,
        staging: HostReservation,
        fetch: FetchUnderWay,
        parts: Sequence[PageCopies],
    ) -> Generator[Job, Operation, None]:
        """Read some pages of a prefetch into host slots and graft what came."""
        leg = self._speeds.legs[TransferKind.PREFETCH]
        fetch.job = job = FetchJob(storage, prompt, parts, leg.clock)
        failure: CacheError | None = None
        clears_count = self._ledger.stored.clears_count
        changes = self._ledger.changes
        since = changes.evictions_count
        with leg.moving(self._speeds.payload_bytes([len(part) for part in parts])) as moved:
            try:
                yield job
                leg.note(moved, self._speeds.payload_bytes([int(mask.sum()) for mask in job.arrived]), job.ended_s)
            except (StorageError, RankError) as error:  # what came before it is as good as ever
                failure = error
        fetch.job = None
        arrived = true_for_all(self._ranks, job.arrived)
        for mask, chosen, came in zip(fetch.arrived, fetch.chosen, arrived, strict=True):
            mask[chosen] = came
        grafted = self._graft(prompt, staging, [part.where(mask) for part, mask in zip(parts, arrived, strict=True)])
        self._remember(prompt, parts, arrived, job)
        if clears_count == self._ledger.stored.clears_count:
            for part in grafted:
                self._ledger.stored.add(part.component, part.target)
                if changes.is_watched:
                    changes.note_stored(part.component, prompt, part.pages, since)
        if failure is not None:
            raise failure

    def _left_s(self, operation: Operation) -> float:
        """Return the seconds until the deadline of an operation."""
        if operation.answer_s == math.inf:
            return math.inf
        return max(operation.answer_s - self._speeds.legs[TransferKind.PREFETCH].clock(), 0.0)

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
        self.planner.host_pages_left -= pages
        try:
            yield
        finally:
            self.planner.host_pages_left += pages
