"""Differences between the versions of SGLang; the one module that knows them. Imports no SGLang."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # pyright: ignore[reportMissingImports]

SUPPORTED: Mapping[str, str] = {
    "UnifiedCacheExternalLinker": "0.5.23",
    "UnifiedCacheHiCache": "0.5.19 to 0.5.23",
}
"""Versions that the class of either way in ran under; before 0.5.23 SGLang loads no linker but its own."""


def decode_context_size(config: "HiCacheStorageConfig") -> int:
    """Return the ranks of decode context parallelism; SGLang before 0.5.23 has none."""
    size: int = vars(config).get("dcp_size", 1)
    return size


def shares_memory(pool: "HostKVCache") -> bool:
    """Return whether a host pool's pages lie in memory shared with other pools; SGLang before 0.5.21 has no such."""
    try:
        return pool.shared_allocation_domain is not None
    except AttributeError:
        return False
