"""Differences between the versions of SGLang; the one module that knows them. Imports no SGLang."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unified_cache.integrations.ranges import VersionRange

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # pyright: ignore[reportMissingImports]

_DOCUMENT = "docs/sglang.md#versions"

CHECKED: Mapping[str, VersionRange] = {
    each.name: each
    for each in (
        VersionRange("UnifiedCacheExternalLinker", "SGLang", "0.5.23", "0.5.23", _DOCUMENT),
        VersionRange("UnifiedCacheHiCache", "SGLang", "0.5.21", "0.5.23", _DOCUMENT),
    )
}
"""Versions that ``make engines`` runs, by class; before 0.5.23 SGLang loads no linker but its own."""


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
