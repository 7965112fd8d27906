"""Backup: what the device has of a prompt, copied to the host, and what the host has of it, put into storage.

                 0                          other ends            longest end      pages_count
    Full         |------------- copied where the host lacks it ---------|== in pieces ==|
    windows               |- w -|     |- w -|                    |- w --|         |= w =|
                 each with the end that it was kept for, for the resumes that begin there

    ask        for the pages that are to be backed up; what is where it should be is taken off
    copy       for each end, the longest first: pin, allocate, copy to the host and seal, publish
    put        what the host has of it, while it is pinned; storage answers page by page
    in pieces  what the host is too small for

A prompt that the host is too small for goes on to storage in pieces: each is copied into host slots of its own, put,
and given up before the next one, in the order of the prompt. As the ``buffer_only`` host of SGLang.

A write policy gives storage only what storage is not known to have: a page once, and once more after a failure. Where
the policy backs up everything, pages that the device evicts before are copied to the host on the owner's thread.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unified_cache.controller import LeftOut, Operation, PageTally, StorageTier, TransferKind
from unified_cache.controller.controller import run_job
from unified_cache.controller.jobs import BackupJob, ClearJob, StoreJob, batch_pages
from unified_cache.controller.ledger import Ledger
from unified_cache.controller.memory import PageMemory
from unified_cache.controller.operation import Job, TrafficCounts
from unified_cache.controller.ranks.group import RankGroup, held_by_all, true_for_all
from unified_cache.controller.storage_tier import UsedPages
from unified_cache.core.errors import RankLostError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import PageCopies, PageNumbers, Pages, Slots, Tier, all_pages, numbers_of
from unified_cache.core.window import restorable_ends, window
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.tree import Match
from unified_cache.tree.transfer import Transfer

HINT_PARTS = 32
"""A page in use is hinted to storage once per ``host_bytes / HINT_PARTS`` bytes stored."""

_REASONS = tuple(LeftOut)
_UNTRIED = 1
_FIRST_REASON = 2

logger = logging.getLogger(__name__)

JobSteps = Generator[Job, Operation, int]
"""Steps that wait for jobs of their own alone."""


class BackupRequest:
    """Pages of one prompt, by component, that still have to be backed up, and why the last backup left each out.

    A backup takes off what has arrived; what it left out is asked for again by the next one.
    """

    __slots__ = ("_states", "_was_tried", "attempts_count", "has_lost", "prompt")

    def __init__(self, prompt: Prompt, wanted: Sequence[Pages]) -> None:
        self.prompt = prompt
        self._states: list[npt.NDArray[np.int8]] = [pages.astype(np.int8) for pages in wanted]
        """By component and page: 0 for nothing to do, 1 for a page not tried, else the reason that left it out."""
        self._was_tried = False
        self.attempts_count = 0
        """Backups in a row that brought none of these pages any further."""
        self.has_lost = False
        """Whether pages of it were given up."""

    @property
    def pages_count(self) -> int:
        """Pages that still have to be backed up."""
        return int(sum(map(np.count_nonzero, self._states)))

    def waiting(self, component: int) -> Pages:
        """Return a mask of the pages of a component that still have to be backed up."""
        mask: Pages = self._states[component] > 0
        return mask

    def untried(self, component: int) -> Pages:
        """Return a mask of those that the backup under way has not left out yet."""
        mask: Pages = self._states[component] == _UNTRIED
        return mask

    def begin(self) -> None:
        """Mark all pages as untried, for the next backup."""
        if self._was_tried:
            for states in self._states:
                np.minimum(states, _UNTRIED, out=states)

    def take_off(self, component: int, pages: PageNumbers | Pages | slice) -> int:
        """Take pages off, which have arrived or cannot any more; return how many of them were to be backed up."""
        states = self._states[component]
        count = int(np.count_nonzero(states[pages]))
        states[pages] = 0
        return count

    def leave_out(self, component: int, pages: PageNumbers | Pages, reason: LeftOut) -> None:
        """Record the reason that left pages out, of those that still have to be backed up."""
        self._was_tried = True
        states = self._states[component]
        states[pages] = np.where(states[pages] > 0, _FIRST_REASON + _REASONS.index(reason), 0)

    def leave_untried(self, reason: LeftOut) -> None:
        """Record the reason that left all untried pages out."""
        self._was_tried = True
        for states in self._states:
            states[states == _UNTRIED] = _FIRST_REASON + _REASONS.index(reason)

    def left_out(self) -> Iterator[tuple[LeftOut, int]]:
        """Yield each reason for which pages were left out, and how many."""
        counts = sum(np.bincount(states, minlength=_FIRST_REASON + len(_REASONS)) for states in self._states)
        for reason, count in zip(_REASONS, np.asarray(counts).tolist()[_FIRST_REASON:], strict=True):
            if count:
                yield reason, count

    def merge(self, earlier: "BackupRequest") -> int:
        """Ask for the pages of an earlier request for the same prompt, too; return how many both ask for."""
        both_count = 0
        for component, states in enumerate(self._states):
            waiting = earlier.waiting(component)
            both_count += int(np.count_nonzero(waiting & (states > 0)))
            states[waiting & (states == 0)] = _UNTRIED
        return both_count


@dataclass(slots=True)
class BackupRun:
    """One backup under way."""

    request: BackupRequest
    tally: PageTally
    storage: StorageTier | None
    """The storage that pages go on to from the host."""
    level: Level
    puts_again: bool
    """Whether pages that storage has already are put once more, to keep them recent there."""
    operation: Operation | None = None
    """Its operation; None until its first job has ended."""
    pages_max: int = field(init=False)
    """Pages of the prompt that storage holds, see ``StorageTier.prompt_pages_max``."""

    def __post_init__(self) -> None:
        self.pages_max = self.request.prompt.pages_count
        if self.storage is not None:
            self.pages_max = self.storage.prompt_pages_max(self.pages_max)

    def is_stopping(self) -> bool:
        """Return whether the operation is to end early."""
        return self.operation is not None and self.operation.is_stopping


class Backups:
    """Backups over one ledger and one memory."""

    __slots__ = ("_is_warned", "_ledger", "_memory", "_owners", "_ranks", "_traffic")

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        owners: Mapping[str, bytes],
        ranks: RankGroup,
        traffic: TrafficCounts,
    ) -> None:
        """Take the parts of one cache; ``owners`` names by pool whose pages are sealed, see ``Identity.owners``."""
        self._ledger = ledger
        self._memory = memory
        self._owners = owners
        self._ranks = ranks
        self._traffic = traffic
        self._is_warned = False

    def backup(self, prompt: Prompt, storage: StorageTier | None, level: Level, tally: PageTally) -> JobSteps:
        """Copy what the host lacks of a prompt's device prefix and publish it; then put all that the host has of it.

        Pages that storage has already are put again, and so are the windows at the end that this prompt was resumed
        from: that costs a look-up and keeps them recent there, where hits in memory are not seen. Returns pages copied.
        """
        found = self._ledger.tree.match(prompt)
        run = BackupRun(self._request(found), tally, storage, level, puts_again=storage is not None)
        return (yield from self._back_up(run, found, self._ledger.tree.match))

    def write(self, request: BackupRequest, storage: StorageTier | None, tally: PageTally) -> JobSteps:
        """Back up pages for a write policy: storage is given only what it is not known to have."""
        run = BackupRun(request, tally, storage, Level.CACHED, puts_again=False)
        found = self._ledger.tree.peek(request.prompt)
        return (yield from self._back_up(run, found, self._ledger.tree.peek))

    def request_of(self, prompt: Prompt) -> BackupRequest:
        """Return a request for what memory has of a prompt."""
        return self._request(self._ledger.tree.peek(prompt))

    def _request(self, found: Match) -> BackupRequest:
        """Return a request for all of a matched prompt: Full, and the windows that memory keeps at any end.

        Where the host has none to spare, those are left out from which nobody resumes any more.
        """
        ends = self._resumable(found)
        if not self._ledger.has_spare_windows():
            ends &= ~found.superseded_ends(found.host_end)
        return self._request_at(found, ends)

    def _request_at(self, found: Match, ends: Pages) -> BackupRequest:
        """Return a request for all of a matched prompt: Full, and the windows of ``ends``, which memory keeps."""
        pages_count = found.prompt.pages_count
        wanted = [all_pages(pages_count)]
        kept_before = np.concatenate([[0], np.cumsum(ends)])
        starts = np.arange(found.host_end)
        for component in self._ledger.layout.components[1:]:
            pages = np.zeros(pages_count, np.bool_)
            last = np.minimum(starts + component.span, found.host_end)
            pages[: len(starts)] = kept_before[last] > kept_before[starts]
            wanted.append(pages)
        return BackupRequest(found.prompt, wanted)

    def evict_to_host(self, prompt: Prompt) -> None:
        """Copy what the host lacks of a prompt, and has room for, before the device evicts it; wait for that."""
        if self._ranks.is_lost:
            return
        tree = self._ledger.tree
        found = tree.peek(prompt)
        run = BackupRun(self._request(found), PageTally(), None, Level.CACHED, puts_again=False)
        try:
            with closing(self._back_up(run, found, tree.peek, at_once=True)) as steps:
                for job in steps:
                    error = run_job(job)
                    if not self._ranks.agree(np.array([error is None], np.bool_))[0]:
                        logger.warning("pages are evicted that could not be copied to the host: %s", error)
                        return
        except RankLostError as error:
            logger.warning("pages are evicted that could not be copied to the host: %s", error)

    def _back_up(
        self, run: BackupRun, found: Match, look: Callable[[Prompt], Match], *, at_once: bool = False
    ) -> JobSteps:
        """Copy and put what is needed at each end of ``found``, the longest first, then the rest; return pages."""
        ledger, request = self._ledger, run.request
        prompt = request.prompt
        request.begin()
        run.tally.asked = request.pages_count
        self._take_off_known(run, found)
        for component in range(len(ledger.layout.components)):
            request.leave_out(component, found.arriving_pages(Tier.HOST, component), LeftOut.UNDER_WAY)
        longest = max(ledger.fitting_end(found, Tier.DEVICE, Tier.HOST), found.full_end(Tier.HOST))
        for end in [longest, *self._other_ends(found, longest, run)] if longest else ():
            if end != longest:
                found = look(prompt.head(end))
                if found.host_end != end or found.full_end(Tier.HOST) < end:
                    continue
            with ledger.moving(found, end, Tier.DEVICE, Tier.HOST, at_once=at_once) as held:
                moving = held_by_all(self._ranks, held)
                if moving is None:
                    continue
                yield from self._copy(run, moving)
                if run.storage is not None:
                    on_host = ledger.locked(moving.target)
                    yield from self._put_held(run, on_host if end == longest else on_host[1:])
        reason = LeftOut.HOST_FULL
        if request.pages_count and self._exceeds_host(prompt.pages_count):
            if run.storage is None:
                reason = LeftOut.HOST_TOO_SMALL
            else:
                yield from self._put_in_pieces(run, run.storage)
        if request.pages_count:
            request.leave_untried(LeftOut.STOPPED if run.is_stopping() else reason)
            for reason, pages in request.left_out():
                run.tally.leave_out(reason, pages)
        return run.tally.copied

    def _take_off_known(self, run: BackupRun, found: Match) -> None:
        """Take pages off that are where they should be, and those that memory does not hold any more."""
        ledger, request, end = self._ledger, run.request, found.host_end
        if end < found.prompt.pages_count:
            run.tally.leave_out(LeftOut.EVICTED, request.take_off(0, slice(end, None)))
        if run.pages_max < end:
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "the store's cap holds the first %d of a prompt's %d pages; the others are not put",
                    run.pages_max,
                    end,
                )
            for component in range(len(ledger.layout.components)):
                behind = request.take_off(component, slice(run.pages_max, None))
                run.tally.leave_out(LeftOut.STORE_TOO_SMALL, behind)
        if len(ledger.layout.components) > 1:
            usable = self._request_at(found, self._resumable(found))
            for component in range(1, len(ledger.layout.components)):
                run.tally.leave_out(LeftOut.EVICTED, request.take_off(component, ~usable.waiting(component)))
        if run.storage is None:
            run.tally.already += request.take_off(0, slice(0, found.full_end(Tier.HOST)))
        for component in () if run.puts_again else range(len(ledger.layout.components)):
            if run.storage is None and not component:
                continue
            on_host = found.slots(Tier.HOST, component, 0, end)
            known = on_host >= 0
            if run.storage is not None:
                on_device = found.slots(Tier.DEVICE, component, 0, end)
                known &= ledger.stored.among(component, on_host)
                known |= ledger.stored_device.among(component, on_device) & (on_device >= 0)
            run.tally.already += request.take_off(component, numbers_of(known))

    def _resumable(self, found: Match) -> Pages:
        """Return a mask of the ends in [1, host_end] at which a match can be resumed from device and host together."""
        ledger, end = self._ledger, found.host_end
        spans = [component.span for component in ledger.layout.components]
        tombstones: list[Pages | None] = [None]
        for component in range(1, len(spans)):
            on_device, on_host = (found.slots(tier, component, 0, end) for tier in Tier)
            tombstones.append((on_device < 0) & (on_host < 0))
        return restorable_ends(spans, tombstones, end)

    def _exceeds_host(self, pages_count: int) -> bool:
        """Return whether a prompt of so many pages does not fit the host even where that is empty."""
        ledger = self._ledger
        return any(
            min(pages_count, component.span) > ledger.capacity(Tier.HOST, number)
            for number, component in enumerate(ledger.layout.components)
        )

    def _other_ends(self, found: Match, longest: int, run: BackupRun) -> list[int]:
        """Return the ends before the longest, descending, whose windows memory keeps and the host or storage lacks.

        Where pages are put again, also the end at which the prompt was resumed.
        """
        resumed = found.host_end
        spans = [component.span for component in self._ledger.layout.components]
        lacking: list[tuple[int, Pages]] = []
        for component, span in enumerate(spans[1:], 1):
            on_device, on_host = (found.slots(tier, component, 0, resumed) for tier in Tier)
            lacks = (on_device >= 0) & (on_host < 0)
            if run.storage is not None:
                stored = self._ledger.stored
                known = stored.among(component, on_host) | stored.offered(component, on_host)
                lacks |= (on_host >= 0) & ~known
            lacks &= run.request.waiting(component)[:resumed]
            lacks[window(longest, span) :] = False
            lacking.append((span, lacks))
        puts_again = run.puts_again and len(spans) > 1
        if not puts_again and not any(lacks.any() for _, lacks in lacking):
            return []
        resumable = self._resumable(found)
        ends = _covering_ends(lacking, resumable)
        if puts_again:
            later = resumable & ~found.superseded_ends(resumed)
            before = [end for end in found.node_ends() if end < longest and later[end - 1]]
            ends.update([end for end in before if end not in ends][-1:])
        return sorted(ends - {longest}, reverse=True)

    def _copy(self, run: BackupRun, moving: Transfer) -> Generator[Job, Operation, None]:
        """Copy and publish what moves; without storage it has arrived."""
        prompt, ledger = run.request.prompt, self._ledger
        if moving.parts:
            run.operation = yield BackupJob(self._memory, ledger.layout, self._owners, prompt, moving.parts)
        published = ledger.publish(moving)
        for part in published:
            if run.storage is None:
                run.tally.arrived += run.request.take_off(part.component, part.pages)
            else:
                known = ledger.stored_device.among(part.component, part.source)
                ledger.stored.add(part.component, part.target[known])
        run.tally.copied += self._traffic.add(TransferKind.BACKUP, published)

    def _put_held(self, run: BackupRun, held: Sequence[PageCopies]) -> Generator[Job, Operation, None]:
        """Put pages that the host holds; they count as offered meanwhile, so that no write policy gives them twice."""
        stored, clears_count = self._ledger.stored, self._ledger.stored.clears_count
        put: list[PageCopies] = []
        known: list[Pages] = []
        if run.pages_max < run.request.prompt.pages_count:
            held = [part.where(part.pages < run.pages_max) for part in held]
        for part in held:
            is_known = stored.among(part.component, part.target)
            if not run.puts_again:
                is_offered = stored.offered(part.component, part.target)
                run.tally.already += run.request.take_off(part.component, part.pages[is_known])
                run.request.leave_out(part.component, part.pages[is_offered], LeftOut.UNDER_WAY)
                put.append(part.where(~is_known & ~is_offered))
                known.append(np.zeros(len(put[-1].pages), np.bool_))
            else:
                put.append(part)
                known.append(is_known)
            stored.offer(part.component, put[-1].target[~known[-1]])
        held, whole = put, list(map(np.zeros_like, known))
        try:
            whole = yield from self._put(run, held, known)
        finally:
            for part, mask in zip(held, whole, strict=True):
                stored.add(part.component, part.target[mask])
                stored.forget(part.component, part.target[~mask])
        self._record_given(held, [mask & ~was for mask, was in zip(whole, known, strict=True)])
        self._record_stored_on_device(run, held, whole, clears_count)

    def _put(
        self, run: BackupRun, parts: Sequence[PageCopies], known: Sequence[Pages]
    ) -> Generator[Job, Operation, list[Pages]]:
        """Put pages that lie in host slots; return by part which storage took or had; ``known`` are those it had."""
        if run.storage is None or not any(map(len, parts)):
            return [np.zeros(len(part), np.bool_) for part in parts]
        ledger, request, prompt = self._ledger, run.request, run.request.prompt
        since = ledger.changes.evictions_count
        whole: list[Pages] = [np.zeros(len(part), np.bool_) for part in parts]
        job = StoreJob(run.storage, prompt, parts, run.level)
        try:
            run.operation = yield job
            whole = true_for_all(self._ranks, job.whole)
        finally:
            if ledger.changes.is_watched:
                for part, mask in zip(parts, whole, strict=True):
                    ledger.changes.record_stored(part.component, prompt, part.pages[mask], since)
        for part, mask, refused in zip(parts, whole, job.answered(Answer.DECLINED), strict=True):
            run.tally.stored += int(np.count_nonzero(mask))
            run.tally.arrived += request.take_off(part.component, part.pages[mask])
            request.leave_out(part.component, part.pages[~mask & refused], LeftOut.DECLINED)
            reason = LeftOut.STOPPED if run.is_stopping() else LeftOut.FAILED
            request.leave_out(part.component, part.pages[~mask & ~refused], reason)
        new = [part.where(mask & ~was) for part, mask, was in zip(parts, whole, known, strict=True)]
        self._traffic.add(TransferKind.STORE, new)
        return whole

    # ---- what the host is too small for ----------------------------------------------------------------------

    def _put_in_pieces(self, run: BackupRun, storage: StorageTier) -> Generator[Job, Operation, None]:
        """Put pages that the host cannot keep piece by piece; those of a piece are pinned only while it is copied."""
        ledger, prompt = self._ledger, run.request.prompt
        pages_max = batch_pages(ledger.layout)
        for end in self._ends_to_put(run):
            while not run.is_stopping():
                found = ledger.tree.peek(prompt)
                held_end = min(end, found.full_end(Tier.DEVICE))
                wanted = self._next_piece(run, found, held_end, pages_max)
                if not any(len(pages) for pages, _ in wanted):
                    break
                clears_count = ledger.stored.clears_count
                with ledger.reserving(Tier.HOST, [len(pages) for pages, _ in wanted]) as held:
                    reserved = held_by_all(self._ranks, held)
                    if reserved is None:
                        return
                    parts = [
                        PageCopies(component, pages, source, target)
                        for component, ((pages, source), target) in enumerate(zip(wanted, reserved.slots, strict=True))
                    ]
                    with ledger.pinned(ledger.tree.peek(prompt), held_end, Tier.DEVICE):
                        run.operation = yield BackupJob(self._memory, ledger.layout, storage.owners, prompt, parts)
                    run.tally.copied += self._traffic.add(TransferKind.BACKUP, parts)
                    known: list[Pages] = [np.zeros(len(part), np.bool_) for part in parts]
                    whole = yield from self._put(run, parts, known)
                self._record_stored_on_device(run, parts, whole, clears_count)
                self._record_given(parts, whole)

    def _record_given(self, parts: Sequence[PageCopies], new: Sequence[Pages]) -> None:
        """Count the bytes of pages that storage was given, by which it evicts."""
        pages = [0 for _ in self._ledger.layout.components]
        for part, mask in zip(parts, new, strict=True):
            pages[part.component] = int(np.count_nonzero(mask))
        self._ledger.stored.record_given(self._ledger.layout.prompt_bytes(pages, sealed=True))

    def _ends_to_put(self, run: BackupRun) -> list[int]:
        """Return the ends, ascending, whose windows are still to be put, and the longest that the device holds."""
        found = self._ledger.tree.peek(run.request.prompt)
        lacking = [
            (component.span, run.request.untried(number)[: found.host_end])
            for number, component in enumerate(self._ledger.layout.components)
            if number
        ]
        return sorted({found.device_end, *_covering_ends(lacking, self._resumable(found))} - {0})

    def _next_piece(self, run: BackupRun, found: Match, end: int, pages_max: int) -> list[tuple[PageNumbers, Slots]]:
        """Return by component the pages before ``end`` to put next and their device slots: as many as have room."""
        ledger = self._ledger
        pieces: list[tuple[PageNumbers, Slots]] = []
        piece_end = end
        for number, component in enumerate(ledger.layout.components):
            start = window(end, component.span)
            on_device = found.slots(Tier.DEVICE, number, start, end)
            left = numbers_of(run.request.untried(number)[start:end] & (on_device >= 0))
            pieces.append((left + start, on_device[left]))
            room = min(ledger.available_pages(Tier.HOST, number), pages_max)
            if len(left) > room:
                piece_end = min(piece_end, int(left[room]) + start)
        return [(pages[pages < piece_end], slots[pages < piece_end]) for pages, slots in pieces]

    def _record_stored_on_device(
        self, run: BackupRun, parts: Sequence[PageCopies], whole: Sequence[Pages], clears_count: int
    ) -> None:
        """Record by device slots that storage has these pages, unless it was cleared since ``clears_count``."""
        ledger = self._ledger
        if clears_count != ledger.stored.clears_count or not any(map(len, parts)):
            return
        found = ledger.tree.peek(run.request.prompt)
        for part, mask in zip(parts, whole, strict=True):
            slots = found.slots(Tier.DEVICE, part.component, 0, found.tree_end)
            there = slots[part.pages[mask & (part.pages < found.tree_end)]]
            ledger.stored_device.add(part.component, there[there >= 0])

    # ---- beside backups ---------------------------------------------------------------------------------------

    def record_use(self, found: Match, storage: StorageTier) -> None:
        """Send a storage that evicts a recency hint, before the next put, for pages that a request hits in memory.

        For those that storage is known to have and had no hint of for long: all of Full, and the windows from the end
        on that later requests resume after. Those before it are superseded: a store that had hints of them would evict
        needed pages for them.
        """
        if storage.hints is None:
            return
        ledger = self._ledger
        host_pages = [ledger.capacity(Tier.HOST, component) for component in range(len(ledger.layout.components))]
        given_bytes = ledger.layout.prompt_bytes(host_pages, sealed=True) // HINT_PARTS
        pages: list[PageNumbers] = []
        for component, start in enumerate(ledger.windows(found.next_end)):
            slots = found.slots(Tier.HOST, component, start, found.tree_end)
            unheard_of = numbers_of(ledger.stored.unheard_of(component, slots, given_bytes))
            if len(unheard_of):
                ledger.stored.add(component, slots[unheard_of])
            pages.append(unheard_of + start)
        if any(map(len, pages)):
            storage.hints.add(UsedPages(found.prompt, tuple(pages)))

    def clear(self, storage: StorageTier) -> JobSteps:
        """Remove from storage what this rank has put there; no backup puts anything meanwhile. Returns objects."""
        job = ClearJob(storage)
        try:
            with storage.epoch.clear():
                yield job
        finally:
            self._ledger.forget_stored()
        return job.removed_count


def _covering_ends(lacking: Sequence[tuple[int, Pages]], resumable: Pages) -> set[int]:
    """Return ends, as few as will do, whose windows are all pages that anything lacks; of others there is no end.

    ``lacking`` has the span of each windowed component and its pages, which are used up.
    """
    ends: set[int] = set()
    for span, lacks in lacking:
        for page in numbers_of(lacks)[::-1].tolist():
            if not lacks[page]:
                continue  # covered by an end that was found before
            later = numbers_of(resumable[page : page + span])
            if later.size:
                end = page + int(later[0]) + 1
                ends.add(end)
                for other_span, others in lacking:
                    others[window(end, other_span) : end] = False
    return ends
