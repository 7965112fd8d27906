"""Evict: give slots back, in the order of the lane's policy, never a page that a lock pins."""

import numpy as np

from unified_cache.pool import Tier
from unified_cache.tree.node import Node
from unified_cache.tree.state import Freed, TreeState

__all__ = ["evict"]


def evict(tree: TreeState, tier: Tier, component: int, pages: int) -> Freed:
    """Free up to ``pages`` slots of a component on a tier, and what stands on those pages.

    Full goes from the tail of a leaf-most run, so that it stays prefix-closed; a windowed component from anywhere,
    oldest page first, leaving holes. Components after it stand on it: they lose the same pages. A page that the
    other tier holds as well is thereby demoted; a node that holds nothing any more leaves the tree.
    O(log n) per victim. Frees fewer pages only when locks pin everything else.
    """
    freed = Freed([[] for _ in range(2 * tree.components_count)], [])
    lane = int(tier) * tree.components_count + component
    got = 0
    while got < pages:
        node = tree.queues.next_victim(lane)
        if node is None:
            break
        if component == 0:
            got += _evict_tail(tree, node, lane, pages - got, freed)
        else:
            got += _evict_windowed(tree, node, lane, pages - got, freed)
        if not node.children:
            tree.prune(node)
    return freed


def _evict_tail(tree: TreeState, node: Node, lane: int, pages: int, freed: Freed) -> int:
    """Drop the last ``pages`` of Full's run in a node, after everything that stands on them."""
    end = node.held_count[lane]
    start = max(0, end - pages)
    for dependant in range(lane + tree.components_count - 1, lane, -1):
        tree.drop(node, dependant, start, node.pages, freed)
    return tree.drop(node, lane, start, end, freed)


def _evict_windowed(tree: TreeState, node: Node, lane: int, pages: int, freed: Freed) -> int:
    """Drop the oldest ``pages`` that no lock pins, and the same pages of the components after this one."""
    held = node.slots[lane]
    assert held is not None
    end = node.first_pinned(lane)
    victims = np.flatnonzero(held[:end] >= 0)
    if victims.size > pages:
        end = int(victims[pages - 1]) + 1
    last_lane = (lane // tree.components_count + 1) * tree.components_count - 1
    for dependant in range(last_lane, lane, -1):
        tree.drop(node, dependant, 0, min(end, node.first_pinned(dependant)), freed)
    return tree.drop(node, lane, 0, end, freed)
