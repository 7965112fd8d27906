"""Registration of the tree with SGLang, found through the entry point group ``sglang.srt.plugins``.

python -m sglang.launch_server ... --radix-cache-backend unified-cache
"""

from typing import Protocol

from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    BasePrefixCache,
)
from sglang.srt.mem_cache.cache_init_params import (  # pyright: ignore[reportMissingImports]
    CacheInitParams,
)
from sglang.srt.mem_cache.registry import (  # pyright: ignore[reportMissingImports]
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.runtime_context import (  # pyright: ignore[reportMissingImports]
    get_memory,
)
from torch.distributed import get_world_size

from unified_cache.errors import ConfigError
from unified_cache.integrations.sglang.tree import UnifiedCacheTree
from unified_cache.integrations.sglang.tree_hicache import UnifiedCacheHostTree

__all__ = ["BACKEND_NAME", "register", "tree_of"]

BACKEND_NAME = "unified-cache"
"""Name to give to ``--radix-cache-backend``."""

GIGABYTE = 1_000_000_000
"""What ``--hicache-size`` counts in."""


class KvPoolSize(Protocol):
    """The part of a KV pool that says how much it holds."""

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the bytes of all keys, and of all values."""
        ...


class TokenAllocator(Protocol):
    """The part of an allocator that says how many slots there are."""

    size: int
    page_size: int

    def get_kvcache(self) -> KvPoolSize:
        """Return the pool that the slots lie in."""
        ...


class TreeContext(Protocol):
    """The part of ``TreeCacheBuildContext`` that says which tree a model needs."""

    params: CacheInitParams
    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    enable_hierarchical_cache: bool


def register() -> None:
    """Offer the tree under its name; once more changes nothing."""
    if get_radix_cache_factory(BACKEND_NAME) is None:
        register_radix_cache_backend(BACKEND_NAME, tree_of)


def tree_of(context: TreeContext) -> BasePrefixCache:
    """Make the tree of one scheduler, over host memory too where ``--enable-hierarchical-cache`` asks for it.

    Raises:
        ConfigError: the model or the options need what this tree does not do; the message names it.
    """
    for name, is_asked in (("sliding windows", context.is_hybrid_swa), ("recurrent state", context.is_hybrid_ssm)):
        if is_asked:
            raise ConfigError(f"--radix-cache-backend {BACKEND_NAME} does not do {name}; leave the flag out")
    params = context.params
    if not context.enable_hierarchical_cache or params.disable:
        return UnifiedCacheTree(params)
    memory = get_memory()
    if memory.hicache_storage_backend is not None:
        raise ConfigError(f"--radix-cache-backend {BACKEND_NAME} does not do --hicache-storage-backend; leave one out")
    if params.tp_cache_group is not None and get_world_size(params.tp_cache_group) > 1:
        raise ConfigError(f"--radix-cache-backend {BACKEND_NAME} has host memory with one rank only")
    host_pages = _host_pages(params.token_to_kv_pool_allocator, memory.hicache_size, memory.hicache_ratio)
    return UnifiedCacheHostTree(params, host_pages)


def _host_pages(allocator: TokenAllocator, size_gigabytes: int, ratio: float) -> int:
    """Return the pages of host memory that ``--hicache-size`` or else ``--hicache-ratio`` asks for."""
    device_pages = allocator.size // allocator.page_size
    if not size_gigabytes:
        return int(device_pages * ratio)
    page_bytes = sum(allocator.get_kvcache().get_kv_size_bytes()) // device_pages
    return size_gigabytes * GIGABYTE // page_bytes
