"""Eviction queues of lanes that go by the forecast: a queue for each cell, and LRU until there is something to go by.

Within a cell the oldest goes first, as everywhere, or the youngest where that is worth less: worth rises with age
until people have thought, and falls after. Which cell gives the next victim says the forecast, by what these two are
worth now; of windows and states, see ``window_worth``. Where requests do not differ, or a shadow of LRU is ahead, all
cells go by their oldest: that is LRU. So ranks never fall, and a node goes earlier only by standing in another queue.

The last page of a prompt, which the next turn fills up, goes before all that, as long as hardly any is asked for again.

Which cell a node has, and which request's it is, is written by ``request_marks``.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

from unified_cache.config import EvictionConfig, EvictionPolicy
from unified_cache.pool import Tier
from unified_cache.tree.cell_ends import CellEnds
from unified_cache.tree.eviction_queues import STALE_MIN, EvictionQueues, Queue
from unified_cache.tree.forecast import CELLS_COUNT, NEVER, NO_NODE, Forecast, in_session
from unified_cache.tree.node import Node
from unified_cache.tree.returns import Returns
from unified_cache.tree.shadow_lru import ShadowLru
from unified_cache.tree.window_worth import WINDOW_CELLS, ResumeShares, window_cell

__all__ = ["AdaptiveQueues"]

WEIGH_REQUESTS = 4
"""Requests after which windows and states are weighed anew: where sessions resume is learned with every request."""
_FIRST = len(Queue)
"""First queue of a lane that is a cell's."""
START_MAX = 1 << 24
"""More than the pages of a prompt: of windows of equal stamp, in whatever cells, that goes first which begins first."""
YOUNG_MAX = 16
"""Nodes of each cell, the youngest, that are known as such."""


