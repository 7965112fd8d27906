"""Locks: page intervals that pin what a resume needs, per component, on one tier; and transfers, which hold two.

A lock names pages, not nodes, so it survives splits. It cuts a node only at its end; where a component's window
begins inside a node, the node records {page: count} and a split distributes the entries. Tombstones inside the
interval count too, so a tombstone revived meanwhile cannot unbalance it.

Full is special in one respect only: while its last page is held on the tier, the ancestors cannot be evicted
before it, so the lock takes the last node alone. Where that page is not held, the lock takes the whole path.

A transfer between tiers pins both ends, marks its pages in flight, and publishes them or gives their slots back. The
end that it goes to is found in one pass and before any pin, since moving what a resume at ``end`` needs pins its pages
on the target, and evicts others there to make room:

    free            allocated first
    evictable       outside the windows before ``end``: evicted for the rest
                    inside of them: pinned, and no room
    protected       no room

So a page in a window before ``end`` takes a slot if it is still to come, and one from what could be evicted if it is
there already.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unified_cache.core.hits import Hits
from unified_cache.core.pool import PageCopies, Pages, Slots, Tier, all_pages, numbers_of
from unified_cache.core.slots import MapChange
from unified_cache.core.window import last_end, restorable_ends, window, window_counts
from unified_cache.tree.match import Match, held_pages
from unified_cache.tree.node import ANYWHERE, CHANGED_NODES_MAX, ON_DEVICE, Node
from unified_cache.tree.state import TreeState

__all__ = [
    "Lock",
    "Published",
    "Transfer",
    "Wanted",
    "begin_transfer",
    "evictable_mask",
    "expect_pages",
    "fitting_end",
    "lock",
    "nodes_of_pages",
    "publish_transfer",
    "release_transfer",
    "release_windows",
    "unlock",
]


NO_HITS = Hits()


class Lock:
    """Receipt for pages pinned on one tier; give it back once."""

    __slots__ = ("end", "held", "hits", "node", "released", "tier", "tree")

    def __init__(self, tree: TreeState, node: Node, end: int, tier: Tier, held: list[tuple[int, int]]) -> None:
        self.tree = tree
        self.node = node
        """The node that ends at ``end``."""
        self.end = end
        self.tier = tier
        self.held = held
        """(component, first page pinned): pages [that, end) are pinned for it."""
        self.released = False
        self.hits = NO_HITS
        """Pages that a request found, by the tier that they came from; set by ``UnifiedCache.lock``."""

    def pins(self, component: int) -> bool:
        """Return whether any page is pinned for a component."""
        return any(number == component for number, _ in self.held)


def lock(tree: TreeState, node: Node, end: int, tier: Tier) -> Lock:
    """Pin ``[window(end), end)`` of every component on ``tier``; ``end`` lies in ``node``, or is 0 to pin nothing.

    Splits ``node`` if ``end`` is inside it. The pages need not be held: a lock also keeps the place of pages
    that a transfer will bring. As inc_lock_ref in SGLang 0.5.23.
    """
    if not end:
        return Lock(tree, node, 0, tier, [])
    assert not node.dead
    if end < node.end:
        node = tree.split(node, end - node.start)
    components = tree.components_count
    tier_component = int(tier) * components
    full_start = node.start if node.held_count[tier_component] == node.end - node.start else 0
    held = [(0, full_start)]
    _pin(tree, node, tier_component, full_start)
    for component in range(1, components):
        start = window(end, tree.spans[component])
        held.append((component, start))
        _pin(tree, node, tier_component + component, start)
    if len(tree.counts.changed) > CHANGED_NODES_MAX:
        tree.counts.count_changed()
    return Lock(tree, node, end, tier, held)


def _pin(tree: TreeState, node: Node, tier_component: int, start: int) -> None:
    """Count one more lock on pages from ``start`` to the end of ``node``."""
    changed = tree.counts.changed
    at = node
    while at.start >= start and at.parent is not None:
        if not at.locks[tier_component]:
            changed.add(at)
        at.locks[tier_component] += 1
        at = at.parent
    if at.end > start:
        changed.add(at)
        if at.partial_locks is None:
            at.partial_locks = {}
        begins = at.partial_locks.setdefault(tier_component, {})
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
    tier_component = int(lock.tier) * lock.tree.components_count
    for component, start in held:
        _unpin(lock.tree, lock.node, tier_component + component, start)


def _unpin(tree: TreeState, node: Node, tier_component: int, start: int) -> None:
    """Count one lock less on pages from ``start`` to the end of ``node``; offer what that frees."""
    changed = tree.counts.changed
    offer = tree.queues.offer
    at = node
    while at.start >= start and at.parent is not None:
        at.locks[tier_component] -= 1
        assert at.locks[tier_component] >= 0, "unlocked more often than locked"
        if not at.locks[tier_component]:
            changed.add(at)
            offer(at, tier_component)
        at = at.parent
    if at.end > start:
        assert at.partial_locks is not None
        changed.add(at)
        begins = at.partial_locks[tier_component]
        begins[start] -= 1
        if not begins[start]:
            del begins[start]
            if not begins:
                del at.partial_locks[tier_component]
        if not at.partial_locks:
            at.partial_locks = None
        offer(at, tier_component)


def fitting_end(tree: TreeState, found: Match, source: Tier, target: Tier, available_pages: Sequence[int]) -> int:
    """Return the longest end that a match can be resumed at from ``source`` for which ``target`` has room; else 0.

    From the host means from host and device together. ``available_pages[c]`` are free or evictable on the target.
    Linear in pages, unless there is room for all of the windows.
    """
    view, end = (ON_DEVICE, found.device_end) if source is Tier.DEVICE else (ANYWHERE, found.host_end)
    if all(end - window(end, span) <= room for span, room in zip(tree.spans, available_pages, strict=True)):
        return end
    components = tree.components_count
    fits = restorable_ends(tree.spans, _tombstones(tree, found.path, view, end), 0, end, [0] * components)
    for component, available in enumerate(available_pages):
        tier_component = int(target) * components + component
        takes = held_pages(found.path, int(source) * components + component, end, end)
        takes &= ~held_pages(found.path, tier_component, end, end)
        takes &= ~_in_flight(found.path, tier_component, end)
        takes |= evictable_mask(tree, found.path, tier_component, end)
        fits &= window_counts(takes, tree.spans[component])[1:] <= available
    return last_end(fits)


def evictable_mask(tree: TreeState, path: Sequence[Node], tier_component: int, end: int) -> Pages:
    """Return a mask of the first ``end`` pages of a path that eviction could free of a component on a tier."""
    tree.counts.count_changed()
    evictable = np.zeros(end, np.bool_)
    for node in path:
        held = node.slots[tier_component]
        if node.start >= end:
            break
        if held is not None and tree.counts.protected_in(node, tier_component) < node.held_count[tier_component]:
            # Of Full it is all that the node holds, of the others what lies before the first page that a lock pins.
            first_pinned = min(node.start + node.first_pinned(tier_component), end)
            evictable[node.start : first_pinned] = held[: first_pinned - node.start] >= 0
    return evictable


def _tombstones(tree: TreeState, path: Sequence[Node], view: int, end: int) -> list[Pages | None]:
    """Return by component where it lacks pages before ``end`` in a view; Full lacks none before a restorable end."""
    tombstones: list[Pages | None] = [None]
    for component in range(1, tree.components_count):
        lacks = all_pages(end)
        for node in path:
            if node.start >= end:
                break
            held = node.seen(view, component)
            if held is not None:
                lacks[node.start : node.end] = held[: end - node.start] < 0
        tombstones.append(lacks)
    return tombstones


def _in_flight(path: Sequence[Node], tier_component: int, end: int) -> Pages:
    """Return a mask of the first ``end`` pages of a path that another transfer is bringing."""
    arriving = np.zeros(end, np.bool_)
    for node in path:
        if node.in_flight is not None and tier_component in node.in_flight and node.start < end:
            arriving[node.start : node.end] = node.in_flight[tier_component][: end - node.start]
    return arriving


@dataclass(slots=True)
class Wanted:
    """Pages of one component that a transfer has to bring, ascending, and where they lie now."""

    component: int
    pages: npt.NDArray[np.int64]
    source: Slots


@dataclass(frozen=True, slots=True)
class Published:
    """Result of publishing a transfer."""

    taken: tuple[PageCopies, ...]
    """Held by the tree now, with the slots they came from."""
    leftovers: list[Slots]
    """Target slots that the tree did not take, by component; the caller frees them."""
    map_changes: list[MapChange]
    """Changes of the page map: Full slots with a new peer."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Pins of one transfer between device and host, from ``begin`` to ``release``."""

    source: Lock
    target: Lock
    wanted: list[Wanted]
    at_once: bool
    """Whether it cannot wait for others: it leaves no page to them, and marks none, so both may bring one."""
    parts: tuple[PageCopies, ...] = field(default=())
    """Pages in flight: empty until ``expect``, and again after ``publish`` or ``release``."""

    @property
    def end(self) -> int:
        """Pages of the prompt that are restorable on the target once the transfer is published."""
        return self.target.end


