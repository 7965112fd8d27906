"""Kinds of state that models keep per page, each with its own ``window(end)``; layouts of models made of them."""

from unified_cache.components.full import Full
from unified_cache.components.mamba import RecurrentState
from unified_cache.components.swa import SlidingWindow

__all__ = ["Full", "RecurrentState", "SlidingWindow"]
