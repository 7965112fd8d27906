"""Steps of a prefetch: look what memory lacks, ask storage for it, copy what the device has, graft."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from unified_cache.controller import Operation, OperationState, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, FetchJob, LoadJob, ProbeJob
from unified_cache.controller.operation import Job
from unified_cache.estimates import TransferSpeeds
from unified_cache.ledger import Ledger, Reservation, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.miss_reason import MissReason
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, Pages, Slots, Tier, all_pages, no_slots
from unified_cache.prefetch_plan import FetchedPages, FetchPlanner, MissingPages, last_end
from unified_cache.ranks import RankGroup, held_by_all
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Lock
from unified_cache.window import window

__all__ = ["FetchWatch", "PrefetchSteps"]


class FetchWatch:
    """Look at a cache before pages are read: what happened to it since decides what is noted of those that came."""

    __slots__ = ("clears_count", "evictions_count")

    def __init__(self, ledger: Ledger) -> None:
        self.clears_count = ledger.stored.clears_count
        self.evictions_count = ledger.changes.evictions_count


class PrefetchSteps:
    """Pins, marks, the budget of host pages and the steps of prefetches, over one ledger and one memory."""

    __slots__ = ("_traffic", "fetching", "ledger", "memory", "planner", "ranks", "speeds")

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
        self.ledger = ledger
        self.memory = memory
        self.ranks = ranks
        self.speeds = speeds
        self.planner = FetchPlanner(ledger, host_pages_max)
        self.fetching = FetchedPages(len(ledger.layout.components))
        """Pages on their way from storage, and which operation fetches each."""
        self._traffic = traffic

    # ---- before anything is read -----------------------------------------------------------------------------

    def missing(self, prompt: Prompt, lost: Sequence[Pages] | None) -> MissingPages:
        """Look at what memory has of a prompt, and what it lacks for any longer resume, but for what is ``lost``.

        Makes the prompt recent, unless ``lost`` is None: then nobody asks for it.
        """
        tree = self.ledger.tree
        found = tree.peek(prompt) if lost is None else tree.match(prompt)
        spans = [component.span for component in self.ledger.layout.components]
        held, device, to_copy, to_read = [], [], [], []
        for component, span in enumerate(spans):
            on_host = tree.held_pages(found, Tier.HOST, component)
            on_device = tree.held_pages(found, Tier.DEVICE, component)
            either = on_host | on_device
            held.append(either)
            device.append(on_device)
            to_copy.append(either ^ on_host)
            to_read.append(~either if lost is None else ~(either | lost[component]))
            to_read[component][: window(found.host_end + 1, span)] = False
        full_end = int(np.count_nonzero(held[0]))
        return MissingPages(found, spans, found.host_end, full_end, held, device, to_copy, to_read)

    def nothing_lost(self, prompt: Prompt) -> list[Pages]:
        """Return by component a mask of a prompt's pages that storage has been found to lack: of none yet."""
        return [np.zeros(prompt.pages_count, np.bool_) for _ in self.ledger.layout.components]

    def ask(
        self, prompt: Prompt, storage: StorageTier, worth_pages: int, lost: Sequence[Pages]
    ) -> Generator[Job, Operation, tuple[Operation, MissingPages, Pages] | None]:
        """Ask storage for what memory lacks of a prompt; return at which ends all ranks could resume with it.

        Each end is counted from ``known_end`` on. None if none of them adds ``worth_pages``, or the operation is over.
        """
        missing = self.missing(prompt, lost)
        if missing.known_end + worth_pages > prompt.pages_count:
            return None
        with self.pinned(prompt, missing.full_end):
            probe = ProbeJob(storage, prompt, missing.page_numbers)
            operation = yield probe
        if operation.state is not OperationState.RUNNING:
            return None
        stored = probe.present
        if self.ledger.tree.peek(prompt) is not missing.found:  # others have brought or evicted some of it meanwhile
            missing = self.missing(prompt, lost)
            stored = probe.among(missing.page_numbers)
        ends = self.ranks.agree(missing.stored_ends(stored))
        return (operation, missing, ends) if last_end(ends) >= worth_pages else None

    # ---- while it is read ------------------------------------------------------------------------------------

    def pinned(self, prompt: Prompt, end: int, tier: Tier = Tier.HOST) -> AbstractContextManager[Lock]:
        """Keep what a resume of a prompt at ``end`` needs on a tier, and the place of what that lacks of it."""
        return self.ledger.pinned(self.ledger.tree.peek(prompt), end, tier)

    @contextmanager
    def budgeted(self, pages: int) -> Iterator[None]:
        """Reserve host pages out of the budget of prefetches, for the length of a ``with`` block."""
        self.planner.host_pages_left -= pages
        try:
            yield
        finally:
            self.planner.host_pages_left += pages

    def left_s(self, operation: Operation) -> float:
        """Return the seconds until the deadline of an operation."""
        if operation.answer_s == math.inf:
            return math.inf
        return max(operation.answer_s - self.speeds.clock(), 0.0)

    def copy(
        self, prompt: Prompt, storage: StorageTier, moving: AbstractContextManager[TierTransfer | None]
    ) -> Generator[Job, Operation, None]:
        """Copy to the host what it lacks of a prompt and the device holds, as a backup does."""
        with moving as held:
            transfer = held_by_all(self.ranks, held)
            if transfer is not None and transfer.parts:
                layout = self.ledger.layout
                yield BackupJob(self.memory, layout, storage.owners, prompt, transfer.parts, is_urgent=True)
                self._traffic.add(TransferKind.BACKUP, transfer.publish())

    def bring_up(self, moving: AbstractContextManager[TierTransfer | None]) -> Generator[Job, Operation, None]:
        """Copy to the device what it lacks of a prompt and the host holds, as a load does."""
        with moving as held:
            transfer = held_by_all(self.ranks, held)
            if transfer is not None and transfer.parts:
                yield self._load(transfer.parts)
                self._traffic.add(TransferKind.LOAD, transfer.publish())

    def copy_up(
        self, prompt: Prompt, came: Sequence[PageCopies], target: Reservation, watch: FetchWatch
    ) -> Generator[Job, Operation, None]:
        """Copy what came into host slots on to the device, and put it into the tree there."""
        parts = [
            PageCopies(part.component, part.pages, part.target, slots)
            for part, slots in zip(came, target.slots, strict=True)
        ]
        yield self._load([part for part in parts if len(part)])
        self.keep(prompt, target, parts, [all_pages(len(part)) for part in parts], watch)
        self._traffic.add(TransferKind.LOAD, parts)

    def _load(self, parts: Sequence[PageCopies]) -> LoadJob:
        return LoadJob(self.memory, self.ledger.layout, parts)

    # ---- what came -------------------------------------------------------------------------------------------

    def keep(
        self,
        prompt: Prompt,
        staging: Reservation,
        parts: Sequence[PageCopies],
        arrived: Sequence[Pages],
        watch: FetchWatch,
    ) -> None:
        """Put what came of ``parts`` into the tree, on the tier of the reservation, and note that storage has it."""
        grafted = self._graft(prompt, staging, [part.where(mask) for part, mask in zip(parts, arrived, strict=True)])
        if watch.clears_count != self.ledger.stored.clears_count:
            return
        changes = self.ledger.changes
        stored = self.ledger.stored if staging.tier is Tier.HOST else self.ledger.stored_device
        for part in grafted:
            stored.add(part.component, part.target)
            if changes.is_watched:
                changes.note_stored(part.component, prompt, part.pages, watch.evictions_count)

    def remember(self, prompt: Prompt, parts: Sequence[PageCopies], arrived: Sequence[Pages], fetch: FetchJob) -> None:
        """Remember what storage had of the pages that were read."""
        for part, came, flawed in zip(parts, arrived, fetch.flawed, strict=True):
            self.ledger.fates.note_stored(part.component, prompt, part.pages[came], MissReason.STORE_LOST)
            self.ledger.fates.note_stored(part.component, prompt, part.pages[flawed], MissReason.FLAWED)

    def _graft(self, prompt: Prompt, staging: Reservation, came: Sequence[PageCopies]) -> Sequence[PageCopies]:
        """Put what came into the tree: Full as far as it continues the tier's prefix, the rest where Full is.

        Returns what that is.
        """
        tree = self.ledger.tree
        full_end = tree.full_end(tree.match(prompt), staging.tier)
        new = came[0].pages[came[0].pages >= full_end]
        full_end += int(np.count_nonzero(new == full_end + np.arange(len(new))))
        kept = [part.where(part.pages < full_end) for part in came]
        if not any(len(part) for part in kept):
            return ()
        start = min(int(part.pages[0]) for part in kept if len(part))
        end = max(int(part.pages[-1]) + 1 for part in kept if len(part))
        slots: list[Slots] = []
        for part in kept:
            given = no_slots(end - start)
            given[part.pages - start] = part.target
            slots.append(given)
        staging.insert(prompt.head(end), start, slots)
        self._traffic.add(TransferKind.PREFETCH, kept)
        return kept
