"""Eviction queues: the order of eviction for each component on each tier, by default least recently used first.

A heap with lazy ranks: touching a node only writes its stamp; the queue finds out when the node comes up and
puts it back in its place. So a touch costs nothing, a split keeps its place, and a victim costs O(log n). This needs
that a rank never falls (see policy).

Of windows of equal rank, as one request's have, that goes first which begins first in its prompt: the last one, from
which the prompt is resumed, goes last. Where a node begins never falls either; a split moves it back. Of Full no two
nodes of a request can be evicted at a time, and others of equal rank go in the order in which they were queued.

A node is queued for a component on a tier while some of its pages could be evicted there. It is offered again whenever
that may have become true: a fill, an unlock, a split, the last Full child's eviction. Entries of nodes that another
queue took over, or that died, are *stale*: counted and swept, so that a queue costs memory for its live nodes only.

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
"""Stale entries that a component on a tier may hold before it is worth sweeping its queues."""
STALE_PART = 32
"""One in so many entries of a component on a tier may be stale: a dead one keeps a whole node in memory."""


class Queue(IntEnum):
    """Queues of a component on a tier, in the order in which they are emptied.

    A *queue id* is ``queue * stride + tier_component``, where the stride is the number of tiers times components.
    A node stands where it belongs in one of them.
    """

    OPEN = 0
    """Ordinary ones; the only queue that lru needs."""
    PREFERRED = 1


class EvictionQueues:
    """Eviction queues of all components on all tiers, and their clock. As lru_lists in SGLang 0.5.23."""

    __slots__ = (
        "_by_priority",
        "_components_count",
        "_is_by_priority",
        "_places",
        "_queues",
        "_sequence",
        "_spans",
        "_stale_counts",
        "_stale_max",
        "_stride",
        "clock",
    )

    def __init__(self, spans: Sequence[int], eviction: EvictionConfig, classes_count: int = 0) -> None:
        """Make empty queues: of each component on a tier those of ``Queue``, and ``classes_count`` more."""
        components = len(spans)
        kinds = [eviction.policy(tier, component) for tier in Tier for component in range(components)]
        tier_components = len(kinds)
        self._spans = tuple(spans)
        self._components_count = components
        self._stride = tier_components
        self._is_by_priority = [kind is EvictionPolicy.PRIORITY for kind in kinds]
        """For each component on a tier, whether it goes by priority; else the stamp is the rank."""
        self._by_priority = [number for number, by_priority in enumerate(self._is_by_priority) if by_priority]
        queues = len(Queue) + classes_count
        self._queues: list[list[tuple[int, int, int, Node]]] = [[] for _ in range(queues * tier_components)]
        """Heaps of (rank, ``place_of``, sequence, node), by queue id."""
        places = sum(1 << queue * tier_components for queue in range(queues))
        self._places = [places << tier_component for tier_component in range(tier_components)]
        """By tier and component: bits of its queues; a node stands where it belongs in one of these."""
        self._stale_counts = [0] * tier_components
        """By tier and component: entries of dead nodes, and those of others beyond the one where they belong."""
        self._stale_max = [STALE_MIN] * tier_components
        self._sequence = 0
        self.clock = 0
        """Counts touches; the newest stamp."""

    # ---- history -----------------------------------------------------------------------------------------------

    def touch(self, node: Node, priority: int) -> None:
        """Make the prefix that ends with ``node`` the most recent one, on both tiers.

        Full is stamped down to its deepest live node, a windowed component inside its window and one page more.
        """
        self.clock += 1
        now = self.clock
        components = self._components_count
        for tier_component in (0, components):
            above: Node | None = node
            while above is not None:
                above.stamps[tier_component] = now
                above = None if above.held_count[tier_component] else above.parent
        for component in range(1, components):
            window_start = node.end - self._spans[component] - 1
            at = node
            while at.parent is not None and at.end > window_start:
                at.stamps[component] = now
                at.stamps[components + component] = now
                at = at.parent
        for tier_component in self._by_priority:
            for at in self._covered(node, tier_component):
                history = self.history(at, tier_component)
                history.priority = max(history.priority, priority)

    def _covered(self, node: Node, tier_component: int) -> Iterator[Node]:
        """Yield the nodes that ``touch`` makes recent on a tier and component, directly or by their descendants."""
        first = max(0, node.end - self._spans[tier_component % self._components_count] - 1)
        at = node
        while at.parent is not None and at.end > first:
            yield at
            at = at.parent

    def history(self, node: Node, tier_component: int) -> History:
        """Return the history of a node for a component on a tier, a new one if it has none."""
        if node.history is None:
            node.history = {}
        found = node.history.get(tier_component)
        if found is None:
            found = node.history[tier_component] = History()
        return found

    # ---- queues ------------------------------------------------------------------------------------------------

    def evictable(self, node: Node, tier_component: int) -> bool:
        """Return whether anything of ``node`` could be evicted from ``tier_component`` now."""
        if not node.held_count[tier_component] or node.locks[tier_component] or node.dead:
            return False
        if tier_component % self._components_count == 0:
            return not node.full_children[tier_component // self._components_count]
        if node.partial_locks is None or tier_component not in node.partial_locks:
            return True
        slots = node.slots[tier_component]
        return slots is not None and bool((slots[: node.first_pinned(tier_component)] >= 0).any())

    def is_preferred(self, node: Node, tier_component: int) -> bool:
        """Return whether a preference covers a node in a component on a tier."""
        history = None if node.history is None else node.history.get(tier_component)
        return history is not None and history.preferences > 0

    def queue_id(self, node: Node, tier_component: int) -> int:
        """Return the queue that a node belongs to while it is evictable from ``tier_component``."""
        preferred = Queue.PREFERRED * self._stride + tier_component
        return preferred if self.is_preferred(node, tier_component) else tier_component

    def rank(self, node: Node, tier_component: int) -> int:
        """Return the present rank of a node for a component on a tier."""
        if not self._is_by_priority[tier_component]:
            return node.stamps[tier_component]
        return (self.history(node, tier_component).priority << PRIORITY_BIT) + node.stamps[tier_component]

    def place_of(self, node: Node, tier_component: int) -> int:
        """Return by what nodes of equal rank go: of windows the page at which they begin, of Full nothing."""
        return node.start if tier_component % self._components_count else 0

    def offer(self, node: Node, tier_component: int) -> None:
        """Queue ``node`` in ``tier_component`` if it is evictable there and not queued yet."""
        if node.history is None and not self._is_by_priority[tier_component]:
            is_queued = node.queued >> tier_component & 1
            if not is_queued and node.held_count[tier_component] and self.evictable(node, tier_component):
                node.queued |= 1 << tier_component
                self._sequence += 1
                place = node.start if tier_component % self._components_count else 0
                heappush(self._queues[tier_component], (node.stamps[tier_component], place, self._sequence, node))
        elif self.evictable(node, tier_component):
            queue_id = self.queue_id(node, tier_component)
            if not node.queued >> queue_id & 1:
                self._enter(node, tier_component, queue_id)
                self._sequence += 1
                rank, place = self.rank(node, tier_component), self.place_of(node, tier_component)
                heappush(self._queues[queue_id], (rank, place, self._sequence, node))

    def offer_all(self, node: Node) -> None:
        """Queue ``node`` in every component on a tier where it is evictable."""
        for tier_component, live in enumerate(node.held_count):
            if live and (node.history is not None or not node.queued >> tier_component & 1):
                self.offer(node, tier_component)

    def forget(self, node: Node) -> None:
        """Record that ``node`` died: its entries are stale."""
        for tier_component, places in enumerate(self._places):
            if node.queued & places:
                self._record_stale(tier_component)

    def _enter(self, node: Node, tier_component: int, queue_id: int) -> None:
        """Record that a node is in a queue; its entry in another queue for the same tier and component is stale."""
        if node.queued & self._places[tier_component]:
            self._record_stale(tier_component)
        node.queued |= 1 << queue_id

    def _leave(self, node: Node, tier_component: int, queue_id: int) -> None:
        node.queued ^= 1 << queue_id
        if node.dead or node.queued & self._places[tier_component]:
            self._stale_counts[tier_component] -= 1

    def _record_stale(self, tier_component: int) -> None:
        """Count one more stale entry of a component on a tier; sweep its queues once there are too many."""
        self._stale_counts[tier_component] += 1
        if self._stale_counts[tier_component] > self._stale_max[tier_component]:
            self._stale_max[tier_component] = max(STALE_MIN, self.queue_length(tier_component) // STALE_PART)
            if self._stale_counts[tier_component] > self._stale_max[tier_component]:
                self._sweep(tier_component)

    def _sweep(self, tier_component: int) -> None:
        places = self._places[tier_component]
        for queue_id in range(tier_component, len(self._queues), self._stride):
            queue, place = self._queues[queue_id], 1 << queue_id
            if not queue:
                continue
            left = [
                node
                for _, _, _, node in queue
                if node.dead or (node.queued & places != place and not self._belongs(node, tier_component, queue_id))
            ]
            if left:
                for node in left:
                    self._leave(node, tier_component, queue_id)
                queue[:] = [entry for entry in queue if entry[3].queued & place]
                heapify(queue)

    def _belongs(self, node: Node, tier_component: int, queue_id: int) -> bool:
        """Return whether a node, if it is evictable, belongs to a queue of a component on a tier."""
        return not node.dead and (node.history is None or queue_id == self.queue_id(node, tier_component))

    def next_victim(self, tier_component: int) -> Node | None:
        """Return the node of ``tier_component`` that goes next; it stays queued. None if nothing can be evicted."""
        for queue in Queue:
            node = self._first(queue * self._stride + tier_component, tier_component)
            if node is not None:
                return node
        return None

    def pages_at_once(self, node: Node, tier_component: int, pages: int) -> int:
        """Return how many of ``pages`` the next victim gives before another is looked for; they are evicted now."""
        return pages

    def pass_over(self, node: Node, tier_component: int) -> None:
        """Take the next victim of ``tier_component`` out of every queue that it heads, until it is offered again."""
        for queue_id in range(tier_component, len(self._queues), self._stride):
            queue = self._queues[queue_id]
            if queue and queue[0][3] is node:
                heappop(queue)
                self._leave(node, tier_component, queue_id)

    def _first(self, queue_id: int, tier_component: int) -> Node | None:
        """Return the node at the head of a queue, after moving stale entries before it to their places."""
        queue = self._queues[queue_id]
        by_stamp = not self._is_by_priority[tier_component]
        while queue:
            queued_rank, queued_place, _, node = queue[0]
            if not self.evictable(node, tier_component) or not self._belongs(node, tier_component, queue_id):
                heappop(queue)
                self._leave(node, tier_component, queue_id)
                continue
            rank = node.stamps[tier_component] if by_stamp else self.rank(node, tier_component)
            place = node.start if tier_component % self._components_count else 0
            if rank == queued_rank and place == queued_place:
                return node
            self._sequence += 1
            heapreplace(queue, (rank, place, self._sequence, node))
        return None

    @property
    def queues_count(self) -> int:
        """Queues of all components on all tiers; their ids are the numbers below it."""
        return len(self._queues)

    def entries(self, queue_id: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of a queue, dead ones too, with the ranks they are queued under; for ``check``."""
        return ((node, rank) for rank, _, _, node in self._queues[queue_id])

    def places_count(self, node: Node, tier_component: int) -> int:
        """Return in how many queues of a component on a tier a node stands: one is not stale; for ``check``."""
        return (node.queued & self._places[tier_component]).bit_count()

    def stale_count(self, tier_component: int) -> int:
        """Return how many entries of a component on a tier are stale, as counted; for ``check``."""
        return self._stale_counts[tier_component]

    def queue_length(self, tier_component: int) -> int:
        """Entries in all queues of a component on a tier."""
        return sum(map(len, self._queues[tier_component :: self._stride]))
