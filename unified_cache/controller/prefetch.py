"""Prefetch and load: bring pages up to a request, from storage to the host and from the host to the device.

A prefetch keeps the pages that arrived, however it ends:

                 0            known_end     host_full_end   full_end                 end       pages_count
    Full         |---- on the host -----------|-- copied ------|======= read ==========|.............|
    windows            |- w -|                           |copied|     |= w =|     |= w =|
                     of known_end                        before     of an end     of the
                     (pinned)                            full_end   in between    longest end

    probe      find what memory lacks, and ask storage which of it it has; each rank says at which ends it could resume
    choose     the longest end that memory has room for; none where another prefetch reads it
    allocate   pin what memory has, copy to the host what the device alone has, reserve host slots for the rest
    read       in the order of the prompt, all pools of a page together; storage verifies each page
    graft      put the pages that arrived into the tree

A page that the device holds is copied from there, as by a backup, so that Full's prefix on the host has no tombstone.
The windows of the ends in between at which the prompt can be resumed are read too: wherever it ends early, one is left.

Pages that the host has no room for go on to the device in pieces, if that has room: each is read into host slots of its
own, copied up, and the slots are given back before the next one. As the ``buffer_only`` host of SGLang.

A load copies what the host holds to the device, layer by layer, and publishes it there. An engine may read the pages
before they are in the tree: see ``LayerwiseLoad``.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from unified_cache.controller import LayerwiseLoad, LeftOut, PageTally, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, CallSizes, FetchJob, LoadJob, ProbeJob, batch_pages
from unified_cache.controller.ledger import Ledger, Reservation
from unified_cache.controller.memory import PageMemory
from unified_cache.controller.operation import Job, Operation, OperationState, Steps, TrafficCounts, WaitFor
from unified_cache.controller.ranks.group import RankGroup, held_by_all, true_for_all
from unified_cache.core.errors import CacheError
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import PageCopies, PageNumbers, Pages, Slots, Tier, all_pages, no_slots, numbers_of
from unified_cache.core.window import last_end, needed_pages, restorable_ends, window, window_counts
from unified_cache.tree import Match
from unified_cache.tree.transfer import Transfer

READS_MAX = 4
"""Times that one prefetch reads: again only where pages that storage said it had did not come, for what they leave."""

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
    to_copy: Sequence[Pages]
    """On the device alone."""
    to_read: Sequence[Pages]
    """On neither, nor found missing in storage, and of use for a longer resume."""

    def reads(self, ends: Sequence[int]) -> list[PageNumbers]:
        """Return by component the pages to read for a resume at any of ``ends``, ascending."""
        reads: list[PageNumbers] = []
        for pages, span in zip(self.to_read, self.spans, strict=True):
            reads.append(numbers_of(pages & needed_pages(ends, span, 0, len(pages))))
        return reads

    def stored_ends(self, stored: Sequence[Pages]) -> Pages:
        """Return a mask of the ends after ``known_end`` that can be resumed from with what storage has.

        ``stored[c]`` says of each page of ``to_read[c]`` whether it has that.
        """
        pages_count = len(self.held[0])
        if not any(map(np.count_nonzero, stored)):  # as mostly: there is no end beyond what is known
            return np.zeros(pages_count - self.known_end, np.bool_)
        tombstones: list[Pages] = []
        for held, pages, kept in zip(self.held, self.to_read, stored, strict=True):
            lacks = ~held
            lacks[pages] = ~kept
            tombstones.append(lacks)
        return restorable_ends(self.spans, tombstones, pages_count)[self.known_end :]


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


@dataclass(slots=True, eq=False)
class FetchUnderWay:
    """A prefetch that reads what a plan says."""

    operation: Operation
    prompt: Prompt
    storage: StorageTier
    first_end: int
    """Pages that could be resumed from when the prefetch began."""
    missing: MissingPages
    plan: FetchPlan
    call_sizes: CallSizes | None
    """Objects of each call; None without a deadline."""
    lost: Sequence[Pages]
    """By component: pages of the prompt that storage said it had and did not give, whichever plan they were in."""
    has_missed: bool = False
    """Whether any page of this plan did not come."""
    job: FetchJob | None = None
    reading: Sequence[PageCopies] = ()
    """What the job under way reads, by component."""
    staging: Reservation | None = None
    """The host slots that it has for that."""
    clears_count: int = 0
    """Clears of storage before the last read: pages that came since another one are not known to be stored."""
    evictions_count: int = 0
    """Evictions before the last read."""


class Prefetches:
    """Prefetches of one cache: they share a budget of host pages, and no two read one page."""

    __slots__ = (
        "_batch_pages",
        "_clock",
        "_fetched",
        "_ledger",
        "_memory",
        "_ranks",
        "_traffic",
        "_under_way",
        "host_pages_left",
    )

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        host_pages_max: int,
        ranks: RankGroup,
        traffic: TrafficCounts,
        clock: Callable[[], float],
    ) -> None:
        """Fill at most ``host_pages_max`` host pages of the first component at a time; ``clock`` times calls."""
        self._ledger = ledger
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._clock = clock
        self._batch_pages = batch_pages(ledger.layout)
        self._fetched: list[dict[PageKey, Operation]] = [{} for _ in ledger.layout.components]
        """By component: pages on their way from storage, and the operation that fetches each."""
        self._under_way: dict[Operation, FetchUnderWay] = {}
        self.host_pages_left = host_pages_max

    def prefetch(self, found: Match, storage: StorageTier, worth_pages: int) -> Steps:
        """Read the pages that memory lacks for the longest resume with storage, and graft those that arrive.

        Ends that add fewer than ``worth_pages`` are not read for. Where a page that storage said it had did not come,
        what is left is read for. Prefetches are single flight: while another one fetches any of these pages, or holds
        the room for them, this one waits, and then looks again at what is still missing. Returns the pages by which the
        prompt can be resumed further, whichever transfer has brought them.
        """
        tree, prompt = self._ledger.tree, found.prompt
        first_end = found.host_end
        lost = [np.zeros(prompt.pages_count, np.bool_) for _ in self._ledger.layout.components]
        lacks_room = 0
        operation: Operation | None = None
        reads_left = READS_MAX
        while reads_left and (operation is None or not operation.is_stopping):
            if not found.is_as_found():
                found = tree.match(prompt)
            answer = yield from self._probe(found, storage, worth_pages, lost)
            if answer is None:
                break
            operation, missing, ends, probe_s = answer
            stored_end = missing.known_end + len(ends)
            plan = self._plan_to_host(missing, ends)
            if plan.end < stored_end:
                plan = self._plan_to_device(missing, ends, plan)
            sizes = CallSizes.within(operation, probe_s, self._clock)
            fetch = FetchUnderWay(operation, prompt, storage, first_end, missing, plan, sizes, lost)
            operation.tally.asked = max(operation.tally.asked, stored_end - first_end)
            lacks_room = stored_end - plan.end
            other = self._fetching(prompt, missing, stored_end, plan)
            if other is not None:
                yield WaitFor(other)
                continue
            operation.pages_count = max(missing.known_end - first_end, 0)
            if plan.end >= missing.known_end + worth_pages:
                bring = self._bring_to_device if plan.tier is Tier.DEVICE else self._bring_to_host
                had_room = yield from bring(fetch)
                reads_left -= fetch.has_missed
                found = tree.match(prompt)
                if found.host_end >= plan.end or operation.is_stopping or (had_room and not fetch.has_missed):
                    break
                lacks_room = 0 if had_room else stored_end - found.host_end
                if had_room:
                    continue
            holder = next((each for each in self._under_way if each.state is OperationState.RUNNING), None)
            if holder is None or operation.is_stopping:
                break
            yield WaitFor(holder)
        if not found.is_as_found():
            found = tree.match(prompt)
        gained = max(found.host_end - first_end, 0)
        if operation is not None and operation.state is OperationState.RUNNING:
            _explain_rest(operation, gained, lacks_room, is_lost=any(map(np.any, lost)))
        return gained

    def keep(self, operation: Operation) -> None:
        """Graft what the job of a prefetch has read into the host by now, on all ranks, and count what that gains."""
        fetch = self._under_way.get(operation)
        if fetch is None:
            return
        if fetch.job is not None and fetch.staging is not None and fetch.plan.tier is Tier.HOST:
            self._graft(fetch, fetch.staging, fetch.reading, true_for_all(self._ranks, fetch.job.whole))
        operation.gain(max(self._ledger.tree.peek(fetch.prompt).host_end - fetch.first_end, 0))

    # ---- probe -----------------------------------------------------------------------------------------------

    def _probe(
        self, found: Match, storage: StorageTier, worth_pages: int, lost: Sequence[Pages]
    ) -> Generator[Job, Operation, tuple[Operation, MissingPages, Pages, float] | None]:
        """Ask storage for what memory lacks; return the ends after ``known_end`` at which all ranks could then resume.

        They go up to the last one. The last value is the seconds that storage took to answer. None if no end adds
        ``worth_pages``, or the operation is over.
        """
        prompt = found.prompt
        missing = self._missing(found, lost)
        if missing.known_end + worth_pages > prompt.pages_count:
            return None
        with self._ledger.pinned(found, missing.full_end, Tier.HOST) if missing.full_end else nullcontext():
            probe = ProbeJob(storage, prompt, list(map(numbers_of, missing.to_read)), self._clock)
            operation = yield probe
        if operation.state is not OperationState.RUNNING:
            return None
        stored = probe.present
        if not found.is_as_found():  # others have brought or evicted some of it meanwhile
            missing = self._missing(self._ledger.tree.match(prompt), lost)
            stored = probe.among(list(map(numbers_of, missing.to_read)))
        ends = self._ranks.agree(missing.stored_ends(stored))
        length = last_end(ends)
        return (operation, missing, ends[:length], probe.call_s) if length >= worth_pages else None

    def _missing(self, found: Match, lost: Sequence[Pages]) -> MissingPages:
        """Return what memory lacks for any resume after a match, but for what storage was found to have ``lost``."""
        spans = [component.span for component in self._ledger.layout.components]
        held, to_copy, to_read = [], [], []
        for component, span in enumerate(spans):
            on_host = found.held_pages(Tier.HOST, component)
            either = on_host | found.held_pages(Tier.DEVICE, component)
            held.append(either)
            to_copy.append(either ^ on_host)
            to_read.append(~(either | lost[component]))
            to_read[component][: window(found.host_end + 1, span)] = False
        full_end = int(np.count_nonzero(held[0]))
        return MissingPages(found, spans, found.host_end, full_end, held, to_copy, to_read)

    # ---- choose ----------------------------------------------------------------------------------------------

    def _plan_to_host(self, missing: MissingPages, ends: Pages) -> FetchPlan:
        """Choose the last of ``ends`` that the host has room for, and earlier ones that are worth their windows.

        The windows of ``known_end`` stay pinned, so that a prefetch that fails takes nothing away.
        """
        known_end, full_end = missing.known_end, missing.full_end
        numbers = np.arange(known_end + 1, known_end + 1 + len(ends))
        fits = ends.copy()
        rooms: list[PageNumbers] = []
        for component, span in enumerate(missing.spans):
            pinned = missing.found.evictable_pages(Tier.HOST, component)[:full_end]
            known = slice(window(known_end, span), known_end)
            room = self._ledger.available_pages(Tier.HOST, component) - np.count_nonzero(pinned[known])
            pinned[known] = False
            reads = window_counts(missing.to_read[component], span)[numbers]
            if component == 0:
                fits &= reads <= self.host_pages_left
            held = window_counts(pinned | missing.to_copy[component][:full_end], span)[np.minimum(numbers, full_end)]
            rooms.append(room - reads - held)
            fits &= rooms[component] >= 0
        length = last_end(fits)
        if not length:
            return FetchPlan(known_end, copies=False, reads=missing.reads([]))
        end = known_end + length
        copies = any(map(np.any, missing.to_copy)) and any(
            mask[window(end, span) : end].any() for mask, span in zip(missing.to_copy, missing.spans, strict=True)
        )
        between: list[int] = []
        if len(missing.spans) > 1:
            between = self._ends_between(missing, ends[: length - 1], end, [int(room[length - 1]) for room in rooms])
        return FetchPlan(end, copies, missing.reads([end, *between]))

    def _ends_between(self, missing: MissingPages, ends: Pages, end: int, rooms: list[int]) -> list[int]:
        """Choose of the ends before ``end``, last first, those whose windows are read too, should it end early.

        One is chosen if its windows fit, and have no more bytes than the pages of Full after it that it would save.
        """
        page_bytes = self._traffic.page_bytes
        before = [np.concatenate([[0], np.cumsum(pages)]) for pages in missing.to_read]
        windowed = range(1, len(missing.spans))
        apart_pages = max(1, (end - missing.known_end) // ENDS_BETWEEN_MAX)
        earlier = numbers_of(ends) + missing.known_end + 1
        chosen: list[int] = []
        while (earlier := earlier[earlier <= end - apart_pages]).size:
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

    def _plan_to_device(self, missing: MissingPages, ends: Pages, plan: FetchPlan) -> FetchPlan:
        """Choose the last of ``ends`` that the device has room for, if that is longer than a plan for the host."""
        numbers = np.arange(missing.known_end + 1, missing.known_end + 1 + len(ends))
        fits = ends.copy()
        for component, span in enumerate(missing.spans):
            takes = ~missing.found.held_pages(Tier.DEVICE, component)
            evictable = missing.found.evictable_pages(Tier.DEVICE, component)
            takes[: len(evictable)] |= evictable
            known = slice(window(missing.known_end, span), missing.known_end)
            room = self._ledger.available_pages(Tier.DEVICE, component) - int(np.count_nonzero(takes[known]))
            takes[known] = False
            fits &= window_counts(takes, span)[numbers] <= room
        end = missing.known_end + last_end(fits)
        return FetchPlan(end, copies=False, reads=missing.reads([end]), tier=Tier.DEVICE) if end > plan.end else plan

    # ---- single flight ---------------------------------------------------------------------------------------

    def _fetching(self, prompt: Prompt, missing: MissingPages, stored_end: int, plan: FetchPlan) -> Operation | None:
        """Return a running operation that fetches any page that a resume at ``stored_end`` or a plan needs."""
        if not any(self._fetched):
            return None
        keys = prompt.keys
        for wanted in (missing.reads([stored_end]), plan.reads):
            for fetched, pages in zip(self._fetched, wanted, strict=True):
                for page in pages.tolist():
                    operation = fetched.get(keys[page])
                    if operation is not None and operation.state is OperationState.RUNNING:
                        return operation
        return None

    @contextmanager
    def _marked(self, prompt: Prompt, wanted: Sequence[PageNumbers], operation: Operation) -> Iterator[None]:
        """Mark pages as fetched by an operation during a ``with`` block."""
        keys = prompt.keys
        for fetched, pages in zip(self._fetched, wanted, strict=True):
            for page in pages.tolist():
                fetched[keys[page]] = operation
        try:
            yield
        finally:
            for fetched, pages in zip(self._fetched, wanted, strict=True):
                for page in pages.tolist():
                    if fetched.get(keys[page]) is operation:  # where it has failed, another may have taken over
                        del fetched[keys[page]]

    # ---- allocate --------------------------------------------------------------------------------------------

    def _pinned(self, prompt: Prompt, end: int, tier: Tier) -> AbstractContextManager[object]:
        """Keep what a resume of a prompt at ``end`` needs on a tier, and the place of what that lacks of it."""
        return self._ledger.pinned(self._ledger.tree.peek(prompt), end, tier)

    @contextmanager
    def _reserving(self, counts: Sequence[int]) -> Iterator[Reservation | None]:
        """Reserve host slots by component, out of the budget, in a ``with`` block; None where a rank has no room."""
        self.host_pages_left -= counts[0]
        try:
            with self._ledger.reserving(Tier.HOST, counts) as held:
                yield held_by_all(self._ranks, held)
        finally:
            self.host_pages_left += counts[0]

    def _copy_held(self, fetch: FetchUnderWay, end: int, source: Tier, target: Tier) -> Generator[Job, Operation, None]:
        """Copy what ``target`` lacks of a prompt and ``source`` holds, as a backup or a load does."""
        ledger, prompt = self._ledger, fetch.prompt
        with ledger.moving(ledger.tree.match(prompt), end, source, target) as held:
            moving = held_by_all(self._ranks, held)
            if moving is None or not moving.parts:
                return
            if target is Tier.DEVICE:
                yield LoadJob(self._memory, ledger.layout, moving.parts)
            else:
                owners = fetch.storage.owners
                yield BackupJob(self._memory, ledger.layout, owners, prompt, moving.parts, is_urgent=True)
            kind = TransferKind.LOAD if target is Tier.DEVICE else TransferKind.BACKUP
            self._traffic.add(kind, ledger.publish(moving))

    # ---- read ------------------------------------------------------------------------------------------------

    def _bring_to_host(self, fetch: FetchUnderWay) -> Generator[Job | WaitFor, Operation, bool]:
        """Fetch the pages of a plan and graft those that arrive; return whether there was room for them."""
        operation, prompt, missing, plan = fetch.operation, fetch.prompt, fetch.missing, fetch.plan
        anchor = min(plan.end, missing.full_end)
        with ExitStack() as pins:
            pins.enter_context(self._marked(prompt, plan.reads, operation))
            for end in {missing.known_end, anchor} - {0}:
                pins.enter_context(self._pinned(prompt, end, Tier.HOST))
            if plan.copies:
                yield from self._copy_held(fetch, anchor, Tier.DEVICE, Tier.HOST)
            with self._reserving(list(map(len, plan.reads))) as staging:
                if staging is None:
                    return False
                self._under_way[operation] = fetch
                try:
                    arrived, failure = yield from self._read(fetch, staging, plan.reads)
                finally:
                    del self._under_way[operation]
                self._graft(fetch, staging, fetch.reading, arrived)
                if failure is not None:
                    raise failure
        return True

    def _bring_to_device(self, fetch: FetchUnderWay) -> Generator[Job | WaitFor, Operation, bool]:
        """Bring what a plan says to the device piece by piece; return whether there was room for it."""
        operation, prompt, missing, plan = fetch.operation, fetch.prompt, fetch.missing, fetch.plan
        tree = self._ledger.tree
        gained_before = operation.pages_count
        with ExitStack() as pins:
            pins.enter_context(self._marked(prompt, plan.reads, operation))
            for known in sorted({missing.known_end, min(plan.end, missing.full_end)} - {0}):
                yield from self._copy_held(fetch, known, Tier.HOST, Tier.DEVICE)
                pins.enter_context(self._pinned(prompt, known, Tier.DEVICE))
            self._under_way[operation] = fetch
            pins.callback(self._under_way.pop, operation)
            start = min(int(pages[0]) for pages in plan.reads if len(pages))
            while start < plan.end:
                end = self._piece_end(plan, start)
                if end == start:
                    return False
                piece = [pages[(start <= pages) & (pages < end)] for pages in plan.reads]
                if not (yield from self._bring_piece(fetch, piece)):
                    return False
                if fetch.has_missed:
                    break
                found = tree.match(prompt)
                operation.gain(gained_before + max(found.host_end - missing.known_end, 0))
                if operation.is_stopping:
                    break
                pins.enter_context(self._pinned(prompt, min(end, found.full_end(Tier.DEVICE)), Tier.DEVICE))
                start = end
        return True

    def _piece_end(self, plan: FetchPlan, start: int) -> int:
        """Return the end of the piece from page ``start`` on that the host has room for now; ``start`` if for none."""
        end = plan.end
        for component, pages in enumerate(plan.reads):
            left = pages[pages >= start]
            room = self._ledger.available_pages(Tier.HOST, component)
            room = min(room, self._batch_pages, *([self.host_pages_left] if component == 0 else []))
            if len(left) > room:
                end = min(end, int(left[room]))
        return end

    def _bring_piece(self, fetch: FetchUnderWay, piece: Sequence[PageNumbers]) -> Generator[Job, Operation, bool]:
        """Read pages into host slots and copy up those that arrived; return whether there was room."""
        ledger = self._ledger
        with self._reserving(list(map(len, piece))) as staging:
            if staging is None:
                return False
            arrived, failure = yield from self._read(fetch, staging, piece)
            came = [part.where(mask) for part, mask in zip(fetch.reading, arrived, strict=True)]
            if failure is not None and fetch.operation.error is not None:
                raise failure  # the host has no room for it, and nobody waits for a copy to the device
            staging.keep([part.target for part in came])
            with ledger.reserving(Tier.DEVICE, [len(part) for part in came]) as on_device:
                target = held_by_all(self._ranks, on_device)
                if target is not None:
                    up = [
                        PageCopies(part.component, part.pages, part.target, slots)
                        for part, slots in zip(came, target.slots, strict=True)
                    ]
                    yield LoadJob(self._memory, ledger.layout, [part for part in up if len(part)])
                    self._graft(fetch, target, up, [all_pages(len(part)) for part in up])
                    self._traffic.add(TransferKind.LOAD, up)
            if failure is not None:
                raise failure
            return target is not None

    def _read(
        self, fetch: FetchUnderWay, staging: Reservation, reads: Sequence[PageNumbers]
    ) -> Generator[Job, Operation, tuple[list[Pages], CacheError | None]]:
        """Read pages of a prefetch; return by component which came on all ranks, and why others did not."""
        ledger = self._ledger
        fetch.clears_count = ledger.stored.clears_count
        fetch.evictions_count = ledger.changes.evictions_count
        fetch.staging = staging
        fetch.reading = list(map(PageCopies, range(len(reads)), reads, staging.slots, staging.slots))
        fetch.job = job = FetchJob(fetch.storage, fetch.prompt, fetch.reading, fetch.call_sizes)
        failure: CacheError | None = None
        try:
            yield job
        except CacheError as error:  # pages that arrived before it are good
            failure = error
        fetch.job = None
        arrived = true_for_all(self._ranks, job.whole)
        for lost, pages, came in zip(fetch.lost, reads, arrived, strict=True):
            missed = pages[~came]
            lost[missed] = True
            fetch.has_missed |= len(missed) > 0
        return arrived, failure

    # ---- graft -----------------------------------------------------------------------------------------------

    def _graft(
        self, fetch: FetchUnderWay, staging: Reservation, parts: Sequence[PageCopies], arrived: Sequence[Pages]
    ) -> None:
        """Graft the pages that arrived: Full as far as it continues the prefix of the tier, the rest where Full is."""
        ledger, prompt, tree = self._ledger, fetch.prompt, self._ledger.tree
        if fetch.operation.is_stopping:  # some may have been grafted when it was stopped
            ours = zip(arrived, parts, staging.slots, strict=True)
            arrived = [mask & np.isin(part.target, slots) for mask, part, slots in ours]
        full_end = tree.peek(prompt).full_end(staging.tier)
        new = parts[0].pages[arrived[0] & (parts[0].pages >= full_end)]
        full_end += int(np.count_nonzero(new == full_end + np.arange(len(new))))
        kept: list[PageCopies] = []
        start, end = prompt.pages_count, 0
        for part, mask in zip(parts, arrived, strict=True):
            below = part.where(mask & (part.pages < full_end))
            kept.append(below)
            if len(below.pages):
                start, end = min(start, int(below.pages[0])), max(end, int(below.pages[-1]) + 1)
        if not end:
            return
        slots: list[Slots] = []
        for part in kept:
            given = no_slots(end - start)
            given[part.pages - start] = part.target
            slots.append(given)
        staging.insert(prompt.head(end), start, slots)
        self._traffic.add(TransferKind.PREFETCH, kept)
        if fetch.clears_count != ledger.stored.clears_count:
            return
        stored = ledger.stored if staging.tier is Tier.HOST else ledger.stored_device
        for part in kept:
            stored.add(part.component, part.target)
            if ledger.changes.is_watched:
                ledger.changes.record_stored(part.component, prompt, part.pages, fetch.evictions_count)


def _explain_rest(operation: Operation, gained: int, lacks_room: int, *, is_lost: bool) -> None:
    """Count what a prefetch has gained, and why not the rest; ``is_lost`` says that storage did not bring some."""
    tally = operation.tally
    tally.gain(gained)
    tally.leave_out(LeftOut.HOST_FULL, min(tally.asked - gained, lacks_room))
    why = LeftOut.FAILED if is_lost else LeftOut.EVICTED
    tally.close(LeftOut.STOPPED if operation.is_stopping else why)


class Loads:
    """Loads of one cache."""

    __slots__ = ("_ledger", "_memory", "_ranks", "_traffic", "_under_way")

    def __init__(self, ledger: Ledger, memory: PageMemory, ranks: RankGroup, traffic: TrafficCounts) -> None:
        self._ledger = ledger
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._under_way: dict[Job | None, tuple[Transfer, LoadJob]] = {}
        """By job: what loads under way bring."""

    def load(self, prompt: Prompt, tally: PageTally) -> Steps:
        """Copy what the device lacks of a prompt's restorable prefix, as far as it has room; return pages loaded."""
        found = self._ledger.tree.match(prompt)
        end = self._ledger.fitting_end(found, Tier.HOST, Tier.DEVICE)
        tally.asked = found.host_end - found.device_end
        tally.leave_out(LeftOut.DEVICE_FULL, found.host_end - max(end, found.device_end))
        if end <= found.device_end:
            return 0
        with self._ledger.moving(found, end, Tier.HOST, Tier.DEVICE) as held:
            moving = held_by_all(self._ranks, held)
            if moving is None:
                tally.leave_out(LeftOut.DEVICE_FULL, end - found.device_end)
                return 0
            if moving.parts:
                job = LoadJob(self._memory, self._ledger.layout, moving.parts)
                self._under_way[job] = moving, job
                try:
                    yield job
                finally:
                    del self._under_way[job]
            tally.arrived = end - found.device_end
            return self._traffic.add(TransferKind.LOAD, self._ledger.publish(moving))

    def layerwise(self, operation: Operation) -> LayerwiseLoad | None:
        """Return the pages of a load under way by layer; None if it is over or another load brings part of it."""
        if operation.job not in self._under_way or operation.state is not OperationState.RUNNING:
            return None
        moving, job = self._under_way[operation.job]
        slots = moving.coming()
        if any((given < 0).any() for given in slots):
            return None
        return LayerwiseLoad(operation, moving.target.end, slots, moving.parts, job.progress)