def begin_transfer(tree: TreeState, node: Node, end: int, source: Tier, target: Tier, *, at_once: bool) -> Transfer:
    """Pin what a resume at ``end`` needs on both tiers, since allocating evicts, and say which pages ``target`` lacks.

    Pages that another transfer is bringing are left to it, unless this one ends ``at_once``.
    """
    source_lock = lock(tree, node, end, source)
    target_lock = lock(tree, source_lock.node, end, target)
    wanted = []
    for component in range(tree.components_count):
        found = _missing(tree, source_lock.node, end, component, source, target, at_once=at_once)
        if found is not None:
            wanted.append(found)
    return Transfer(source_lock, target_lock, wanted, at_once)


def _missing(
    tree: TreeState, node: Node, end: int, component: int, source: Tier, target: Tier, *, at_once: bool
) -> Wanted | None:
    """Collect the pages of a window that ``source`` holds and ``target`` does not, nor, unless at once, expects."""
    source_tier_component = int(source) * tree.components_count + component
    target_tier_component = int(target) * tree.components_count + component
    start = window(end, tree.spans[component])
    pages: list[npt.NDArray[np.int64]] = []
    slots: list[Slots] = []
    at: Node | None = node
    while at is not None and at.end > start:
        held = at.slots[source_tier_component]
        if held is not None and at.held_count[target_tier_component] < at.pages:
            lacking = held >= 0
            present = at.slots[target_tier_component]
            if present is not None:
                lacking &= present < 0
            if not at_once and at.in_flight is not None and target_tier_component in at.in_flight:
                lacking &= ~at.in_flight[target_tier_component]
            if at.start < start:
                lacking[: start - at.start] = False
            offsets = numbers_of(lacking)
            if offsets.size:
                pages.append(offsets + at.start)
                slots.append(held[offsets])
        at = at.parent
    if not pages:
        return None
    return Wanted(component, np.concatenate(pages[::-1]), np.concatenate(slots[::-1]))


