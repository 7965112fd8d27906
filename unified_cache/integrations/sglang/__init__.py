"""SGLang over our stores. Modules are imported by name; each says whether it needs the engine.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "unified_cache", "interface_v1": 1,
        "module_path": "unified_cache.integrations.sglang", "class_name": "UnifiedCacheHiCache",
        "url": "packed:/var/cache/kv"}'

    hicache       ``UnifiedCacheHiCache``, the class that SGLang loads for its storage; needs the engine
    host_pools    pages of SGLang's host pools
    engine_facts  facts of a running engine; needs it
    naming        facts of an engine as identities
    settings      what the extra configuration says
    versions      in what the versions of SGLang differ

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "UnifiedCacheExternalLinker",
        "linker_module_path": "unified_cache.integrations.sglang",
        "linker_extra_config": {"url": "packed:/var/cache/kv", "host_bytes": "64GB"}}'

    linker        ``UnifiedCacheExternalLinker``, the class that SGLang loads in the place of HiCache; needs the engine
    linker_tier   its pages in host memory: look-ups, pins, recency
    tier_storage  its pages between host memory and a store
    device_pools  SGLang's device pools, layer by layer; needs the engine

Importing this package imports no SGLang; asking it for one of the two classes does.
"""

from importlib import import_module

from unified_cache.core.errors import ConfigError
from unified_cache.integrations.sglang.versions import CHECKED

__all__ = ["UnifiedCacheExternalLinker", "UnifiedCacheHiCache"]  # pyright: ignore[reportUnsupportedDunderAll]  # made by __getattr__


def __getattr__(name: str) -> object:
    """Import the class that SGLang asks for, and SGLang with it.

    Raises:
        ConfigError: SGLang lacks what the class needs. A version that it is not checked with gets one line.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    found, checked = str(vars(import_module("sglang.version"))["__version__"]), CHECKED[name]
    try:
        cls = vars(import_module(f"{__name__}.{'hicache' if name == 'UnifiedCacheHiCache' else 'linker'}"))[name]
    except ImportError as error:
        if not (error.name or "").startswith("sglang"):
            raise  # what is missing is not SGLang's
        raise ConfigError(f"{checked.line(found)}, which lacks what it needs: {error}") from error
    checked.warn(found)
    return cls
