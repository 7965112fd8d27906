"""Backups: what the device has of a prompt, copied to the host, and what the host has of it, put into storage.

                 0                          other ends            longest end      pages_count
    Full         |------------- copied where the host lacks it ---------|.............|
    windows               |- w -|     |- w -|                    |- w --|
                 each with the end that it was kept for, for the resumes that begin there

A write policy gives storage only what storage is not known to have: a page once, and once more after a failure. Where
the policy means to lose nothing, what the device evicts before its turn is copied to the host on the owner's thread.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

import numpy as np

from unified_cache.controller import Operation, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, StoreJob
from unified_cache.controller.operation import Job
from unified_cache.controller.touches import UsedPages
from unified_cache.controller.workers import run_job
from unified_cache.errors import RankLostError
from unified_cache.forgotten import Cause
from unified_cache.ledger import Ledger, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, PageNumbers, Pages, Tier, numbers_of
from unified_cache.ranks import RankGroup, held_by_all, true_for_all
from unified_cache.storage_backends.protocol import Level
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Match
from unified_cache.window import restorable_ends, window

__all__ = ["Backups"]

HEARD_PARTS = 32
"""Storage hears of a page in use once for so many pages that it is given: the host's, divided by this."""

logger = logging.getLogger(__name__)

Moving = AbstractContextManager[TierTransfer | None]

JobSteps = Generator[Job, Operation, int]
"""Steps that wait for jobs of their own alone."""


@dataclass(frozen=True, slots=True)
class Putting:
    """The storage that pages go on to from the host, and which of them."""

    storage: StorageTier
    level: Level
    puts_again: bool
    """Whether what storage has already is put once more, to keep it recent there."""


