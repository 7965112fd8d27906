"""Eviction queues of lanes that go by the forecast: a queue for each cell, and LRU until there is something to go by.

Within a cell the oldest goes first, as everywhere; which cell gives the next victim says the forecast, by what the head
of each queue is worth now. So ranks never fall, and a node goes earlier only by standing in another queue.

A node knows the last request that used it: number, cell, and how far the next one must agree to continue it. That is
written when a request's pages become a leaf; when a leaf goes, its parent takes over the later of the two.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

from unified_cache.config import EvictionConfig, EvictionPolicy
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.tree.eviction_queues import EvictionQueues, Queue
from unified_cache.tree.forecast import (
    CELLS_COUNT,
    PASSED,
    SHARED,
    UNASKED,
    Forecast,
    Ghost,
    Visit,
    first_turn,
    goes_on,
    in_session,
    shared_cell,
)
from unified_cache.tree.node import Node

__all__ = ["AdaptiveQueues"]

REORDER_REQUESTS = 32
"""Requests after which the heads of all cells are looked at anew: their worth changes as they age."""

RETURNS_MAX = 16
"""One in so many of the runs that sessions have moved past may be asked for again."""


class Heads:
    """Queues of one lane by what their heads are worth: a heap whose entries are looked at again when they come up."""

    __slots__ = ("by_worth", "listed", "reorder_at")

    def __init__(self) -> None:
        self.by_worth: list[tuple[float, int]] = []
        """(worth, cell); an entry counts only if ``listed`` says the same."""
        self.listed: list[float] = [-1.0] * CELLS_COUNT
        self.reorder_at = 0
        """Number of the request from which on all are looked at anew."""

    def put(self, worth: float, cell: int) -> None:
        """List a cell under what its head is worth now."""
        if self.listed[cell] != worth:
            self.listed[cell] = worth
            heappush(self.by_worth, (worth, cell))


class AdaptiveQueues(EvictionQueues):
    """Eviction queues, of which those of some lanes go by the forecast."""

    __slots__ = (
        "_capacity",
        "_evicted",
        "_heads",
        "_is_adaptive",
        "_newest",
        "_page_key_bytes",
        "_passed_count",
        "_returned_count",
        "forecast",
    )

    def __init__(
        self,
        spans: Sequence[int],
        eviction: EvictionConfig,
        time: Callable[[], float],
        capacity: Sequence[int],
        forecast: Forecast,
        page_key_bytes: int,
    ) -> None:
        super().__init__(spans, eviction, time)
        lanes = [(tier, component) for tier in Tier for component in range(len(spans))]
        self.forecast = forecast
        self._page_key_bytes = page_key_bytes
        self._is_adaptive = [eviction.policy(tier, component) is EvictionPolicy.ADAPTIVE for tier, component in lanes]
        self._capacity = tuple(capacity)
        self._evicted = [0] * len(lanes)
        self._heads = [Heads() for _ in lanes]
        self._passed_count = 0
        self._returned_count = 0
        self._newest: list[Node | None] = [None] * len(lanes)
        extra = CELLS_COUNT * len(lanes)
        self._queues.extend([] for _ in range(extra))
        self._dead_counts.extend([0] * extra)

    # ---- requests ------------------------------------------------------------------------------------------------

    def arrive(self, prompt: Prompt, path: Sequence[Node], tree_end: int) -> Visit:
        """Note that a request takes up a prompt, of which the tree has ``tree_end`` pages on ``path``."""
        forecast = self.forecast
        node = path[-1] if path else None
        last: Ghost | None = None
        if tree_end < prompt.pages_count:
            offset = tree_end * self._page_key_bytes
            last = forecast.recall(tree_end, prompt.tokens[offset : offset + self._page_key_bytes])
        if last is not None and not in_session(last.cell):
            forecast.close(last.number)
            last = None
        if (
            last is None
            and node is not None
            and in_session(node.cell)
            and goes_on(tree_end, node.start, node.asked_end)
        ):
            last = Ghost(node.request, node.cell, node.asked_end)
            if tree_end == node.end:
                for child in node.children.values():
                    if child.request == node.request:
                        self.pass_by(child)
        if node is not None and node.cell == PASSED:
            self._returned_count += 1
        is_shared = last is None and node is not None and node.end == tree_end and SHARED <= node.cell < PASSED
        visit = forecast.begin(tree_end, prompt.pages_count, last, below_shared=is_shared)
        if is_shared and node is not None:
            forecast.close(node.request)
            self._share(node)
        return visit

    def _share(self, node: Node) -> None:
        node.asked_end = node.asked_end + 1 if SHARED <= node.cell < PASSED else 2
        node.cell = shared_cell(node.asked_end)
        node.request = self.forecast.open(node.cell)
        self.offer_all(node)

    def pass_by(self, node: Node) -> None:
        """Note that a session has gone on without these pages, which one of its requests had.

        They go first, as long as hardly any such pages are asked for again.
        """
        self._passed_count += 1
        if RETURNS_MAX * self._returned_count > self._passed_count:
            return
        node.cell = PASSED
        self.offer_all(node)

    def take_up(self, node: Node, parent: Node, visit: Visit | None) -> None:
        """Note that the pages of ``node``, after ``parent``, are those that a request has asked for last.

        None for pages that storage brought before anybody asked.
        """
        if visit is None:
            first = node
            while first.parent is not None and first.parent is not parent:
                first = first.parent
            ghost = self.forecast.recall(first.start, first.key[: self._page_key_bytes])
            if ghost is None:
                ghost = Ghost(self.forecast.open(UNASKED), UNASKED, node.end)
            at = node
            while at is not parent and at.parent is not None:
                at.request, at.cell, at.asked_end = ghost
                at = at.parent
            return
        at = node
        while at is not parent and at.parent is not None:
            at.request, at.cell, at.asked_end = visit.number, visit.cell, node.end
            at = at.parent
        for lane, is_adaptive in enumerate(self._is_adaptive):
            if is_adaptive:
                self._newest[lane] = node
        if first_turn(visit.cell) and parent.parent is not None and parent.end == visit.start:
            at = parent
            while at.parent is not None and in_session(at.cell):
                self._share(at)
                at = at.parent

    def settle(self, node: Node, visit: Visit) -> None:
        """Note that a request has asked for all pages that end with ``node``, and no more."""
        if in_session(node.cell) or node.cell >= PASSED:
            node.request, node.cell = visit.number, visit.cell
            node.asked_end = node.end
            self.offer_all(node)

    def child_left(self, parent: Node, child: Node) -> None:
        """Have a parent take over from its child, which is evicted, the later request."""
        if child.request > parent.request and in_session(child.cell) and in_session(parent.cell):
            parent.request, parent.cell, parent.asked_end = child.request, child.cell, child.asked_end
            self.offer_all(parent)

    # ---- queues --------------------------------------------------------------------------------------------------

    def queue_ids(self, node: Node, lane: int) -> tuple[int, ...]:
        """Return the queues that a node belongs to while it is evictable from ``lane``."""
        if not self._is_adaptive[lane]:
            return super().queue_ids(node, lane)
        history = None if node.history is None else node.history.get(lane)
        if history is not None and history.preferences:
            return (Queue.PREFERRED * self._lanes_count + lane,)
        queue_id = (len(Queue) + node.cell) * self._lanes_count + lane
        if self._ages is None:
            return (queue_id,)
        return queue_id, Queue.AGED * self._lanes_count + lane

    def offer(self, node: Node, lane: int) -> None:
        """Queue ``node`` in ``lane`` if it is evictable there and not queued yet."""
        if not self._is_adaptive[lane]:
            super().offer(node, lane)
        elif node.held_count[lane] and self.evictable(node, lane):
            for queue_id in self.queue_ids(node, lane):
                if not node.queued >> queue_id & 1:
                    node.queued |= 1 << queue_id
                    self._sequence += 1
                    queue = self._queues[queue_id]
                    heappush(queue, (node.stamps[lane], self._sequence, node))
                    if queue_id >= len(Queue) * self._lanes_count and queue[0][2] is node:
                        self._heads[lane].put(self._worth(node, lane), node.cell)

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
        victim = self._least(lane)
        if victim is None:
            return self._first(Queue.PREFERRED * self._lanes_count + lane, lane)
        newest = self._newest[lane]
        if newest is None or newest is victim:
            return victim
        is_preferred = self.queue_ids(newest, lane)[0] < len(Queue) * self._lanes_count
        if is_preferred or not self.evictable(newest, lane):
            return victim
        return newest if self._worth(newest, lane) < self._worth(victim, lane) else victim

    def _least(self, lane: int) -> Node | None:
        """Return the head that is worth least of all cells."""
        heads = self._heads[lane]
        if heads.reorder_at <= self.forecast.now:
            self._reorder(lane)
        by_worth, listed = heads.by_worth, heads.listed
        while by_worth:
            worth, cell = by_worth[0]
            if listed[cell] != worth:
                heappop(by_worth)
                continue
            node = self._first((len(Queue) + cell) * self._lanes_count + lane, lane)
            if node is None:
                listed[cell] = -1.0
                heappop(by_worth)
                continue
            present = self._worth(node, lane)
            if present <= worth:
                return node
            listed[cell] = present
            heapreplace(by_worth, (present, cell))
        return None

    def _reorder(self, lane: int) -> None:
        heads = self._heads[lane]
        heads.reorder_at = self.forecast.now + REORDER_REQUESTS
        heads.by_worth.clear()
        for cell in range(CELLS_COUNT):
            node = self._first((len(Queue) + cell) * self._lanes_count + lane, lane)
            heads.listed[cell] = -1.0
            if node is not None:
                heads.put(self._worth(node, lane), cell)

    def _worth(self, node: Node, lane: int) -> float:
        """Return what a node of a lane is worth now; by lru, while there is nothing to go by, the later the more."""
        if self._evicted[lane] < self._capacity[lane] or not self.forecast.is_ready:
            return node.stamps[lane]
        return self.forecast.worth(node.cell, node.request)

    def note_evicted(self, lane: int, pages: int) -> None:
        """Note that so many pages of a lane were evicted."""
        before = self._evicted[lane]
        self._evicted[lane] = before + pages
        if before < self._capacity[lane] <= before + pages:
            self._heads[lane].reorder_at = 0

    def _first(self, queue_id: int, lane: int) -> Node | None:
        """Return the node at the head of a queue, after moving stale entries before it to their places."""
        if not self._is_adaptive[lane]:
            return super()._first(queue_id, lane)
        queue = self._queues[queue_id]
        while queue:
            stamp, _, node = queue[0]
            if not self.evictable(node, lane) or queue_id not in self.queue_ids(node, lane):
                heappop(queue)
                node.queued ^= 1 << queue_id
                if node.dead:
                    self._dead_counts[queue_id] -= 1
                continue
            if node.stamps[lane] == stamp:
                return node
            self._sequence += 1
            heapreplace(queue, (node.stamps[lane], self._sequence, node))
        return None

    def pass_over(self, node: Node, lane: int) -> None:
        """Take the next victim of ``lane`` out of every queue that it heads, until it is offered again."""
        super().pass_over(node, lane)
        if self._is_adaptive[lane]:
            if self._newest[lane] is node:
                self._newest[lane] = None
            for queue_id in range(len(Queue) * self._lanes_count + lane, len(self._queues), self._lanes_count):
                queue = self._queues[queue_id]
                if queue and queue[0][2] is node:
                    heappop(queue)
                    node.queued ^= 1 << queue_id
