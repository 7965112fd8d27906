"""A small serving engine over the prefix cache, and a workload to watch it with. Needs the extra ``transformers``."""

from importlib import import_module

from unified_cache.core.extras import needs_extra

with needs_extra("transformers", "the demo"):
    import_module("torch")
    import_module("transformers")

__all__ = ()
