"""Eviction queues: the order of eviction for each component on each tier, least recently used first, or by priority.

A heap with lazy ranks: touching a node only writes its stamp; the queue finds out when the node comes up and
puts it back in its place. So a touch costs nothing, a split keeps its place, and a victim costs O(log n). This needs
that a rank never falls: no touch and no higher priority makes a node go earlier.

    lru        least recently used; the stamp is the rank, and nothing else is kept
    priority   lowest priority first, lru within

Windows of equal rank, as one request's have, go in the order in which they begin in its prompt: the last one, from
which the prompt is resumed, goes last. Where a node begins never falls either; a split moves it back. Of Full no two
nodes of a request can be evicted at a time, and others of equal rank go in the order in which they were queued.
Superseded windows go before all others.

A node is queued for a component on a tier while some of its pages could be evicted there. It is offered again whenever
that may have become true: a fill, an unlock, a split, the last Full child's eviction. Entries of nodes that died are
*stale*: counted and swept, so that a queue costs memory for its live nodes only.

Full needs only its deepest node touched. Ancestors cannot be evicted before it; when it goes, its stamp passes
to the parent if it is the younger one.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.pool import Tier
from unified_cache.tree.node import PRIORITY_BIT, UNNAMED, Node

STALE_MIN = 64
"""Stale entries that a component on a tier may hold before it is worth sweeping its queue."""
STALE_PART = 32
"""One in so many entries of a component on a tier may be stale: a dead one keeps a whole node in memory."""

SUPERSEDED_MAX = 4096
"""Nodes that a component on a tier remembers to evict first; of more, the oldest go as all others do."""


class EvictionQueues:
    """Eviction queues of all components on all tiers, and their clock. As lru_lists in SGLang 0.5.23."""

    __slots__ = (
        "_by_priority",
        "_components_count",
        "_is_by_priority",
        "_queues",
        "_sequence",
        "_spans",
        "_stale_counts",
        "_stale_max",
        "_superseded",
        "clock",
    )

    def __init__(self, spans: Sequence[int], eviction: EvictionConfig) -> None:
        components = len(spans)
        kinds = [eviction.policy(tier, component) for tier in Tier for component in range(components)]
        self._spans = tuple(spans)
        self._components_count = components
        self._is_by_priority = [kind is EvictionPolicy.PRIORITY for kind in kinds]
        """For each component on a tier, whether it goes by priority; else the stamp is the rank."""
        self._by_priority = [number for number, by_priority in enumerate(self._is_by_priority) if by_priority]
        self._queues: list[list[tuple[int, int, int, Node]]] = [[] for _ in kinds]
        """Heaps of (rank, ``place_of``, sequence, node), by tier and component."""
        self._stale_counts = [0] * len(kinds)
        """By tier and component: entries of dead nodes."""
        self._stale_max = [STALE_MIN] * len(kinds)
        self._superseded: list[deque[tuple[Node, int, int]]] = [deque(maxlen=SUPERSEDED_MAX) for _ in kinds]
        """By tier and component: nodes that ``supersede`` named, their stamps then, and where they are kept from."""
        self._sequence = 0
        self.clock = 0
        """Counts touches; the newest stamp."""

    def touch(self, node: Node, priority: int) -> None:
        """Make the prefix that ends with ``node`` the most recent one, on both tiers.

        Full is stamped down to its deepest live node, a windowed component inside its window and one page more.
        """
        self.clock += 1
        now = self.clock
        node.is_superseded = False
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
                if at.priorities is None:
                    at.priorities = {}
                at.priorities[tier_component] = max(at.priorities.get(tier_component, UNNAMED), priority)

    def supersede(self, node: Node, end: int) -> None:
        """Evict the windows first that ``touch`` has made recent for a resume where ``node`` ends.

        A prompt has gone on from there to ``end`` alone: later requests resume at ``end``, or a page before it. What
        that needs stays in its place, what is used again goes back there, and pages that go by priority do not move.
        """
        components = self._components_count
        for component in range(1, components):
            kept_start = end - self._spans[component] - 1
            at = node
            while at.parent is not None and len(at.children) == 1 and at.end >= node.end - self._spans[component]:
                for tier_component in (component, components + component):
                    if at.start < kept_start and not self._is_by_priority[tier_component]:
                        self._superseded[tier_component].append((at, at.stamps[tier_component], kept_start))
                at = at.parent

    def _first_superseded(self, tier_component: int) -> tuple[Node, int] | None:
        """Return the first node with superseded pages that can be evicted, and how many; drop those before it."""
        superseded = self._superseded[tier_component]
        while superseded:
            node, stamp, kept_start = superseded[0]
            is_used = node.stamps[tier_component] != stamp
            slots = node.slots[tier_component]
            if slots is not None and not is_used and self.evictable(node, tier_component):
                kept_offset = max(kept_start - node.start, 0)
                pages = int((slots[: min(kept_offset, node.first_pinned(tier_component))] >= 0).sum())
                if pages:
                    return node, pages
            superseded.popleft()
        return None

    def _covered(self, node: Node, tier_component: int) -> Iterator[Node]:
        """Yield the nodes that ``touch`` makes recent on a tier and component, directly or by their descendants."""
        first = max(0, node.end - self._spans[tier_component % self._components_count] - 1)
        at = node
        while at.parent is not None and at.end > first:
            yield at
            at = at.parent

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

    def rank(self, node: Node, tier_component: int) -> int:
        """Return the present rank of a node for a component on a tier."""
        stamp = node.stamps[tier_component]
        if not self._is_by_priority[tier_component]:
            return stamp
        priority = UNNAMED if node.priorities is None else node.priorities.get(tier_component, UNNAMED)
        return (priority << PRIORITY_BIT) + stamp

    def place_of(self, node: Node, tier_component: int) -> int:
        """Return by what nodes of equal rank go: of windows the page at which they begin, of Full nothing."""
        return node.start if tier_component % self._components_count else 0

    def offer(self, node: Node, tier_component: int) -> None:
        """Queue ``node`` in ``tier_component`` if it is evictable there and not queued yet."""
        if node.queued >> tier_component & 1 or not self.evictable(node, tier_component):
            return
        node.queued |= 1 << tier_component
        self._sequence += 1
        rank = self.rank(node, tier_component) if self._is_by_priority[tier_component] else node.stamps[tier_component]
        place = node.start if tier_component % self._components_count else 0
        heappush(self._queues[tier_component], (rank, place, self._sequence, node))

    def offer_all(self, node: Node) -> None:
        """Queue ``node`` in every component on a tier where it is evictable."""
        for tier_component, live in enumerate(node.held_count):
            if live and not node.queued >> tier_component & 1:
                self.offer(node, tier_component)

    def forget(self, node: Node) -> None:
        """Record that ``node`` died: its entries are stale, and are swept once there are too many."""
        for tier_component in range(len(self._queues)):
            if not node.queued >> tier_component & 1:
                continue
            self._stale_counts[tier_component] += 1
            if self._stale_counts[tier_component] > self._stale_max[tier_component]:
                self._stale_max[tier_component] = max(STALE_MIN, self.queue_length(tier_component) // STALE_PART)
                if self._stale_counts[tier_component] > self._stale_max[tier_component]:
                    self._sweep(tier_component)

    def _sweep(self, tier_component: int) -> None:
        queue = self._queues[tier_component]
        for _, _, _, node in queue:
            if node.dead:
                node.queued ^= 1 << tier_component
        queue[:] = [entry for entry in queue if not entry[3].dead]
        heapify(queue)
        self._stale_counts[tier_component] = 0

    def next_victim(self, tier_component: int) -> Node | None:
        """Return the node of ``tier_component`` that goes next; it stays queued. None if nothing can be evicted."""
        superseded = self._first_superseded(tier_component)
        if superseded is not None:
            return superseded[0]
        queue = self._queues[tier_component]
        while queue:
            queued_rank, queued_place, _, node = queue[0]
            if not self.evictable(node, tier_component):
                self._pop(tier_component)
                continue
            rank, place = self.rank(node, tier_component), self.place_of(node, tier_component)
            if rank == queued_rank and place == queued_place:
                return node
            self._sequence += 1
            heapreplace(queue, (rank, place, self._sequence, node))
        return None

    def pages_at_once(self, node: Node, tier_component: int, pages: int) -> int:
        """Return how many of ``pages`` the next victim gives before another is looked for; they are evicted now."""
        superseded = self._first_superseded(tier_component)
        return pages if superseded is None or superseded[0] is not node else min(pages, superseded[1])

    def _pop(self, tier_component: int) -> None:
        node = heappop(self._queues[tier_component])[3]
        node.queued ^= 1 << tier_component
        self._stale_counts[tier_component] -= node.dead

    def entries(self, tier_component: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of a queue, dead ones too, with the ranks they are queued under; for ``check``."""
        return ((node, rank) for rank, _, _, node in self._queues[tier_component])

    def stale_count(self, tier_component: int) -> int:
        """Return how many entries of a component on a tier are stale, as counted; for ``check``."""
        return self._stale_counts[tier_component]

    def queue_length(self, tier_component: int) -> int:
        """Return the entries in the queue of a component on a tier."""
        return len(self._queues[tier_component])
