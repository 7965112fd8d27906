"""Eviction queues: the order in which nodes are evicted from each lane, by default least recently used first.

A heap with lazy ranks: touching a node only writes its stamp; the queue finds out when the node comes up and
puts it back in its place. So a touch costs nothing, a split keeps its place, and a victim costs O(log n). This needs
that a rank never falls (see policy).

Of windows of equal rank, as one request's have, that goes first which begins first in its prompt: the last one, from
which the prompt is resumed, goes last. Where a node begins never falls either; a split moves it back. Of Full no two
nodes of a request can be evicted at a time, and others of equal rank go in the order in which they were queued.

A node stands in a lane's queue while something of it could be evicted there. It is offered again whenever
that may have become true: a fill, an unlock, a split, the last Full child's going. What makes a node go earlier or
later than its rank says is another queue of the same lane, see ``Queue``; who moves a node to another queue offers it
there, and the queue that it left finds out when it comes up. Such *stale* entries, and those of nodes that died before
they came up, are counted and swept, so that a queue costs memory for what stands in it.

Full needs only its deepest node touched. Ancestors cannot be evicted before it; when it goes, its stamp passes
to the parent if it is the younger one.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace

from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.pool import Tier
from unified_cache.tree.node import PRIORITY_BIT, History, Node

__all__ = ["STALE_MIN", "EvictionQueues", "Queue"]

STALE_MIN = 64
"""Stale entries that a lane may hold before it is worth sweeping its queues."""
STALE_PART = 32
"""One in so many entries of a lane may be stale: a dead one keeps a whole node in memory."""


class Queue(IntEnum):
    """The queues of a lane, in the order in which they are emptied. ``queue * lanes_count + lane`` is a *queue id*.

    A node stands where it belongs in one of them.
    """

    OPEN = 0
    """Ordinary ones; the only queue that lru needs."""
    PREFERRED = 1


class EvictionQueues:
    """Eviction queues of all lanes, and the clock that orders them."""

    __slots__ = (
        "_components_count",
        "_is_by_priority",
        "_lanes_count",
        "_places",
        "_priority_lanes",
        "_queues",
        "_sequence",
        "_spans",
        "_stale_counts",
        "_stale_max",
        "clock",
    )

    def __init__(self, spans: Sequence[int], eviction: EvictionConfig, cells_count: int = 0) -> None:
        """Make empty queues: of each lane those of ``Queue``, and ``cells_count`` more."""
        components = len(spans)
        kinds = [eviction.policy(tier, component) for tier in Tier for component in range(components)]
        lanes = len(kinds)
        self._spans = tuple(spans)
        self._components_count = components
        self._lanes_count = lanes
        self._is_by_priority = [kind is EvictionPolicy.PRIORITY for kind in kinds]
        """For each lane, whether it goes by priority; else the stamp is the rank."""
        self._priority_lanes = [lane for lane, by_priority in enumerate(self._is_by_priority) if by_priority]
        queues = len(Queue) + cells_count
        self._queues: list[list[tuple[int, int, int, Node]]] = [[] for _ in range(queues * lanes)]
        """Heaps of (rank, ``place_of``, sequence, node), by queue id."""
        self._places = [sum(1 << (queue * lanes + lane) for queue in range(queues)) for lane in range(lanes)]
        """By lane: bits of its queues; a node stands where it belongs in one of these."""
        self._stale_counts = [0] * lanes
        """By lane: entries of dead nodes, and those of others beyond the one where they belong."""
        self._stale_max = [STALE_MIN] * lanes
        self._sequence = 0
        self.clock = 0
        """Counts touches; the newest stamp."""

    # ---- history -----------------------------------------------------------------------------------------------

    def touch(self, node: Node, priority: int) -> None:
        """Make the prefix that ends with ``node`` the most recent one, on both tiers.

        Full is stamped down to its deepest live node on each tier, a windowed component inside its window and one
        page more: stamping all of it would keep dead pages hot.
        """
        self.clock += 1
        now = self.clock
        components = self._components_count
        for lane in (0, components):
            above: Node | None = node
            while above is not None:
                above.stamps[lane] = now
                above = None if above.held_count[lane] else above.parent
        for component in range(1, components):
            window_start = node.end - self._spans[component] - 1
            at = node
            while at.parent is not None and at.end > window_start:
                at.stamps[component] = now
                at.stamps[components + component] = now
                at = at.parent
        for lane in self._priority_lanes:
            for at in self._covered(node, lane):
                history = self.history(at, lane)
                history.priority = max(history.priority, priority)

    def _covered(self, node: Node, lane: int) -> Iterator[Node]:
        """Yield the nodes that ``touch`` makes recent in a lane, directly or through what is below them."""
        first = max(0, node.end - self._spans[lane % self._components_count] - 1)
        at = node
        while at.parent is not None and at.end > first:
            yield at
            at = at.parent

    def history(self, node: Node, lane: int) -> History:
        """Return what is remembered of a node in a lane, from now on if nothing was."""
        if node.history is None:
            node.history = {}
        found = node.history.get(lane)
        if found is None:
            found = node.history[lane] = History()
        return found

    # ---- queues ------------------------------------------------------------------------------------------------

    def evictable(self, node: Node, lane: int) -> bool:
        """Tell whether anything of ``node`` could be evicted from ``lane`` now."""
        if not node.held_count[lane] or node.locks[lane] or node.dead:
            return False
        if lane % self._components_count == 0:
            return not node.full_children[lane // self._components_count]
        if node.partial_locks is None or lane not in node.partial_locks:
            return True
        slots = node.slots[lane]
        return slots is not None and bool((slots[: node.first_pinned(lane)] >= 0).any())

    def is_preferred(self, node: Node, lane: int) -> bool:
        """Return whether a preference covers a node in a lane."""
        history = None if node.history is None else node.history.get(lane)
        return history is not None and history.preferences > 0

    def queue_id(self, node: Node, lane: int) -> int:
        """Return the queue that a node belongs to while it is evictable from ``lane``."""
        return Queue.PREFERRED * self._lanes_count + lane if self.is_preferred(node, lane) else lane

    def rank(self, node: Node, lane: int) -> int:
        """Return the present rank of a node in a lane."""
        if not self._is_by_priority[lane]:
            return node.stamps[lane]
        return (self.history(node, lane).priority << PRIORITY_BIT) + node.stamps[lane]

    def place_of(self, node: Node, lane: int) -> int:
        """Return by what nodes of equal rank go: of windows the page at which they begin, of Full nothing."""
        return node.start if lane % self._components_count else 0

    def offer(self, node: Node, lane: int) -> None:
        """Queue ``node`` in ``lane`` if it is evictable there and not queued yet."""
        if node.history is None and not self._is_by_priority[lane]:
            if not node.queued >> lane & 1 and node.held_count[lane] and self.evictable(node, lane):
                node.queued |= 1 << lane
                self._sequence += 1
                place = node.start if lane % self._components_count else 0
                heappush(self._queues[lane], (node.stamps[lane], place, self._sequence, node))
        elif self.evictable(node, lane):
            queue_id = self.queue_id(node, lane)
            if not node.queued >> queue_id & 1:
                self._enter(node, lane, queue_id)
                self._sequence += 1
                rank, place = self.rank(node, lane), self.place_of(node, lane)
                heappush(self._queues[queue_id], (rank, place, self._sequence, node))

    def offer_all(self, node: Node) -> None:
        """Queue ``node`` in every lane where it is evictable."""
        for lane, live in enumerate(node.held_count):
            if live and (node.history is not None or not node.queued >> lane & 1):
                self.offer(node, lane)

    def forget(self, node: Node) -> None:
        """Note that ``node`` died: its entries are stale."""
        for lane, places in enumerate(self._places):
            if node.queued & places:
                self._note_stale(lane)

    def _enter(self, node: Node, lane: int, queue_id: int) -> None:
        """Note that a node stands in a queue from now on; its entry in another one of the same lane is stale."""
        if node.queued & self._places[lane]:
            self._note_stale(lane)
        node.queued |= 1 << queue_id

    def _leave(self, node: Node, lane: int, queue_id: int) -> None:
        """Note that a node stands in a queue no more."""
        node.queued ^= 1 << queue_id
        if node.dead or node.queued & self._places[lane]:
            self._stale_counts[lane] -= 1

    def _note_stale(self, lane: int) -> None:
        """Count one more stale entry of a lane; sweep its queues once there are too many."""
        self._stale_counts[lane] += 1
        if self._stale_counts[lane] > self._stale_max[lane]:
            self._stale_max[lane] = max(STALE_MIN, self.queue_length(lane) // STALE_PART)
            if self._stale_counts[lane] > self._stale_max[lane]:
                self._sweep(lane)

    def _sweep(self, lane: int) -> None:
        """Drop the stale entries of a lane."""
        places = self._places[lane]
        for queue_id in range(lane, len(self._queues), self._lanes_count):
            queue, place = self._queues[queue_id], 1 << queue_id
            if not queue:
                continue
            left = [
                node
                for _, _, _, node in queue
                if node.dead or (node.queued & places != place and not self._belongs(node, lane, queue_id))
            ]
            if left:
                for node in left:
                    self._leave(node, lane, queue_id)
                queue[:] = [entry for entry in queue if entry[3].queued & place]
                heapify(queue)

    def _belongs(self, node: Node, lane: int, queue_id: int) -> bool:
        """Tell whether a node, if it is evictable, belongs to a queue of a lane."""
        return not node.dead and (node.history is None or queue_id == self.queue_id(node, lane))

    def next_victim(self, lane: int) -> Node | None:
        """Return the node of ``lane`` that goes next; it stays queued. None if nothing can be evicted."""
        for queue in Queue:
            node = self._first(queue * self._lanes_count + lane, lane)
            if node is not None:
                return node
        return None

    def pages_at_once(self, node: Node, lane: int, pages: int) -> int:
        """Return how many of ``pages`` the next victim gives before another is looked for; they are evicted now."""
        return pages

    def pass_over(self, node: Node, lane: int) -> None:
        """Take the next victim of ``lane`` out of every queue that it heads, until it is offered again."""
        for queue_id in range(lane, len(self._queues), self._lanes_count):
            queue = self._queues[queue_id]
            if queue and queue[0][3] is node:
                heappop(queue)
                self._leave(node, lane, queue_id)

    def _first(self, queue_id: int, lane: int) -> Node | None:
        """Return the node at the head of a queue, after moving stale entries before it to their places."""
        queue = self._queues[queue_id]
        by_stamp = not self._is_by_priority[lane]
        while queue:
            queued_rank, queued_place, _, node = queue[0]
            if not self.evictable(node, lane) or not self._belongs(node, lane, queue_id):
                heappop(queue)
                self._leave(node, lane, queue_id)
                continue
            rank = node.stamps[lane] if by_stamp else self.rank(node, lane)
            place = node.start if lane % self._components_count else 0
            if rank == queued_rank and place == queued_place:
                return node
            self._sequence += 1
            heapreplace(queue, (rank, place, self._sequence, node))
        return None

    @property
    def queues_count(self) -> int:
        """Queues of all lanes; their ids are the numbers below it."""
        return len(self._queues)

    def entries(self, queue_id: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of a queue, dead ones too, with the ranks they are queued under; for ``check``."""
        return ((node, rank) for rank, _, _, node in self._queues[queue_id])

    def places_count(self, node: Node, lane: int) -> int:
        """Return in how many queues of a lane a node stands: one is not stale; for ``check``."""
        return (node.queued & self._places[lane]).bit_count()

    def stale_count(self, lane: int) -> int:
        """Return how many entries of a lane are stale, as counted; for ``check``."""
        return self._stale_counts[lane]

    def queue_length(self, lane: int) -> int:
        """Entries in all queues of a lane."""
        return sum(map(len, self._queues[lane :: self._lanes_count]))
