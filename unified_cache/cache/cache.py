"""The cache an engine embeds: which prefix need not be computed again, where its pages lie, what moves them.

``UnifiedCache`` has what a request asks for first, what an operator asks for last.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Self

import numpy as np

from unified_cache.cache.explain.cached import explain
from unified_cache.cache.explain.explanation import Explanation
from unified_cache.cache.recording import RequestWatcher
from unified_cache.cache.stats import AttachedStore, LookupCounts, Occupancy, PublishedStats, Stats
from unified_cache.controller import (
    Controller,
    HintCounts,
    LayerwiseLoad,
    LeftOut,
    NotStarted,
    Operation,
    OperationState,
    PageTally,
    StorageTier,
    ThreadWorkers,
    TransferKind,
    Workers,
)
from unified_cache.controller.backup import Backups
from unified_cache.controller.backup_scheduler import BackupScheduler
from unified_cache.controller.duplicates import DuplicateCheck
from unified_cache.controller.ledger import Ledger, WriteBack
from unified_cache.controller.memory import ComputeStreams, DevicePool, PageMemory, TieredMemory, check_dtype
from unified_cache.controller.operation import Traffic, TrafficCounts
from unified_cache.controller.prefetch import Loads, Prefetches
from unified_cache.controller.ranks import LocalRanks, RankGroup, check_configuration, pools_to_store, together
from unified_cache.controller.storage_tier import storage_of
from unified_cache.controller.store_arrival import StoreArrival
from unified_cache.core.config import CacheConfig, GuardConfig, WritePolicy
from unified_cache.core.errors import (
    ClosedError,
    InputError,
    OwnerThreadError,
    RankLostError,
    StateError,
    WaitTimeoutError,
    check_kind,
)
from unified_cache.core.hits import Hits
from unified_cache.core.page import DEFAULT_NAMESPACE, MediaItem, Namespace, Prompt, TokensLike
from unified_cache.core.pool import Identity, ModelLayout, Pages, Slots, Tier, identity_of
from unified_cache.core.slots import PairedAllocator
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.protocol import Level, StorageBackend
from unified_cache.storage_backends.url import check_storage_url
from unified_cache.tree import UNNAMED, Lock, Match

__all__ = ["Request", "UnifiedCache"]

logger = logging.getLogger(__name__)


class UnifiedCache:
    """Prefix cache over device, host and storage. One thread owns it; only that thread may call it.

    A request's life is one ``bring``. For an engine that overlaps more, its steps: ``match`` the prompt; ``prefetch``
    and ``load`` what lies further down, ``poll`` until that is over and match again; ``lock`` what is on the device;
    ``allocate`` slots for the rest and compute it; ``insert``; ``backup``; ``release``. See ARCHITECTURE.md.

    Ranks of a group each have one, hold different shards of the same pages, and make the same calls in the same order.
    """

    @classmethod
    def open(  # noqa: PLR0913  # each is one part that an engine brings, five of them by name
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        device_pools: Sequence[DevicePool],
        *,
        identity: Identity | str,
        storage: StorageBackend | str | None = None,
        workers: Workers | None = None,
        ranks: RankGroup = LocalRanks(),
        after: ComputeStreams | None = None,
    ) -> "UnifiedCache":
        """Put a cache over the engine's own tensors; the calling thread owns it.

        ``device_pools`` holds one pool for each of the layout's, with a slot more than ``config.device_pages``.
        ``identity`` may be the name of a model, and ``storage`` a URL, see ``open_storage``. The cache takes the store
        over, unless this raises: it verifies every page read and closes it in the end. A store that is away is logged
        once, and attached by a ``poll`` once it is there; until then the cache is as one without a store.

        ``after`` returns the CUDA streams that the engine computes on, one at least, whenever a copy is to come after
        what they have been given; without it that is the owner's current stream.

        Raises:
            ConfigError: pools, layout, sizes and the identity's dtype do not fit each other, the pools are not on one
                device that is the CPU or a GPU, or host memory does not suffice.
            StorageError: the store cannot be opened, or does not take the layout, until somebody mends that.
        """
        memory = TieredMemory.fitting(layout, config, device_pools, after)
        with ExitStack() as undo:
            undo.callback(memory.close)
            named = identity_of(identity)
            check_dtype(named, device_pools)
            layout = layout.with_tensors({pool.spec.name: pool.tensors for pool in device_pools})
            with cls._started(layout, config, memory, workers, named, ranks, storage is not None) as cache:
                if storage is not None:
                    cache.await_store(storage)
            undo.pop_all()
        return cache

    @classmethod
    def assemble(
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        memory: PageMemory,
        workers: Workers | None,
        identity: Identity,
        storage: StorageBackend | None,
        ranks: RankGroup = LocalRanks(),
    ) -> "UnifiedCache":
        """Put a cache over any memory, for simulation and for sizing without bytes; the store must be there.

        Without ``workers`` it starts threads; an error leaves none behind.
        """
        with cls._started(layout, config, memory, workers, identity, ranks, storage is not None) as cache:
            if storage is not None:
                cache.attach(storage)
        return cache

    @classmethod
    @contextmanager
    def _started(
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        memory: PageMemory,
        workers: Workers | None,
        identity: Identity,
        ranks: RankGroup,
        has_storage: bool,
    ) -> Iterator["UnifiedCache"]:
        """Yield a cache without its store, and end its workers if the block raises."""
        check_configuration(ranks, layout, config, identity, has_storage=has_storage)
        if workers is None:
            workers = ThreadWorkers.start(storage=config.storage_workers)
        cache = cls(layout, config, memory, workers, identity, ranks)
        try:
            yield cache
        except BaseException:
            workers.close(config.close_timeout_s)
            raise
        logger.info("opened a cache of %s device and %s host pages", config.device_pages, config.host_pages)

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
        self._ledger = Ledger(layout, capacity, config.eviction, self._write_back)
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
        self._duplicates = DuplicateCheck(layout, memory, config.duplicates_every)
        self._locks: set[Lock] = set()
        self._owner = threading.get_ident()
        self._closed = False
        self._lookups = LookupCounts()
        self._recorder: RequestWatcher | None = None
        self._published = PublishedStats(self._count)

    # ---- asking --------------------------------------------------------------------------------------------

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

    def bring(self, prompt: Prompt, deadline_s: float = math.inf, priority: int = UNNAMED) -> "Request":
        """Begin a request: bring what storage and host hold of its prompt to the device, and pin what is there then.

        It prefetches, loads and locks, and so counts once. Reading storage ends as a ``prefetch`` with ``deadline_s``
        does. What the device has in full is pinned when this returns. Use it in a ``with`` block, which gives all
        back however it is left.

        Raises:
            InputError: the deadline is no positive number of seconds.
        """
        self._enter()
        request = Request(self, prompt, deadline_s, priority)
        request.advance()
        return request

    # ---- computing -----------------------------------------------------------------------------------------

    def checkpoint_ends(self, found: Match) -> tuple[int, ...]:
        """Return the ends, ascending, at which a request that goes on from ``found`` leaves what a resume needs.

        See ``config.Retention``. The last one is the prompt's own end, where a longer prompt resumes; where that is a
        page farther than ``match`` goes, the one before it is kept too, for the same prompt again.
        """
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

    def allocate(self, masks: Sequence[Pages], *, may_wait: bool = True) -> list[Slots] | None:
        """Hand out device slots for pages to be computed, evicting what is short; None if pins leave too little.

        ``masks`` has an array per component, True for each page that gets a slot. Returns an array per component with
        an entry per page, -1 where it gets none: what ``insert`` takes. Until then, or until ``free``, they are the
        caller's.

        With write-back and write-through it waits until what it evicts has been copied to the host. Where it should not
        (``may_wait``), it evicts first what the host has, however recent, and waits only if that is not enough.

        Raises:
            InputError: not an array for each component, of one length, the first all True.
        """
        self._enter()
        return self._ledger.allocate_pages(masks, may_wait=may_wait)

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
            InputError: the tree holds no state at the end of the lock, or the lock has released its windows.
        """
        self._enter()
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

    # ---- moving --------------------------------------------------------------------------------------------

    def load(self, prompt: Prompt) -> Operation | NotStarted:
        """Start bringing what the host holds of a prompt to the device, as far as ``match`` goes.

        Not started if too much is under way.

        Raises:
            ConfigError: there is no host tier.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        self.config.check_host()
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
        check_kind(deadline_s, int | float, "deadline_s as a number of seconds")
        if not deadline_s > 0:
            raise InputError(f"deadline_s must be a positive number of seconds from now, found {deadline_s}")
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
        load = self._loads.layerwise(operation)
        if load is not None:
            operation.followers.add(load)
        return load

    def end_layerwise(self, load: LayerwiseLoad) -> None:
        """End the layer-wise reading of a load. A second call, or one after ``reset``, changes nothing."""
        self._enter()
        load.operation.followers.discard(load)

    def poll(self) -> list[Operation]:
        """Advance transfers whose bytes have moved; return those that are over, each once.

        Raises:
            RankLostError: of several ranks, one no longer answers; raised once. From now on nothing is moved any more.
        """
        self._enter()
        self._look_for_store()
        over = self._controller.poll()
        if self._storage is not None:
            self._scheduler.look_at_clock()
        self._scheduler.start_due(self._storage)
        self._published.publish_if_due()
        return over

    def wait_all(self, timeout_s: float) -> list[Operation]:
        """Poll until no transfer is under way and no backup is due; return the transfers that are over, as ``poll``.

        Raises:
            WaitTimeoutError: some still are after ``timeout_s``; they go on, and ``poll`` returns them.
            RankLostError: as ``poll``.
        """
        self._enter()
        self._look_for_store()
        self._scheduler.wait_all(timeout_s, self._storage)
        over = self._controller.take_completed()
        self._published.publish_if_due()
        return over

    def finish_early(self, operation: Operation) -> None:
        """End a transfer now and keep what has arrived, as a deadline does. As best_effort in SGLang.

        The next ``poll`` returns a prefetch; any other transfer ends with the call or the copy that is under way.
        """
        self._enter()
        operation.stop()

    def cancel(self, operation: Operation) -> bool:
        """End a transfer that nobody waits for any more; return whether it was still running.

        What a prefetch has read is kept for others; of any other transfer, nothing. Its slots are given back once no
        worker and no store uses them any more.
        """
        self._enter()
        return self._controller.cancel(operation)

    # ---- operating -----------------------------------------------------------------------------------------

    def explain(self, prompt: Prompt, *, seeks_near: bool = True) -> Explanation:
        """Explain by tier and component how far a prompt's hit goes, and why pages are missing; ``str()`` draws it.

        Its pages are those that ``match`` could find, and so not the last one where its tokens fill it. It says what
        is, not what was: the counters of ``stats`` do. It changes nothing, not even recency, and asks the store once
        for all pages: as long as the store's guard lets it, this waits. With ``seeks_near`` it looks for the same
        tokens under other namespaces and identities, too.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        storage, prompt = self._storage, prompt.reusable
        return explain(self._ledger, self.config.write, storage, self.identity, prompt, seeks_near=seeks_near)

    def stats(self) -> Stats:
        """Count what is where and what has moved."""
        self._enter()
        return self._count()

    def published_stats(self) -> Stats:
        """Return the figures of one moment, while the owner polls a second old at most; from any thread."""
        return self._published.latest

    def traffic(self) -> dict[TransferKind, Traffic]:
        """Count what has moved since the cache was opened; copies, the caller's own."""
        self._enter()
        return self._traffic.copy()

    def record_to(self, watcher: RequestWatcher | None) -> None:
        """Report every request to a watcher from now on, such as that of a ``TraceRecorder``; None ends that."""
        self._enter()
        self._recorder = watcher

    def attach(self, storage: StorageBackend | str) -> None:
        """Take a store, or the one that a URL names, over while the cache runs: verify all reads, close it in the end.

        Raises:
            StateError: there is one already.
            ConfigError: there is no host tier, or two ranks that hold different parts of the model name them alike.
            StorageError: the store does not take the layout.
            RankError: of several ranks, another could not take its store over.
        """
        written = self._written_pools()
        with together(self._ranks, "taking a store over"), storage_of(storage) as store:
            assert store is not None
            tier = self._tier_over(store, written)
        self._take_over(tier)

    def await_store(self, storage: StorageBackend | str, clock: Callable[[], float] = time.monotonic) -> None:
        """Attach a store as ``attach`` does; one that is away by the ``poll`` that finds it on every rank.

        Waits for an attempt that goes on, but no longer than for a store to say what it can do. Pauses between two go
        by ``clock``, in seconds.
        """
        written = self._written_pools()
        if isinstance(storage, str):
            check_storage_url(storage)

        def opened() -> StorageTier:
            with storage_of(storage) as store:
                assert store is not None
                return self._tier_over(store, written)

        given = None if isinstance(storage, str) else storage
        arrival = StoreArrival(opened, given, self.config.guard or GuardConfig(), self._ranks, clock)
        try:
            tier = arrival.begin()
        except BaseException:
            arrival.leave(self.config.close_timeout_s)
            raise
        self._arrival = arrival
        if tier is not None:
            self._take_over(tier)

    def _written_pools(self) -> frozenset[str]:
        """Check that a store can be taken over; return the pools that this rank stores."""
        self._enter()
        if self._storage is not None or self._arrival is not None:
            raise StateError("a store is attached, or waited for; detach it first")
        self.config.check_host()
        return pools_to_store(self._ranks, self.identity, self.layout)

    def _tier_over(self, store: StorageBackend, written: frozenset[str]) -> StorageTier:
        return StorageTier.open(store, self.config.guard, self.layout, self.identity, self._memory, written)

    def _take_over(self, tier: StorageTier) -> None:
        self._storage = tier
        self._arrival = None
        self._ledger.follow_storage(tier.backend)
        self._scheduler.storage_attached()
        logger.info("attached a store")

    def _end_arrival(self) -> None:
        """Wait no longer for a store; where it is there on this rank, and not on all, it is taken to be closed."""
        if self._arrival is not None:
            self._storage = self._arrival.end(self.config.close_timeout_s)
            self._arrival = None

    def _look_for_store(self) -> None:
        if self._arrival is not None and not self._ranks.is_lost:
            tier = self._arrival.poll()
            if tier is not None:
                self._take_over(tier)

    def detach(self) -> list[str]:
        """End what moves to or from the store and close it, in twice ``config.close_timeout_s``; name what hangs."""
        self._enter()
        self._end_arrival()
        if self._storage is None:
            return []
        tier = self._storage
        self._storage = None
        self._controller.stop_all()
        self._controller.try_wait_all(self.config.close_timeout_s)  # the store is closed once it has returned
        self._ledger.follow_storage(None)
        hanging = tier.close(self.config.close_timeout_s)
        logger.info("detached the store%s", _hanging(hanging))
        return hanging

    def clear_storage(self) -> Operation | NotStarted:
        """Start removing what storage holds of this identity, and nobody else's, unless too much is under way.

        What was there is gone when it is done; what a backup puts there meanwhile is taken back. Left may be what other
        processes put; a failed or cancelled call may have removed any part. Memory keeps its pages; of several ranks
        each removes what it stores.
        """
        self._enter()
        if self._storage is None:
            return NotStarted.NO_STORAGE
        return self._controller.start(TransferKind.CLEAR, self._backups.clear(self._storage))

    def reset(self) -> None:
        """Forget every prefix in memory; storage keeps its own. Ends transfers first.

        Call it when no request runs: locks and arrivals that are out become void, and the slots they pinned are free.

        Raises:
            WaitTimeoutError: a transfer does not end within ``config.close_timeout_s``; nothing was forgotten.
            RankLostError: as ``poll``; nothing was forgotten.
        """
        self._enter()
        self._controller.leave_all()
        self._controller.wait_all(self.config.close_timeout_s)
        self._ledger.clear()
        self._scheduler.drop_all(LeftOut.EVICTED)

    def check(self) -> None:
        """Assert every invariant of tree, locks and slots from scratch. For tests; slow."""
        self._ledger.check(None if self._controller.live_count else list(self._locks))

    def close(self) -> list[str]:
        """End transfers and workers, then storage; return the names of workers that hang, which is rare and bad.

        Where there is storage, what the write policy has put off is stored first, as far as there is time. Waits at
        most ``config.close_timeout_s``, three times. Once more does nothing.
        """
        if self._closed:
            return []
        self._enter()
        timeout_s = self.config.close_timeout_s
        self._end_arrival()
        self._controller.leave_all()
        if self._storage is not None:
            self._scheduler.give_up_waiting()
            self._scheduler.start_due(self._storage)
        with suppress(WaitTimeoutError, RankLostError):  # what does not end in time is named below
            self._scheduler.wait_all(timeout_s, self._storage)
        self._closed = True
        stuck = self._controller.close(timeout_s)
        self._controller.take_completed()
        self._scheduler.drop_all(LeftOut.CLOSED)
        given_up = self._scheduler.counts()
        if self._storage is not None:
            stuck += self._storage.close(timeout_s)
        if not stuck:
            self._memory.close()
        self._published.publish()
        self._published.latest.warn_of_nothing_kept(self.config)
        self._duplicates.report()
        logger.info("closed the cache%s", _hanging(stuck))
        if given_up.lost_pages:
            logger.warning("%s", given_up)
        return stuck

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self) -> None:
        if threading.get_ident() != self._owner:
            raise OwnerThreadError("a cache may be called only from the thread that opened it")
        if self._closed:
            raise ClosedError("the cache is closed")

    def _write_back(self) -> WriteBack | None:
        """Return the write-back on eviction, if the write policy backs up every page."""
        return self._backups if self._scheduler.writes_inserted else None

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
            flawed_pages=0 if storage is None else sum(storage.backend.flaws_count.values()),
            storage_answers={} if storage is None else storage.answers.copy(),
            recency_hints=HintCounts() if storage is None or storage.hints is None else storage.hints.counts(),
            store=None if storage is None else AttachedStore.of(storage),
            duplicates=self._duplicates.counts(),
        )


