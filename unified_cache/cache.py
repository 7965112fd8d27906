"""The cache an engine embeds: which prefix need not be computed again, where its pages lie, what moves them."""

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from unified_cache.arguments import check_kind, check_text
from unified_cache.config import CacheConfig, WritePolicy
from unified_cache.controller import (
    LayerwiseLoad,
    Operation,
    PageTally,
    ThreadWorkers,
    TransferKind,
    Workers,
)
from unified_cache.errors import InputError
from unified_cache.explain.explanation import Explanation
from unified_cache.memory import ComputeStreams, DevicePool, PageMemory, TieredMemory
from unified_cache.miss_reason import MissReason
from unified_cache.named_parts import identity_of, storage_of
from unified_cache.owned_cache import OwnedCache
from unified_cache.page import DEFAULT_NAMESPACE, Namespace, Prompt, TokensLike
from unified_cache.pool import Identity, ModelLayout, Pages, Slots, Tier
from unified_cache.prefetch import PrefetchProgress
from unified_cache.ranks import LocalRanks, RankGroup, check_configuration
from unified_cache.storage_backends.protocol import Level, StorageBackend
from unified_cache.transfer_policy import TransferPolicy
from unified_cache.tree import UNNAMED, Lock, Match, Preference, binding_components

__all__ = ["UnifiedCache"]

logger = logging.getLogger(__name__)


