"""Ends of a lane's cells: the oldest and the youngest node of each, one of which is the lane's next victim.

Of a lane's cells few hold nodes at a time, so ends stand in lists without gaps, in which the least is found in one
pass; of 170 places that takes longer than everything else that a victim costs.
"""

from unified_cache.tree.forecast import NO_NODE
from unified_cache.tree.node import Node

__all__ = ["CellEnds"]

NOWHERE = -1


class CellEnds:
    """Nodes at the ends of one lane's cells, and what they were worth when they were looked at last.

    End ``cell`` is the oldest node of a cell, end ``cells_count + cell`` its youngest. What stands in the lists is what
    was found there last: a node may be evictable no more.
    """

    __slots__ = ("_places", "cells_count", "ends", "look_at", "nodes", "reorder_at", "worths")

    def __init__(self, cells_count: int) -> None:
        self.cells_count = cells_count
        self._places = [NOWHERE] * (2 * cells_count)
        """Place of each end in the lists below."""
        self.ends: list[int] = []
        self.nodes: list[Node | None] = []
        self.worths: list[float] = []
        """What the nodes are worth, infinity where none stands any more; as it was once until ``reorder_at``."""
        self.reorder_at = 0
        """Number of the request from which on their worth is looked up anew."""
        self.look_at = 0
        """Number of the request from which on the nodes are looked for anew."""

    def put(self, end: int, node: Node, worth: float) -> None:
        """Note the node at an end, and what it is worth now."""
        place = self._places[end]
        if place == NOWHERE:
            self._places[end] = len(self.ends)
            self.ends.append(end)
            self.nodes.append(node)
            self.worths.append(worth)
        else:
            self.nodes[place] = node
            self.worths[place] = worth

    def leave(self, place: int) -> None:
        """Note that there is no node at the end that stands at a place."""
        self.nodes[place] = None
        self.worths[place] = NO_NODE

    def clear(self) -> None:
        """Forget all ends."""
        for end in self.ends:
            self._places[end] = NOWHERE
        self.ends.clear()
        self.nodes.clear()
        self.worths.clear()
