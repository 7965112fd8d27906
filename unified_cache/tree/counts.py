"""Counts of a tree: its changes, and the pages that locks keep from eviction."""

import numpy as np

from unified_cache.tree.node import Node, Protection

CHANGED_NODES_MAX = 64
"""Nodes that may wait to be counted again: the cost of asking."""


class TreeCounts:
    """Changes of a tree, and protected pages by tier and component, so that an engine may ask for them in O(1).

    A page is *protected* when eviction could not give it back now, not even after pages that have to go before it.
    Every other page that the tree holds is *evictable*. A lock protects on its tier:

        Full            every page of the nodes it pins, and every page above them: Full goes from the tail
        any other       the pages from where the lock begins, and no page above

    So *free + evictable* pages can be allocated, of all components on all tiers at once, and neither a new leaf nor an
    eviction changes how many pages are protected. A lock only records the nodes it pins; they are counted when a caller
    asks, or when many are recorded.
    """

    __slots__ = ("_components_count", "_protected", "changed", "changes_count", "version")

    def __init__(self, components_count: int) -> None:
        self._components_count = components_count
        self._protected = [0] * (2 * components_count)
        """Sum of ``Protection.pages`` over all nodes, by tier and component."""
        self.changed: set[Node] = set()
        """Nodes whose locks have changed, or whose slots below locks, since they were counted; some may be dead."""
        self.version = 0
        """Counts changes of structure; a match made under another version is dead."""
        self.changes_count = 0
        """Counts changes of what nodes hold; beside an equal version it says that all is found where it was."""

    def protected(self, tier_component: int) -> int:
        """Return the pages of a component on a tier that locks keep from eviction."""
        if self.changed:
            self.count_changed()
        return self._protected[tier_component]

    def count_changed(self) -> None:
        """Count the nodes that have changed."""
        while self.changed:
            self._count(self.changed.pop())

    def _count(self, node: Node) -> None:
        """Count a node again, and the nodes above it as far up as its locks make a difference."""
        for tier, tier_component in enumerate((0, self._components_count)):
            at = node
            protection = self._recount(at, tier_component)
            while at.parent is not None:
                is_protected = at.locks[tier_component] > 0 or protection.children[tier] > 0
                if is_protected == protection.is_protected[tier]:
                    break
                protection.is_protected[tier] = is_protected
                at = at.parent
                protection = self._protection(at)
                protection.children[tier] += 1 if is_protected else -1
                self._recount(at, tier_component)
        for tier_component in range(len(self._protected)):
            if tier_component % self._components_count:
                self._recount(node, tier_component)

    def _recount(self, node: Node, tier_component: int) -> Protection:
        protection = self._protection(node)
        count = self.protected_in(node, tier_component)
        self._protected[tier_component] += count - protection.pages[tier_component]
        protection.pages[tier_component] = count
        return protection

    def _protection(self, node: Node) -> Protection:
        if node.protection is None:
            node.protection = Protection(len(self._protected))
        return node.protection

    def protected_in(self, node: Node, tier_component: int) -> int:
        """Count the protected pages of one node on a tier and component; of Full, once its children are counted."""
        held_count = node.held_count[tier_component]
        if not held_count or node.locks[tier_component]:
            return held_count
        tier, component = divmod(tier_component, self._components_count)
        if not component:
            return held_count if node.protection is not None and node.protection.children[tier] else 0
        slots = node.slots[tier_component]
        first_pinned = node.first_pinned(tier_component)
        if slots is None or first_pinned == node.pages:
            return 0
        return int(np.count_nonzero(slots[first_pinned:] >= 0))