class Backups:
    """Backups over one ledger and one memory."""

    __slots__ = ("_ledger", "_memory", "_owners", "_ranks", "_traffic")

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

    def backup(self, prompt: Prompt, storage: StorageTier | None, level: Level) -> JobSteps:
        """Copy what the host lacks of a prompt's device prefix and publish it; then put all that the host has of it.

        First what a resume at its end needs, then the windows that were kept at other ends, for other resumes. Pages
        that storage has already are put again, and so are the windows at the end that this prompt was resumed from:
        that costs a look-up and keeps them recent there, where hits in memory are not seen. The host pages stay pinned
        until storage has answered.
        Where the host is short of room, the longest prefix that fits is backed up. Returns the pages copied to it.
        """
        putting = None if storage is None else Putting(storage, level, puts_again=True)
        return self._move(prompt, self._ledger.tree.match, self._moving, putting)

    def write(self, prompt: Prompt, storage: StorageTier | None) -> JobSteps:
        """Back a prompt up for a write policy: storage is given only what it is not known to have."""
        putting = None if storage is None else Putting(storage, Level.CACHED, puts_again=False)
        return self._move(prompt, self._ledger.tree.match, self._moving, putting)

    def note_use(self, found: Match, storage: StorageTier) -> None:
        """Have storage hear, before it is given more, of the pages in memory that a request asks for.

        Handed out or computed again, and the windows of all ends on the way, where other prompts part from this one. Of
        these only what storage has and has not heard of for long, and only where it evicts. What the host does not hold
        is not known to be in storage: the next backup offers it.
        """
        if storage.touches is None:
            return
        ledger = self._ledger
        given_pages = -(-ledger.capacity(Tier.HOST, 0) // HEARD_PARTS)
        pages: list[PageNumbers] = []
        for component in range(len(ledger.layout.components)):
            slots = ledger.tree.slots(found, Tier.HOST, component, 0, found.tree_end)
            unheard_of = numbers_of(ledger.stored.unheard_of(component, slots, given_pages))
            if len(unheard_of):
                ledger.stored.add(component, slots[unheard_of])
            pages.append(unheard_of)
        if any(map(len, pages)):
            storage.touches.add(UsedPages(found.prompt, tuple(pages)))

    def save(self, prompt: Prompt) -> None:
        """Copy what the host lacks of a prompt's device prefix before the device evicts it; return when it is there.

        As far as the host has room. What cannot be copied is lost, as everywhere once a rank is.
        """
        if self._ranks.is_lost:
            return
        try:
            with closing(self._move(prompt, self._ledger.tree.peek, self._ledger.saving, None)) as steps:
                for job in steps:
                    error = run_job(job)
                    if not self._ranks.agree(np.array([error is None], np.bool_))[0]:
                        logger.warning("pages are evicted that could not be copied to the host: %s", error)
                        return
        except RankLostError as error:
            logger.warning("pages are evicted that could not be copied to the host: %s", error)

    def _moving(self, found: Match, end: int) -> Moving:
        return self._ledger.moving(found, end, Tier.DEVICE, Tier.HOST)

    def _move(
        self,
        prompt: Prompt,
        look: Callable[[Prompt], Match],
        begin: Callable[[Match, int], Moving],
        putting: Putting | None,
    ) -> JobSteps:
        """Copy and put what is needed at each end, the longest first; return the pages copied."""
        tree = self._ledger.tree
        found = look(prompt)
        longest = max(self._ledger.fitting_end(found, Tier.DEVICE, Tier.HOST), tree.full_end(found, Tier.HOST))
        if longest < found.device_end:
            self._ledger.fates.note_unbacked(prompt.head(found.device_end), Cause.HOST_FULL)
        copied = 0
        for end in [longest, *self._other_ends(found, longest, putting)] if longest else ():
            if end != longest:
                found = look(prompt.head(end))
                if found.host_end != end or tree.full_end(found, Tier.HOST) < end:
                    continue
            with begin(found, end) as held:
                moving = held_by_all(self._ranks, held)
                if moving is None:
                    self._ledger.fates.note_unbacked(prompt.head(end), Cause.HOST_FULL)
                    continue
                copied += yield from self._copy(prompt, moving)
                if putting is not None:
                    yield from self._put(prompt, moving.held() if end == longest else moving.held_windows(), putting)
        return copied

    def _other_ends(self, found: Match, longest: int, putting: Putting | None) -> list[int]:
        """Return the ends before the longest, descending, whose windows memory keeps and the host or storage lacks.

        Where pages are put again, also the last one that neither lacks: that is where the prompt was resumed.
        """
        tree, resumed = self._ledger.tree, found.host_end
        spans = [component.span for component in self._ledger.layout.components]
        holes: list[Pages | None] = [None]
        lacking: list[tuple[int, Pages]] = []
        for component, span in enumerate(spans[1:], 1):
            on_device, on_host = (tree.slots(found, tier, component, 0, resumed) for tier in (Tier.DEVICE, Tier.HOST))
            lacks = (on_device >= 0) & (on_host < 0)
            if putting is not None:
                lacks |= (on_host >= 0) & ~self._ledger.stored.among(component, on_host)
            lacks[window(longest, span) :] = False
            holes.append((on_device < 0) & (on_host < 0))
            lacking.append((span, lacks))
        puts_again = putting is not None and putting.puts_again and len(spans) > 1
        if not puts_again and not any(lacks.any() for _, lacks in lacking):
            return []
        resumable = restorable_ends(spans, holes, 0, resumed, [0 for _ in spans])
        ends = _covering_ends(lacking, resumable)
        if puts_again:
            before = [end for end in tree.node_ends(found) if end < longest and resumable[end - 1]]
            ends.update([end for end in before if end not in ends][-1:])
        return sorted(ends - {longest}, reverse=True)

    def _copy(self, prompt: Prompt, moving: TierTransfer) -> JobSteps:
        """Copy and publish what moves; return the pages copied."""
        is_copied = False
        try:
            if moving.parts:
                yield BackupJob(self._memory, self._ledger.layout, self._owners, prompt, moving.parts)
            is_copied = True
        finally:
            if not is_copied:
                self._ledger.fates.note_unbacked(prompt, Cause.BACKUP_FAILED)
        return self._traffic.add(TransferKind.BACKUP, moving.publish())

    def _put(self, prompt: Prompt, held: Sequence[PageCopies], putting: Putting) -> JobSteps:
        """Put what is chosen of pages that the host holds; return how many storage took or had.

        They count as stored from the beginning, so that no write policy offers them twice meanwhile, and as not stored
        where this does not come to a good end.
        """
        stored, changes = self._ledger.stored, self._ledger.changes
        since = changes.evictions_count
        parts = list(held) if putting.puts_again else self._unstored(held)
        if not any(len(part) for part in parts):
            return 0
        were_stored = [stored.among(part.component, part.target) for part in parts]
        for part in parts:
            stored.add(part.component, part.target)
        whole: list[Pages] = [np.zeros(len(part), np.bool_) for part in parts]
        job = StoreJob(putting.storage, prompt, parts, putting.level)
        try:
            operation = yield job
            whole = true_for_all(self._ranks, job.stored)
        finally:
            if self._ledger.fates.remembers:
                self._note_puts(prompt, parts, whole, job)
            for part, mask in zip(parts, whole, strict=True):
                stored.forget(part.component, part.target[~mask])
                if changes.is_watched:
                    changes.note_stored(part.component, prompt, part.pages[mask], since)
        stored_count = sum(int(np.count_nonzero(mask)) for mask in whole)
        operation.note_stored(stored_count, sum(map(len, parts)) - stored_count)
        new = [part.where(mask & ~was) for part, mask, was in zip(parts, whole, were_stored, strict=True)]
        self._traffic.add(TransferKind.STORE, new)
        stored.note_given(sum(len(part) for part in new if not part.component))
        return stored_count

    def _note_puts(self, prompt: Prompt, parts: Sequence[PageCopies], whole: Sequence[Pages], job: StoreJob) -> None:
        """Note what became of pages that were offered to storage."""
        note = self._ledger.fates.note_stored
        for number, (part, stored) in enumerate(zip(parts, whole, strict=True)):
            taken = part.where(stored)
            note(part.component, prompt, taken.pages, Cause.STORED)
            if len(taken) < len(part):
                declined = job.declined[number]
                note(part.component, prompt, part.pages[declined & ~stored], Cause.STORE_DECLINED)
                note(part.component, prompt, part.pages[~declined & ~stored], Cause.STORE_FAILED)

    def _unstored(self, held: Sequence[PageCopies]) -> list[PageCopies]:
        """Return of pages that the host holds those that storage is not known to have."""
        return [part.where(~self._ledger.stored.among(part.component, part.target)) for part in held]


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