class AdaptiveQueues(EvictionQueues):
    """Eviction queues, of which those of some lanes go by the forecast."""

    __slots__ = (
        "_by_forecast",
        "_capacity",
        "_ends",
        "_first_cell_queue",
        "_is_adaptive",
        "_look",
        "_same_queues",
        "_tail_lanes",
        "_tail_nodes",
        "_tails_max",
        "_trusts",
        "_unlearned_pages",
        "_young",
        "forecast",
        "shadow",
        "shares",
        "tails",
    )

    def __init__(
        self,
        spans: Sequence[int],
        eviction: EvictionConfig,
        time: Callable[[], float],
        capacity: Sequence[int],
        forecast: Forecast,
        shadow: ShadowLru,
    ) -> None:
        super().__init__(spans, eviction, time, WINDOW_CELLS)
        lanes = [(tier, component) for tier in Tier for component in range(len(spans))]
        self.forecast = forecast
        self.shadow = shadow
        self.shares = ResumeShares()
        """Where sessions resume, by which windows are weighed."""
        self.tails = Returns()
        """Last pages of prompts."""
        self._is_adaptive = [eviction.policy(tier, component) is EvictionPolicy.ADAPTIVE for tier, component in lanes]
        self._trusts = False
        """Whether there is a forecast, and LRU not ahead of it."""
        self._look = forecast.table
        """Look at the log by which worths were looked up."""
        self._capacity = tuple(capacity)
        self._unlearned_pages = [(pages + 1) // 2 for pages in capacity]
        """By lane: pages yet to be evicted before its pages go by the forecast."""
        self._by_forecast = [False] * len(lanes)
        """Whether a lane goes by the forecast; else it is LRU."""
        self._ends = [CellEnds(WINDOW_CELLS if component else CELLS_COUNT) for _, component in lanes]
        self._tail_nodes: list[deque[Node]] = [deque() for _ in lanes]
        """Nodes that may end with the last page of a prompt, oldest first; of lanes of Full."""
        self._tail_lanes = [lane for lane in range(0, len(lanes), len(spans)) if self._is_adaptive[lane]]
        self._tails_max = [STALE_MIN] * len(lanes)
        """By lane: how many of them may be queued before those that do not are dropped."""
        self._young: dict[int, deque[Node]] = {}
        """By queue id: nodes that became evictable last, youngest last, and some that are not any more."""
        self._first_cell_queue = _FIRST * len(lanes)
        self._same_queues: dict[int, int] = {}
        """Values of ``Node.queued``, each once: as numbers of their own they take 48 bytes a node."""

    # ---- what to go by -------------------------------------------------------------------------------------------

    def trust(self, *, forecast: bool) -> None:
        """Go by the forecast as it is from now on, or by LRU, where there is none or LRU would have been better."""
        if forecast is not self._trusts or self._look is not self.forecast.table:
            self._trusts = forecast
            self._look = self.forecast.table
            self._order_anew()

    def note_evicted(self, lane: int, pages: int) -> None:
        """Note that so many pages of a lane were evicted."""
        if self._unlearned_pages[lane] > 0:
            self._unlearned_pages[lane] -= pages
            if self._unlearned_pages[lane] <= 0:
                self._look_anew(lane)

    def _order_anew(self) -> None:
        for lane in range(self._lanes_count):
            self._look_anew(lane)

    def _look_anew(self, lane: int) -> None:
        """Find out what a lane goes by, and have it look at all ends anew."""
        by_forecast = self._by_forecast[lane] = self._trusts and self._unlearned_pages[lane] <= 0
        ends = self._ends[lane]
        ends.clear()
        ends.worths_stand = by_forecast and lane % self._components_count == 0
        first = self._first_cell_queue + lane
        end = first + ends.cells_count * self._lanes_count
        for cell, queue in enumerate(self._queues[first : end : self._lanes_count]):
            oldest = self._oldest(cell, lane) if queue else None
            if oldest is not None:
                ends.noted[cell] = oldest
                youngest = self._youngest(cell, lane) if by_forecast else None
                if youngest is not None:
                    ends.noted[ends.cells_count + cell] = youngest

    # ---- queues --------------------------------------------------------------------------------------------------

    def queue_ids(self, node: Node, lane: int) -> tuple[int, ...]:
        """Return the queues that a node belongs to while it is evictable from ``lane``."""
        if not self._is_adaptive[lane]:
            return super().queue_ids(node, lane)
        if self._is_preferred(node, lane):
            return (Queue.PREFERRED * self._lanes_count + lane,)
        queue_id = self._first_cell_queue + self._cell(node, lane) * self._lanes_count + lane
        if self._ages is None:
            return (queue_id,)
        return queue_id, Queue.AGED * self._lanes_count + lane

    def _cell(self, node: Node, lane: int) -> int:
        """Return the cell whose queue a node belongs to in a lane."""
        return window_cell(node) if lane % self._components_count else node.cell

    def offer(self, node: Node, lane: int) -> None:
        """Queue ``node`` in ``lane`` if it is evictable there and not queued yet."""
        if not self._is_adaptive[lane]:
            super().offer(node, lane)
            return
        if not self.evictable(node, lane):
            return
        cell = window_cell(node) if lane % self._components_count else node.cell
        queue_id = self._first_cell_queue + cell * self._lanes_count + lane
        if node.history is not None or self._ages is not None:
            for each in self.queue_ids(node, lane):
                if not node.queued >> each & 1:
                    self._enqueue(node, lane, each)
        elif not node.queued >> queue_id & 1:
            self._enqueue(node, lane, queue_id)
        ends = self._ends[lane]
        queue = self._queues[queue_id]
        if queue and queue[0][3] is node:
            ends.noted[cell] = node
        young = self._young.get(queue_id)
        if young is None:
            young = self._young[queue_id] = deque(maxlen=YOUNG_MAX)
        if young and young[-1] is not node and young[-1].request > node.request:
            return
        if not young or young[-1] is not node:
            young.append(node)
        if self._by_forecast[lane]:
            ends.noted[ends.cells_count + cell] = node

    def _enqueue(self, node: Node, lane: int, queue_id: int) -> None:
        """Put a node into a queue in which it is not."""
        self._enter(node, lane, queue_id)
        self._sequence += 1
        heappush(self._queues[queue_id], (node.stamps[lane], self.place_of(node, lane), self._sequence, node))

    def _enter(self, node: Node, lane: int, queue_id: int) -> None:
        if node.queued:
            super()._enter(node, lane, queue_id)
        else:
            node.queued = 1 << queue_id
        node.queued = self._same_queues.setdefault(node.queued, node.queued)

    def _leave(self, node: Node, lane: int, queue_id: int) -> None:
        super()._leave(node, lane, queue_id)
        if node.queued:
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
        if self._ages is not None:
            oldest = self._first(Queue.AGED * self._lanes_count + lane, lane)
            if oldest is not None and oldest.stamps[lane] <= self._ages.expired():
                return oldest
        tail = self._next_tail(lane) if self._tail_nodes[lane] and self._by_forecast[lane] else None
        if tail is not None:
            return tail
        victim = self._least(lane)
        return self._first(Queue.PREFERRED * self._lanes_count + lane, lane) if victim is None else victim

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
                if self.evictable(node, lane) and (node.history is None or not self._is_preferred(node, lane)):
                    return node
                if not node.full_children[lane // self._components_count]:
                    nodes.rotate(-1)
                    continue
            nodes.popleft()
        return None

    def ends_with_tail(self, node: Node, lane: int) -> bool:
        """Tell whether the last page that a lane of Full holds of a node is the last one of a prompt."""
        return not node.dead and node.start + node.held_count[lane] == node.asked_end and in_session(node.cell)

    def pages_at_once(self, node: Node, lane: int, pages: int) -> int:
        """Return how many of ``pages`` the next victim may give before another is looked for."""
        nodes = self._tail_nodes[lane]
        if not nodes or nodes[0] is not node or not self.ends_with_tail(node, lane):
            return pages
        nodes.popleft()
        return min(pages, 1)

    def _is_preferred(self, node: Node, lane: int) -> bool:
        history = None if node.history is None else node.history.get(lane)
        return history is not None and history.preferences > 0

    def _least(self, lane: int) -> Node | None:
        """Return the node that is worth least of the oldest and youngest of all cells."""
        ends = self._ends[lane]
        if ends.noted or ends.due_at <= self.forecast.now:
            self._renew(ends, lane)
        worths, nodes = ends.worths, ends.nodes
        while worths:
            least = min(worths)
            if least == NO_NODE:
                break
            place = worths.index(least)
            cell = ends.ends[place]
            is_oldest = cell < ends.cells_count
            node = self._oldest(cell, lane) if is_oldest else self._youngest(cell - ends.cells_count, lane)
            if node is None:
                ends.leave(place)
                continue
            if node is nodes[place] and ends.worths_stand:
                return node
            nodes[place] = node
            worth, until = self._standing(node, lane)
            worths[place], ends.standing[place] = worth, until
            if until < ends.due_at:
                ends.due_at = until
            if worth <= least:
                return node
        return None

    def _renew(self, ends: CellEnds, lane: int) -> None:
        """Look up what nodes are worth whose worth does not stand any more."""
        nodes, worths, standing = ends.nodes, ends.worths, ends.standing
        cells_count, standing_of = ends.cells_count, self.forecast.standing
        for place in ends.due(self.forecast.now):
            cell = ends.ends[place]
            if cell < cells_count:  # some other node may be the oldest by now
                oldest = self._oldest(cell, lane)
                if oldest is None:
                    ends.leave(place)
                    continue
                nodes[place] = oldest
            node = nodes[place]
            if ends.worths_stand:
                worths[place], standing[place] = standing_of(node.cell, node.request)
            else:
                worths[place], standing[place] = self._standing(node, lane)
        ends.due_at = min(standing)

    def _oldest(self, cell: int, lane: int) -> Node | None:
        """Return the oldest node of a cell, after moving stale entries before it to their places."""
        queue_id = self._first_cell_queue + cell * self._lanes_count + lane
        queue = self._queues[queue_id]
        while queue:
            queued_stamp, queued_place, _, node = queue[0]
            if not self._goes_from(node, cell, lane):
                heappop(queue)
                self._leave(node, lane, queue_id)
                continue
            stamp = node.stamps[lane]
            place = node.start if lane % self._components_count else 0
            if stamp == queued_stamp and place == queued_place:
                return node
            self._sequence += 1
            heapreplace(queue, (stamp, place, self._sequence, node))
        return None

    def _youngest(self, cell: int, lane: int) -> Node | None:
        """Return the youngest node of a cell; None if there is none, or it is not known any more."""
        young = self._young.get(self._first_cell_queue + cell * self._lanes_count + lane)
        while young:
            node = young[-1]
            if self._goes_from(node, cell, lane):
                return node
            young.pop()
        return None

    def _goes_from(self, node: Node, cell: int, lane: int) -> bool:
        """Tell whether a node belongs to a cell and could be evicted now."""
        if lane % self._components_count:
            if window_cell(node) != cell or not self.evictable(node, lane):
                return False
        elif (  # ``evictable`` of Full, in place: of all that is asked of queues, this is asked most often
            node.cell != cell
            or node.full_children[lane // self._components_count]
            or not node.held_count[lane]
            or node.locks[lane]
            or node.dead
        ):
            return False
        return node.history is None or not self._is_preferred(node, lane)

    def _worth(self, node: Node, lane: int) -> float:
        """Return what a node of a lane is worth now; by lru, while there is nothing to go by, the later the more."""
        return self._standing(node, lane)[0]

    def _standing(self, node: Node, lane: int) -> tuple[float, int]:
        """Return what a node of a lane is worth, and the request from which on it may be worth something else."""
        if not self._by_forecast[lane]:
            return node.stamps[lane] + self.place_of(node, lane) / START_MAX, NEVER
        component = lane % self._components_count
        if not component:
            return self.forecast.standing(node.cell, node.request)
        worth, until = self.forecast.standing(node.cell, node.request)
        worth *= self.shares.weigh(node, lane, self._spans[component])
        return worth, min(until, self.forecast.now + WEIGH_REQUESTS)

    def _belongs(self, node: Node, lane: int, queue_id: int) -> bool:
        """Tell whether a node, if it is evictable, belongs to a queue of a lane."""
        if not self._is_adaptive[lane]:
            return super()._belongs(node, lane, queue_id)
        if node.dead:
            return False
        if node.history is None and self._ages is None:
            cell = window_cell(node) if lane % self._components_count else node.cell
            return queue_id == self._first_cell_queue + cell * self._lanes_count + lane
        return queue_id in self.queue_ids(node, lane)

    def pass_over(self, node: Node, lane: int) -> None:
        """Take the next victim of ``lane`` out of every queue that it heads, until it is offered again."""
        queued = node.queued
        while queued:
            queue_id = queued.bit_length() - 1
            queued ^= 1 << queue_id
            queue = self._queues[queue_id]
            if queue_id % self._lanes_count == lane and queue[0][3] is node:
                heappop(queue)
                self._leave(node, lane, queue_id)
        if self._is_adaptive[lane]:
            young = self._young.get(self._first_cell_queue + self._cell(node, lane) * self._lanes_count + lane)
            if young and young[-1] is node:
                young.pop()
            if self._tail_nodes[lane] and self._tail_nodes[lane][0] is node:
                self._tail_nodes[lane].popleft()
