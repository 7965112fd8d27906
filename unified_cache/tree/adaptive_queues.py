"""Eviction queues of lanes that go by the forecast: a queue for each cell, and LRU until there is something to go by.

Within a cell the oldest goes first, as everywhere, or the youngest where that is worth less: worth rises with age until
people have thought, and falls after. Which cell gives the next victim says the forecast, by what these two are worth
now; of windows and states, see ``window_worth``. So ranks never fall, and a node goes earlier only by standing in
another queue.

What is hardly ever asked for again goes before all that: the last page of a prompt, which the next turn fills up, and
what a session has moved past. How rare that is, is counted; where it is not, they are as all other pages.

A node knows the last request that used it: number, cell, and how far the next one must agree to continue it. That is
written when a request's pages become a leaf; when a leaf goes, its parent takes over the later of the two.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

from unified_cache.config import EvictionConfig, EvictionPolicy
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.tree.eviction_queues import EvictionQueues, Queue
from unified_cache.tree.forecast import (
    CELLS_COUNT,
    ENDED,
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
from unified_cache.tree.window_worth import WINDOW_CELLS, ResumeShares, window_cell

__all__ = ["AdaptiveQueues"]

REORDER_REQUESTS = 4
"""Requests after which the heads of all cells are looked at anew: their worth changes as they age."""

RETURNS_MAX = 16
"""One in so many pages of a kind may be asked for again, if they are to go before others."""
RETURNS_HALVED_AT = 4096
"""Pages of a kind that are counted before the counts are halved: habits change."""
YOUNG_MAX = 16
"""Nodes of each cell, the youngest, that are known as such."""


class Returns:
    """Count of how often one kind of page is asked for again."""

    __slots__ = ("_left", "_returned")

    def __init__(self) -> None:
        self._left = 0
        self._returned = 0

    def leave(self) -> None:
        """Note a page of that kind."""
        self._left += 1
        if self._left == RETURNS_HALVED_AT:
            self._left >>= 1
            self._returned >>= 1

    def come_back(self) -> None:
        """Note that one was asked for again."""
        self._returned += 1

    @property
    def are_rare(self) -> bool:
        """Whether hardly any is asked for again."""
        return RETURNS_MAX * self._returned <= self._left


class Heads:
    """Ends of the queues of one lane by what they are worth: a heap whose entries are looked at again at the top.

    End ``cell`` is the oldest node of a cell, end ``cells_count + cell`` its youngest.
    """

    __slots__ = ("by_worth", "cells_count", "listed", "reorder_at")

    def __init__(self, cells_count: int) -> None:
        self.cells_count = cells_count
        self.by_worth: list[tuple[float, int]] = []
        """(worth, end); an entry counts only if ``listed`` says the same."""
        self.listed: list[float] = [-1.0] * (2 * cells_count)
        self.reorder_at = 0
        """Number of the request from which on all are looked at anew."""

    def put(self, worth: float, end: int) -> None:
        """List an end under what its node is worth now."""
        if self.listed[end] != worth:
            self.listed[end] = worth
            heappush(self.by_worth, (worth, end))


class AdaptiveQueues(EvictionQueues):
    """Eviction queues, of which those of some lanes go by the forecast."""

    __slots__ = (
        "_capacity",
        "_ended",
        "_evicted",
        "_heads",
        "_is_adaptive",
        "_page_key_bytes",
        "_passed",
        "_shares",
        "_tail_nodes",
        "_tails",
        "_young",
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
        self._heads = [Heads(WINDOW_CELLS if component else CELLS_COUNT) for _, component in lanes]
        self._passed = Returns()
        """Pages that sessions have moved past."""
        self._tails = Returns()
        """Last pages of prompts."""
        self._ended = Returns()
        """Pages of sessions that are said to have ended."""
        self._shares = ResumeShares()
        self._tail_nodes: list[deque[Node]] = [deque() for _ in lanes]
        """Nodes that may end with the last page of a prompt, oldest first; of lanes of Full."""
        self._young: list[deque[Node]] = [deque(maxlen=YOUNG_MAX) for _ in range(WINDOW_CELLS * len(lanes))]
        """By cell and lane: those that became evictable last, youngest last, and some that are not any more."""
        extra = WINDOW_CELLS * len(lanes)
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
            if last is not None and last.end == tree_end + 1:
                self._tails.come_back()
        if last is not None and not in_session(last.cell):
            forecast.close(last.number)
            self._come_back(last.cell)
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
        if node is not None:
            self._come_back(node.cell)
        if node is not None and node.end == node.asked_end == tree_end and in_session(node.cell):
            self._tails.come_back()
        self._shares.note_request(node, tree_end, None if last is None else last.end)
        is_shared = last is None and node is not None and node.end == tree_end and SHARED <= node.cell < PASSED
        visit = forecast.begin(tree_end, prompt.pages_count, last, below_shared=is_shared)
        if is_shared and node is not None:
            forecast.close(node.request)
            self._share(node)
        return visit

    def _come_back(self, cell: int) -> None:
        """Note that pages of a cell are asked for; of some that is not expected."""
        if cell == PASSED:
            self._passed.come_back()
        elif cell == ENDED:
            self._ended.come_back()

    def _share(self, node: Node) -> None:
        node.asked_end = node.asked_end + 1 if SHARED <= node.cell < PASSED else 2
        node.cell = shared_cell(node.asked_end)
        node.request = self.forecast.open(node.cell)
        node.moved_past = False
        self.offer_all(node)

    def pass_by(self, node: Node) -> None:
        """Note that a session has gone on without these pages, which one of its requests had.

        They go first, as long as hardly any such pages are asked for again.
        """
        self._passed.leave()
        if self._passed.are_rare:
            node.cell = PASSED
            self.offer_all(node)

    def end_session(self, node: Node) -> None:
        """Note that the session whose last prompt ends with ``node`` does not go on.

        What it alone has used goes first, as long as hardly any of what is said to have ended is asked for again.
        """
        self._ended.leave()
        at = node
        while self._ended.are_rare and at.parent is not None and in_session(at.cell):
            at.cell = ENDED
            self.offer_all(at)
            at = at.parent

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
        self._tails.leave()
        for lane in range(0, self._lanes_count, self._components_count):
            if self._is_adaptive[lane]:
                self._note_tail(node, lane)
        if first_turn(visit.cell) and parent.parent is not None and parent.end == visit.start:
            at = parent
            while at.parent is not None and (in_session(at.cell) or at.cell == ENDED):
                self._share(at)
                at = at.parent
        elif visit.goes_on:
            self._move_past(parent, visit)

    def _move_past(self, node: Node, visit: Visit) -> None:
        """Note that a session has gone on below: what is kept there is what the next request resumes from."""
        at = node
        while at.parent is not None and in_session(at.cell) and not at.moved_past:
            if at.request != visit.number:
                self._shares.note_moved_past()
                at.moved_past = True
                self.offer_all(at)
            at = at.parent

    def _note_tail(self, node: Node, lane: int) -> None:
        """Queue a node that ends with the last page of a prompt; look at two others, so that few stale ones stay."""
        nodes = self._tail_nodes[lane]
        for _ in range(min(2, len(nodes))):
            if self.ends_with_tail(nodes[0], lane):
                nodes.rotate(-1)
            else:
                nodes.popleft()
        nodes.append(node)

    def settle(self, node: Node, visit: Visit) -> None:
        """Note that a request has asked for all pages that end with ``node``, and no more."""
        if in_session(node.cell) or node.cell >= PASSED:
            node.request, node.cell = visit.number, visit.cell
            node.asked_end = node.end
            node.moved_past = False
            self.offer_all(node)

    def child_left(self, parent: Node, child: Node) -> None:
        """Have a parent take over from its child, which is evicted, the later request."""
        if child.request > parent.request and in_session(child.cell) and in_session(parent.cell):
            parent.request, parent.cell, parent.asked_end = child.request, child.cell, child.asked_end
            parent.moved_past = False
            self.offer_all(parent)

    # ---- queues --------------------------------------------------------------------------------------------------

    def queue_ids(self, node: Node, lane: int) -> tuple[int, ...]:
        """Return the queues that a node belongs to while it is evictable from ``lane``."""
        if not self._is_adaptive[lane]:
            return super().queue_ids(node, lane)
        if self._is_preferred(node, lane):
            return (Queue.PREFERRED * self._lanes_count + lane,)
        queue_id = (len(Queue) + self._cell(node, lane)) * self._lanes_count + lane
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
        elif node.held_count[lane] and self.evictable(node, lane):
            cell = self._cell(node, lane)
            heads = self._heads[lane]
            for queue_id in self.queue_ids(node, lane):
                if not node.queued >> queue_id & 1:
                    node.queued |= 1 << queue_id
                    self._sequence += 1
                    queue = self._queues[queue_id]
                    heappush(queue, (node.stamps[lane], self._sequence, node))
                    if queue_id >= len(Queue) * self._lanes_count and queue[0][2] is node:
                        heads.put(self._worth(node, lane), cell)
            young = self._young[cell * self._lanes_count + lane]
            if not young or (young[-1] is not node and young[-1].request <= node.request):
                young.append(node)
                heads.put(self._worth(node, lane), heads.cells_count + cell)

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
        tail = self._next_tail(lane)
        if tail is not None:
            return tail
        victim = self._least(lane)
        return self._first(Queue.PREFERRED * self._lanes_count + lane, lane) if victim is None else victim

    def _next_tail(self, lane: int) -> Node | None:
        """Return the oldest node that ends with the last page of a prompt, if such pages are not asked for again."""
        nodes = self._tail_nodes[lane]
        if not nodes or not self._tails.are_rare or not self._goes_by_forecast(lane):
            return None
        for _ in range(len(nodes)):
            node = nodes[0]
            if self.ends_with_tail(node, lane):
                if self.evictable(node, lane) and not self._is_preferred(node, lane):
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
        heads = self._heads[lane]
        if heads.reorder_at <= self.forecast.now:
            self._reorder(lane)
        by_worth, listed = heads.by_worth, heads.listed
        while by_worth:
            worth, end = by_worth[0]
            if listed[end] != worth:
                heappop(by_worth)
                continue
            node = self._at_end(end, lane)
            if node is None:
                listed[end] = -1.0
                heappop(by_worth)
                continue
            present = self._worth(node, lane)
            if present <= worth:
                return node
            listed[end] = present
            heapreplace(by_worth, (present, end))
        return None

    def _at_end(self, end: int, lane: int) -> Node | None:
        """Return the oldest or youngest node of a cell; None if there is none, or it is not known any more."""
        cells_count = self._heads[lane].cells_count
        if end < cells_count:
            return self._first((len(Queue) + end) * self._lanes_count + lane, lane)
        cell = end - cells_count
        young = self._young[cell * self._lanes_count + lane]
        while young:
            node = young[-1]
            if self._cell(node, lane) == cell and self.evictable(node, lane) and not self._is_preferred(node, lane):
                return node
            young.pop()
        return None

    def _reorder(self, lane: int) -> None:
        heads = self._heads[lane]
        heads.reorder_at = self.forecast.now + REORDER_REQUESTS
        heads.by_worth.clear()
        heads.listed = [-1.0] * (2 * heads.cells_count)
        for end in range(2 * heads.cells_count):
            node = self._at_end(end, lane)
            if node is not None:
                heads.put(self._worth(node, lane), end)

    def _goes_by_forecast(self, lane: int) -> bool:
        """Tell whether there is something to go by; until then a lane is LRU."""
        return 2 * self._evicted[lane] >= self._capacity[lane] and self.forecast.is_ready

    def _worth(self, node: Node, lane: int) -> float:
        """Return what a node of a lane is worth now; by lru, while there is nothing to go by, the later the more."""
        if not self._goes_by_forecast(lane):
            return node.stamps[lane]
        worth = self.forecast.worth(node.cell, node.request)
        component = lane % self._components_count
        return worth * self._shares.weigh(node, lane, self._spans[component]) if component else worth

    def note_evicted(self, lane: int, pages: int) -> None:
        """Note that so many pages of a lane were evicted."""
        before = self._evicted[lane]
        self._evicted[lane] = before + pages
        if 2 * before < self._capacity[lane] <= 2 * (before + pages):
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
            young = self._young[self._cell(node, lane) * self._lanes_count + lane]
            if young and young[-1] is node:
                young.pop()
            if self._tail_nodes[lane] and self._tail_nodes[lane][0] is node:
                self._tail_nodes[lane].popleft()
            for queue_id in range(len(Queue) * self._lanes_count + lane, len(self._queues), self._lanes_count):
                queue = self._queues[queue_id]
                if queue and queue[0][2] is node:
                    heappop(queue)
                    node.queued ^= 1 << queue_id
