"""The cache that an engine embeds: opened over its tensors, asked by its requests, run by an operator."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

from unified_cache.cache.calls import RequestCalls, check_deadline
from unified_cache.cache.explain import Explanation, NearMatch, explanation_of, near_in_store, stored_pages
from unified_cache.cache.recording import RequestWatcher
from unified_cache.cache.request import Request
from unified_cache.cache.stats import Stats
from unified_cache.controller import (
    LeftOut,
    NotStarted,
    Operation,
    StorageTier,
    ThreadWorkers,
    TransferKind,
    Workers,
)
from unified_cache.controller.copies.gpu import ComputeStreams
from unified_cache.controller.memory import DevicePool, PageMemory, TieredMemory, check_dtype
from unified_cache.controller.operation import Traffic
from unified_cache.controller.ranks.group import LocalRanks, RankGroup, check_configuration, pools_to_store, together
from unified_cache.controller.storage_tier import StoreArrival, storage_of
from unified_cache.core.config import CacheConfig, GuardConfig
from unified_cache.core.errors import RankLostError, StateError, StorageError, WaitTimeoutError, check_kind
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, Pages, Tier, identity_of
from unified_cache.storage_backends.manifest import Description
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import check_storage_url
from unified_cache.tree import UNNAMED

__all__ = ["UnifiedCache"]

logger = logging.getLogger(__name__)


class UnifiedCache(RequestCalls):
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
        storage: Store | str | None = None,
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
        storage: Store | None,
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

    def bring(self, prompt: Prompt, deadline_s: float = math.inf, priority: int = UNNAMED) -> Request:
        """Begin a request: bring what storage and host hold of its prompt to the device, and pin what is there then.

        It prefetches, loads and locks, and so counts once. Reading storage ends as a ``prefetch`` with ``deadline_s``
        does. What the device has in full is pinned when this returns. Its pages, those that it inserts among them, get
        at least ``priority``. Use it in a ``with`` block, which gives all back however it is left.

        Raises:
            InputError: the deadline is no positive number of seconds.
        """
        self._enter()
        check_deadline(deadline_s)
        self._close_dropped()
        request = Request(self, prompt, deadline_s, priority)
        request.advance()
        return request

    # ---- operating ----------------------------------------------------------------------------------------------

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
        tree, layout = self._ledger.tree, self._ledger.layout
        found, numbers = tree.peek(prompt), range(len(layout.components))
        tiers: dict[str, list[Pages] | None] = {}
        for tier in Tier:
            if self._ledger.capacity(tier, 0):
                tiers[tier.name.lower()] = [found.held_pages(tier, number) for number in numbers]
        alike = tree.prompts_alike(prompt) if seeks_near else []
        near = [NearMatch("memory", pages, prompt.differences(other)) for other, pages in alike if pages]
        if storage is not None:
            stored: list[Pages] | None = None
            with suppress(StorageError):  # what a store has that fails is not known
                stored = stored_pages(storage.backend, layout, storage.owners, prompt)
            tiers["storage"] = stored
            if seeks_near and stored is not None and not stored[0].any():
                here, others = Description(self.identity, layout), [other for other, _ in alike]
                near += near_in_store(storage.backend, prompt, here, storage.owners, others)
        return explanation_of(layout, prompt.pages_count, tiers, near, self.config.write)

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
        check_kind(watcher, RequestWatcher | None, "a RequestWatcher, or None")
        self._recorder = watcher

    def attach(self, storage: Store | str) -> None:
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

    def await_store(self, storage: Store | str, clock: Callable[[], float] = time.monotonic) -> None:
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

    def _tier_over(self, store: Store, written: frozenset[str]) -> StorageTier:
        return StorageTier.open(store, self.config.guard, self.layout, self.identity, self._memory, written)

    def _end_arrival(self) -> None:
        """Wait no longer for a store; where it is there on this rank, and not on all, it is taken to be closed."""
        if self._arrival is not None:
            self._storage = self._arrival.end(self.config.close_timeout_s)
            self._arrival = None

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
        most ``config.close_timeout_s``, three times. Once more does nothing, nor does it in a forked child.
        """
        if self._closed or not self._home.is_here:
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


def _hanging(names: Sequence[str]) -> str:
    """Return the end of a log line that names what hangs; empty if nothing does."""
    return f"; still hanging: {', '.join(names)}" if names else ""