def _hanging(names: Sequence[str]) -> str:
    """Return the end of a log line that names what hangs; empty if nothing does."""
    return f"; still hanging: {', '.join(names)}" if names else ""


class Request:
    """A prompt that an engine serves; ``UnifiedCache.bring`` begins it, leaving its ``with`` block ends it.

        [0, lock.end)         pages of the tree, pinned for this request
        [lock.end, own_end)   pages of its own: ``allocate`` gave them slots, ``insert`` hands them to the tree

    ``advance`` once after each ``poll`` until it returns True, or ``wait``. Then read what ``slots`` names, compute the
    rest into what ``allocate`` returns, and ``insert``. Calls out of turn raise ``StateError``.
    """

    __slots__ = ("_cache", "_ends", "_lock", "_operation", "_own", "_steps", "hits", "prompt")

    def __init__(self, cache: "UnifiedCache", prompt: Prompt, deadline_s: float, priority: int) -> None:
        """Take a prompt; nothing is asked or started before the first ``advance``."""
        self.prompt = prompt
        """The prompt; once more was inserted, the longer one."""
        self.hits = Hits()
        """Pages of its prefix that need not be computed, by the tier that they came from; known once it is pinned."""
        self._cache = cache
        self._ends: tuple[int, ...] = ()
        self._lock: Lock | None = None
        self._operation: Operation | None = None
        self._own = [np.empty(0, np.int32) for _ in cache.layout.components]
        self._steps = self._bring(deadline_s, priority)

    # ---- what the tiers hold ---------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Take the next step if bytes have come; return whether the prefix is pinned on the device. Never waits."""
        if self._lock is None:
            next(self._steps, None)
        return self._lock is not None

    def wait(self, timeout_s: float) -> list[Operation]:
        """Wait until the prefix is pinned on the device; return the transfers, anybody's, that are over, as ``poll``.

        Raises:
            WaitTimeoutError: it is not after ``timeout_s``; what moves goes on.
            RankLostError: as ``UnifiedCache.poll``.
        """
        over: list[Operation] = []
        end_s = time.monotonic() + timeout_s
        while not self.advance():
            over += self._cache.wait_all(end_s - time.monotonic())
        return over

    def _bring(self, deadline_s: float, priority: int) -> Iterator[None]:
        """Move what lies further down; yield while it moves. What fails to come, or was declined, is computed."""
        cache, prompt = self._cache, self.prompt
        found = cache.match(prompt, priority)
        if found.host_end < prompt.reusable_pages:
            yield from self._moving(cache.prefetch(prompt, deadline_s))
            found = cache.match(prompt, priority)
        if found.host_end > found.device_end:
            yield from self._moving(cache.load(prompt))
            found = cache.match(prompt, priority)
        self._ends = cache.checkpoint_ends(found)
        self._lock = cache.lock(found)
        self.hits = self._lock.hits

    def _moving(self, started: Operation | NotStarted) -> Iterator[None]:
        if started:
            self._operation = started
            while started.state is OperationState.RUNNING:
                yield
            self._operation = None

    @property
    def moving(self) -> TransferKind | None:
        """PREFETCH while storage is read, LOAD while host memory is copied, None otherwise."""
        return None if self._operation is None else self._operation.kind

    @property
    def lock(self) -> Lock:
        """The lock on all pages of the tree that this request has, those that it inserted among them."""
        if self._lock is None:
            raise StateError("expected the prefix pinned: after wait, or an advance that is True, and before close")
        return self._lock

    def slots(self, component: int = 0) -> Slots:
        """Return the device slots of the pinned pages: all for Full, for others those of the window that ends there."""
        return self._cache.slots(self.lock, component)

    # ---- its own pages ---------------------------------------------------------------------------------------

    @property
    def own(self) -> list[Slots]:
        """Device slots of the pages [lock.end, own_end), an array per component, -1 where it keeps none."""
        return self._own

    @property
    def own_end(self) -> int:
        """End, in pages, of what is pinned and of its own."""
        return self.lock.end + len(self._own[0])

    def allocate(self, end: int | None = None, ends: Iterable[int] | None = None) -> list[Slots] | None:
        """Get slots for the pages from ``own_end`` to ``end``, those of the prompt unless given; evicts what is short.

        ``ends`` are where later requests may resume, those of ``UnifiedCache.checkpoint_ends`` unless given; windows
        and states are kept for these alone. Returns the new slots as ``UnifiedCache.allocate`` does. None, and nothing
        was taken, if pins leave too little room: wait, or compute without keeping.
        """
        end = self.prompt.pages_count if end is None else end
        masks = self._cache.pages_to_allocate(self.own_end, end, self._ends if ends is None else ends)
        taken = self._cache.allocate(masks)
        if taken is not None:
            self._own = [np.concatenate(pair) for pair in zip(self._own, taken, strict=True)]
        return taken

    def trim(self, end: int) -> None:
        """Free those of its own windows and states that no resume at ``end`` pages or later needs.

        Once its own pages fill every window, what it resumed from becomes evictable too: it must not read that again.
        """
        spans = [component.span for component in self._cache.layout.components[1:]]
        if end - self.lock.end >= max(spans, default=SPAN_ALL):
            self._cache.release_windows(self.lock)
        ends = self._cache.config.retention.ends(end, 0, self._cache.layout.page_size)
        self._cache.trim(self._own, self._cache.pages_to_allocate(self.lock.end, self.own_end, ends))

    def insert(self, prompt: Prompt | None = None) -> None:
        """Hand its own pages to the tree: other requests hit them from now on, and they stay pinned for this one.

        ``prompt`` is the longer one once its answer has filled more pages. Pages without a slot end what is inserted,
        and pages past the prompt stay its own. Inserting nothing new changes nothing.

        Raises:
            InputError, SlotError: see ``UnifiedCache.insert``; nothing was changed.
        """
        lock, prompt = self.lock, self.prompt if prompt is None else prompt
        prompt = prompt.head(min(prompt.pages_count, self.own_end))
        count = prompt.pages_count - lock.end
        if count > 0:
            self._lock = self._cache.insert(prompt, [slots[:count] for slots in self._own], lock)
            self._own = [slots[count:] for slots in self._own]
            self.prompt = prompt

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what moves, free its own pages, release the lock; what was inserted stays cached. Twice is once."""
        self._steps = iter(())
        if self._operation is not None:
            self._cache.cancel(self._operation)
            self._operation = None
        if self._lock is not None:
            self._cache.free(self._own)
            self._own = [slots[:0] for slots in self._own]
            self._cache.release(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
