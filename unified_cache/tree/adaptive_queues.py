"""Eviction queues of lanes that go by the forecast: a queue for each cell, and LRU until there is something to go by.

Within a cell the oldest goes first, as everywhere, or the youngest where that is worth less: worth rises with age
until people have thought, and falls after. Which cell gives the next victim says the forecast, by what these two are
worth now; of windows and states, see ``window_worth``. Where requests do not differ, or a shadow of LRU is ahead, all
cells go by their oldest: that is LRU. So ranks never fall, and a node goes earlier only by standing in another queue.

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
    NO_NODE,
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
from unified_cache.tree.shadow_lru import ShadowLru
from unified_cache.tree.window_worth import WINDOW_CELLS, ResumeShares, window_cell

__all__ = ["AdaptiveQueues"]

REORDER_REQUESTS = 4
"""Requests after which the worth of all ends is looked up anew: it changes as they age."""
LOOK_REQUESTS = 32
"""Requests after which the nodes at the ends are looked for anew; meanwhile only the one that goes next is."""

RETURNS_MAX = 16
"""One in so many pages of a kind may be asked for again, if they are to go before others."""
RETURNS_HALVED_AT = 4096
"""Pages of a kind that are counted before the counts are halved: habits change."""
NEVER = 1 << 62
"""Number of a request that never comes."""
_FIRST = len(Queue)
"""First queue of a lane that is a cell's."""
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
    """Ends of the queues of one lane, and what they were worth when they were looked at last.

    End ``cell`` is the oldest node of a cell, end ``cells_count + cell`` its youngest.
    """

    __slots__ = ("cells_count", "look_at", "nodes", "reorder_at", "worths")

    def __init__(self, cells_count: int) -> None:
        self.cells_count = cells_count
        self.nodes: list[Node | None] = [None] * (2 * cells_count)
        """Nodes at the ends, as far as is known: one may be evictable no more."""
        self.worths: list[float] = [NO_NODE] * (2 * cells_count)
        """What they are worth; less than it was once and others' only until ``reorder_at``."""
        self.reorder_at = 0
        """Number of the request from which on their worth is looked up anew."""
        self.look_at = 0
        """Number of the request from which on the nodes are looked for anew."""

    def put(self, node: Node, worth: float, end: int) -> None:
        """Note the node at an end, and what it is worth now."""
        self.nodes[end] = node
        self.worths[end] = worth

    def leave(self, end: int) -> None:
        """Note that there is no node at an end."""
        self.nodes[end] = None
        self.worths[end] = NO_NODE


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
        "_same_queues",
        "_shares",
        "_tail_nodes",
        "_tails",
        "_trusts",
        "_young",
        "forecast",
        "shadow",
    )

    def __init__(
        self,
        spans: Sequence[int],
        eviction: EvictionConfig,
        time: Callable[[], float],
        capacity: Sequence[int],
        forecast: Forecast,
        shadow: ShadowLru,
        page_key_bytes: int,
    ) -> None:
        super().__init__(spans, eviction, time)
        lanes = [(tier, component) for tier in Tier for component in range(len(spans))]
        self.forecast = forecast
        self.shadow = shadow
        self._trusts = False
        """Whether there is a forecast, and LRU not ahead of it."""
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
        self._same_queues: dict[int, int] = {}
        """Values of ``Node.queued``, each once: as numbers of their own they take 48 bytes a node."""

    # ---- requests ------------------------------------------------------------------------------------------------

    def arrive(self, prompt: Prompt, path: Sequence[Node], tree_end: int) -> Visit:
        """Note that a request takes up a prompt, of which the tree has ``tree_end`` pages on ``path``."""
        forecast = self.forecast
        node = path[-1] if path else None
        last, gone = self._recall(prompt, tree_end)
        if (
            last is None
            and node is not None
            and in_session(node.cell)
            and goes_on(tree_end, node.start, node.asked_end)
        ):
            last = Ghost(node.request, node.cell, node.asked_end, node.used, node.end)
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
        self.shadow.arrive(visit.number, path, tree_end, gone, prompt.pages_count)
        trusts = forecast.is_ready and not self.shadow.is_ahead
        if trusts is not self._trusts:
            self._trusts = trusts
            self._order_anew()
        if is_shared and node is not None:
            forecast.close(node.request)
            self._share(node)
        return visit

    def _recall(self, prompt: Prompt, start: int) -> tuple[Ghost | None, list[tuple[int, int]]]:
        """Take back what is remembered of a prompt's pages from ``start`` on, which have left the tree.

        Returns the last request of the session that they belong to, if there is one, and by whom they were used last:
        runs of (request, pages), each after the one before.
        """
        forecast, page_key_bytes, total = self.forecast, self._page_key_bytes, prompt.pages_count
        gone: list[tuple[int, int]] = []
        at = start
        while at < total:
            offset = at * page_key_bytes
            ghost = forecast.recall(at, prompt.tokens[offset : offset + page_key_bytes])
            if ghost is None:
                break
            if in_session(ghost.cell):
                if ghost.end == at + 1:
                    self._tails.come_back()
                gone.append((ghost.used, min(ghost.end - self._tails.are_rare, total) - at))
                return ghost, gone
            forecast.close(ghost.number)
            self._come_back(ghost.cell)
            gone.append((ghost.used, min(ghost.run_end, total) - at))
            at = ghost.run_end
        return None, gone

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
                ghost = Ghost(self.forecast.open(UNASKED), UNASKED, node.end, 0, node.end)
            at = node
            while at is not parent and at.parent is not None:
                at.request, at.cell, at.asked_end = ghost.number, ghost.cell, ghost.end
                at.used = -ghost.used
                at = at.parent
            return
        at = node
        while at is not parent and at.parent is not None:
            at.request, at.cell, at.asked_end = visit.number, visit.cell, node.end
            at.used = visit.number
            at = at.parent
        if node.end > visit.end:
            self.shadow.extend(self.forecast.now, node.end - max(parent.end, visit.end))
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
        queue_id = (_FIRST + self._cell(node, lane)) * self._lanes_count + lane
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
            if node.history is None and self._ages is None:
                self._enqueue(node, lane, (_FIRST + cell) * self._lanes_count + lane)
            else:
                for queue_id in self.queue_ids(node, lane):
                    self._enqueue(node, lane, queue_id)
            young = self._young[cell * self._lanes_count + lane]
            if not young or (young[-1] is not node and young[-1].request <= node.request):
                young.append(node)
                if self._goes_by_forecast(lane):
                    heads = self._heads[lane]
                    heads.put(node, self._worth(node, lane), heads.cells_count + cell)

    def _enqueue(self, node: Node, lane: int, queue_id: int) -> None:
        """Put a node into a queue, unless it is there."""
        if node.queued >> queue_id & 1:
            return
        queued = node.queued | 1 << queue_id
        node.queued = self._same_queues.setdefault(queued, queued)
        self._sequence += 1
        queue = self._queues[queue_id]
        heappush(queue, (node.stamps[lane], self._sequence, node))
        if queue[0][2] is node and queue_id >= _FIRST * self._lanes_count:
            self._heads[lane].put(node, self._worth(node, lane), self._cell(node, lane))

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
        worths = heads.worths
        while True:
            least = min(worths)
            if least == NO_NODE:
                return None
            end = worths.index(least)
            node = self._at_end(end, lane)
            if node is None:
                heads.leave(end)
                continue
            present = self._worth(node, lane)
            heads.put(node, present, end)
            if present <= least:
                return node

    def _at_end(self, end: int, lane: int) -> Node | None:
        """Return the oldest or youngest node of a cell; None if there is none, or it is not known any more."""
        cells_count = self._heads[lane].cells_count
        if end < cells_count:
            return self._first((_FIRST + end) * self._lanes_count + lane, lane)
        cell = end - cells_count
        young = self._young[cell * self._lanes_count + lane]
        while young:
            node = young[-1]
            if self._cell(node, lane) == cell and self.evictable(node, lane) and not self._is_preferred(node, lane):
                return node
            young.pop()
        return None

    def _reorder(self, lane: int) -> None:
        """Look at what nodes are worth now, which changes as they age; all ends anew where the order has changed."""
        heads, forecast = self._heads[lane], self.forecast
        by_forecast = self._goes_by_forecast(lane)
        heads.reorder_at = forecast.now + REORDER_REQUESTS if by_forecast else NEVER
        if forecast.now >= heads.look_at or not by_forecast:
            heads.look_at = forecast.now + LOOK_REQUESTS
            for end in range(2 * heads.cells_count if by_forecast else heads.cells_count):
                node = self._at_end(end, lane)
                if node is not None:
                    heads.put(node, self._worth(node, lane), end)
                else:
                    heads.leave(end)
            if not by_forecast:
                for end in range(heads.cells_count, 2 * heads.cells_count):
                    heads.leave(end)
            return
        if lane % self._components_count:
            heads.worths = [NO_NODE if node is None else self._worth(node, lane) for node in heads.nodes]
        else:
            heads.worths = forecast.worths_of(heads.nodes)

    def _order_anew(self) -> None:
        """Have all lanes look at all ends anew."""
        for heads in self._heads:
            heads.reorder_at = heads.look_at = 0

    def _goes_by_forecast(self, lane: int) -> bool:
        """Tell whether there is something to go by; until then a lane is LRU."""
        return self._trusts and 2 * self._evicted[lane] >= self._capacity[lane]

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
            self._heads[lane].reorder_at = self._heads[lane].look_at = 0

    def _first(self, queue_id: int, lane: int) -> Node | None:
        """Return the node at the head of a queue, after moving stale entries before it to their places."""
        if not self._is_adaptive[lane]:
            return super()._first(queue_id, lane)
        queue = self._queues[queue_id]
        while queue:
            stamp, _, node = queue[0]
            if not self.evictable(node, lane) or not self._belongs(node, lane, queue_id):
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

    def _belongs(self, node: Node, lane: int, queue_id: int) -> bool:
        """Tell whether an evictable node belongs to a queue."""
        if node.history is None and self._ages is None:
            return queue_id == (_FIRST + self._cell(node, lane)) * self._lanes_count + lane
        return queue_id in self.queue_ids(node, lane)

    def pass_over(self, node: Node, lane: int) -> None:
        """Take the next victim of ``lane`` out of every queue that it heads, until it is offered again."""
        super().pass_over(node, lane)
        if self._is_adaptive[lane]:
            young = self._young[self._cell(node, lane) * self._lanes_count + lane]
            if young and young[-1] is node:
                young.pop()
            if self._tail_nodes[lane] and self._tail_nodes[lane][0] is node:
                self._tail_nodes[lane].popleft()
            for queue_id in range(_FIRST * self._lanes_count + lane, len(self._queues), self._lanes_count):
                queue = self._queues[queue_id]
                if queue and queue[0][2] is node:
                    heappop(queue)
                    node.queued ^= 1 << queue_id