class UnifiedCache(OwnedCache):
    """Prefix cache over device, host and storage. One thread owns it; only that thread may call it.

    A request's life: ``match`` its prompt; ``prefetch`` and ``load`` what lies further down, ``poll`` until that
    is over and match again; ``lock`` what is on the device; ``allocate`` slots for the rest and compute it;
    ``insert``; ``backup``; ``release``. See ARCHITECTURE.md.

    Ranks of a group each have one, hold different shards of the same pages, and make the same calls in the same order.
    """

    @classmethod
    def open(
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
        over, unless this raises: it verifies every page read and closes it in the end.

        ``after`` returns the CUDA streams that the engine computes on, one at least, whenever a copy is to come after
        what they have been given; without it that is the owner's current stream.

        Raises:
            ConfigError: pools, layout and sizes do not fit each other, the pools are not on one device that is the CPU
                or a GPU, or host memory does not suffice.
            StorageError: the store cannot be opened, or does not take the layout.
        """
        memory = TieredMemory.fitting(layout, config, device_pools, after)
        with ExitStack() as undo, storage_of(storage) as store:
            undo.callback(memory.close)
            cache = cls.assemble(layout, config, memory, workers, identity_of(identity), store, ranks)
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
        """Put a cache over any memory, for simulation and for sizing without bytes; otherwise as ``open``.

        Without ``workers`` it starts threads; an error leaves none behind.
        """
        check_configuration(ranks, layout, config, identity, has_storage=storage is not None)
        if workers is None:
            workers = ThreadWorkers.start(storage=config.storage_workers)
        cache = cls(layout, config, memory, workers, identity, ranks)
        if storage is not None:
            try:
                cache.attach(storage)
            except BaseException:
                workers.close(config.close_timeout_s)
                raise
        logger.info("opened a cache of %s device and %s host pages", config.device_pages, config.host_pages)
        return cache

    # ---- asking ----------------------------------------------------------------------------------------------

    def prompt(
        self,
        tokens: TokensLike,
        namespace: Namespace = DEFAULT_NAMESPACE,
        session: str | None = None,
        *,
        whole: bool = False,
    ) -> Prompt:
        """Convert token ids once; whole pages only, a partial tail is never cached.

        ``session`` names the session whose request it is, for ``session_returns``. ``whole`` says
        that all pages can be reused, see ``Prompt.of``; otherwise one token at least is left to compute.

        Raises:
            TokenError: not a flat run of integers in [0, 2**31).
            InputError: ``session`` is neither text nor None.
        """
        if namespace is not DEFAULT_NAMESPACE and self.changes.names_namespaces:
            self.changes.note_namespace(namespace)
        return Prompt.of(tokens, self.layout.page_size, namespace, session, whole=whole)

    def match(self, prompt: Prompt, priority: int = UNNAMED) -> Match:
        """Find the longest prefix that can be resumed from the device, and from device and host.

        It leaves a token to compute: of a prompt whose tokens fill its pages, the last page is not part of it
        (``Prompt.reusable_pages``). Makes recent what is held of the prompt and changes nothing else. The match is dead
        as soon as the tree changes. Where pages go by priority, that prefix has at least ``priority`` from now on.
        """
        self._enter()
        found = self._ledger.tree.match(prompt, priority).within(prompt.reusable_pages)
        self._lookups.note(prompt.reusable_pages, found.device_end, found.host_end)
        if self._recorder is not None:
            self._recorder.matched(prompt, found.device_end, found.host_end)
        return found

    def explain(self, prompt: Prompt, *, seeks_near: bool = True) -> Explanation:
        """Say why a prompt's hit is as long as it is, and what became of the pages that are missing.

        By tier and component how far it goes, and which component binds it; ``str()`` of it draws a picture. Its pages
        are those that ``match`` could find, and so not the last one where its tokens fill it.
        Where the transfer policy asks for what is fastest, it says what would be left in storage now, by the figures of
        this rank. What has gone is remembered where ``config.forgotten_pages_max`` is not 0. It
        changes nothing, not even recency, and asks the store once for all pages: as long as the store's guard lets it,
        this waits. With ``seeks_near`` it looks for the same tokens under other namespaces and identities, too.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        return self._explained(prompt, seeks_near=seeks_near)

    def lock(self, found: Match) -> Lock:
        """Pin the device prefix of a match until ``release``; the match is dead afterwards.

        Raises:
            StaleMatchError: the tree has changed since; match again.
        """
        self._enter()
        check_kind(found, Match, "a match")
        used = found.prompt.head(found.used_end)
        visit = self._ledger.tree.use(found, used.pages_count)
        bound_by = binding_components(found) if self._recorder is not None else ()
        if found.tree_end and self.config.write is not WritePolicy.ON_CALL:
            self._transfers.note_use(found)
        lock = self._ledger.tree.lock(found, found.device_end, Tier.DEVICE, visit)
        self._locks.add(lock)
        if self._speeds.is_choosing:
            self._speeds.prefill.begin(lock)
        if self._recorder is not None:
            self._recorder.locked(found.prompt, lock, bound_by)
        if used.pages_count:
            self._backups.reused(used)
            self._back_up_due()
        return lock

    def slots(self, lock: Lock, component: int = 0) -> Slots:
        """Return the device slots that a lock pins for a component: all pages for Full, else its window.

        Raises:
            LockError, InputError: released already, or another cache's; there is no such component.
        """
        self._enter()
        return self._ledger.lock_slots(lock, component)

    # ---- computing -------------------------------------------------------------------------------------------

    def checkpoint_ends(self, found: Match) -> tuple[int, ...]:
        """Return the ends, ascending, at which a request that goes on from ``found`` leaves what a resume needs.

        See ``config.Retention``. The last one is the prompt's own end, where a longer prompt resumes; where that is a
        page farther than ``match`` goes, the one before it is kept too, for the same prompt again.
        """
        prompt = found.prompt
        ends = self.config.retention.ends(prompt.pages_count, found.tree_end, self.layout.page_size)
        return tuple(sorted(end for end in {prompt.reusable_pages, *ends} if end > found.device_end))

    def pages_to_allocate(self, start: int, end: int, ends: Iterable[int]) -> list[Pages]:
        """Tell by component which pages of [start, end) a resume at one of ``ends`` needs: what ``allocate`` takes.

        See ``ModelLayout.pages_to_allocate``.
        """
        return self.layout.pages_to_allocate(start, end, ends)

    def available(self, component: int = 0) -> int:
        """Return how many device pages of a component ``allocate`` could hand out now: free and evictable ones. O(1).

        Until the next lock, insert or transfer, an ``allocate`` that asks for no more than that of any component
        succeeds. ``stats`` has the same for all components and tiers, with the protected pages.
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
        """Take back what ``allocate`` or ``fork`` handed out and ``insert`` did not take.

        Raises:
            SlotError: a slot is not the caller's. Nothing was freed.
        """
        self._enter()
        self._ledger.free_pages(pages)

    def trim(self, pages: Sequence[Slots], masks: Sequence[Pages]) -> None:
        """Take back of an allocation the slots of pages whose mask is False; they become -1 in ``pages``.

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
        prompt's slots are those of the new lock from now on: a page that somebody else inserted meanwhile is a
        duplicate, and the caller's slot for it was freed.

        Raises:
            LockError: the lock was released already, or is another cache's; nothing was changed.
            InputError, SlotError: see ``RadixTree.insert``; nothing was changed, slots and lock are the caller's.
        """
        self._enter()
        tree = self._ledger.tree
        tree.check_lock(lock)
        inserted = self._ledger.insert(prompt, lock.end, slots, Tier.DEVICE, priority, lock.visit)
        renewed = tree.lock_inserted(inserted, prompt, Tier.DEVICE, lock.visit)
        if prompt.session is None:
            renewed.session = lock.session
        self._locks.add(renewed)
        new_pages = prompt.pages_count - lock.end
        if self._speeds.is_choosing:
            self._speeds.prefill.end(lock, new_pages * prompt.page_size)
        if self._recorder is not None:
            self._recorder.inserted(lock, renewed)
        self.release(lock)
        if new_pages:
            self._backups.inserted(prompt, new_pages)
            self._back_up_due()
        return renewed

    def release(self, lock: Lock) -> None:
        """Take a lock back, once.

        Raises:
            LockError: released already, or another cache's.
        """
        self._enter()
        self._ledger.tree.unlock(lock)
        self._locks.discard(lock)
        if self._speeds.is_choosing:
            self._speeds.prefill.leave(lock)
        if self._recorder is not None:
            self._recorder.released(lock)

    def release_windows(self, lock: Lock) -> None:
        """Let go of the windows and states that a lock pins; Full stays pinned until ``release``.

        For a request whose own pages have filled its windows: what it resumed from becomes evictable while it still
        runs. It must not read those pages any more, nor ``fork`` them. Once more changes nothing.

        Raises:
            LockError: released already, or another cache's.
        """
        self._enter()
        self._ledger.tree.release_windows(lock)

    def prefer(self, prompt: Prompt, tier: Tier) -> Preference | None:
        """Have what ``tier`` holds of a prompt go last, when nothing else is left to evict; give it to ``unprefer``.

        For what is sure to come again, such as a system prompt. None, with nothing changed, if nothing is held or if
        preferences would cover more than ``config.eviction.preferred_share`` of what a component can hold there. The
        page that leaves all the same, and is computed again, is not preferred any more.
        """
        self._enter()
        tree = self._ledger.tree
        found = tree.match(prompt)
        return tree.prefer(found, found.device_end if tier is Tier.DEVICE else tree.full_end(found, tier), tier)

    def unprefer(self, preference: Preference) -> None:
        """Take a preference back. Once more, or after ``reset``, changes nothing."""
        self._enter()
        self._ledger.tree.unprefer(preference)

    def session_returns(self, session: str, within_s: float) -> bool:
        """Say that a session comes back within some seconds: after the call of a tool, say; whatever the policy.

        The prompt that it gave back last is preferred (see ``prefer``) on the device and the host, until its next
        request is locked or the time is over. Tells whether anything is preferred now: nothing is where nothing of it
        is known or held, where it is more than preferences may cover, and on several ranks, whose clocks differ.

        Raises:
            InputError: ``session`` is no text, or ``within_s`` no positive number of seconds.
        """
        self._enter()
        check_text("the name of a session", session)
        check_kind(within_s, int | float, "within_s as a number of seconds")
        if not 0 < within_s < math.inf:
            raise InputError(f"within_s must be a positive number of seconds from now, found {within_s}")
        return self._ranks.size == 1 and self._ledger.tree.session_returns(session, within_s)

    # ---- moving ----------------------------------------------------------------------------------------------

    def load(self, prompt: Prompt) -> Operation | None:
        """Start bringing what the host holds of a prompt to the device, as far as ``match`` goes.

        None if too much is under way, and where the transfer policy says never.

        Raises:
            ConfigError: there is no host tier.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        self.config.check_host()
        prompt = prompt.reusable
        if self.config.transfer is TransferPolicy.NEVER:
            return None
        tally = PageTally()
        return self._controller.start(TransferKind.LOAD, self._transfers.load(prompt, tally), tally=tally)

    def backup(self, prompt: Prompt, level: Level = Level.CACHED) -> Operation | None:
        """Start copying a prompt's device prefix to the host, and on to storage; None if too much is under way.

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
        steps = self._transfers.backup(prompt, level, tally)
        operation = self._controller.start(TransferKind.BACKUP, steps, tally=tally)
        if operation is None:
            self._ledger.fates.note_unbacked(prompt, MissReason.BACKUP_DECLINED)
        return operation

    def prefetch(self, prompt: Prompt, deadline_s: float = math.inf) -> Operation | None:
        """Start reading what storage can add to a prompt, as far as ``match`` goes.

        None without storage, or if it is not worth it now: fewer than ``config.prefetching.threshold_tokens`` are
        missing, or too much is under way, or the transfer policy says never; if storage adds fewer, nothing is read.
        Where the policy asks for what is fastest, what is better computed is not read, and the operation says so
        (``left_alone``). What has come is kept however the reading ends: as far as the prompt can be resumed from then,
        and Full pages also for a later prefetch.

        After ``deadline_s`` seconds, or ``config.prefetching.patience`` if that is sooner, the next ``poll`` returns it
        as done, whatever the store still does, with what has come by then; what comes later is for other requests.

        Raises:
            InputError: the deadline is no positive number of seconds.
        """
        self._enter()
        self._ledger.tree.check_prompt(prompt)
        check_kind(deadline_s, int | float, "deadline_s as a number of seconds")
        if not deadline_s > 0:
            raise InputError(f"deadline_s must be a positive number of seconds from now, found {deadline_s}")
        prompt = prompt.reusable
        if self._storage is None or self.config.transfer is TransferPolicy.NEVER:
            return None
        prefetching, page_size = self.config.prefetching, self.layout.page_size
        missing_tokens = (prompt.pages_count - self._ledger.tree.match(prompt).host_end) * page_size
        if missing_tokens < prefetching.threshold_tokens:
            return None
        worth_pages = max(1, -(-prefetching.threshold_tokens // page_size))
        steps = self._transfers.prefetches.prefetch(prompt, self._storage, worth_pages)
        deadline_s = min(deadline_s, prefetching.patience(missing_tokens))
        return self._controller.start(TransferKind.PREFETCH, steps, deadline_s=deadline_s)

    def prefetch_progress(self, operation: Operation) -> PrefetchProgress | None:
        """Return how far a prefetch has come that is reading now, as this rank sees it; None for any other operation.

        For an engine that may not want to wait any longer: ``finish_early`` keeps what has come.
        """
        self._enter()
        return self._transfers.prefetches.progress(operation)

    def begin_layerwise(self, operation: Operation) -> LayerwiseLoad | None:
        """Begin to read what a load brings, layer by layer, before it is in the tree; ``end_layerwise`` ends it.

        None if the operation is over or no load, or if another one brings part of its prefix. Once the last layer was
        there: ``end_layerwise``, then ``wait_all`` or ``poll`` until the load is over, then match and lock as ever.
        """
        self._enter()
        load = self._transfers.layerwise_load(operation)
        if load is not None:
            operation.followers.add(load)
        return load

    def end_layerwise(self, load: LayerwiseLoad) -> None:
        """End the layer-wise reading of a load. A second call, or one after ``reset``, changes nothing."""
        self._enter()
        load.operation.followers.discard(load)