def expect_pages(tree: TreeState, transfer: Transfer, targets: Sequence[Slots]) -> None:
    """Give the transfer the slots it will fill, one array per entry of ``wanted``, and mark its pages arriving."""
    transfer.parts = tuple(
        PageCopies(wanted.component, wanted.pages, wanted.source, slots)
        for wanted, slots in zip(transfer.wanted, targets, strict=True)
    )
    for part in transfer.parts:
        _mark(tree, transfer, part, nodes_of_pages(transfer.target.node, part.pages), arriving=True)


def _mark(
    tree: TreeState, transfer: Transfer, part: PageCopies, nodes: Sequence[tuple[Node, int, int]], *, arriving: bool
) -> None:
    """Mark the pages of a part, which lie in these nodes, as on their way, or as so no longer."""
    if transfer.at_once:
        return
    tier_component = int(transfer.target.tier) * tree.components_count + part.component
    for node, first, last in nodes:
        marks = node.in_flight if node.in_flight is not None else {}
        pages = marks.get(tier_component)
        if pages is None:
            pages = marks[tier_component] = np.zeros(node.pages, np.bool_)
        pages[part.pages[first:last] - node.start] = arriving
        if not arriving and not np.count_nonzero(pages):
            del marks[tier_component]
        node.in_flight = marks or None


