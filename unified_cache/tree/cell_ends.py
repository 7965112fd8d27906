"""Ends of a lane's cells: the oldest and the youngest node of each, one of which is the lane's next victim.

Of a lane's cells few hold nodes at a time, so ends stand in lists without gaps, in which the least is found in one
pass; of 170 places that takes longer than everything else that a victim costs.

What a node is worth depends on its age alone, and changes only where its age passes from one bin of the forecast to the
next. So a worth *stands* until a request whose number is known, and is looked up anew no sooner: of old nodes after
thousands of requests, of one that was put at an end just now before the next victim is chosen.
"""

from unified_cache.tree.forecast import NEVER, NO_NODE
from unified_cache.tree.node import Node

__all__ = ["CellEnds"]

NOWHERE = -1


class CellEnds:
    """Nodes at the ends of one lane's cells, and what they are worth.

    End ``cell`` is the oldest node of a cell, end ``cells_count + cell`` its youngest. What stands in the lists is what
    was found there last: a node may be evictable no more.
    """

    __slots__ = ("_places", "cells_count", "due_at", "ends", "nodes", "noted", "standing", "worths", "worths_stand")

    def __init__(self, cells_count: int) -> None:
        self.cells_count = cells_count
        self._places = [NOWHERE] * (2 * cells_count)
        """Place of each end in the lists below."""
        self.ends: list[int] = []
        self.nodes: list[Node] = []
        self.worths: list[float] = []
        """What the nodes are worth, infinity where none stands any more."""
        self.standing: list[int] = []
        """Number of the request from which on each worth has to be looked up anew."""
        self.due_at = NEVER
        """The least of these."""
        self.noted: dict[int, Node] = {}
        """Nodes found at ends since worths were looked up last, by end: they are put in the lists then."""
        self.worths_stand = False
        """Whether a worth is the same until then while the node is: not of windows, nor by LRU, where it rises."""

    def due(self, now: int) -> list[int]:
        """Return the places whose worth has to be looked up at request ``now``, those of nodes that were noted too."""
        due: list[int] = []
        if self.due_at <= now:
            due = [place for place, until in enumerate(self.standing) if until <= now]
        for end, node in self.noted.items():
            place = self._places[end]
            if place == NOWHERE:
                place = self._places[end] = len(self.ends)
                self.ends.append(end)
                self.nodes.append(node)
                self.worths.append(NO_NODE)
                self.standing.append(NEVER)
            else:
                self.nodes[place] = node
            due.append(place)
        self.noted.clear()
        return due

    def leave(self, place: int) -> None:
        """Note that there is no node at the end that stands at a place."""
        self.worths[place], self.standing[place] = NO_NODE, NEVER

    def clear(self) -> None:
        """Forget all ends."""
        for end in self.ends:
            self._places[end] = NOWHERE
        self.ends.clear()
        self.nodes.clear()
        self.worths.clear()
        self.standing.clear()
        self.noted.clear()
        self.due_at = NEVER
