"""Locks: page intervals that pin what a resume needs, per component, on one tier.

A lock names pages, not nodes, so it survives splits. It cuts a node only at its end; where a component's window
begins inside a node, the node records {page: count} and a split distributes the entries (cutting both ends would
double the nodes). Holes inside the interval count too, so a hole revived meanwhile cannot unbalance it.

Full is special in one respect only: while its last page is held on the tier, the ancestors cannot be evicted
before it, so the lock takes the last node alone. Where that page is not held, the lock takes the whole path.
"""

from unified_cache.pool import Tier
from unified_cache.tree.forecast import Visit
from unified_cache.tree.node import Node
from unified_cache.tree.page_counts import CHANGED_NODES_MAX
from unified_cache.tree.state import TreeState
from unified_cache.window import window

__all__ = ["Lock", "lock", "release_windows", "unlock"]


class Lock:
    """Receipt for pages pinned on one tier; give it back once.

    A plain class, since a dataclass is made by interpreted code where the core is compiled: a quarter of a lock's time.
    """

    __slots__ = ("end", "held", "node", "released", "session", "tier", "tree", "visit")

    def __init__(
        self, tree: TreeState, node: Node, end: int, tier: Tier, held: list[tuple[int, int]], visit: Visit | None
    ) -> None:
        self.tree = tree
        self.node = node
        """The node that ends at ``end``."""
        self.end = end
        self.tier = tier
        self.held = held
        """(component, first page pinned): pages [that, end) are pinned for it."""
        self.released = False
        self.visit = visit
        """What the forecast made of the request; it goes on to the lock that ``insert`` returns."""
        self.session: str | None = None
        """Session whose request has it; see ``Prompt.session``."""

    def pins(self, component: int) -> bool:
        """Tell whether any page is pinned for a component."""
        return any(number == component for number, _ in self.held)


def lock(tree: TreeState, node: Node, end: int, tier: Tier, visit: Visit | None = None) -> Lock:
    """Pin ``[window(end), end)`` of every component on ``tier``; ``end`` lies in ``node``, or is 0 to pin nothing.

    Splits ``node`` if ``end`` is inside it. The pages need not be held: a lock also keeps the place of pages
    that a transfer will bring.
    """
    if not end:
        return Lock(tree, node, 0, tier, [], visit)
    assert not node.dead
    if end < node.end:
        node = tree.split(node, end - node.start)
    if tree.adaptive is not None and visit is not None and end == visit.end:
        tree.adaptive.settle(node, visit)
    components = tree.components_count
    lane = int(tier) * components
    full_start = node.start if node.held_count[lane] == node.end - node.start else 0
    held = [(0, full_start)]
    _pin(tree, node, lane, full_start)
    for component in range(1, components):
        start = window(end, tree.spans[component])
        held.append((component, start))
        _pin(tree, node, lane + component, start)
    if len(tree.counts.changed) > CHANGED_NODES_MAX:
        tree.counts.count_changed()
    return Lock(tree, node, end, tier, held, visit)


def _pin(tree: TreeState, node: Node, lane: int, start: int) -> None:
    """Count one more lock on pages from ``start`` to the end of ``node``."""
    changed = tree.counts.changed
    at = node
    while at.start >= start and at.parent is not None:
        if not at.locks[lane]:
            changed.add(at)
        at.locks[lane] += 1
        at = at.parent
    if at.end > start:
        changed.add(at)
        if at.partial_locks is None:
            at.partial_locks = {}
        begins = at.partial_locks.setdefault(lane, {})
        begins[start] = begins.get(start, 0) + 1


def unlock(lock: Lock) -> None:
    """Unpin what ``lock`` still pins."""
    _unpin_all(lock, lock.held)
    lock.held = []
    lock.released = True
    if lock.end and not lock.node.children:
        lock.tree.prune(lock.node)


def release_windows(lock: Lock) -> None:
    """Unpin all components but Full, on which they stand. Once more changes nothing."""
    _unpin_all(lock, lock.held[1:])
    lock.held = lock.held[:1]


def _unpin_all(lock: Lock, held: list[tuple[int, int]]) -> None:
    lane = int(lock.tier) * lock.tree.components_count
    for component, start in held:
        _unpin(lock.tree, lock.node, lane + component, start)


def _unpin(tree: TreeState, node: Node, lane: int, start: int) -> None:
    """Count one lock less on pages from ``start`` to the end of ``node``; offer what that frees."""
    changed = tree.counts.changed
    offer = tree.queues.offer
    at = node
    while at.start >= start and at.parent is not None:
        at.locks[lane] -= 1
        assert at.locks[lane] >= 0, "unlocked more often than locked"
        if not at.locks[lane]:
            changed.add(at)
            offer(at, lane)
        at = at.parent
    if at.end > start:
        assert at.partial_locks is not None
        changed.add(at)
        begins = at.partial_locks[lane]
        begins[start] -= 1
        if not begins[start]:
            del begins[start]
            if not begins:
                del at.partial_locks[lane]
        if not at.partial_locks:
            at.partial_locks = None
        offer(at, lane)
