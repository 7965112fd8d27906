"""Eviction queues of lanes that go by the forecast: a queue for each cell, and LRU until there is something to go by.

Within a cell the oldest goes first, as everywhere, or the youngest where that is worth less: worth rises with age
until people have thought, and falls after. Which cell gives the next victim says the forecast, by what these two are
worth; of windows and states, see ``ResumeShares``. Where requests do not differ, or have not come back as was foretold,
all cells go by their oldest: that is LRU. So ranks never fall, and a node goes earlier only by another queue.

The last page of a prompt, which the next turn fills up, goes before all that, as long as hardly any is asked for again.

Which cell a node has, and which request's it is, is written by ``RequestMarks``.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import sqrt

from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.tree.eviction_queues import STALE_MIN, EvictionQueues, Queue
from unified_cache.tree.forecast import (
    CELLS_COUNT,
    SESSION_CELLS,
    UNASKED,
    Forecast,
    Ghost,
    Returns,
    Visit,
    first_turn,
    goes_on,
    in_session,
    shared_cell,
)
from unified_cache.tree.node import Node

__all__ = ["WINDOW_CELLS", "AdaptiveQueues", "RequestMarks", "ResumeShares", "window_cell"]

MOVED_PAST = CELLS_COUNT + SESSION_CELLS
"""Cell of ends that sessions have gone on from."""
WINDOW_CELLS = MOVED_PAST + 1
"""Cells of a windowed lane: the forecast's, for windows at a prompt's end; those of sessions once more, before it."""
OFFSETS_MAX = 64
"""Pages before the end of a prompt that are told apart."""
HALVED_AT = 4096
"""Continuations that are counted before counts are halved: habits change."""


def window_cell(node: Node) -> int:
    """Return the cell of a node in a windowed lane."""
    if not in_session(node.cell):
        return node.cell
    if node.moved_past:
        return MOVED_PAST
    return node.cell if node.end == node.asked_end else CELLS_COUNT + node.cell


class ResumeShares:
    """Counts of where sessions resume: how far before the end of their last prompt, and how often before it began.

    A page of Full is used by whoever gets that far; a window only by who resumes at its very end. So what the forecast
    makes of a session is shared out between the ends that its last request left:

        worth = forecast x P(resumed here | goes on), for each page of the window  x square root of the pages before it

    since who does not resume here computes those again; the root keeps few long prompts from driving out many short
    ones. An end that its session has gone on from is worth as much less as such ends are asked for again.
    """

    __slots__ = ("_counts", "_total", "moved_past")

    def __init__(self) -> None:
        self._counts = [1.0 / (1 + offset) for offset in range(OFFSETS_MAX)]
        """Continuations by the pages of the prompt that they leave; at first, the nearer the end the likelier."""
        self._total = sum(self._counts)
        self.moved_past = Returns(8, 1)
        """Ends that sessions have gone on from."""

    def count(self, node: Node | None, agreed_end: int, last_end: int | None) -> None:
        """Count a request that agrees with ``node``, and what is above it, up to ``agreed_end``.

        ``last_end`` are the pages of the prompt that it continues; None if it begins a session.
        """
        if node is not None and node.moved_past and node.end == agreed_end:
            self.moved_past.come_back()
        if last_end is None:
            return
        if self._total >= HALVED_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        self._total += 1
        pages_left = max(last_end - agreed_end, 0)
        if pages_left < OFFSETS_MAX:
            self._counts[pages_left] += 1

    def weigh(self, node: Node, lane: int, span: int) -> float:
        """Return what each window page of a node in ``lane`` is worth, of what the forecast says of its request.

        A window is ``span`` pages. One that has lost a page, or that the lane does not hold any more, is worth nothing.
        """
        pages, held_pages = node.end - node.start, node.held_count[lane]
        if not held_pages or pages - node.last_tombstone[lane] < min(span, pages):
            return 0.0
        resumed = 1.0
        if in_session(node.cell) and node.moved_past:
            resumed = self.moved_past.part
        elif in_session(node.cell):
            first = max(node.asked_end - node.end, 0)
            resumed = sum(self._counts[first : first + held_pages]) / self._total
        return resumed / held_pages * sqrt(node.end)


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


class RequestMarks:
    """Marks of one tree's nodes: which request used them last; and what is learned from requests as they come.

    A node knows the last request that ended with its pages: number, cell, and how far the next one must agree to
    continue it. That is written when a request's pages become a leaf; when a leaf goes, its parent takes over the later
    of the two. A node that is marked anew is offered to the queues, which stand by these marks.
    """

    __slots__ = ("_has_windows", "_page_key_bytes", "_queues", "forecast")

    def __init__(self, queues: AdaptiveQueues, page_key_bytes: int, *, has_windows: bool) -> None:
        self._queues = queues
        self.forecast = queues.forecast
        self._page_key_bytes = page_key_bytes
        self._has_windows = has_windows
        """Whether any component but Full is there: where sessions resume matters to windows and states alone."""

    def arrive(self, prompt: Prompt, path: Sequence[Node], tree_end: int) -> Visit:
        """Note that a request takes up a prompt, of which the tree has ``tree_end`` pages on ``path``."""
        node = path[-1] if path else None
        last = self._recall(prompt, tree_end)
        is_shared = False
        if node is not None and in_session(node.cell):
            if last is None and goes_on(tree_end, node.start, node.asked_end):
                last = Ghost(node.request, node.cell, node.asked_end, node.end)
            if node.end == node.asked_end == tree_end:
                self._queues.tails.come_back()
        elif node is not None and node.cell < UNASKED:
            is_shared = last is None and node.end == tree_end
        if self._has_windows:
            self._queues.shares.count(node, tree_end, None if last is None else last.end)
        visit = self.forecast.begin(tree_end, prompt.pages_count, last, below_shared=is_shared)
        self._queues.follow_forecast()
        if is_shared and node is not None:
            self.forecast.close(node.request)
            self._share(node)
        return visit

    def _recall(self, prompt: Prompt, start: int) -> Ghost | None:
        """Take back what is remembered of a prompt's pages from ``start`` on, which have left the tree.

        Returns the last request of the session that they belong to, if there is one.
        """
        at = start
        while at < prompt.pages_count:
            offset = at * self._page_key_bytes
            ghost = self.forecast.recall(at, prompt.tokens[offset : offset + self._page_key_bytes])
            if ghost is None:
                return None
            if in_session(ghost.cell):
                if ghost.end == at + 1:
                    self._queues.tails.come_back()
                return ghost
            self.forecast.close(ghost.number)
            at = ghost.run_end
        return None

    def _share(self, node: Node) -> None:
        """Note that one more session has begun below a node."""
        node.asked_end = 2 if in_session(node.cell) else node.asked_end + 1
        node.cell = shared_cell(node.asked_end)
        node.request = self.forecast.open(node.cell)
        node.moved_past = False
        self._queues.offer_all(node)

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
                ghost = Ghost(self.forecast.open(UNASKED), UNASKED, node.end, node.end)
            number, cell, asked_end = ghost.number, ghost.cell, ghost.end
        else:
            number, cell, asked_end = visit.number, visit.cell, node.end
        at = node
        while at is not parent and at.parent is not None:
            at.request, at.cell, at.asked_end = number, cell, asked_end
            at = at.parent
        if visit is None:
            return
        self._queues.note_tail(node)
        if first_turn(visit.cell) and parent.parent is not None and parent.end == visit.start:
            at = parent
            while at.parent is not None and in_session(at.cell):
                self._share(at)
                at = at.parent
        elif visit.goes_on and self._has_windows:
            self._move_past(parent, visit)

    def _move_past(self, node: Node, visit: Visit) -> None:
        """Note that a session has gone on below: what is kept there is what the next request resumes from."""
        at = node
        while at.parent is not None and in_session(at.cell) and not at.moved_past:
            if at.request != visit.number:
                self._queues.shares.moved_past.leave()
                at.moved_past = True
                self._queues.offer_all(at)
            at = at.parent

    def settle(self, node: Node, visit: Visit) -> None:
        """Note that a request has asked for all pages that end with ``node``, and no more."""
        if node.request == visit.number and node.cell == visit.cell and node.asked_end == node.end:
            return  # as ``take_up`` has left it
        if in_session(node.cell) or node.cell == UNASKED:
            node.request, node.cell, node.asked_end = visit.number, visit.cell, node.end
            node.moved_past = False
            self._queues.offer_all(node)

    def child_left(self, parent: Node, child: Node) -> bool:
        """Have a parent take over from its child, which is evicted, the later request; return whether that was."""
        if child.request <= parent.request or not in_session(child.cell) or not in_session(parent.cell):
            return False
        parent.request, parent.cell, parent.asked_end = child.request, child.cell, child.asked_end
        parent.moved_past = False
        return True

    def remember(self, node: Node, end: int) -> None:
        """Have the forecast remember whose pages of a node from ``end`` on leave the tree."""
        offset = (end - node.start) * self._page_key_bytes
        page = node.key[offset : offset + self._page_key_bytes]
        self.forecast.remember(end, page, Ghost(node.request, node.cell, node.asked_end, node.end))
