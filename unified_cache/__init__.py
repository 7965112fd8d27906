"""Prefix cache and L3 KV store for LLM serving engines.

The names below are loaded when first used: what an engine embeds needs torch, the extra ``engine``; the rest does not.
"""

import logging
from typing import TYPE_CHECKING

from unified_cache.core.extras import import_with_extra

if TYPE_CHECKING:
    from unified_cache.cache.cache import UnifiedCache
    from unified_cache.cache.request import Request
    from unified_cache.cache.stats import Stats
    from unified_cache.components import Full, RecurrentState, SlidingWindow
    from unified_cache.components.layouts import from_hf_config
    from unified_cache.controller import NotStarted, Operation, OperationState
    from unified_cache.controller.memory import DevicePool
    from unified_cache.core.config import (
        CacheConfig,
        EvictionPolicy,
        Prefetching,
        Retention,
        WritePolicy,
    )
    from unified_cache.core.errors import CacheError, ConfigError, InputError, LayoutError, StorageError
    from unified_cache.core.page import MediaItem, Namespace, Prompt
    from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, Tier
    from unified_cache.core.settings.loading import cache_settings
    from unified_cache.storage_backends.protocol import Store
    from unified_cache.storage_backends.url import open_storage
    from unified_cache.tree import Lock, Match

__all__ = [
    "CacheConfig",
    "CacheError",
    "Component",
    "ConfigError",
    "DevicePool",
    "EvictionPolicy",
    "Full",
    "Identity",
    "InputError",
    "LayoutError",
    "Lock",
    "Match",
    "MediaItem",
    "ModelLayout",
    "Namespace",
    "NotStarted",
    "Operation",
    "OperationState",
    "PoolSpec",
    "Prefetching",
    "Prompt",
    "RecurrentState",
    "Request",
    "Retention",
    "SlidingWindow",
    "Stats",
    "StorageError",
    "Store",
    "Tier",
    "UnifiedCache",
    "WritePolicy",
    "cache_settings",
    "from_hf_config",
    "open_storage",
]

_HOMES = {
    "CacheConfig": "core.config",
    "CacheError": "core.errors",
    "Component": "core.pool",
    "ConfigError": "core.errors",
    "DevicePool": "controller.memory",
    "EvictionPolicy": "core.config",
    "Full": "components",
    "Identity": "core.pool",
    "InputError": "core.errors",
    "LayoutError": "core.errors",
    "Lock": "tree",
    "Match": "tree",
    "MediaItem": "core.page",
    "ModelLayout": "core.pool",
    "Namespace": "core.page",
    "NotStarted": "controller",
    "Operation": "controller",
    "OperationState": "controller",
    "PoolSpec": "core.pool",
    "Prefetching": "core.config",
    "Prompt": "core.page",
    "RecurrentState": "components",
    "Request": "cache.request",
    "Retention": "core.config",
    "SlidingWindow": "components",
    "Stats": "cache.stats",
    "Store": "storage_backends.protocol",
    "StorageError": "core.errors",
    "Tier": "core.pool",
    "UnifiedCache": "cache.cache",
    "WritePolicy": "core.config",
    "cache_settings": "core.settings.loading",
    "from_hf_config": "components.layouts",
    "open_storage": "storage_backends.url",
}


# Log lines go nowhere unless the program that embeds the cache gives them a handler.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    """Load a public name from the room it lives in.

    Raises:
        MissingExtraError: it needs torch, which is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_with_extra(f"{__name__}.{_HOMES[name]}", "engine", f"{__name__}.{name}"), name)
