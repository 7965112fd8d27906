"""``UnifiedCacheTree``: our tree behind the prefix cache interface of SGLang 0.5.23, for models of full attention.

The scheduler goes on allocating slots itself and calls this in place of its ``UnifiedRadixCache``: what it matches,
locks, checkpoints and evicts is the same, slot for slot. Importing this module needs the engine.

    tokens of a request      [0, cache_protected_len)       the tree's, pinned by the request's lock
                             [cache_protected_len, matched) somebody inserted them meanwhile: ours are freed
                             [matched, whole pages)         become the tree's now
                             the rest                       part of a page: stays the request's
"""

import logging
import time
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.cache_init_params import (  # pyright: ignore[reportMissingImports]
    CacheInitParams,
)
from sglang.srt.mem_cache.radix_cache import (  # pyright: ignore[reportMissingImports]
    RadixKey,
)

from unified_cache.errors import ConfigError
from unified_cache.integrations.sglang.tree_slots import EngineSlotTree, TreePrefix, in_subtree_order
from unified_cache.integrations.sglang.tree_tiers import TieredSlotTree
from unified_cache.page import Namespace, Prompt
from unified_cache.pool import Slots
from unified_cache.tree import Lock

__all__ = ["UnifiedCacheTree"]

logger = logging.getLogger(__name__)


class CheckpointedKv(Protocol):
    """The part of ``ReqKvInfo`` that a checkpoint reads and writes."""

    req_pool_idx: int
    cache_protected_len: int
    cache_inserted_len: int


class CheckpointedRequest(Protocol):
    """The part of ``Req`` that a checkpoint reads and writes."""

    kv: CheckpointedKv
    lock: object
    last_node: TreePrefix
    extra_key: str | None
    cache_salt: str | None
    full_untruncated_fill_ids: "array[int]"
    origin_input_ids: "array[int]"


