"""Protected pages of every lane, counted as locks change, so that an engine may ask for them in O(1).

A page is *protected* when eviction could not give it back now, not even after pages that have to go before it. Every
other page that the tree holds is *evictable*. A lock protects, in each lane of its tier:

    Full            every page of the nodes it pins, and every page above them: Full goes from the tail
    any other       the pages from where the lock begins, and no page above

Evicting moves pages from evictable to free and changes neither count of any other page. What goes with an evictable
page, because it stands on it, was evictable in its own lane: a lock that pins it would protect the page below it. So
in each lane *free + evictable* is what can be allocated, in all lanes at once. And so only locks, and what is filled
in below them, are counted here: neither a new leaf nor an eviction changes how many pages are protected.

A lock only notes the nodes it pins. They are counted when somebody asks, or when many have been noted: a request that
locks a long path and lets go of it climbs it once at most, up to the first node that other locks protect.
"""

import numpy as np

from unified_cache.tree.node import Node, Protection

__all__ = ["CHANGED_NODES_MAX", "PageCounts"]

CHANGED_NODES_MAX = 64
"""Nodes that may wait to be counted anew: what asking may cost."""


class PageCounts:
    """Counts of one tree, by lane."""

    __slots__ = ("_components_count", "_protected", "changed")

    def __init__(self, components_count: int) -> None:
        self._components_count = components_count
        self._protected = [0] * (2 * components_count)
        """Sum of ``Protection.pages`` over all nodes, by lane."""
        self.changed: set[Node] = set()
        """Nodes whose locks have changed, or whose slots below locks, since they were counted; some may be dead."""

    def protected(self, lane: int) -> int:
        """Return the pages of a lane that locks keep from eviction."""
        self.count_changed()
        return self._protected[lane]

    def count_changed(self) -> None:
        """Count the nodes that have changed."""
        while self.changed:
            self._count(self.changed.pop())

    def _count(self, node: Node) -> None:
        """Count a node anew, and the nodes above it as far up as its locks make a difference."""
        for tier, lane in enumerate((0, self._components_count)):
            at = node
            protection = self._recount(at, lane)
            while at.parent is not None:
                is_protected = at.locks[lane] > 0 or protection.children[tier] > 0
                if is_protected == protection.is_protected[tier]:
                    break
                protection.is_protected[tier] = is_protected
                at = at.parent
                protection = self._protection(at)
                protection.children[tier] += 1 if is_protected else -1
                self._recount(at, lane)
        for lane in range(len(self._protected)):
            if lane % self._components_count:
                self._recount(node, lane)

    def _recount(self, node: Node, lane: int) -> Protection:
        protection = self._protection(node)
        count = self.protected_in(node, lane)
        self._protected[lane] += count - protection.pages[lane]
        protection.pages[lane] = count
        return protection

    def _protection(self, node: Node) -> Protection:
        if node.protection is None:
            node.protection = Protection(len(self._protected))
        return node.protection

    def protected_in(self, node: Node, lane: int) -> int:
        """Count the protected pages of one node in a lane; of Full, if its children have been counted."""
        held_count = node.held_count[lane]
        if not held_count or node.locks[lane]:
            return held_count
        tier, component = divmod(lane, self._components_count)
        if not component:
            return held_count if node.protection is not None and node.protection.children[tier] else 0
        slots = node.slots[lane]
        first_pinned = node.first_pinned(lane)
        if slots is None or first_pinned == node.pages:
            return 0
        return int(np.count_nonzero(slots[first_pinned:] >= 0))
