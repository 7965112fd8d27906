"""Tails: what storage has of a prompt is read from its end backward, while the engine computes the head.

                  known_end            computed         landed.start                     end
    Full  |-- held ---|==== computed =====>|               |<======== read ===============|
    windows, states                                                            |== read ==|  first

Causal attention makes the pages of a tail right without the head being there: they were computed with all of it. But a
page enters the tree only onto its prefix, so until head and tail meet, the tail waits in host slots of the operation
that reads it. Once the engine has inserted the head up to ``LandedTail.start``, ``join`` copies it to the host and
grafts the tail onto it: an operation of its own, so that no call which a store has not returned from holds it up.

Windows and states are needed at the end alone. They come first, and of the head the engine's pages of Full are of use.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from unified_cache.controller import LeftAlone, LeftAloneReason, Operation, StorageTier, TransferKind
from unified_cache.controller.jobs import FetchJob, TailBatches
from unified_cache.controller.operation import Job, Steps, WaitFor
from unified_cache.ledger import Reservation
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, Pages, Tier, all_pages
from unified_cache.prefetch_plan import FetchPlan, MissingPages
from unified_cache.prefetch_steps import FetchWatch, PrefetchSteps
from unified_cache.ranks import held_by_all, largest_of_all, true_for_all

__all__ = ["LandedTail", "Tails"]


@dataclass(frozen=True, slots=True)
class LandedTail:
    """Pages [start, end) of a prompt have come from storage, on every rank; ``start`` falls while more come.

    With a head of ``start`` pages in the tree the prompt can be resumed at ``end``. That is where memory ends already
    once nothing is missing, and ``end`` as long as it lacks a window.
    """

    start: int
    end: int


@dataclass(slots=True, eq=False)
class TailUnderWay:
    """A tail that is read, or has been, and waits for its head."""

    prompt: Prompt
    storage: StorageTier
    known_end: int
    end: int
    parts: Sequence[PageCopies]
    job: FetchJob
    staging: Reservation
    watch: FetchWatch
    began_s: float

    def start(self, arrived: Sequence[Pages]) -> int:
        """Return where the tail begins that has arrived, if that much of each part has."""
        full, *windows = arrived
        if not all(mask.all() for mask in windows):
            return self.end
        missed = np.flatnonzero(~full)
        return int(self.parts[0].pages[missed[-1]]) + 1 if missed.size else self.known_end

    def came(self, arrived: Sequence[Pages]) -> list[PageCopies]:
        """Return by component what has arrived of the tail: of Full what no page is missing after."""
        start = self.start(arrived)
        if start == self.end:
            return [part.where(np.zeros(len(part), np.bool_)) for part in self.parts]
        full, *windows = self.parts
        return [full.where(full.pages >= start), *windows]


class Tails:
    """Tails of prompts that are read backward, by the operations that read them."""

    __slots__ = ("_left_count", "_shared", "_under_way")

    def __init__(self, shared: PrefetchSteps) -> None:
        """Take the steps that they share with other prefetches."""
        self._shared = shared
        self._under_way: dict[Operation, TailUnderWay] = {}
        self._left_count = 0
        """Times that all tails were given up."""

    def read(self, prompt: Prompt, storage: StorageTier, worth_pages: int) -> Steps:
        """Read backward what memory lacks for the longest resume that both together allow, and wait to be joined.

        It ends once it is joined or left, and its store is in no call; pages that nobody has joined by then are lost.
        Returns the pages of the tail.
        """
        shared, left_count = self._shared, self._left_count
        while True:
            answer = yield from shared.ask(prompt, storage, worth_pages, shared.nothing_lost(prompt))
            if answer is None or left_count != self._left_count:
                return 0
            operation, missing, ends = answer
            plan = shared.planner.longest(missing, ends)
            if plan.end < missing.known_end + worth_pages:
                return 0
            other = shared.fetching.find(prompt, plan.reads)
            if other is None:
                return (yield from self._fetch(operation, prompt, storage, missing, plan))
            yield WaitFor(other)

    def landed(self, operation: Operation) -> LandedTail | None:
        """Return how much of a tail has come; None while nothing is read, or if nothing can be joined any more.

        One agreement, where there are several ranks.
        """
        tail = self._under_way.get(operation)
        if tail is None:
            return None
        (start,) = largest_of_all(self._shared.ranks, [float(tail.start(tail.job.arrived))])
        return LandedTail(int(start), tail.end)

    def leave(self, operation: Operation) -> None:
        """Give up what has come of a tail; nothing if it is none, or has been joined."""
        tail = self._under_way.pop(operation, None)
        if tail is not None:
            operation.followers.discard(tail)
            operation.stop()

    def leave_all(self) -> None:
        """Give up what has come of all tails, and those of which nothing is read yet."""
        self._left_count += 1
        for operation in list(self._under_way):
            self.leave(operation)

    def computed(self, operation: Operation) -> LeftAlone | None:
        """Return what of a tail's prompt was computed before storage came to it; None if nothing, or if it is none."""
        landed = self.landed(operation)
        tail = self._under_way.get(operation)
        if landed is None or tail is None or not tail.known_end < landed.start < landed.end:
            return None
        shared = self._shared
        taken_s = shared.speeds.legs[TransferKind.PREFETCH].clock() - tail.began_s
        load_s = taken_s / (landed.end - landed.start) * (landed.start - tail.known_end)
        reason, size = LeftAloneReason.COMPUTING_IS_FASTER, tail.prompt.page_size
        return LeftAlone(TransferKind.PREFETCH, tail.known_end, landed.start, size, reason, load_s, taken_s)

    def join(self, operation: Operation) -> Steps:
        """Put a tail onto its head: copy that to the host and graft what has come. No more of it is read.

        Returns the pages by which the prompt can be resumed further; 0 where memory lacks the head. Until then the
        operation that has read it counts as bringing it, so that nobody reads it again.
        """
        tail = self._under_way.pop(operation)
        operation.stop()
        shared, ledger, prompt = self._shared, self._shared.ledger, tail.prompt
        try:
            arrived = true_for_all(shared.ranks, tail.job.arrived)
            came = tail.came(arrived)
            before_end = ledger.tree.match(prompt).host_end
            head_end = int(came[0].pages[0]) if len(came[0]) else tail.end
            if not any(map(len, came)) or head_end > shared.missing(prompt, None).full_end:
                return 0
            with shared.pinned(prompt, head_end), tail.staging.parted([part.target for part in came]) as staging:
                if head_end:
                    head = ledger.saving(ledger.tree.match(prompt), head_end)
                    yield from shared.copy(prompt, tail.storage, head)
                everything = [all_pages(len(part)) for part in came]
                shared.keep(prompt, staging, came, everything, tail.watch)
                return max(ledger.tree.match(prompt).host_end - before_end, 0)
        finally:
            operation.followers.discard(tail)

    def _fetch(
        self, operation: Operation, prompt: Prompt, storage: StorageTier, missing: MissingPages, plan: FetchPlan
    ) -> Generator[Job, Operation, int]:
        """Read what a plan says, and hold it until it is joined or left."""
        shared, ledger = self._shared, self._shared.ledger
        leg = shared.speeds.legs[TransferKind.PREFETCH]
        payload_bytes = shared.speeds.payload_bytes
        counts = [len(pages) for pages in plan.reads]
        with (
            shared.fetching.marked(prompt, plan.reads, operation),
            shared.pinned(prompt, missing.known_end),
            shared.pinned(prompt, missing.anchor(plan.end)),
            shared.budgeted(counts[0]),
            ledger.reserving(Tier.HOST, counts) as held,
        ):
            staging = held_by_all(shared.ranks, held)
            if staging is None:
                return 0
            parts = [
                PageCopies(component, pages, slots, slots)
                for component, (pages, slots) in enumerate(zip(plan.reads, list(staging.slots), strict=True))
            ]
            job = FetchJob(storage, prompt, parts, leg.clock, TailBatches)
            tail = TailUnderWay(
                prompt, storage, missing.known_end, plan.end, parts, job, staging, FetchWatch(ledger), leg.clock()
            )
            self._under_way[operation] = tail
            operation.followers.add(tail)
            try:
                with leg.moving(payload_bytes(counts)) as moved:
                    yield job
                    leg.note(moved, payload_bytes([int(mask.sum()) for mask in job.arrived]), job.ended_s)
            finally:
                self._under_way.pop(operation, None)
                operation.followers.discard(tail)
            shared.remember(prompt, parts, job.arrived, job)
            return plan.end - tail.start(job.arrived)
