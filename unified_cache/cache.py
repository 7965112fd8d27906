"""The cache an engine embeds: which prefix need not be computed again, where its pages lie, what moves them."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.config import CacheConfig
from unified_cache.controller import Controller, Leg, Operation, StorageTier, ThreadWorkers, Workers
from unified_cache.errors import ClosedError, ConfigError, InputError, OwnerThreadError, SettleTimeoutError
from unified_cache.ledger import Ledger
from unified_cache.memory import DevicePool, PageMemory, TieredMemory
from unified_cache.page import DEFAULT_NAMESPACE, Namespace, Prompt, TokensLike
from unified_cache.pool import Identity, ModelLayout, Slots, Tier
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Level, StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.transfers import Traffic, Transfers
from unified_cache.tree import Lock, Match
from unified_cache.window import needed_pages

__all__ = ["Occupancy", "Pages", "Stats", "UnifiedCache"]

Pages = npt.NDArray[np.bool_]
"""Which pages of a range, shape (pages,)."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Pages of one component on one tier."""

    tier: Tier
    component: str
    capacity: int
    free: int
    out: int
    """With requests and transfers; the rest is in the tree."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What the cache holds and what it has moved since it was opened."""

    occupancy: tuple[Occupancy, ...]
    traffic: dict[Leg, Traffic]
    operations_live: int
    operations_failed: int
    operations_declined: int
    flawed_pages: int
    """Pages that storage returned and that were not what they should be: misses, every one."""


