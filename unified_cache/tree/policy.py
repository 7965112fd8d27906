"""Ranks: the order in which the nodes of a lane are evicted, and the history that it depends on beside the stamp.

=========  =========================================================================================================
lru        least recently used; the stamp is the rank, and nothing else is kept
priority   lowest priority first, lru within
adaptive   what a forecast says is worth least; see ``unified_cache.tree.forecast``. Here it is as lru: a queue for each
           kind of request, in which the stamp is the rank
=========  =========================================================================================================

A rank depends on history and stamp alone, and never falls: no touch, use, arrival or higher priority makes a node go
earlier. Only so may a queue find out a new rank when the node comes up; what makes a node go earlier is a change of
queue.
"""

from dataclasses import dataclass

__all__ = ["PRIORITY_BIT", "UNNAMED", "History"]

PRIORITY_BIT = 64
"""Ranks hold the priority above this bit and the stamp below; a stamp counts touches and stays far smaller."""
UNNAMED = -(1 << 31)
"""Priority of pages that no request named one for: they go first."""


@dataclass(slots=True)
class History:
    """History of a node in one lane beside its stamp; a split gives both halves a copy."""

    priority: int = UNNAMED
    """The highest that requests that needed the pages have named."""
    preferences: int = 0
    """Preferences that cover the node in this lane."""
