"""A cache whatever is asked of it: its parts and the thread that owns them, its transfers, its store, its end."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Never, Self

from unified_cache.backup_request import BackupRequest
from unified_cache.backup_scheduler import BackupScheduler
from unified_cache.config import CacheConfig, WritePolicy
from unified_cache.controller import (
    Controller,
    Operation,
    PageTally,
    StorageTier,
    TransferKind,
    Workers,
)
from unified_cache.errors import ClosedError, OwnerThreadError, RankLostError, StateError, WaitTimeoutError
from unified_cache.estimates import TransferSpeeds
from unified_cache.explain.cached import explain
from unified_cache.explain.explanation import Explanation
from unified_cache.forgotten import ForgottenPages
from unified_cache.gone import method_instead
from unified_cache.ledger import Ledger
from unified_cache.memory import PageMemory
from unified_cache.miss_reason import MissReason
from unified_cache.named_parts import storage_of
from unified_cache.page import Prompt
from unified_cache.pool import Identity, ModelLayout
from unified_cache.ranks import LocalRanks, RankGroup, pools_to_store, together
from unified_cache.recording.requests import RequestWatcher
from unified_cache.slots import PairedAllocator
from unified_cache.stats import LookupCounts, PublishedStats, Stats
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.traffic import Traffic
from unified_cache.transfers import Transfers
from unified_cache.tree import Lock

__all__ = ["OwnedCache"]

logger = logging.getLogger(__name__)


class OwnedCache:
    """The parts of a cache and the one thread that owns them; ``UnifiedCache`` adds what a request asks for.

    ``poll`` lets transfers go on, the store comes and goes with ``attach`` and ``detach``, and ``close`` ends it all.
    """

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
        """Take parts that fit each other; ``UnifiedCache.open`` puts them together.

        Transfers are timed and bounded by ``clock``, in seconds; so are sessions that come back, and the time to live.
        """
        self.layout = layout
        self.config = config
        self.identity = identity
        self._memory = memory
        self._storage: StorageTier | None = None
        forgotten = ForgottenPages(config.forgotten_pages_max) if config.forgotten_pages_max else None
        self._ledger = Ledger(layout, (config.device_pages, config.host_pages), config.eviction, forgotten, clock)
        self.changes = self._ledger.changes
        """Pages that enter and leave the tiers, for one watcher: a publisher of KV events."""
        self._ranks = ranks
        self._controller = Controller(workers, config.operations_max, config.operation_timeout_s, clock, ranks)
        prefetch_max = int(config.host_pages[0] * config.prefetching.host_share)
        self._speeds = TransferSpeeds(layout, config, ranks, clock)
        self._transfers = Transfers(self._ledger, memory, identity.owners(layout), prefetch_max, self._speeds, ranks)
        self._backups = BackupScheduler(config, self._request_of, ranks, clock)
        self._ledger.saver = self._transfers.backups if self._backups.writes_inserted else None
        self._locks: set[Lock] = set()
        self._owner = threading.get_ident()
        self._closed = False
        self._lookups = LookupCounts()
        self._recorder: RequestWatcher | None = None
        self._published = PublishedStats(self._count)

    if not TYPE_CHECKING:  # for a type checker there are no methods but those that there are

        def __getattr__(self, name: str) -> Never:
            """Raise an AttributeError that says what to use in the place of a method that is gone."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{method_instead(name)}"
            raise AttributeError(message, name=name, obj=self)

    @property
    def pairing(self) -> PairedAllocator | None:
        """Full's device slots and those reached through them, with their page map; None for a layout without."""
        return self._ledger.paired

    # ---- moving --------------------------------------------------------------------------------------------

    def poll(self) -> list[Operation]:
        """Let transfers go on whose bytes have moved; return those that are over, each once.

        Raises:
            RankLostError: of several ranks, one no longer answers; told once. From now on nothing is moved any more.
        """
        self._enter()
        over = self._controller.poll()
        if self._storage is not None:
            self._backups.look_at_clock()
        self._back_up_due()
        self.changes.take_removals()
        self._publish_if_due()
        return over

    def wait_all(self, timeout_s: float) -> list[Operation]:
        """Poll until no transfer is under way and no backup is due; return the transfers that are over, as ``poll``.

        Raises:
            WaitTimeoutError: some still are after ``timeout_s``; they go on, and ``poll`` returns them.
            RankLostError: as ``poll``.
        """
        over = self._wait_until_over(timeout_s)
        self._published.publish()
        return over

    def settle(self, timeout_s: float) -> list[Operation]:
        """Wait as ``wait_all`` does, and publish figures as seldom as ``poll``: for who waits at every request.

        Raises:
            WaitTimeoutError, RankLostError: as ``wait_all``.
        """
        over = self._wait_until_over(timeout_s)
        self._publish_if_due()
        return over

    def finish_early(self, operation: Operation) -> None:
        """End a transfer early and keep what has arrived, as far as it can be resumed from; ``poll`` returns it."""
        self._enter()
        operation.stop()

    def cancel(self, operation: Operation) -> bool:
        """End a transfer and keep nothing of it; tell whether it was still running.

        Its slots are given back once no worker and no store uses them any more.
        """
        self._enter()
        return self._controller.cancel(operation)

    def record_to(self, watcher: RequestWatcher | None) -> None:
        """Tell a watcher of every request from now on, such as one that a ``TraceRecorder`` makes; None ends that."""
        self._enter()
        self._recorder = watcher

    def set_write_policy(self, policy: WritePolicy) -> None:
        """Go on with another write policy; what the old one has put off is backed up now.

        Raises:
            ConfigError: it writes, and there is no host tier; the old one stays.
        """
        self._enter()
        config = replace(self.config, write=policy)
        self._backups.follow(config)
        self._ledger.saver = self._transfers.backups if self._backups.writes_inserted else None
        self.config = config
        self._back_up_due()

    # ---- storage -------------------------------------------------------------------------------------------

    def attach(self, storage: StorageBackend | str) -> None:
        """Take a store, or the one that a URL names, over while the cache runs: verify all reads, close it in the end.

        Raises:
            StateError: there is one already.
            ConfigError: there is no host tier, or nothing with bytes that all prefixes share, or two ranks that hold
                different parts of the model name them alike.
            StorageError: the store does not take the layout.
            RankError: of several ranks, another could not take its store over.
        """
        self._enter()
        if self._storage is not None:
            raise StateError("a store is attached; detach it first")
        self.config.check_host()
        written = pools_to_store(self._ranks, self.identity, self.layout)
        with together(self._ranks, "taking a store over"), storage_of(storage) as store:
            assert store is not None
            tier = StorageTier.open(store, self.config.guard, self.layout, self.identity, self._memory, written)
        self._storage = self._transfers.storage = tier
        self._ledger.follow_storage(tier.backend, tier.owners)
        self._backups.storage_attached()
        logger.info("attached a store: %s", type(store).__name__)

    def detach(self) -> list[str]:
        """End what moves to or from the store and close it, in twice ``config.close_timeout_s``; name what hangs."""
        self._enter()
        if self._storage is None:
            return []
        tier = self._storage
        self._storage = self._transfers.storage = None
        self._controller.stop_all()
        self._controller.try_wait_all(self.config.close_timeout_s)  # the store is closed once it has returned
        self._ledger.follow_storage(None, {})
        hanging = tier.close(self.config.close_timeout_s)
        logger.info("detached the store%s", _hanging(hanging))
        return hanging

    def clear_storage(self) -> Operation | None:
        """Start removing what storage holds of this identity, and nobody else's; None as ``prefetch``.

        What was there is gone when it is done. What a backup puts there meanwhile is taken back and not counted as
        stored; a later one stores all of its prompt. Left may be what other processes put, or a store that hangs or
        fails; a failed or cancelled call may have removed any part. Memory keeps its pages; of several ranks each
        removes what it stores.
        """
        self._enter()
        if self._storage is None:
            return None
        return self._controller.start(TransferKind.CLEAR, self._transfers.clear(self._storage))

    # ---- the whole -----------------------------------------------------------------------------------------

    def traffic(self) -> dict[TransferKind, Traffic]:
        """Count what has moved since the cache was opened; copies, the caller's own."""
        self._enter()
        return self._transfers.traffic.copy()

    def stats(self) -> Stats:
        """Count what is where and what has moved."""
        self._enter()
        return self._count()

    def published_stats(self) -> Stats:
        """Return the figures that ``poll``, ``wait_all``, ``settle`` or ``close`` has published last; from any thread.

        While the owner polls they are a little more than a second old at most. They are one moment's, and a value.
        """
        return self._published.latest

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
        self._backups.forget()
        self._speeds.prefill.leave_all()

    def check(self) -> None:
        """Assert every invariant of tree, locks and slots from scratch. For tests; slow."""
        self._ledger.check(None if self._controller.live_count else list(self._locks))

    def close(self) -> list[str]:
        """End transfers and workers, then storage; return the names of workers that hang, which is rare and bad.

        Where there is storage, what the write policy has put off is stored first, as far as there is time. A store that
        a worker hangs in is closed once it has returned. Waits at most ``config.close_timeout_s``, three times. Once
        more does nothing.
        """
        if self._closed:
            return []
        self._enter()
        timeout_s = self.config.close_timeout_s
        self._controller.leave_all()
        if self._storage is not None:
            self._backups.give_up_waiting()
            self._back_up_due()
        with suppress(WaitTimeoutError, RankLostError):  # what does not end in time is named below
            self._wait_and_back_up(timeout_s)
        self._closed = True
        stuck = self._controller.close(timeout_s)
        self._controller.take_completed()
        given_up = self._backups.close()
        if self._storage is not None:
            stuck += self._storage.close(timeout_s)
        if not stuck:
            self._memory.close()
        self._published.publish()
        self._published.latest.warn_of_nothing_kept(self.config)
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

    def _wait_until_over(self, timeout_s: float) -> list[Operation]:
        self._enter()
        self._wait_and_back_up(timeout_s)
        return self._controller.take_completed()

    def _wait_and_back_up(self, timeout_s: float) -> None:
        """Wait until no transfer is under way, starting the backups that are due as there is room for them."""
        deadline_s = time.monotonic() + timeout_s
        self._controller.wait_all(timeout_s)
        while self._back_up_due():
            self._controller.wait_all(deadline_s - time.monotonic())

    def _publish_if_due(self) -> None:
        if self._published.is_due():
            self._published.publish()

    def _explained(self, prompt: Prompt, *, seeks_near: bool) -> Explanation:
        prompt = prompt.reusable
        explanation = explain(self._ledger, self.config, self._storage, self.identity, prompt, seeks_near=seeks_near)
        return replace(explanation, left_alone=self._transfers.left_alone(prompt, explanation.end))

    def _count(self) -> Stats:
        return Stats.of(self._ledger, self._controller, self._transfers, self._lookups, self._backups.counts())

    def _request_of(self, prompt: Prompt) -> BackupRequest:
        return self._transfers.backups.request(self._ledger.tree.peek(prompt))

    def _back_up_due(self) -> bool:
        """Start what the write policy asks for, as far as not too much is under way; tell whether that was anything."""
        room = self.config.operations_max - self._controller.live_count
        due = self._backups.take(room, self._controller.released_count)
        for request in due:
            tally = PageTally()
            steps = self._transfers.write(request, tally)
            operation = self._controller.start(TransferKind.BACKUP, steps, tally=tally)
            self._backups.started(request, operation)
            if operation is None:
                self._ledger.fates.note_unbacked(request.prompt, MissReason.BACKUP_DECLINED)
        return bool(due)


def _hanging(names: Sequence[str]) -> str:
    """Return the end of a log line that names what hangs; empty if nothing does."""
    return f"; still hanging: {', '.join(names)}" if names else ""
