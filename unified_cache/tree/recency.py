"""Which node goes next: one queue per lane, least recently used first.

A heap with lazy stamps: touching a node only writes its stamp; the queue finds out when the node comes up and
puts it back in its place. So a touch costs nothing, a split keeps its place, and a victim costs O(log n).

A node stands in a lane's queue while something of it could be evicted there. It is offered again whenever
that may have become true: a fill, an unlock, a split, the last Full child's going.

Full needs only its deepest node touched. Ancestors cannot be evicted before it; when it goes, its stamp passes
to the parent if it is the younger one.
"""

from heapq import heapify, heappop, heappush, heapreplace

from unified_cache.tree.node import Node

__all__ = ["Recency"]

SWEEP_DEAD_MIN = 64
"""Dead entries a queue may hold before it is worth sweeping."""


class Recency:
    """Eviction queues of all lanes, and the clock that orders them."""

    __slots__ = ("_components_count", "_dead_counts", "_queues", "_sequence", "clock")

    def __init__(self, components_count: int) -> None:
        self._components_count = components_count
        self._queues: list[list[tuple[int, int, Node]]] = [[] for _ in range(2 * components_count)]
        self._dead_counts = [0] * (2 * components_count)
        self._sequence = 0
        self.clock = 0
        """Counts touches; the newest stamp."""

    def touch(self, node: Node, spans: tuple[int, ...]) -> None:
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
                above = None if above.live[lane] else above.parent
        for component in range(1, components):
            window_start = node.end - spans[component] - 1
            at = node
            while at.parent is not None and at.end > window_start:
                at.stamps[component] = now
                at.stamps[components + component] = now
                at = at.parent

    def evictable(self, node: Node, lane: int) -> bool:
        """Tell whether anything of ``node`` could be evicted from ``lane`` now."""
        if not node.live[lane] or node.locks[lane] or node.dead:
            return False
        if lane % self._components_count == 0:
            return not node.full_children[lane // self._components_count]
        if node.edges is None or lane not in node.edges:
            return True
        slots = node.slots[lane]
        return slots is not None and bool((slots[: node.first_pinned(lane)] >= 0).any())

    def offer(self, node: Node, lane: int) -> None:
        """Queue ``node`` in ``lane`` if it is evictable there and not queued yet."""
        if not node.queued[lane] and node.live[lane] and self.evictable(node, lane):
            node.queued[lane] = True
            self._sequence += 1
            heappush(self._queues[lane], (node.stamps[lane], self._sequence, node))

    def offer_all(self, node: Node) -> None:
        """Queue ``node`` in every lane where it is evictable."""
        for lane, live in enumerate(node.live):
            if live and not node.queued[lane]:
                self.offer(node, lane)

    def forget(self, node: Node) -> None:
        """Note that ``node`` died; sweep a queue once half of it is dead, so that none grows without bound."""
        for lane, queued in enumerate(node.queued):
            if not queued:
                continue
            self._dead_counts[lane] += 1
            queue = self._queues[lane]
            if self._dead_counts[lane] > max(SWEEP_DEAD_MIN, len(queue) // 2):
                queue[:] = [entry for entry in queue if not entry[2].dead]
                heapify(queue)
                self._dead_counts[lane] = 0

    def next_victim(self, lane: int) -> Node | None:
        """Return the least recently used node of ``lane``; it stays queued. None if nothing can be evicted."""
        queue = self._queues[lane]
        while queue:
            stamp, _, node = queue[0]
            if not self.evictable(node, lane):
                heappop(queue)
                node.queued[lane] = False
                if node.dead:
                    self._dead_counts[lane] -= 1
            elif node.stamps[lane] != stamp:
                self._sequence += 1
                heapreplace(queue, (node.stamps[lane], self._sequence, node))
            else:
                return node
        return None

    def queued(self, lane: int) -> dict[Node, int]:
        """Return the nodes of a lane's queue with the stamps they are queued under; for ``check``."""
        return {node: stamp for stamp, _, node in self._queues[lane]}

    def queue_length(self, lane: int) -> int:
        """Entries in a lane's queue."""
        return len(self._queues[lane])