class UnifiedCache:
    """Prefix cache over device, host and storage. One thread owns it; only that thread may call it.

    A request's life: ``match`` its prompt; ``prefetch`` and ``load`` what lies further down, ``poll`` until that
    is over and match again; ``lock`` what is on the device; ``allocate`` slots for the rest and compute it;
    ``insert``; ``backup``; ``release``. See ARCHITECTURE.md.
    """

    def __init__(
        self,
        layout: ModelLayout,
        config: CacheConfig,
        memory: PageMemory,
        workers: Workers,
        identity: bytes,
        storage: StorageTier | None,
    ) -> None:
        """Take parts that fit each other; ``UnifiedCache.open`` puts them together."""
        self.layout = layout
        self.config = config
        self._memory = memory
        self._storage = storage
        self._ledger = Ledger(layout, (config.device_pages, config.host_pages))
        self._controller = Controller(workers, config.operations_max)
        self._transfers = Transfers(self._ledger, memory, identity, storage)
        self._locks: set[Lock] = set()
        self._failed_count = 0
        self._owner = threading.get_ident()
        self._closed = False

    @classmethod
    def open(
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        device_pools: Sequence[DevicePool],
        *,
        identity: Identity,
        storage: StorageBackend | None = None,
        workers: Workers | None = None,
    ) -> "UnifiedCache":
        """Put a cache over the engine's own tensors; the calling thread owns it.

        ``device_pools`` holds one pool for each of the layout's, with a slot more than ``config.device_pages``.
        The cache takes ``storage`` over: it verifies every page read from it and closes it in the end.

        Raises:
            ConfigError: pools, layout and sizes do not fit each other, or host memory does not suffice.
        """
        pools = {pool.spec.name: pool for pool in device_pools}
        host_pages: dict[str, int] = {}
        for number, component in enumerate(layout.components):
            for spec in component.pools:
                host_pages[spec.name] = config.host_pages[number]
                if not spec.page_bytes:
                    continue
                found = pools.get(spec.name)
                if found is None or found.spec != spec:
                    raise ConfigError(f"the layout needs a device pool {spec}, found {found and found.spec}")
                if found.slots_count <= config.device_pages[number]:
                    raise ConfigError(
                        f"pool {spec.name} needs {config.device_pages[number] + 1} slots "
                        f"(the padding sink and device_pages), found {found.slots_count}"
                    )
        memory = TieredMemory.allocate(device_pools, host_pages)
        return cls.assemble(layout, config, memory, workers, identity, storage)

    @classmethod
    def assemble(
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        memory: PageMemory,
        workers: Workers | None,
        identity: Identity,
        storage: StorageBackend | None,
    ) -> "UnifiedCache":
        """Put a cache over any memory, for simulation and for sizing without bytes; otherwise as ``open``.

        Without ``workers`` it starts threads, last of all, so that an error leaves none behind.
        """
        digest = identity.digest(layout)
        tier = None
        if storage is not None:
            if not config.host_pages[0]:
                raise ConfigError(f"storage is reached through host memory, found host pages {config.host_pages}")
            if not any(pool.page_bytes for pool in layout.components[0].pools):
                raise ConfigError(f"storage needs a pool with bytes in {layout.components[0].name}, found none")
            verified = VerifiedStorage(storage)
            verified.register(manifest_of(identity, layout), memory.slabs())
            tier = StorageTier(verified, layout, digest, memory)
        if workers is None:
            workers = ThreadWorkers.start(storage=config.storage_workers)
        return cls(layout, config, memory, workers, digest, tier)

    # ---- asking ----------------------------------------------------------------------------------------------

    def prompt(self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE) -> Prompt:
        """Convert token ids once; whole pages only, a partial tail is never cached.

        Raises:
            TokenError: not a flat run of integers in [0, 2**31).
        """
        return Prompt.of(tokens, self.layout.page_size, namespace)

    def match(self, prompt: Prompt) -> Match:
        """Find the longest prefix that can be resumed from the device, and from device and host.

        Makes it recent and changes nothing else. The match is dead as soon as the tree changes.
        """
        self._enter()
        return self._ledger.tree.match(prompt)

    def lock(self, found: Match) -> Lock:
        """Pin the device prefix of a match until ``release``; the match is dead afterwards.

        Raises:
            StaleMatchError: the tree has changed since; match again.
        """
        self._enter()
        lock = self._ledger.tree.lock(found, found.device_end, Tier.DEVICE)
        self._locks.add(lock)
        return lock

    def slots(self, lock: Lock, component: int = 0) -> Slots:
        """Return the device slots that a lock pins for a component: all pages for Full, else its window."""
        self._enter()
        return self._ledger.tree.lock_slots(lock, component)

    # ---- computing -------------------------------------------------------------------------------------------

    def resume_ends(self, found: Match) -> tuple[int, ...]:
        """Return the ends, ascending, at which a request that goes on from ``found`` leaves what a resume needs.

        See ``config.Retention``. The last one is the prompt's own end.
        """
        prompt = found.prompt
        ends = self.config.retention.ends(prompt.pages_count, found.tree_end, self.layout.page_size)
        return tuple(end for end in ends if end > found.device_end)

    def needed(self, start: int, end: int, ends: Sequence[int]) -> list[Pages]:
        """Tell by component which pages of [start, end) a resume at one of ``ends`` needs; of Full, all.

        What ``allocate`` and ``trim`` take. New arrays, the caller's own: an engine that computes a window densely
        may set its pages to True before it allocates.

        Raises:
            InputError: no range of pages.
        """
        self._enter()
        if not 0 <= start <= end:
            raise InputError(f"expected 0 <= start <= end, found [{start}, {end})")
        others = self.layout.components[1:]
        return [np.ones(end - start, np.bool_), *(needed_pages(ends, other.span, start, end) for other in others)]

    def allocate(self, needed: Sequence[Pages]) -> list[Slots] | None:
        """Hand out device slots for pages to be computed, evicting what is short; None if pins leave too little.

        ``needed`` says by component, page by page, who gets one; see ``needed``. Returns an array per component with
        an entry per page, -1 where it gets none: what ``insert`` takes. Until then, or until ``free``, they are the
        caller's.

        Raises:
            InputError: not an array for each component, of one length, the first all True.
        """
        self._enter()
        self._check_needed(needed)
        return self._ledger.allocate_pages(needed)

    def free(self, pages: Sequence[Slots]) -> None:
        """Take back what ``allocate`` or ``fork`` handed out and ``insert`` did not take.

        Raises:
            SlotError: a slot is not the caller's. Nothing was freed.
        """
        self._enter()
        self._ledger.free_pages(pages)

    def trim(self, pages: Sequence[Slots], needed: Sequence[Pages]) -> None:
        """Take back of an allocation the slots of pages that are not ``needed``; they become -1 in ``pages``.

        For what has left every window that matters while its request still runs; Full keeps its slots.

        Raises:
            InputError: as ``allocate``, or the arrays differ in length.
            SlotError: a slot is not the caller's. Nothing was freed.
        """
        self._enter()
        self._check_needed(needed)
        if [len(slots) for slots in pages] != [len(mask) for mask in needed]:
            raise InputError(f"expected slots for {len(needed[0])} pages of every component")
        self._ledger.trim_pages(pages, needed)

    def fork(self, lock: Lock) -> list[Slots] | None:
        """Copy the state at the end of ``lock`` that a request goes on changing into slots of the caller's own.

        That is recurrent state: the pinned page stays what it is, for others; the copy is the request's to run on
        (copy-on-write). Returns an array per component, empty for those whose pages are never changed; None if
        pins leave too little room, or nothing is locked. Give it back with ``free``, or to ``insert`` as the last
        page of its component.

        Raises:
            InputError: the tree holds no state at the end of the lock.
        """
        self._enter()
        return self._ledger.fork(lock, self._memory) if lock.end else None

    def insert(self, prompt: Prompt, slots: Sequence[Slots], lock: Lock) -> Lock:
        """Hand over the computed pages after those that ``lock`` pins; return a lock on the whole prompt instead.

        ``slots[c]`` has an entry for each page from ``lock.end`` on, -1 where component ``c`` keeps none. The
        prompt's slots are those of the new lock from now on: a page that somebody else inserted meanwhile is a
        duplicate, and the caller's slot for it was freed.

        Raises:
            InputError, SlotError: see ``RadixTree.insert``; nothing was changed, slots and lock are the caller's.
        """
        self._enter()
        tree = self._ledger.tree
        self._ledger.insert(prompt, lock.end, slots, Tier.DEVICE)
        renewed = tree.lock(tree.match(prompt), prompt.pages_count, Tier.DEVICE)
        self._locks.add(renewed)
        self.release(lock)
        return renewed

    def release(self, lock: Lock) -> None:
        """Take a lock back, once.

        Raises:
            LockError: released already, or another cache's.
        """
        self._enter()
        self._ledger.tree.unlock(lock)
        self._locks.discard(lock)

    # ---- moving ----------------------------------------------------------------------------------------------

    def load(self, prompt: Prompt) -> Operation | None:
        """Start bringing what the host holds of a prompt to the device; None if too much is under way.

        Raises:
            ConfigError: there is no host tier.
        """
        self._enter()
        self._check_host()
        return self._started(self._controller.start(Leg.LOAD, self._transfers.load(prompt)))

    def backup(self, prompt: Prompt, level: Level = Level.CACHED) -> Operation | None:
        """Start copying a prompt's device prefix to the host, and on to storage; None if too much is under way.

        Raises:
            ConfigError: there is no host tier.
        """
        self._enter()
        self._check_host()
        return self._started(self._controller.start(Leg.BACKUP, self._transfers.backup(prompt, level)))

    def prefetch(self, prompt: Prompt) -> Operation | None:
        """Start reading what storage can add to a prompt; None without storage, or if too much is under way."""
        self._enter()
        if self._storage is None:
            return None
        steps = self._transfers.prefetch(prompt, self._storage)
        return self._started(self._controller.start(Leg.PREFETCH, steps))

    def poll(self) -> list[Operation]:
        """Let transfers go on whose bytes have moved; return those that are over. Results appear only here."""
        self._enter()
        return self._ended(self._controller.poll())

    def settle(self, timeout_s: float) -> list[Operation]:
        """Poll until no transfer is under way; return those that ended.

        Raises:
            SettleTimeoutError: some still are after ``timeout_s``; they go on all the same.
        """
        self._enter()
        return self._ended(self._controller.settle(timeout_s))

    # ---- the whole -------------------------------------------------------------------------------------------

    def traffic(self) -> dict[Leg, Traffic]:
        """Count what has moved since the cache was opened; copies, the caller's own."""
        self._enter()
        moved = self._transfers.traffic.items()
        return {leg: Traffic(list(found.component_pages), found.payload_bytes) for leg, found in moved}

    def stats(self) -> Stats:
        """Count what is where and what has moved."""
        self._enter()
        occupancy = tuple(
            Occupancy(
                tier,
                component.name,
                self._ledger.capacity(tier, number),
                self._ledger.free_count(tier, number),
                self._ledger.out_pages(tier, number),
            )
            for tier in Tier
            for number, component in enumerate(self.layout.components)
        )
        return Stats(
            occupancy=occupancy,
            traffic=self.traffic(),
            operations_live=self._controller.live_count,
            operations_failed=self._failed_count,
            operations_declined=self._controller.declined_count,
            flawed_pages=0 if self._storage is None else sum(self._storage.backend.flaws_count.values()),
        )

    def reset(self) -> None:
        """Forget every prefix in memory; storage keeps its own. Ends transfers first.

        Call it when no request runs: locks that are out become void, and the slots they pinned are free.

        Raises:
            SettleTimeoutError: a transfer does not end within ``config.close_timeout_s``; nothing was forgotten.
        """
        self.settle(self.config.close_timeout_s)
        self._ledger.clear()

    def check(self) -> None:
        """Assert every invariant of tree, locks and slots from scratch. For tests; slow."""
        self._ledger.check(None if self._controller.live_count else list(self._locks))

    def close(self) -> list[str]:
        """End transfers and workers, then storage; return the names of workers that hang, which is rare and bad.

        Waits at most ``config.close_timeout_s``, twice. A second call does nothing.
        """
        if self._closed:
            return []
        self._enter()
        self._closed = True
        timeout_s = self.config.close_timeout_s
        with suppress(SettleTimeoutError):  # what does not end in time is named below
            self._controller.settle(timeout_s)
        stuck = self._controller.close(timeout_s)
        if self._storage is not None and not stuck:
            self._storage.backend.close()
        return stuck

    def __enter__(self) -> "UnifiedCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self) -> None:
        if threading.get_ident() != self._owner:
            raise OwnerThreadError("a cache may be called only from the thread that opened it")
        if self._closed:
            raise ClosedError("the cache is closed")

    def _check_host(self) -> None:
        if not self.config.host_pages[0]:
            raise ConfigError(f"host pages are needed for a backup or a load, found {self.config.host_pages}")

    def _check_needed(self, needed: Sequence[Pages]) -> None:
        names = [component.name for component in self.layout.components]
        lengths = {len(mask) for mask in needed}
        if len(needed) != len(names) or len(lengths) != 1 or not needed[0].all():
            raise InputError(f"expected one array for each of {', '.join(names)}, of one length, the first all True")

    def _started(self, operation: Operation | None) -> Operation | None:
        if operation is not None and operation.error is not None:
            self._failed_count += 1
        return operation

    def _ended(self, operations: list[Operation]) -> list[Operation]:
        self._failed_count += sum(operation.error is not None for operation in operations)
        return operations
