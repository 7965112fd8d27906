"""Kinds of state that models keep per page, each with its own ``window(end)``."""

from unified_cache.components.full import Full

__all__ = ["Full"]
