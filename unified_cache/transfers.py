"""The four ways between tiers, each as one life story: what is pinned, what is moved, what is published.

Each function is an operation's steps (see ``controller.operation``). A ``with`` block holds what the operation
holds; leaving it, on whatever way, gives everything back. Between two ``yield`` statements nothing else runs on
the owner's thread; across a ``yield`` the tree may have changed, and only what is pinned is still true.

What a rank finds out for itself, whether there was room, what storage has, what came, is agreed on before anything
is done about it; the rest follows from the tree, which is the same on every rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from unified_cache.controller import LayerwiseLoad, Operation, OperationState, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, ClearJob, FetchJob, LoadJob, ProbeJob, StoreJob
from unified_cache.controller.layerwise import LayerProgress
from unified_cache.controller.operation import Job, Steps, WaitFor
from unified_cache.errors import CacheError, RankError, StorageError
from unified_cache.ledger import HostReservation, Ledger, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.page import PageKey, Prompt
from unified_cache.pool import PageCopies, Pages, Slots, Tier
from unified_cache.ranks import LocalRanks, RankGroup
from unified_cache.storage_backends.protocol import Level
from unified_cache.tree import Match
from unified_cache.window import restorable_ends, window

__all__ = ["Traffic", "Transfers"]

Held = TypeVar("Held")


@dataclass(slots=True)
class Traffic:
    """Pages and bytes moved in one direction since the cache was opened.

    To storage: pages new on the host. Those put again only to stay recent are looked up there, not moved.
    """

    component_pages: list[int]
    """By component."""
    payload_bytes: int = 0

    @property
    def pages(self) -> int:
        """Pages of all components together."""
        return sum(self.component_pages)


class Transfers:
    """Operations over one ledger, one memory and one storage tier."""

    __slots__ = (
        "_fetching",
        "_host_pages_left",
        "_ledger",
        "_loads",
        "_memory",
        "_owners",
        "_ranks",
        "storage",
        "traffic",
    )

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        owners: Mapping[str, bytes],
        host_pages_max: int,
        ranks: RankGroup = LocalRanks(),
    ) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time.

        ``owners`` names by pool whose pages are sealed, see ``Identity.owners``.
        """
        self._ledger = ledger
        self._memory = memory
        self._owners = owners
        self._ranks = ranks
        self._host_pages_left = host_pages_max
        self._fetching = FetchedPages(len(ledger.layout.components))
        self._loads: dict[Job | None, tuple[TierTransfer, LayerProgress]] = {}
        """By job: what loads under way bring."""
        self.storage: StorageTier | None = None
        """Where backups go on to; None for nowhere."""
        moving = (TransferKind.BACKUP, TransferKind.LOAD, TransferKind.STORE, TransferKind.PREFETCH)
        self.traffic = {kind: Traffic([0 for _ in ledger.layout.components]) for kind in moving}

    def moved(self) -> dict[TransferKind, Traffic]:
        """Return a copy of ``traffic``, the caller's own."""
        return {kind: Traffic(list(found.component_pages), found.payload_bytes) for kind, found in self.traffic.items()}

    def backup(self, prompt: Prompt, level: Level) -> Steps:
        """Copy what the host lacks of a prompt's device prefix and publish it; then put all of it into storage.

        First what a resume at its end needs, then the windows that were kept at other ends, for other resumes. Pages
        that storage has already are put again: that costs it a look-up and keeps them recent there, where hits in
        memory are not seen. The host pages stay pinned until storage has answered.
        Where the host is short of room, the longest prefix that fits is backed up. Returns the pages copied to it.
        """
        tree = self._ledger.tree
        found = tree.match(prompt)
        kept_ends = self._kept_ends(found)
        copied = 0
        end = self._ledger.fitting_end(found, Tier.DEVICE, Tier.HOST)
        if end:
            with self._ledger.moving(found, end, Tier.DEVICE, Tier.HOST) as held:
                moving = self._held_by_all(held)
                if moving is not None:
                    copied = yield from self._back_up(prompt, moving, moving.held, level)
        for end in kept_ends:
            found = tree.match(prompt.head(end))
            if found.device_end != end or tree.full_end(found, Tier.HOST) < end:
                continue
            with self._ledger.moving(found, end, Tier.DEVICE, Tier.HOST) as held:
                moving = self._held_by_all(held)
                if moving is not None:
                    copied += yield from self._back_up(prompt, moving, moving.held_windows, level)
        return copied

    def _kept_ends(self, found: Match) -> list[int]:
        """Return the ends before a match's own, descending, at which the device keeps windows that the host lacks."""
        spans = [component.span for component in self._ledger.layout.components]
        holes: list[Pages | None] = [None]
        lacking: list[tuple[int, Pages]] = []
        for component, span in enumerate(spans[1:], 1):
            on_device, on_host = (
                self._ledger.tree.slots(found, tier, component, 0, found.device_end)
                for tier in (Tier.DEVICE, Tier.HOST)
            )
            holes.append(on_device < 0)
            lacks = (on_device >= 0) & (on_host < 0)
            lacks[window(found.device_end, span) :] = False
            lacking.append((span, lacks))
        if not any(lacks.any() for _, lacks in lacking):
            return []
        resumable = restorable_ends(spans, holes, 0, found.device_end, [0 for _ in spans])
        ends: set[int] = set()
        for span, lacks in lacking:
            for page in np.flatnonzero(lacks)[::-1].tolist():
                if not lacks[page]:
                    continue  # covered by an end that was found before
                later = np.flatnonzero(resumable[page : page + span])
                if later.size:
                    end = page + int(later[0]) + 1
                    ends.add(end)
                    for other_span, others in lacking:
                        others[window(end, other_span) : end] = False
        return sorted(ends, reverse=True)

    def _back_up(
        self, prompt: Prompt, moving: TierTransfer, held: Callable[[], list[PageCopies]], level: Level
    ) -> Steps:
        """Copy and publish what moves; then put what ``held`` says is on the host. Return the pages copied."""
        if moving.parts:
            yield BackupJob(self._memory, self._ledger.layout, self._owners, prompt, moving.parts)
        taken = moving.publish()
        copied = self._count(TransferKind.BACKUP, taken)
        if self.storage is not None:
            parts = held()
            store = StoreJob(self.storage, prompt, parts, level)
            yield store
            stored = zip(parts, self._true_for_all(store.stored), strict=True)
            self._count(TransferKind.STORE, _among([part.where(whole) for part, whole in stored], taken))
        return copied

    def load(self, prompt: Prompt) -> Steps:
        """Copy what the device lacks of a prompt's restorable prefix and publish it.

        Where the device is short of room, the longest prefix that fits is loaded instead. Returns pages loaded.
        """
        found = self._ledger.tree.match(prompt)
        end = self._ledger.fitting_end(found, Tier.HOST, Tier.DEVICE)
        if end <= found.device_end:
            return 0
        with self._ledger.moving(found, end, Tier.HOST, Tier.DEVICE) as held:
            moving = self._held_by_all(held)
            if moving is None:
                return 0
            if moving.parts:
                job = LoadJob(self._memory, self._ledger.layout, moving.parts)
                self._loads[job] = moving, job.progress
                try:
                    yield job
                finally:
                    del self._loads[job]
            return self._count(TransferKind.LOAD, moving.publish())

    def layerwise_load(self, operation: Operation) -> LayerwiseLoad | None:
        """Return the pages of a load under way by layer; None if it is over or another load brings part of it."""
        if operation.job not in self._loads or operation.state is not OperationState.RUNNING:
            return None
        moving, progress = self._loads[operation.job]
        slots = moving.coming()
        if any((given < 0).any() for given in slots):
            return None
        return LayerwiseLoad(operation, moving.end, slots, moving.parts, progress)

    def prefetch(self, prompt: Prompt, storage: StorageTier) -> Steps:
        """Read from storage what memory lacks for the longest resume that both together allow, and graft it there.

        That is what continues the host's own Full prefix, which stays pinned, and the windows before the new end,
        also those that the host has lost while it kept Full. Each rank says at which ends it could resume; the last
        that all could is fetched. Prefetches are single flight: while another one fetches any of these pages, this one
        waits, and then looks again at what is still missing. Returns the pages by which the prompt can be resumed
        further, whoever has brought them.
        """
        missing = self._missing(prompt)
        first_end = missing.known_end
        while missing.known_end < prompt.pages_count:
            with self._ledger.pinned(missing.found, missing.full_start, Tier.HOST):
                probe = ProbeJob(storage, prompt, missing.lacking)
                operation = yield probe
            missing = self._missing(prompt)  # others may have brought or evicted some of it meanwhile
            ends = self._ranks.agree(missing.ends(probe.among(missing.lacking)))
            other = self._fetching.find(prompt, missing.wanted(missing.start + _last(ends)))
            if other is None:
                fetched = yield from self._fetch(operation, prompt, storage, missing, ends)
                return max(missing.known_end + fetched - first_end, 0)
            yield WaitFor(other)
            missing = self._missing(prompt)
        return missing.known_end - first_end

    def _fetch(
        self, operation: Operation, prompt: Prompt, storage: StorageTier, missing: "MissingPages", ends: Pages
    ) -> Steps:
        """Fetch and graft what a resume needs at the last of ``ends`` for which there is room.

        Returns the pages by which the prompt can be resumed further.
        """
        with self._ledger.pinned(missing.found, missing.full_start, Tier.HOST):
            ends[max(missing.full_start + self._host_pages_left - missing.start, 0) :] = False
            while (end := missing.start + _last(ends)) > missing.known_end:
                wanted = missing.wanted(end)
                with (
                    self._budgeted(len(wanted[0])),
                    self._ledger.reserving(Tier.HOST, [len(pages) for pages in wanted]) as held,
                ):
                    staging = self._held_by_all(held)
                    if staging is not None:
                        moved = enumerate(zip(wanted, staging.slots, strict=True))
                        parts = [PageCopies(component, pages, slots, slots) for component, (pages, slots) in moved]
                        fetch = FetchJob(storage, prompt, parts)
                        failure: CacheError | None = None
                        with self._fetching.marked(prompt, wanted, operation):
                            try:
                                yield fetch
                            except (StorageError, RankError) as error:  # what came before it is as good as ever
                                failure = error
                        pages_count = self._graft(prompt, missing, staging, parts, self._true_for_all(fetch.arrived))
                        if failure is not None:
                            raise failure
                        return pages_count
                room_end = missing.full_start + self._ledger.free_count(Tier.HOST, 0)
                ends[max(min(room_end, end - 1) - missing.start, 0) :] = False
        return 0

    def clear(self, storage: StorageTier) -> Steps:
        """Remove from storage what this rank has put there; no backup puts anything meanwhile. Returns objects."""
        job = ClearJob(storage)
        with storage.clearing.clear():
            yield job
        return job.removed_count

    def _missing(self, prompt: Prompt) -> "MissingPages":
        """Look at what memory has of a prompt, and what it lacks for any longer resume."""
        tree = self._ledger.tree
        found = tree.match(prompt)
        full_start = tree.full_end(found, Tier.HOST)
        spans = [component.span for component in self._ledger.layout.components]
        start = min([full_start, *(window(found.host_end + 1, span) for span in spans[1:])])
        pages = np.arange(start, prompt.pages_count)
        lacking = [pages[pages >= full_start]]
        for component in range(1, len(spans)):
            slots = tree.slots(found, Tier.HOST, component, start, found.tree_end)
            lacks = np.ones(len(pages), np.bool_)
            lacks[: len(slots)] = slots < 0
            lacking.append(pages[lacks])
        return MissingPages(found, spans, start, full_start, found.host_end, prompt.pages_count, lacking)

    def _held_by_all(self, held: Held | None) -> Held | None:
        """Return ``held`` if every rank could allocate it, else None; the caller gives it back in either case."""
        return held if self._ranks.agree(np.array([held is not None]))[0] else None

    def _true_for_all(self, masks: Sequence[Pages]) -> list[Pages]:
        """Return where masks, of the same lengths on every rank, are True on all of them."""
        if not masks:
            return []
        return np.split(self._ranks.agree(np.concatenate(masks)), np.cumsum([len(mask) for mask in masks])[:-1])

    @contextmanager
    def _budgeted(self, pages: int) -> Iterator[None]:
        """Reserve host pages out of the budget of prefetches, for the length of a ``with`` block."""
        self._host_pages_left -= pages
        try:
            yield
        finally:
            self._host_pages_left += pages

    def _graft(
        self,
        prompt: Prompt,
        missing: "MissingPages",
        staging: HostReservation,
        parts: Sequence[PageCopies],
        arrived: Sequence[Pages],
    ) -> int:
        """Put what arrived of ``parts`` into the tree, as far as it can be resumed from."""
        came = [part.where(mask) for part, mask in zip(parts, arrived, strict=True)]
        filled = [np.isin(lacks, part.pages) for lacks, part in zip(missing.lacking, came, strict=True)]
        end = missing.start + _last(missing.ends(filled))
        if end <= missing.known_end:
            return 0
        kept = [part.where(part.pages < end) for part in came]
        start = min(int(part.pages[0]) for part in kept if len(part))
        slots: list[Slots] = []
        for part in kept:
            given = np.full(end - start, -1, np.int32)
            given[part.pages - start] = part.target
            slots.append(given)
        staging.insert(prompt.head(end), start, slots)
        self._count(TransferKind.PREFETCH, kept)
        return end - missing.known_end

    def _count(self, kind: TransferKind, parts: Sequence[PageCopies]) -> int:
        """Count pages that were moved; return how many."""
        traffic = self.traffic[kind]
        for part in parts:
            component = self._ledger.layout.components[part.component]
            traffic.payload_bytes += len(part) * sum(pool.page_bytes for pool in component.pools)
            traffic.component_pages[part.component] += len(part)
        return sum(len(part) for part in parts)


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Pages of a prompt that memory lacks: [start, pages_count) of each component, but for those the host holds."""

    found: Match
    spans: Sequence[int]
    start: int
    """First page that a longer resume could need and memory may lack."""
    full_start: int
    """Where the host's own Full prefix ends, and what is fetched of Full goes on."""
    known_end: int
    """What can be resumed without storage."""
    pages_count: int
    lacking: Sequence[npt.NDArray[np.int64]]
    """By component: pages that the host lacks, ascending."""

    def ends(self, filled: Sequence[Pages]) -> Pages:
        """Tell for each end in [start + 1, pages_count] whether it can be resumed from, with some of them filled.

        ``filled[c]`` says it of each page in ``lacking[c]``. What was resumable without is not looked at.
        """
        missing: list[Pages] = []
        for pages, held in zip(self.lacking, filled, strict=True):
            holes = np.zeros(self.pages_count - self.start, np.bool_)
            holes[pages[~held] - self.start] = True
            missing.append(holes)
        holes_before = [0, *(self.start for _ in self.spans[1:])]
        ends = restorable_ends(self.spans, missing, self.start, self.pages_count - self.start, holes_before)
        ends[: max(self.known_end - self.start, 0)] = False
        return ends

    def wanted(self, end: int) -> list[npt.NDArray[np.int64]]:
        """Return by component the pages to fetch for a resume at ``end``."""
        windows = [window(end, span) for span in self.spans]
        return [pages[(pages >= first) & (pages < end)] for pages, first in zip(self.lacking, windows, strict=True)]


class FetchedPages:
    """Pages on their way from storage: which operation fetches each."""

    __slots__ = ("_by_component",)

    def __init__(self, components_count: int) -> None:
        self._by_component: list[dict[PageKey, Operation]] = [{} for _ in range(components_count)]

    def find(self, prompt: Prompt, wanted: Sequence[npt.NDArray[np.int64]]) -> Operation | None:
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


def _among(parts: Sequence[PageCopies], others: Sequence[PageCopies]) -> list[PageCopies]:
    """Return of ``parts`` the pages that are in ``others`` too."""
    pages = {part.component: part.pages for part in others}
    return [part.where(np.isin(part.pages, pages[part.component])) for part in parts if part.component in pages]


def _last(ends: Pages) -> int:
    """Return how many pages the last end takes that is True, counted from where ``ends`` begin; 0 if there is none."""
    found = np.flatnonzero(ends)
    return int(found[-1]) + 1 if found.size else 0
