"""SGLang over our stores. Modules are imported by name; each says whether it needs the engine.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "unified_cache", "interface_v1": 1,
        "module_path": "unified_cache.integrations.sglang", "class_name": "UnifiedCacheHiCache",
        "url": "packed:/var/cache/kv"}'

    hicache     ``UnifiedCacheHiCache``, the class that SGLang loads for its storage; needs the engine
    pool_calls  SGLang's calls as moves of pages of an ``EnginePools``
    host_pools  pages of SGLang's host pools
    naming      facts of an engine as identities
    settings    what the extra configuration says

Importing this package imports no SGLang; asking it for ``UnifiedCacheHiCache`` does.
"""

from importlib import import_module

__all__ = ["UnifiedCacheHiCache"]  # pyright: ignore[reportUnsupportedDunderAll]  # made by __getattr__


def __getattr__(name: str) -> object:
    """Import the class that SGLang asks for, and SGLang with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.hicache"))[name]
