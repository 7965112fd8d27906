"""Adaptive queues that say what they would do: what a node is worth, and which one goes next.

Whoever asks pays, and nothing changes by it: no order, no count, not even the moment at which a queue finds out that an
entry is stale. So an engine may ask as often as it likes, and ranks of a group stay alike where one of them asks.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from unified_cache.tree.adaptive_queues import AdaptiveQueues
from unified_cache.tree.eviction_queues import Queue
from unified_cache.tree.node import Node
from unified_cache.tree.outlook import Guide, VictimReason
from unified_cache.tree.policy import Rank

__all__ = ["ReadableQueues"]

FIRST_CELL = len(Queue)
"""First queue of a lane that is a cell's."""


class ReadableQueues(AdaptiveQueues):
    """Eviction queues, of which those of some lanes go by the forecast, and which tell how."""

    __slots__ = ()

    def adaptive_lanes(self) -> list[int]:
        """Return the lanes under adaptive eviction that hold anything at all."""
        return [lane for lane, pages in enumerate(self._capacity) if pages and self._is_adaptive[lane]]

    def guide(self, lane: int) -> Guide:
        """Tell what a lane goes by now."""
        if self._by_forecast[lane]:
            return Guide.FORECAST
        if not self.forecast.is_ready:
            return Guide.UNTOLD
        return Guide.ROOM_LEFT if self._trusts else Guide.LRU_AHEAD

    def expected(self, node: Node, lane: int) -> tuple[int, int, float | None]:
        """Return a node's cell in a lane, its age in requests, and what it is worth; None while lru decides."""
        worth = self._worth(node, lane) if self._by_forecast[lane] else None
        return self._cell(node, lane), self.forecast.now - node.request, worth

    def peek_victim(self, lane: int) -> tuple[Node, VictimReason] | None:
        """Return what ``next_victim`` finds where it looks at all worths anew, and why that one; changes nothing.

        Eviction itself goes by worths that are some requests old. O(cells, and entries that are stale).
        """
        if self._ages is not None:
            oldest = self._peek(Queue.AGED, lane)
            if oldest is not None and oldest.stamps[lane] <= self._ages.expired():
                return oldest, VictimReason.EXPIRED
        by_forecast = self._by_forecast[lane]
        cells = range(self._ends[lane].cells_count)
        ends = [self._peek(FIRST_CELL + cell, lane) for cell in cells]
        if by_forecast:
            for node in self._tail_nodes[lane] if self.tails.are_rare else ():
                if self.ends_with_tail(node, lane) and self._could_go(node, lane):
                    return node, VictimReason.LAST_PAGE
            ends += [self._peek_young(cell, lane) for cell in cells]
        found = [node for node in ends if node is not None]
        if found:
            least = min(found, key=lambda node: self._worth(node, lane))
            return least, VictimReason.LEAST_WORTH if by_forecast else VictimReason.LEAST_RECENT
        preferred = self._peek(Queue.PREFERRED, lane)
        return None if preferred is None else (preferred, VictimReason.PREFERRED)

    def _could_go(self, node: Node, lane: int) -> bool:
        return self.evictable(node, lane) and not self._is_preferred(node, lane)

    def _peek_young(self, cell: int, lane: int) -> Node | None:
        for node in reversed(self._young.get((FIRST_CELL + cell) * self._lanes_count + lane, ())):
            if self._cell(node, lane) == cell and self._could_go(node, lane):
                return node
        return None

    def _peek(self, queue: int, lane: int) -> Node | None:
        """Return the node that ``_first`` finds, past entries that it would move or drop.

        Entries whose queued rank is above the least present one cannot come before it: a rank never falls.
        """
        queue_id = queue * self._lanes_count + lane
        entries: Sequence[tuple[Rank, int, int, Node]] = self._queues[queue_id]
        found: Node | None = None
        least: tuple[Rank, int, bool] = (0, 0, False)
        """Rank and place of what was found, and whether it would have to be put back, behind its equals."""
        frontier = [(*entries[0][:3], 0)] if entries else []
        while frontier:
            rank, place, _, number = heappop(frontier)
            if found is not None and least[:2] < (rank, place):
                break
            node = entries[number][3]
            if self.evictable(node, lane) and self._belongs(node, lane, queue_id):
                present = (node.stamps[lane], self.place_of(node, lane))
                standing = (*present, present != (rank, place))
                if found is None or standing < least:
                    found, least = node, standing
            for below in range(2 * number + 1, min(2 * number + 3, len(entries))):
                heappush(frontier, (*entries[below][:3], below))
        return found
