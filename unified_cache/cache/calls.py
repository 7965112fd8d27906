"""The calls of a request one by one, for an engine that overlaps what ``UnifiedCache.bring`` does in a row."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from unified_cache.cache.recording import RequestWatcher
from unified_cache.cache.stats import AttachedStore, LookupCounts, Occupancy, PublishedStats, Stats
from unified_cache.controller import (
    Controller,
    HintCounts,
    LayerwiseLoad,
    NotStarted,
    Operation,
    PageTally,
    StorageTier,
    TransferKind,
    Workers,
)
from unified_cache.controller.backup import Backups
from unified_cache.controller.backup_scheduler import BackupScheduler
from unified_cache.controller.duplicates import DuplicateCheck
from unified_cache.controller.ledger import Ledger
from unified_cache.controller.memory import PageMemory
from unified_cache.controller.operation import TrafficCounts
from unified_cache.controller.prefetch import Loads, Prefetches
from unified_cache.controller.ranks.group import LocalRanks, RankGroup
from unified_cache.controller.storage_tier import StoreArrival
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.errors import ClosedError, InputError, OwnerThreadError, check_kind
from unified_cache.core.page import DEFAULT_NAMESPACE, MediaItem, Namespace, Prompt, TokensLike
from unified_cache.core.pool import Identity, ModelLayout, Pages, Slots, Tier
from unified_cache.core.process import HomeProcess
from unified_cache.core.slots import PairedAllocator
from unified_cache.storage_backends.protocol import Level
from unified_cache.tree import UNNAMED, Lock, Match

logger = logging.getLogger(__name__)


def check_deadline(deadline_s: float) -> None:
    """Raise InputError for what is no time from now."""
    check_kind(deadline_s, int | float, "deadline_s as a number of seconds")
    if not deadline_s > 0:
        raise InputError(f"deadline_s must be a positive number of seconds from now, found {deadline_s}")


def _check_operation(operation: Operation) -> None:
    check_kind(operation, Operation, "an operation that has started, such as a prefetch that is not NotStarted")


class RequestCalls:
    """Base of ``UnifiedCache``: its calls for one request, its prefix, slots and transfers."""

    def __init__(
        self,
        layout: ModelLayout,
        config: CacheConfig,
        memory: PageMemory,
        workers: Workers,
        identity: Identity,
        ranks: RankGroup = LocalRanks(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take parts that fit each other; ``clock``, in seconds, times transfers."""
        self.layout = layout
        self.config = config
        self.identity = identity
        self._memory = memory
        self._storage: StorageTier | None = None
        self._arrival: StoreArrival | None = None
        """Of a store that was away when the cache opened."""
        capacity = (config.device_pages, config.host_pages)
        self._ledger = Ledger(layout, capacity, config.eviction)
        self.changes = self._ledger.changes
        """Pages that enter and leave the tiers, for one watcher: a publisher of KV events."""
        self._ranks = ranks
        self._controller = Controller(workers, config.operations_max, config.operation_timeout_s, clock, ranks)
        prefetch_max = int(config.host_pages[0] * config.prefetching.host_share)
        self._traffic = TrafficCounts(layout)
        self._loads = Loads(self._ledger, memory, ranks, self._traffic)
        self._prefetches = Prefetches(self._ledger, memory, prefetch_max, ranks, self._traffic, clock)
        self._backups = Backups(self._ledger, memory, identity.owners(layout), ranks, self._traffic)
        self._scheduler = BackupScheduler(config, self._backups, self._controller, ranks, clock)
        if self._scheduler.writes_inserted:
            self._ledger.evict_to_host = self._backups.evict_to_host
        self._duplicates = DuplicateCheck(layout, memory, config.duplicates_every)
        self._locks: set[Lock] = set()
        self.dropped: deque[Callable[[], None]] = deque()
        """Closes of requests that nobody has any more and nobody closed; their finalizers, on any thread, append."""
        self._home = HomeProcess("the cache")
        self._owner = threading.get_ident()
        self._closed = False
        self._lookups = LookupCounts()
        self._recorder: RequestWatcher | None = None
        self._published = PublishedStats(self._count)

    # ---- asking -------------------------------------------------------------------------------------------------

    def prompt(
        self,
        tokens: TokensLike,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        media: Sequence[MediaItem] = (),
        whole: bool = False,
    ) -> Prompt:
        """Convert token ids once; whole pages only, a partial tail is never cached.

        ``media`` are the pictures, sounds and films behind placeholder tokens: prompts share what lies before the first
        in which they differ. For ``whole`` and errors see ``Prompt.of``.
        """
        return Prompt.of(tokens, self.layout.page_size, namespace, media=media, whole=whole)

    def match(self, prompt: Prompt, priority: int = UNNAMED) -> Match:
        """Find the longest prefix that can be resumed from the device, and from device and host.

        It leaves a token to compute: of a prompt whose tokens fill its pages, the last page is not part of it
        (``Prompt.reusable_pages``). Makes recent what is held of the prompt and changes nothing else. The match is dead
        as soon as the tree changes. Where pages go by priority, that prefix has at least ``priority`` from now on.
        """
        self._enter()
        return self._ledger.tree.match(prompt, priority).within(prompt.reusable_pages)

    def lock(self, found: Match) -> Lock:
        """Pin the device prefix of a match until ``release``; the match is dead afterwards.

        So a request begins, and counts once: ``hits`` of the lock are its pages by the tier that they came from.

        Raises:
            StaleMatchError: the tree has changed since; match again.
        """
        self._enter()
        check_kind(found, Match, "a match")
        used = found.prompt.head(found.used_end)
        bound_by = found.binding_components() if self._recorder is not None else ()
        if found.tree_end and self._storage is not None and self.config.write is not WritePolicy.ON_CALL:
            self._backups.record_use(found, self._storage)
        hits = self._ledger.take_hits(found)
        lock = self._ledger.tree.lock(found, found.device_end, Tier.DEVICE)
        lock.hits = hits
        self._lookups.record(found.prompt.reusable_pages, hits)
        self._locks.add(lock)
        if self._recorder is not None:
            self._recorder.locked(found.prompt, lock, bound_by)
        if used.pages_count:
            self._scheduler.reused(used)
            self._scheduler.start_due(self._storage)
        return lock

    def slots(self, lock: Lock, component: int = 0) -> Slots:
        """Return the device slots that a lock pins for a component: all pages for Full, else its window.

        Raises:
            LockError, InputError: released already, or another cache's; there is no such component.
        """
        self._enter()
        return self._ledger.lock_slots(lock, component)

    def release(self, lock: Lock) -> None:
        """Take a lock back, once.

        Raises:
            LockError: released already, or another cache's.
        """
        self._enter()
        self._ledger.tree.unlock(lock)
        self._locks.discard(lock)
        if self._recorder is not None:
            self._recorder.released(lock)

    def release_windows(self, lock: Lock) -> None:
        """Unpin the windows and states that a lock pins; Full stays pinned until ``release``.

        For a request whose own pages have filled its windows: what it resumed from becomes evictable while it still
        runs. It must not read those pages any more, nor ``fork`` them. Once more changes nothing.

        Raises:
            LockError: released already, or another cache's.
        """
        self._enter()
        self._ledger.tree.release_windows(lock)

    # ---- computing ----------------------------------------------------------------------------------------------

    def checkpoint_ends(self, found: Match) -> tuple[int, ...]:
        """Return the ends, ascending, at which a request that goes on from ``found`` leaves what a resume needs.

        See ``config.Retention``. The last one is the prompt's own end, where a longer prompt resumes; where that is a
        page farther than ``match`` goes, the one before it is kept too, for the same prompt again.
        """
        check_kind(found, Match, "a match")
        prompt = found.prompt
        ends = self.config.retention.ends(prompt.pages_count, found.tree_end, self.layout.page_size)
        return tuple(sorted(end for end in {prompt.reusable_pages, *ends} if end > found.device_end))

    def pages_to_allocate(self, start: int, end: int, ends: Iterable[int]) -> list[Pages]:
        """Return what ``ModelLayout.pages_to_allocate`` does."""
        return self.layout.pages_to_allocate(start, end, ends)

    def available(self, component: int = 0) -> int:
        """Return how many device pages of a component ``allocate`` could hand out now: free and evictable ones. O(1).

        Until the next lock, insert or transfer, an ``allocate`` that asks for no more than that of any component
        succeeds.
        """
        self._enter()
        self.layout.check_component(component)
        return self._ledger.available_pages(Tier.DEVICE, component)

    def allocate(self, masks: Sequence[Pages]) -> list[Slots] | None:
        """Hand out device slots for pages to be computed, evicting what is short; None if pins leave too little.

        ``masks`` has an array per component, True for each page that gets a slot. Returns an array per component with
        an entry per page, -1 where it gets none: what ``insert`` takes. Until then, or until ``free``, they are the
        caller's.

        With write-back and write-through it waits until what it evicts has been copied to the host.

        Raises:
            InputError: not an array for each component, of one length, the first all True.
        """
        self._enter()
        return self._ledger.allocate_pages(masks)

    def free(self, pages: Sequence[Slots]) -> None:
        """Free slots from ``allocate`` or ``fork`` that ``insert`` did not take.

        Raises:
            SlotError: a slot is not the caller's. Nothing was freed.
        """
        self._enter()
        self._ledger.free_pages(pages)

    def trim(self, pages: Sequence[Slots], masks: Sequence[Pages]) -> None:
        """Free the slots of an allocation whose mask is False; they become -1 in ``pages``.

        For what has left every window that matters while its request still runs; Full keeps its slots.

        Raises:
            InputError: as ``allocate``, or the arrays differ in length.
            SlotError: a slot is not the caller's. Nothing was freed.
        """
        self._enter()
        self._ledger.trim_pages(pages, masks)

    def fork(self, lock: Lock) -> list[Slots] | None:
        """Copy the state at the end of ``lock`` that a request goes on changing into slots of the caller's own.

        That is recurrent state: the pinned page stays what it is, for others; the copy is the request's to run on
        (copy-on-write). Returns an array per component, empty for those whose pages are never changed; None if
        pins leave too little room, or nothing is locked. Give it back with ``free``, or to ``insert`` as the last
        page of its component.

        Raises:
            LockError: released already, or another cache's.
            InputError: the tree holds no state at the end of the lock, or the lock has released its windows.
        """
        self._enter()
        self._ledger.tree.check_lock(lock)
        return self._ledger.fork(lock, self._memory) if lock.end else None

    def insert(self, prompt: Prompt, slots: Sequence[Slots], lock: Lock, priority: int = UNNAMED) -> Lock:
        """Hand over the computed pages after those that ``lock`` pins; return a lock on the whole prompt instead.

        That is all pages of the prompt, the last one too where ``match`` leaves it out: longer prompts reuse it.
        ``slots[c]`` has an entry for each page from ``lock.end`` on, -1 where component ``c`` keeps none. The
        prompt's slots are those of the new lock from now on: a page that another request inserted meanwhile is a
        duplicate, and the caller's slot for it was freed; some are compared with what is held (``Stats.duplicates``).

        Raises:
            LockError: the lock was released already, or is another cache's; nothing was changed.
            InputError, SlotError: see ``RadixTree.insert``; nothing was changed, slots and lock are the caller's.
        """
        self._enter()
        tree = self._ledger.tree
        tree.check_lock(lock)
        inserted = self._ledger.insert(prompt, lock.end, slots, Tier.DEVICE, priority)
        if any(map(len, inserted.duplicates)):
            self._duplicates.sample(prompt, lock.end, slots, inserted)
        renewed = tree.lock_node(inserted.node, prompt.pages_count, Tier.DEVICE)
        self._locks.add(renewed)
        new_pages = prompt.pages_count - lock.end
        if self._recorder is not None:
            self._recorder.inserted(lock, renewed)
        self.release(lock)
        if new_pages:
            tree.supersede(lock, prompt.pages_count)
            self._scheduler.inserted(prompt, new_pages)
            self._scheduler.start_due(self._storage)
        return renewed

    @property
    def pairing(self) -> PairedAllocator | None:
        """Full's device slots and those reached through them, with their page map; None for a layout without."""
        return self._ledger.paired

    # ---- moving -------------------------------------------------------------------------------------------------

    def load(self, prompt: Prompt) -> Operation | NotStarted:
        """Start bringing what the host holds of a prompt to the device, as far as ``match`` goes.

        Not started without a host tier, or if too much is under way.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        if not self.config.host_pages[0]:
            return NotStarted.NO_HOST
        prompt = prompt.reusable
        tally = PageTally()
        return self._controller.start(TransferKind.LOAD, self._loads.load(prompt, tally), tally=tally)

    def backup(self, prompt: Prompt, level: Level = Level.CACHED) -> Operation | NotStarted:
        """Start copying a prompt's device prefix to the host, and on to storage, unless too much is under way.

        In the end it is DONE if all of the prompt is there, in storage where there is one; its ``tally`` says how many
        pages are, and how many are not for which reason. A prompt that the host is too small for goes on to storage in
        pieces.

        Raises:
            ConfigError: there is no host tier.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        check_kind(level, Level, "a level, such as Level.DURABLE")
        self.config.check_host()
        tally = PageTally()
        steps = self._backups.backup(prompt, self._storage, level, tally)
        return self._controller.start(TransferKind.BACKUP, steps, tally=tally)

    def prefetch(self, prompt: Prompt, deadline_s: float = math.inf) -> Operation | NotStarted:
        """Start reading what storage can add to a prompt, as far as ``match`` goes.

        Not started without storage, or if it is not worth it now: fewer than ``config.prefetching.threshold_tokens``
        are missing, or too much is under way. Nothing is read if storage adds fewer. What has arrived is kept however
        the reading ends: as far as the prompt can be resumed from then, and Full pages also for a later prefetch.

        After ``deadline_s`` seconds, or ``config.prefetching.patience_s`` if that is sooner, the next ``poll`` returns
        it as done, whatever the store still does, with what has arrived by then; the rest is for other requests.

        Raises:
            InputError: the deadline is no positive number of seconds.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        check_deadline(deadline_s)
        prompt = prompt.reusable
        if self._storage is None:
            return NotStarted.NO_STORAGE
        prefetching, page_size = self.config.prefetching, self.layout.page_size
        found = self._ledger.tree.match(prompt)
        missing_tokens = (prompt.pages_count - found.host_end) * page_size
        if missing_tokens < prefetching.threshold_tokens:
            return NotStarted.BELOW_THRESHOLD
        worth_pages = max(1, -(-prefetching.threshold_tokens // page_size))
        steps = self._prefetches.prefetch(found, self._storage, worth_pages)
        deadline_s = min(deadline_s, prefetching.patience_s)
        return self._controller.start(TransferKind.PREFETCH, steps, deadline_s=deadline_s, keep=self._prefetches.keep)

    def begin_layerwise(self, operation: Operation) -> LayerwiseLoad | None:
        """Begin to read what a load brings, layer by layer, before it is in the tree; ``end_layerwise`` ends it.

        None if the operation is over or no load, or if another one brings part of its prefix. Once the last layer was
        there: ``end_layerwise``, then ``wait_all`` or ``poll`` until the load is over, then match and lock as ever.
        """
        self._enter()
        _check_operation(operation)
        load = self._loads.layerwise(operation)
        if load is not None:
            operation.followers.add(load)
        return load

    def end_layerwise(self, load: LayerwiseLoad) -> None:
        """End the layer-wise reading of a load. A second call, or one after ``reset``, changes nothing."""
        self._enter()
        check_kind(load, LayerwiseLoad, "a load that begin_layerwise returned")
        load.operation.followers.discard(load)

    def poll(self) -> list[Operation]:
        """Advance transfers whose bytes have moved; return those that are over, each once.

        Raises:
            RankLostError: of several ranks, one no longer answers; raised once. From now on nothing is moved any more.
        """
        self._enter()
        self._close_dropped()
        if self._arrival is not None:
            self._look_for_store(self._arrival)
        over = self._controller.poll()
        if self._storage is not None:
            self._scheduler.look_at_clock()
        self._scheduler.start_due(self._storage)
        self._published.publish_if_due()
        return over

    def wait_all(self, timeout_s: float, *, until: Operation | None = None) -> list[Operation]:
        """Poll until no transfer is under way and no backup is due; return the transfers that are over, as ``poll``.

        ``until`` is one whose end is enough, and the others go on.

        Raises:
            WaitTimeoutError: some still are after ``timeout_s``; they go on, and ``poll`` returns them.
            RankLostError: as ``poll``.
            InputError: no time, or ``until`` is no operation.
        """
        self._enter()
        check_kind(timeout_s, int | float, "timeout_s as a number of seconds")
        if until is not None:
            _check_operation(until)
        if self._arrival is not None:
            self._look_for_store(self._arrival)
        self._scheduler.wait_all(timeout_s, self._storage, until)
        over = self._controller.take_completed()
        self._published.publish_if_due()
        return over

    def finish_early(self, operation: Operation) -> None:
        """End a transfer now and keep what has arrived, as a deadline does. As best_effort in SGLang.

        The next ``poll`` returns a prefetch; any other transfer ends with the call or the copy that is under way.
        """
        self._enter()
        _check_operation(operation)
        operation.stop()

    def cancel(self, operation: Operation) -> bool:
        """End a transfer that nobody waits for any more; return whether it was still running.

        What a prefetch has read is kept for others; of any other transfer, nothing. Its slots are given back once no
        worker and no store uses them any more.
        """
        self._enter()
        _check_operation(operation)
        return self._controller.cancel(operation)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _close_dropped(self) -> None:
        """Close requests that were dropped; of several ranks none does, since each would at another time."""
        while self.dropped:
            close = self.dropped.popleft()
            if self._ranks.size == 1:
                close()
            logger.warning(
                "a request was dropped and not closed: its pages %s; use bring in a with block, or call close",
                "were given back now" if self._ranks.size == 1 else "stay pinned until reset",
            )

    def _take_over(self, tier: StorageTier) -> None:
        self._storage = tier
        self._arrival = None
        self._ledger.follow_storage(tier.backend)
        self._scheduler.storage_attached()
        logger.info("attached a store")

    def _look_for_store(self, arrival: StoreArrival) -> None:
        if not self._ranks.is_lost:
            tier = arrival.poll()
            if tier is not None:
                self._take_over(tier)

    def _enter(self) -> None:
        self._home.check()
        if threading.get_ident() != self._owner:
            raise OwnerThreadError("a cache may be called only from the thread that opened it")
        if self._closed:
            raise ClosedError("the cache is closed")

    def _count(self) -> Stats:
        storage = self._storage
        return Stats(
            counted_at_s=time.time(),
            occupancy=Occupancy.of(self._ledger),
            traffic=self._traffic.copy(),
            lookups=replace(self._lookups),
            operations={kind: counts.copy() for kind, counts in self._controller.counts.items()},
            backups=self._scheduler.counts(),
            operations_live=self._controller.live_count,
            calls_quarantined=len(self._controller.quarantined),
            storage_answers={} if storage is None else storage.answers.copy(),
            recency_hints=HintCounts() if storage is None or storage.hints is None else storage.hints.counts(),
            store=None if storage is None else AttachedStore.of(storage),
            duplicates=self._duplicates.counts(),
        )
