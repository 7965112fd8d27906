"""Prefetch: what storage adds to a prompt, read to the host, and used whatever came of it.

                 0            known_end     host_full_end   full_end                 end       pages_count
    Full         |---- on the host -----------|-- copied ------|======= read ==========|.............|
    windows            |- w -|                           |copied|     |= w =|     |= w =|
                     of known_end                        before     of an end     of the
                     (pinned)                            full_end   in between    longest end

A page that the device holds is copied from there, as by a backup, so that the host's Full prefix stays without a hole;
storage is asked for the rest. Pages are read in the order of the prompt, all pools of a page together, with the windows
of the ends in between at which the prompt can be resumed too: wherever it ends early, what came is a prefix.

Pages that the host has no room for go on to the device in pieces, if that has room: each is read into host slots of its
own, copied up, and the slots are given back before the next one. As the ``buffer_only`` host of SGLang.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from unified_cache.controller import (
    LeftAlone,
    LeftOut,
    Operation,
    OperationState,
    StorageTier,
)
from unified_cache.controller.jobs import FetchJob, calls_of
from unified_cache.controller.operation import Job, Steps, WaitFor
from unified_cache.errors import CacheError, RankError, StorageError
from unified_cache.ledger import Reservation
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, PageNumbers, Pages, Tier, all_pages
from unified_cache.prefetch_plan import FetchPlan, MissingPages, last_end
from unified_cache.prefetch_steps import FetchWatch, PrefetchSteps
from unified_cache.ranks import held_by_all, true_for_all

__all__ = ["PrefetchProgress", "Prefetches"]

READS_MAX = 4
"""Times that one prefetch reads: again only where pages that storage said it had did not come, for what they leave."""


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
    staging: Reservation | None = None
    """The host slots that it has, of which the job under way may fill only some."""

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
    """Prefetches in the order of the prompt."""

    __slots__ = ("_shared", "_under_way")

    def __init__(self, shared: PrefetchSteps) -> None:
        """Take their steps."""
        self._shared = shared
        self._under_way: dict[Operation, FetchUnderWay] = {}

    def prefetch(self, prompt: Prompt, storage: StorageTier, worth_pages: int) -> Steps:
        """Read from storage what memory lacks for the longest resume that both together allow, and graft what came.

        Each rank says at which ends it could resume; of those that all could, and that there is room for, the last is
        read for, or none where computing is faster (``TransferPolicy``). Ends that add fewer than
        ``worth_pages`` are not worth it. What came is kept however the reading ends, Full pages also without a window
        to resume from; where a page that storage said it had did not come, what is left is read for. Prefetches are
        single flight: while another one fetches any of these pages, this one waits, and then looks again at what is
        still missing. An end that the host has no room for is read for on the device, if that has. Returns the pages by
        which the prompt can be resumed further, whoever has brought them.
        """
        shared = self._shared
        tree, speeds = shared.ledger.tree, shared.speeds
        first_end = tree.peek(prompt).host_end
        lost = shared.nothing_lost(prompt)
        lacks_room = 0
        operation: Operation | None = None
        reads_left = READS_MAX
        while reads_left:
            answer = yield from shared.ask(prompt, storage, worth_pages, lost)
            if answer is None:
                break
            operation, missing, ends = answer
            worth_end = missing.known_end + worth_pages
            stored_end = missing.known_end + last_end(ends)
            plan = shared.planner.plan(missing, ends)
            if plan.end < stored_end:
                plan = shared.planner.plan_through(missing, ends, plan)
            counts = [len(pages) for pages in plan.reads]
            left_alone = operation.left_alone = speeds.choose(storage, missing.known_end, plan.end, counts)
            if left_alone is not None:
                operation.tally.asked = max(operation.tally.asked, missing.known_end - first_end)
                speeds.left_alone_tokens += left_alone.tokens
                if speeds.is_trial_due():
                    operation.tell_done(max(missing.known_end - first_end, 0))
                    trial = shared.planner.trial(missing, plan, speeds.trial_pages(left_alone))
                    yield from self._fetch(operation, prompt, storage, missing, trial)
                break
            operation.tally.asked = max(operation.tally.asked, stored_end - first_end)
            lacks_room = stored_end - plan.end
            fetching = shared.fetching
            other = fetching.find(prompt, missing.reads([stored_end])) or fetching.find(prompt, plan.reads)
            if other is not None:
                yield WaitFor(other)
                continue
            if plan.end < worth_end:
                break
            reads_left -= 1
            operation.pages_count = max(missing.known_end - first_end, 0)
            bring = self._fetch_through if plan.tier is Tier.DEVICE else self._fetch
            missed = yield from bring(operation, prompt, storage, missing, plan)
            reached = tree.match(prompt).host_end >= plan.end
            if reached or operation.is_stopping or not any(len(pages) for pages in missed):
                break
            for mask, pages in zip(lost, missed, strict=True):
                mask[pages] = True
        gained = max(tree.match(prompt).host_end - first_end, 0)
        if operation is not None and operation.state is OperationState.RUNNING:
            _count(operation, gained, lacks_room)
        return gained

    def progress(self, operation: Operation) -> PrefetchProgress | None:
        """Return the progress of a prefetch; None while it reads nothing, or if it is over or no prefetch."""
        fetch = self._under_way.get(operation)
        return None if fetch is None or operation.state is not OperationState.RUNNING else fetch.progress()

    def left_alone(self, prompt: Prompt, storage: StorageTier, stored_end: int) -> LeftAlone | None:
        """Return what this rank would leave alone of a prompt that storage has up to an end. Changes nothing."""
        missing = self._shared.missing(prompt, None)
        counts = [len(pages) for pages in missing.reads([stored_end])]
        return self._shared.speeds.look(storage, missing.known_end, stored_end, counts)

    def _fetch(
        self, operation: Operation, prompt: Prompt, storage: StorageTier, missing: MissingPages, plan: FetchPlan
    ) -> Generator[Job | WaitFor, Operation, list[PageNumbers]]:
        """Bring what a plan says and graft what came; return by component the pages that did not."""
        shared, ledger = self._shared, self._shared.ledger
        anchor = missing.anchor(plan.end)
        gained_before = operation.pages_count
        fetch = FetchUnderWay.begun(missing, plan)
        with (
            shared.fetching.marked(prompt, plan.reads, operation),
            shared.pinned(prompt, missing.known_end),
            shared.pinned(prompt, anchor),
        ):
            if plan.copies:
                found = ledger.tree.match(prompt)
                yield from shared.copy(prompt, storage, ledger.moving(found, anchor, Tier.DEVICE, Tier.HOST))
            with (
                shared.budgeted(len(plan.reads[0])),
                ledger.reserving(Tier.HOST, [len(pages) for pages in plan.reads]) as held,
            ):
                staging = held_by_all(shared.ranks, held)
                if staging is None:
                    return []
                slots = list(staging.slots)
                fetch.staging = staging
                self._under_way[operation] = fetch
                try:
                    for chosen in self._slices(operation, storage, plan):
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
                        gained = ledger.tree.match(prompt).host_end - missing.known_end
                        operation.gain(gained_before + max(gained, 0))
                finally:
                    del self._under_way[operation]
        return [pages[~mask] for pages, mask in zip(plan.reads, fetch.arrived, strict=True)]

    def _fetch_through(
        self, operation: Operation, prompt: Prompt, storage: StorageTier, missing: MissingPages, plan: FetchPlan
    ) -> Generator[Job | WaitFor, Operation, list[PageNumbers]]:
        """Bring what a plan says to the device piece by piece; return by component the pages that did not come.

        The device pages of the prompt stay pinned meanwhile, those of each piece from its insert on.
        """
        shared, ledger = self._shared, self._shared.ledger
        anchor = missing.anchor(plan.end)
        gained_before = operation.pages_count
        fetch = FetchUnderWay.begun(missing, plan)
        with ExitStack() as pins:
            pins.enter_context(shared.fetching.marked(prompt, plan.reads, operation))
            for known in sorted({missing.known_end, anchor} - {0}):
                found = ledger.tree.match(prompt)
                yield from shared.bring_up(ledger.moving(found, known, Tier.HOST, Tier.DEVICE))
                pins.enter_context(shared.pinned(prompt, known, Tier.DEVICE))
            self._under_way[operation] = fetch
            pins.callback(self._under_way.pop, operation)
            start = min(int(pages[0]) for pages in plan.reads if len(pages))
            while (end := shared.planner.piece_end(plan, start)) > start:
                fetch.chosen = [(start <= pages) & (pages < end) for pages in plan.reads]
                if not (yield from self._fetch_piece(prompt, storage, fetch)):
                    break
                found = ledger.tree.match(prompt)
                gained = found.host_end - missing.known_end
                operation.gain(gained_before + max(gained, 0))
                if operation.is_stopping:
                    break
                pins.enter_context(
                    shared.pinned(prompt, min(end, ledger.tree.full_end(found, Tier.DEVICE)), Tier.DEVICE)
                )
                start = end
        return [pages[~mask] for pages, mask in zip(plan.reads, fetch.arrived, strict=True)]

    def _fetch_piece(
        self, prompt: Prompt, storage: StorageTier, fetch: FetchUnderWay
    ) -> Generator[Job, Operation, bool]:
        """Read the chosen pages into host slots and copy them up; return whether all of them are on the device."""
        shared, ledger = self._shared, self._shared.ledger
        chosen = [pages[mask] for pages, mask in zip(fetch.plan.reads, fetch.chosen, strict=True)]
        with (
            shared.budgeted(len(chosen[0])),
            ledger.reserving(Tier.HOST, [len(pages) for pages in chosen]) as held,
        ):
            staging = held_by_all(shared.ranks, held)
            if staging is None:
                return False
            parts = [
                PageCopies(component, pages, slots, slots)
                for component, (pages, slots) in enumerate(zip(chosen, staging.slots, strict=True))
            ]
            fetch.staging = staging
            watch = FetchWatch(ledger)
            arrived, failure = yield from self._read(prompt, storage, fetch, parts)
            came = [part.where(mask) for part, mask in zip(parts, arrived, strict=True)]
            staging.keep([part.target for part in came])
            with ledger.reserving(Tier.DEVICE, [len(part) for part in came]) as on_device:
                target = held_by_all(shared.ranks, on_device)
                if target is not None:
                    yield from shared.copy_up(prompt, came, target, watch)
            if failure is not None:
                raise failure
            return target is not None and all(mask.all() for mask in arrived)

    def _slices(self, operation: Operation, storage: StorageTier, plan: FetchPlan) -> Iterator[Sequence[Pages]]:
        """Yield by component the pages of ``plan.reads`` to read next: all, or before a deadline some after the other.

        In the order of the prompt, as many as ``TransferSpeeds.pages_to_read`` says.
        """
        if operation.answer_s == math.inf:
            yield [all_pages(len(pages)) for pages in plan.reads]
            return
        shared = self._shared
        left = np.unique(np.concatenate(plan.reads))
        counts = [len(pages) for pages in plan.reads]
        payload_bytes = shared.speeds.payload_bytes(counts)
        pages_count, calls = len(left), calls_of(storage.objects_count(counts), payload_bytes)
        while len(left):
            call_pages, page_bytes = max(1, int(pages_count / max(calls, 1.0))), payload_bytes / pages_count
            left_s, wait_s = shared.left_s(operation), operation.answer_s - operation.started_s
            count = shared.speeds.pages_to_read(len(left), call_pages, page_bytes, left_s, wait_s)
            of_slice, left = left[:count], left[count:]
            yield [(of_slice[0] <= pages) & (pages <= of_slice[-1]) for pages in plan.reads]

    def _fetch_slice(
        self,
        prompt: Prompt,
        storage: StorageTier,
        staging: Reservation,
        fetch: FetchUnderWay,
        parts: Sequence[PageCopies],
    ) -> Generator[Job, Operation, None]:
        """Read some pages of a prefetch into host slots and graft what came."""
        watch = FetchWatch(self._shared.ledger)
        arrived, failure = yield from self._read(prompt, storage, fetch, parts)
        self._shared.keep(prompt, staging, parts, arrived, watch)
        if failure is not None:
            raise failure

    def _read(
        self, prompt: Prompt, storage: StorageTier, fetch: FetchUnderWay, parts: Sequence[PageCopies]
    ) -> Generator[Job, Operation, tuple[list[Pages], CacheError | None]]:
        """Read the chosen pages of a prefetch; return by part which came on all ranks, and why others did not."""
        shared = self._shared
        speeds = shared.speeds
        fetch.job = job = FetchJob(storage, prompt, parts, speeds.clock)
        failure: CacheError | None = None
        began_s = speeds.clock()
        try:
            yield job
            came_bytes = speeds.payload_bytes([int(mask.sum()) for mask in job.arrived])
            speeds.reads.note(job.calls_count, came_bytes, job.ended_s - began_s)
        except (StorageError, RankError) as error:  # what came before it is as good as ever
            failure = error
        fetch.job = None
        arrived = true_for_all(shared.ranks, job.arrived)
        for mask, chosen, came in zip(fetch.arrived, fetch.chosen, arrived, strict=True):
            mask[chosen] = came
        shared.remember(prompt, parts, arrived, job)
        return arrived, failure


def _count(operation: Operation, gained: int, lacks_room: int) -> None:
    """Count what a prefetch gained, and why it gained no more."""
    tally = operation.tally
    tally.gain(gained)
    left_out = tally.asked - gained
    tally.leave_out(LeftOut.HOST_FULL, min(left_out, lacks_room))
    tally.leave_out(LeftOut.STOPPED if operation.is_stopping else LeftOut.FAILED, max(left_out - lacks_room, 0))
