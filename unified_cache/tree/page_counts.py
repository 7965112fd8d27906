"""Pages held and evictable in every lane, counted as they change, so that an engine may ask for them in O(1).

A page is *evictable* when eviction can give it back now: alone, or after pages that have to go before it and are
evictable themselves. Every other page that the tree holds is *protected*. A lock protects, in each lane of its tier:

    Full            every page of the nodes it pins, and every page above them: Full goes from the tail
    any other       the pages from where the lock begins, and no page above

Evicting moves pages from evictable to free and changes neither count of any other page. What goes with an evictable
page, because it stands on it, was evictable in its own lane: a lock that pins it would protect the page below it. So
in each lane *free + evictable* is what can be allocated, in all lanes at once.

A lock only notes the nodes it pins. They are counted when somebody asks, or when many have been noted: a request that
locks a long path and lets go of it climbs it once at most, up to the first node that other locks protect.
"""

import numpy as np

from unified_cache.tree.node import Node

__all__ = ["CHANGED_NODES_MAX", "PageCounts"]

CHANGED_NODES_MAX = 64
"""Nodes that may wait to be counted anew: what asking may cost."""


class PageCounts:
    """Counts of one tree, by lane."""

    __slots__ = ("_components_count", "_evictable", "changed", "held")

    def __init__(self, components_count: int) -> None:
        self._components_count = components_count
        self.held = [0] * (2 * components_count)
        """Pages that the tree holds, by lane."""
        self._evictable = [0] * (2 * components_count)
        """Sum of ``Node.evictable`` over all nodes, by lane."""
        self.changed: set[Node] = set()
        """Nodes whose locks or slots have changed since they were counted."""

    def evictable(self, lane: int) -> int:
        """Return the pages of a lane that eviction could give back now."""
        self.count_changed()
        return self._evictable[lane]

    def count_changed(self) -> None:
        """Count the nodes that have changed."""
        while self.changed:
            self._count(self.changed.pop())

    def add(self, node: Node, lane: int, count: int) -> None:
        """Count pages that a new node holds, below which there is none and which nothing pins."""
        self.held[lane] += count
        self._evictable[lane] += count
        node.evictable[lane] += count

    def drop(self, node: Node, lane: int, count: int) -> None:
        """Count pages off that a node holds no more; they were evictable."""
        self.held[lane] -= count
        self._evictable[lane] -= count
        node.evictable[lane] -= count

    def forget(self, node: Node) -> None:
        """Count a node for the last time, which holds nothing, and which nothing pins."""
        if node in self.changed:
            self.changed.remove(node)
            self._count(node)

    def _count(self, node: Node) -> None:
        """Count a node anew, and the nodes above it as far up as its locks make a difference."""
        for tier, lane in enumerate((0, self._components_count)):
            at = node
            self._recount(at, lane)
            while at.parent is not None:
                is_protected = at.locks[lane] > 0 or at.protected_children[tier] > 0
                if is_protected == at.protected[tier]:
                    break
                at.protected[tier] = is_protected
                at = at.parent
                at.protected_children[tier] += 1 if is_protected else -1
                self._recount(at, lane)
        for lane in range(len(self.held)):
            if lane % self._components_count:
                self._recount(node, lane)

    def _recount(self, node: Node, lane: int) -> None:
        count = self.evictable_in(node, lane)
        self._evictable[lane] += count - node.evictable[lane]
        node.evictable[lane] = count

    def evictable_in(self, node: Node, lane: int) -> int:
        """Count the evictable pages of one node in a lane; of Full, if its children have been counted."""
        held_count = node.held_count[lane]
        if not held_count or node.locks[lane]:
            return 0
        tier, component = divmod(lane, self._components_count)
        if not component:
            return 0 if node.protected_children[tier] else held_count
        slots = node.slots[lane]
        first_pinned = node.first_pinned(lane)
        if slots is None or first_pinned == node.pages:
            return held_count
        return int(np.count_nonzero(slots[:first_pinned] >= 0))
