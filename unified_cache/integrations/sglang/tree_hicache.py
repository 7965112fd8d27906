"""``UnifiedCacheHostTree``: our tree and controller behind SGLang's prefix cache interface, with host memory below.

What ``--enable-hierarchical-cache`` makes the scheduler call, answered by a ``UnifiedCache`` over the engine's own KV
tensors: prompts are backed up as they are checkpointed, and loaded when a request is admitted that needs them.
Importing this module needs the engine.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
)
from sglang.srt.mem_cache.cache_init_params import (  # pyright: ignore[reportMissingImports]
    CacheInitParams,
)

from unified_cache.cache import UnifiedCache
from unified_cache.components import Full
from unified_cache.config import CacheConfig, WritePolicy
from unified_cache.errors import ConfigError, WaitTimeoutError
from unified_cache.integrations.sglang.tree import UnifiedCacheTree
from unified_cache.integrations.sglang.tree_slots import TreePrefix
from unified_cache.integrations.sglang.tree_tiers import TieredSlotTree
from unified_cache.memory import DevicePool
from unified_cache.pool import Identity, ModelLayout, PoolSpec

__all__ = ["LOAD_TIMEOUT_S", "UnifiedCacheHostTree"]

LOAD_TIMEOUT_S = 60.0
"""How long a request waits for what the host holds before it computes it."""

IN_MEMORY = Identity("in-memory")
"""Name of pages that never leave this process."""

logger = logging.getLogger(__name__)


class MultiHeadPool(Protocol):
    """The part of ``MHATokenToKVPool`` that is read: a tensor of each layer, shape (slots, heads, dim)."""

    k_buffer: Sequence[torch.Tensor]
    v_buffer: Sequence[torch.Tensor]


class UnifiedCacheHostTree(UnifiedCacheTree):
    """Prefix cache of one scheduler: full attention, device and host tiers, write-through."""

    def __init__(self, params: CacheInitParams, host_pages: int) -> None:
        """Take the pools that the engine allocates from and computes on, and allocate ``host_pages`` beside them.

        Raises:
            ConfigError: as ``UnifiedCacheTree``; or the KV tensors are not those of multi-head attention on a CPU; or
                host memory does not suffice.
        """
        self._slot_tree = TieredSlotTree(_open(params, host_pages))
        super().__init__(params, self._slot_tree)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, TreePrefix]:
        """Bring what the host holds of a matched prefix to the device, all or nothing; wait until it is there.

        Returns the tokens loaded and the prefix that ends with them, which is the tree's.
        """
        prefix: TreePrefix = params.best_match_node
        before = TreePrefix(prefix.prompt, prefix.end, prefix.end)
        tokens_count = (prefix.host_end - prefix.end) * self.page_size
        allocator = self.token_to_kv_pool_allocator
        short = tokens_count - allocator.available_size()
        if short > 0:
            self.evict(EvictParams(num_tokens=short))
        tokens = allocator.alloc(tokens_count) if tokens_count else None
        if tokens is None:
            return 0, before
        try:
            loaded, unused = self._slot_tree.load(prefix, self._pages(tokens), LOAD_TIMEOUT_S)
        except WaitTimeoutError as error:
            logger.warning("a load from host memory is late, its request computes: %s", error)
            return 0, before
        if len(unused):
            self._free(unused)
        return (tokens_count, loaded) if loaded.end >= prefix.host_end else (0, before)

    def load_back_is_cache_owned(self) -> bool:
        """Tell that what was loaded is the tree's."""
        return True

    def check_hicache_events(self) -> None:
        """Let backups go on."""
        self._slot_tree.poll()

    def ready_to_load_host_cache(self) -> int:
        """Tell that nothing is under way: ``init_load_back`` has waited for it."""
        return -1

    def is_load_back_event_done(self, consumer_index: int) -> bool:
        """Tell that nothing is under way."""
        return True

    def has_free_load_back_slot(self) -> bool:
        """Tell that a load can always begin."""
        return True

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """Do nothing: requests hold nothing of host memory."""

    def release_host_resources(self) -> None:
        """Close the cache and give host memory back."""
        for name in self._slot_tree.close():
            logger.warning("worker %s hangs", name)


def _open(params: CacheInitParams, host_pages: int) -> UnifiedCache:
    """Open a cache over the engine's KV tensors."""
    allocator = params.token_to_kv_pool_allocator
    layers = _page_tensors(allocator.get_kvcache(), params.page_size)
    pool = PoolSpec("kv", sum(layer[0].nbytes for layer in layers))
    device_pages = allocator.size // params.page_size
    config = CacheConfig(device_pages=(device_pages,), host_pages=(host_pages,), write=WritePolicy.THROUGH)
    layout = ModelLayout(params.page_size, (Full((pool,)),))
    return UnifiedCache.open(layout, config, [DevicePool(pool, layers)], identity=IN_MEMORY)


def _page_tensors(kv: MultiHeadPool, page_size: int) -> list[torch.Tensor]:
    """Return the engine's own KV tensors by page: one of each layer's keys, then of its values, (pages, bytes)."""
    layers = [*kv.k_buffer, *kv.v_buffer]
    for layer in layers:
        if layer.device.type != "cpu":
            raise ConfigError(f"the host tier of this tree has run on CPUs only; expected one, found {layer.device}")
        if not layer.is_contiguous() or layer.shape[0] % page_size:
            raise ConfigError(f"expected KV of whole pages of {page_size} tokens, found shape {tuple(layer.shape)}")
    return [layer.view(layer.shape[0] // page_size, -1) for layer in layers]
