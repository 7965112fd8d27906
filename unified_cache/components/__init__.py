"""Kinds of state that models keep per page, each with its own ``window(end)``; layouts of models made of them."""

from unified_cache.components.kinds import Full, RecurrentState, SlidingWindow

__all__ = ["Full", "RecurrentState", "SlidingWindow"]