def nodes_of_pages(node: Node, pages: npt.NDArray[np.int64]) -> list[tuple[Node, int, int]]:
    """Return (node, first, last) root first: ``pages[first:last]``, ascending, lie in that node."""
    found: list[tuple[Node, int, int]] = []
    at: Node | None = node
    last = int(pages.searchsorted(node.end))
    while at is not None and last:
        first = int(pages.searchsorted(at.start))
        if first < last:
            found.append((at, first, last))
        last = first
        at = at.parent
    return found[::-1]


def publish_transfer(tree: TreeState, transfer: Transfer) -> Published:
    """Publish what arrived, root first, and unpin the source; the target stays pinned until ``release``.

    A page filled meanwhile is a duplicate; a page whose prefix went missing has nothing to stand on. Both go back.
    """
    taken: list[PageCopies] = []
    leftovers: list[Slots] = [np.empty(0, np.int32) for _ in range(tree.components_count)]
    map_changes: list[MapChange] = []
    for part in transfer.parts:
        nodes = nodes_of_pages(transfer.target.node, part.pages)
        _mark(tree, transfer, part, nodes, arriving=False)
        tier_component = int(transfer.target.tier) * tree.components_count + part.component
        took = np.zeros(len(part), np.bool_)
        for node, first, last in nodes:
            offsets = part.pages[first:last] - node.start
            took[first:last] = _publish(tree, node, tier_component, offsets, part.target[first:last], map_changes)
        taken.append(part.where(took))
        leftovers[part.component] = part.target[~took]
    transfer.parts = ()
    unlock(transfer.source)
    return Published(tuple(taken), leftovers, map_changes)


def _publish(
    tree: TreeState,
    node: Node,
    tier_component: int,
    offsets: npt.NDArray[np.int64],
    slots: Slots,
    map_changes: list[MapChange],
) -> npt.NDArray[np.bool_]:
    """Fill the tombstones among ``offsets`` that have something to stand on; return which were filled."""
    component = tier_component % tree.components_count
    if component:
        held = node.slots[tier_component]
        tombstones = all_pages(len(offsets)) if held is None else held[offsets] < 0
        full = node.slots[tier_component - component]
        tombstones &= full[offsets] >= 0 if full is not None else False
    else:
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.held_count[tier_component] < parent.pages:
            return np.zeros(len(offsets), np.bool_)
        # Only the run that continues the prefix, page by page after what is held; offsets ascend, so a gap ends it.
        held_count = node.held_count[tier_component]
        first = int(offsets.searchsorted(held_count))
        tombstones = offsets == np.arange(held_count - first, held_count - first + len(offsets))
        tombstones[:first] = False
    tree.fill(node, tier_component, offsets[tombstones], slots[tombstones], map_changes)
    tree.queues.offer(node, tier_component)
    return tombstones


def release_transfer(tree: TreeState, transfer: Transfer) -> list[Slots]:
    """Unpin what is still pinned; return by component the slots of pages that were not published."""
    leftovers: list[Slots] = [np.empty(0, np.int32) for _ in range(tree.components_count)]
    for part in transfer.parts:
        _mark(tree, transfer, part, nodes_of_pages(transfer.target.node, part.pages), arriving=False)
        leftovers[part.component] = part.target
    transfer.parts = ()
    for held in (transfer.target, transfer.source):
        if not held.released:
            unlock(held)
    return leftovers
