"""Eviction queues of lanes that go by the forecast: a queue for each cell, and LRU until there is something to go by.

Within a cell the oldest goes first, as everywhere, or the youngest where that is worth less: worth rises with age
until people have thought, and falls after. Which cell gives the next victim says the forecast, by what these two are
worth; of windows and states, see ``window_worth``. Where requests do not differ, or have not come back as was foretold,
all cells go by their oldest: that is LRU. So ranks never fall, and a node goes earlier only by another queue.

The last page of a prompt, which the next turn fills up, goes before all that, as long as hardly any is asked for again.

Which cell a node has, and which request's it is, is written by ``request_marks``.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from unified_cache.config import EvictionConfig, EvictionPolicy
from unified_cache.pool import Tier
from unified_cache.tree.eviction_queues import STALE_MIN, EvictionQueues, Queue
from unified_cache.tree.forecast import Forecast, in_session
from unified_cache.tree.node import Node
from unified_cache.tree.returns import Returns
from unified_cache.tree.window_worth import WINDOW_CELLS, ResumeShares, window_cell

__all__ = ["AdaptiveQueues"]

WEIGH_REQUESTS = 4
"""Requests after which the ends of all cells are weighed anew; in between only those that changed, or come up."""
ENDS_MAX = 1024
"""Ends noted in a lane before all are weighed anew."""
START_MAX = 1 << 24
"""More than the pages of a prompt: of windows of equal stamp, in whatever cells, that goes first which begins first."""
YOUNG_MAX = 16
"""Nodes of each cell, the youngest, that are known as such."""


class AdaptiveQueues(EvictionQueues):
    """Eviction queues, of which those of some lanes go by the forecast."""

    __slots__ = (
        "_by_forecast",
        "_ends",
        "_is_adaptive",
        "_same_queues",
        "_tail_lanes",
        "_tail_nodes",
        "_tails_max",
        "_unlearned_pages",
        "_weigh_at",
        "_young",
        "forecast",
        "shares",
        "tails",
    )

    def __init__(
        self, spans: Sequence[int], eviction: EvictionConfig, capacity: Sequence[int], forecast: Forecast
    ) -> None:
        super().__init__(spans, eviction, WINDOW_CELLS)
        lanes = [(tier, component) for tier in Tier for component in range(len(spans))]
        self.forecast = forecast
        self.shares = ResumeShares()
        """Where sessions resume, by which windows are weighed."""
        self.tails = Returns()
        """Last pages of prompts."""
        self._is_adaptive = [eviction.policy(tier, component) is EvictionPolicy.ADAPTIVE for tier, component in lanes]
        self._unlearned_pages = [(pages + 1) // 2 for pages in capacity]
        """By lane: pages yet to be evicted before its pages go by the forecast."""
        self._by_forecast = [False] * len(lanes)
        """Whether a lane goes by the forecast; else it is LRU."""
        self._ends: list[list[tuple[float, int]]] = [[] for _ in lanes]
        """By lane: heap of the ends of its cells by worth or less; a queue id is its oldest node, ~id its youngest."""
        self._weigh_at = [0] * len(lanes)
        """By lane: number of the request from which on all its ends are weighed anew."""
        self._tail_nodes: list[deque[Node]] = [deque() for _ in lanes]
        """Nodes that may end with the last page of a prompt, oldest first; of lanes of Full."""
        self._tail_lanes = [lane for lane in range(0, len(lanes), len(spans)) if self._is_adaptive[lane]]
        self._tails_max = [STALE_MIN] * len(lanes)
        """By lane: how many of them may be queued before those that do not are dropped."""
        self._young: dict[int, deque[Node]] = {}
        """By queue id: nodes that became evictable last, youngest last, and some that are not any more."""
        self._same_queues: dict[int, int] = {}
        """Values of ``Node.queued``, each once: as numbers of their own they take 48 bytes a node."""

    # ---- what to go by -------------------------------------------------------------------------------------------

    def follow_forecast(self) -> None:
        """Go by the forecast from now on where it is ready and enough was evicted, and by LRU elsewhere."""
        for lane, was_followed in enumerate(self._by_forecast):
            if was_followed is not (self.forecast.is_ready and self._unlearned_pages[lane] <= 0):
                self._by_forecast[lane] = not was_followed
                self._weigh_at[lane] = 0

    def pages_at_once(self, node: Node, lane: int, pages: int) -> int:
        """Return how many of ``pages`` the next victim gives before another is looked for; they are evicted now."""
        nodes = self._tail_nodes[lane]
        if nodes and nodes[0] is node and self.ends_with_tail(node, lane):
            nodes.popleft()
            pages = min(pages, 1)
        if self._unlearned_pages[lane] > 0:
            self._unlearned_pages[lane] -= min(pages, node.held_count[lane])
            self.follow_forecast()
        return pages

    # ---- queues --------------------------------------------------------------------------------------------------

    def queue_id(self, node: Node, lane: int) -> int:
        """Return the queue that a node belongs to while it is evictable from ``lane``."""
        if not self._is_adaptive[lane] or (node.history is not None and self.is_preferred(node, lane)):
            return super().queue_id(node, lane)
        cell = window_cell(node) if lane % self._components_count else node.cell
        return (len(Queue) + cell) * self._lanes_count + lane

    def offer(self, node: Node, lane: int) -> None:
        """Queue ``node`` in ``lane`` if it is evictable there and not queued yet."""
        if not self._is_adaptive[lane]:
            super().offer(node, lane)
            return
        if not self.evictable(node, lane):
            return
        queue_id = self.queue_id(node, lane)
        queue = self._queues[queue_id]
        if not node.queued >> queue_id & 1:
            self._enter(node, lane, queue_id)
            self._sequence += 1
            heappush(queue, (node.stamps[lane], self.place_of(node, lane), self._sequence, node))
        if queue_id < len(Queue) * self._lanes_count:
            return
        if queue[0][3] is node:
            self._note_end(queue_id, lane)
        young = self._young.setdefault(queue_id, deque(maxlen=YOUNG_MAX))
        if young and young[-1] is not node and young[-1].request > node.request:
            return
        if not young or young[-1] is not node:
            young.append(node)
        if self._by_forecast[lane]:
            self._note_end(~queue_id, lane)

    def _enter(self, node: Node, lane: int, queue_id: int) -> None:
        super()._enter(node, lane, queue_id)
        node.queued = self._same_queues.setdefault(node.queued, node.queued)

    def _leave(self, node: Node, lane: int, queue_id: int) -> None:
        super()._leave(node, lane, queue_id)
        node.queued = self._same_queues.setdefault(node.queued, node.queued)

    def offer_all(self, node: Node) -> None:
        """Queue ``node`` in every lane where it is evictable."""
        for lane, live in enumerate(node.held_count):
            if live:
                self.offer(node, lane)

    def next_victim(self, lane: int) -> Node | None:
        """Return the node of ``lane`` that goes next; it stays queued. None if nothing can be evicted."""
        if not self._is_adaptive[lane]:
            return super().next_victim(lane)
        victim = self._next_tail(lane) or self._least(lane)
        return self._first(Queue.PREFERRED * self._lanes_count + lane, lane) if victim is None else victim

    def pass_over(self, node: Node, lane: int) -> None:
        """Take the next victim of ``lane`` out of every queue that it heads, until it is offered again."""
        queue_id = self.queue_id(node, lane)
        super().pass_over(node, lane)
        for last in (self._young.get(queue_id), self._tail_nodes[lane]):
            if last and node in last:
                last.remove(node)

    # ---- last pages of prompts -----------------------------------------------------------------------------------

    def note_tail(self, node: Node) -> None:
        """Queue a node that ends with the last page of a prompt, and drop those that do not any more at times."""
        self.tails.leave()
        for lane in self._tail_lanes:
            nodes = self._tail_nodes[lane]
            nodes.append(node)
            if len(nodes) > self._tails_max[lane]:
                left = deque(node for node in nodes if self.ends_with_tail(node, lane))
                self._tail_nodes[lane] = left
                self._tails_max[lane] = max(STALE_MIN, 2 * len(left))

    def _next_tail(self, lane: int) -> Node | None:
        """Return the oldest node that ends with the last page of a prompt, if such pages are not asked for again."""
        nodes = self._tail_nodes[lane]
        if not self._by_forecast[lane] or not self.tails.are_rare:
            return None
        for _ in range(len(nodes)):
            node = nodes[0]
            if self.ends_with_tail(node, lane):
                if self.evictable(node, lane) and not self.is_preferred(node, lane):
                    return node
                if not node.full_children[lane // self._components_count]:
                    nodes.rotate(-1)
                    continue
            nodes.popleft()
        return None

    def ends_with_tail(self, node: Node, lane: int) -> bool:
        """Return whether the last page that a lane of Full holds of a node is the last one of a prompt."""
        return not node.dead and node.start + node.held_count[lane] == node.asked_end and in_session(node.cell)

    # ---- ends of cells -------------------------------------------------------------------------------------------

    def _note_end(self, end: int, lane: int) -> None:
        """Have an end of a cell weighed before the next victim is chosen: no worth is less than this."""
        heappush(self._ends[lane], (-1.0, end))
        if len(self._ends[lane]) > ENDS_MAX:
            self._ends[lane].clear()
            self._weigh_at[lane] = 0

    def _least(self, lane: int) -> Node | None:
        """Return the node that is worth least of the oldest and youngest of all cells."""
        ends = self._ends[lane]
        if self._weigh_at[lane] <= self.forecast.now:
            self._weigh_at[lane] = self.forecast.now + WEIGH_REQUESTS
            ids = range(len(Queue) * self._lanes_count + lane, len(self._queues), self._lanes_count)
            held = [queue_id for queue_id in ids if self._queues[queue_id]]
            held += [~queue_id for queue_id in held] if self._by_forecast[lane] else []
            nodes = ((end, self._node_at(end, lane)) for end in held)
            ends[:] = [(self._worth(node, lane), end) for end, node in nodes if node is not None]
            heapify(ends)
        while ends:
            noted, end = ends[0]
            node = self._node_at(end, lane)
            if node is None:
                heappop(ends)
                continue
            worth = self._worth(node, lane)
            if worth <= noted:
                return node
            heapreplace(ends, (worth, end))
        return None

    def _node_at(self, end: int, lane: int) -> Node | None:
        """Return the node at an end of a cell: its oldest one, or its youngest as far as that is known."""
        if end >= 0:
            return self._first(end, lane)
        young = self._young.get(~end)
        while young:
            node = young[-1]
            if self.evictable(node, lane) and self._belongs(node, lane, ~end):
                return node
            young.pop()
        return None

    def _worth(self, node: Node, lane: int) -> float:
        """Return what a node of a lane is worth now; by lru, while there is nothing to go by, the later the more."""
        if not self._by_forecast[lane]:
            return node.stamps[lane] + self.place_of(node, lane) / START_MAX
        worth = self.forecast.worth(node.cell, node.request)
        component = lane % self._components_count
        return worth * self.shares.weigh(node, lane, self._spans[component]) if component else worth

    def _belongs(self, node: Node, lane: int, queue_id: int) -> bool:
        """Return whether a node, if it is evictable, belongs to a queue of a lane."""
        return not node.dead and queue_id == self.queue_id(node, lane)