class UnifiedCacheTree(BasePrefixCache):  # type: ignore[misc]  # the engine says no types
    """Prefix cache of one scheduler: full attention, device tier, least recently used first."""

    def __init__(self, params: CacheInitParams, slot_tree: EngineSlotTree | TieredSlotTree | None = None) -> None:
        """Take the pools that the engine allocates from; ``slot_tree`` keeps prefixes elsewhere than on the device too.

        Raises:
            ConfigError: something is asked for that this tree does not do; the message names it.
        """
        if params.eviction_policy.lower() != "lru":
            raise ConfigError(f"expected --radix-eviction-policy lru, found {params.eviction_policy}")
        if params.enable_kv_cache_events:
            raise ConfigError("this tree publishes no KV events of SGLang's; start without --kv-events-config")
        self.disable = params.disable
        self.page_size: int = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self._bigrams = params.is_eagle
        self._tree = slot_tree or EngineSlotTree(params.page_size)
        self._locks: dict[int, Lock] = {}
        """Locks by the number on their receipts."""
        self._locks_count = 0
        self._offsets = np.arange(params.page_size, dtype=np.int64)
        self._root = TreePrefix.whole(Prompt(b"", params.page_size, b""))
        if params.enable_metrics:
            self.init_metrics_collector()

    # ---- asking ------------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix on the device and make it recent."""
        if self.disable:
            return self._match_result(self._root)
        return self._match_result(self._tree.match(self._prompt(params.key)))

    def touch_prefix(self, key: RadixKey) -> None:
        """Make the longest prefix recent."""
        if not self.disable:
            self._tree.match(self._prompt(key))

    def supports_prefix_sharing(self) -> bool:
        """Tell that prefixes outlive their requests, unless caching is disabled."""
        return not self.disable

    def path_device_indices(self, node: TreePrefix) -> torch.Tensor:
        """Return the slots of a prefix, one a token, shape (tokens,), int64 on the engine's device."""
        return self._tokens(self._tree.slots(node))

    def root_node_handle(self, extra_key: str | None = None) -> TreePrefix:
        """Return the prefix of no pages."""
        return self._root

    def is_root(self, node: TreePrefix) -> bool:
        """Tell whether a prefix has no pages."""
        return node.end == 0

    def dfs_weight_order(self, node_handles: Sequence[TreePrefix]) -> list[int]:
        """Return indexes of prefixes depth first, the subtree that most of them lie in first."""
        return in_subtree_order(node_handles)

    # ---- changing ----------------------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Take over the slots of a key; free those from ``prev_prefix_len`` on whose pages the tree holds already."""
        if self.disable:
            return InsertResult(prefix_len=0)
        prompt = self._prompt(params.key)
        first = min(params.prev_prefix_len, prompt.pages_count * self.page_size)
        matched = self._insert(prompt, params.value[first : prompt.pages_count * self.page_size], first)
        return InsertResult(prefix_len=matched, last_device_node=TreePrefix.whole(prompt))

    def checkpoint(self, req: CheckpointedRequest, *, up_to: int, **_: object) -> None:
        """Take over the whole pages of what a request has computed, and move its lock to their end.

        Where they go on after the prompt, the prompt's end becomes an end in the tree: output can be evicted alone.
        """
        if self.disable:
            return
        kv = req.kv
        prompt = self._prompt_of(req, req.full_untruncated_fill_ids[:up_to])
        length = prompt.pages_count * self.page_size
        protected = min(kv.cache_protected_len, length)
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx, protected:length]
        self._insert(prompt, row.to(torch.int64, copy=True), protected)
        kv.cache_inserted_len = max(kv.cache_inserted_len, length)
        asked = self._prompt_of(req, req.origin_input_ids)
        if 0 < asked.pages_count < prompt.pages_count:
            self._tree.insert(asked, asked.pages_count, np.empty(0, np.int32))
        node = TreePrefix.whole(prompt)
        held = self._tree.slots(node)[protected // self.page_size :]
        self.req_to_token_pool.write((kv.req_pool_idx, slice(protected, length)), self._tokens(held))
        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node
        kv.cache_protected_len = length

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least ``num_tokens`` slots, least recently used prefixes first; fewer if locks pin the rest."""
        if self.disable:
            return EvictResult()
        started_s = time.perf_counter()
        evicted = 0
        for slots in self._tree.evict(-(-params.num_tokens // self.page_size)):
            self._free(slots)
            evicted += len(slots) * self.page_size
        self.update_eviction_metrics(evicted, started_s)
        return EvictResult(num_tokens_evicted=evicted)

    def inc_lock_ref(self, node: TreePrefix) -> IncLockRefResult:
        """Pin a prefix; the receipt names the lock."""
        if self.disable:
            return IncLockRefResult()
        self._locks_count += 1
        self._locks[self._locks_count] = self._tree.lock(node)
        return IncLockRefResult(node_id=self._locks_count)

    def dec_lock_ref(self, node: TreePrefix, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Take a lock back by its receipt, once; one from before ``reset`` is void."""
        if not self.disable and params is not None:
            lock = self._locks.pop(params.node_id, None)
            if lock is not None:
                self._tree.unlock(lock)
        return DecLockRefResult()

    def lock(self, node: TreePrefix) -> TreeLock:
        """Pin a prefix for one holder."""
        return TreeLock(node, self.inc_lock_ref(node).to_dec_params())

    def unlock(self, lock: TreeLock | None) -> None:
        """Take a holder's lock back, if it has one."""
        if lock is not None:
            self.dec_lock_ref(lock.node, lock.receipt)

    def reset(self) -> None:
        """Forget every prefix; the engine clears its allocator itself."""
        self._tree.clear()
        self._locks.clear()

    # ---- counting ----------------------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Tokens that ``evict`` could free now."""
        return self._tree.evictable_pages * self.page_size

    def full_evictable_size(self) -> int:
        """Tokens of full attention that ``evict`` could free now: all there are."""
        return self.evictable_size()

    def protected_size(self) -> int:
        """Tokens that locks keep from eviction."""
        return self._tree.protected_pages * self.page_size

    def full_protected_size(self) -> int:
        """Tokens of full attention that locks keep from eviction: all there are."""
        return self.protected_size()

    def total_size(self) -> int:
        """Tokens in the tree."""
        return self._tree.held_pages * self.page_size

    def sanity_check(self) -> None:
        """Assert every invariant of the tree from scratch."""
        self._tree.check()

    def pretty_print(self) -> None:
        """Log what is in the tree; the engine asks for it when it is out of slots."""
        logger.info("prefixes hold %s tokens, %s of them pinned", self.total_size(), self.protected_size())

    # ---- between the engine's words and ours --------------------------------------------------------------------

    def _prompt(self, key: RadixKey) -> Prompt:
        namespace = Namespace(key.extra_key, key.cache_salt, bigrams=self._bigrams)
        return Prompt.of(key.raw_token_ids(), self.page_size, namespace, whole=True)  # a key leaves a token already

    def _prompt_of(self, req: CheckpointedRequest, tokens: "array[int]") -> Prompt:
        return self._prompt(RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt))

    def _insert(self, prompt: Prompt, tokens: torch.Tensor, first: int) -> int:
        """Take over token slots from the page-aligned token ``first`` on; return the tokens the tree held before."""
        taken = self._tree.insert(prompt, first // self.page_size, self._pages(tokens))
        if len(taken.duplicates):
            self._free(taken.duplicates)
        return taken.matched_end * self.page_size

    def _pages(self, tokens: torch.Tensor) -> Slots:
        """Return the slot of every page of page-aligned token slots; waits for the device that they lie on."""
        pages = (tokens[:: self.page_size] // self.page_size).cpu().to(torch.int32)
        slots: Slots = pages.numpy()
        return slots

    def _free(self, slots: Slots) -> None:
        self.token_to_kv_pool_allocator.free_segment(self._tokens(slots), start_pos=0)

    def _tokens(self, slots: Slots) -> torch.Tensor:
        """Return the engine's slot of every token of pages, shape (pages * page_size,)."""
        tokens = slots.astype(np.int64)[:, None] * self.page_size + self._offsets
        return torch.from_numpy(tokens.reshape(-1)).to(self.device, non_blocking=True)

    def _match_result(self, prefix: TreePrefix) -> MatchResult:
        tokens = prefix.end * self.page_size
        return MatchResult(
            device_prefix_len=tokens,
            last_device_node=prefix,
            last_host_node=prefix,
            best_match_node=prefix,
            host_hit_length=(prefix.host_end - prefix.end) * self.page_size,
            full_kv_hit_length=prefix.host_end * self.page_size,
        )
