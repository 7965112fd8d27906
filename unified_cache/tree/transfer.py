"""Transfers between tiers, as the tree sees them: pin, mark pages in flight, publish or give back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unified_cache.pool import PageCopies, Slots, Tier, all_pages, numbers_of
from unified_cache.slots import MapChange
from unified_cache.tree.lock import Lock, lock, unlock
from unified_cache.tree.node import Node
from unified_cache.tree.state import TreeState
from unified_cache.window import window

__all__ = ["Published", "Transfer", "Wanted", "begin", "expect", "nodes_of_pages", "publish", "release"]


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


def begin(tree: TreeState, node: Node, end: int, source: Tier, target: Tier, *, at_once: bool) -> Transfer:
    """Pin what a resume at ``end`` needs on both tiers, and say which pages ``target`` lacks.

    Both tiers are pinned before anyone allocates, because allocating evicts. Pages that another transfer is
    bringing already are left to it, unless this one ends ``at_once``: then they will be duplicates of that one.
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
    source_lane = int(source) * tree.components_count + component
    target_lane = int(target) * tree.components_count + component
    start = window(end, tree.spans[component])
    pages: list[npt.NDArray[np.int64]] = []
    slots: list[Slots] = []
    at: Node | None = node
    while at is not None and at.end > start:
        held = at.slots[source_lane]
        if held is not None and at.held_count[target_lane] < at.pages:
            lacking = held >= 0
            present = at.slots[target_lane]
            if present is not None:
                lacking &= present < 0
            if not at_once and at.in_flight is not None and target_lane in at.in_flight:
                lacking &= ~at.in_flight[target_lane]
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


def expect(tree: TreeState, transfer: Transfer, targets: Sequence[Slots]) -> None:
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
    lane = int(transfer.target.tier) * tree.components_count + part.component
    for node, first, last in nodes:
        marks = node.in_flight if node.in_flight is not None else {}
        pages = marks.get(lane)
        if pages is None:
            pages = marks[lane] = np.zeros(node.pages, np.bool_)
        pages[part.pages[first:last] - node.start] = arriving
        if not arriving and not np.count_nonzero(pages):
            del marks[lane]
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


def publish(tree: TreeState, transfer: Transfer) -> Published:
    """Publish what arrived, root first, and unpin the source; the target stays pinned until ``release``.

    A page filled meanwhile is a duplicate; a page whose prefix went missing has nothing to stand on. Both go back.
    """
    taken: list[PageCopies] = []
    leftovers: list[Slots] = [np.empty(0, np.int32) for _ in range(tree.components_count)]
    map_changes: list[MapChange] = []
    for part in transfer.parts:
        nodes = nodes_of_pages(transfer.target.node, part.pages)
        _mark(tree, transfer, part, nodes, arriving=False)
        lane = int(transfer.target.tier) * tree.components_count + part.component
        took = np.zeros(len(part), np.bool_)
        for node, first, last in nodes:
            offsets = part.pages[first:last] - node.start
            took[first:last] = _publish(tree, node, lane, offsets, part.target[first:last], map_changes)
        taken.append(part.where(took))
        leftovers[part.component] = part.target[~took]
    transfer.parts = ()
    unlock(transfer.source)
    return Published(tuple(taken), leftovers, map_changes)


def _publish(
    tree: TreeState,
    node: Node,
    lane: int,
    offsets: npt.NDArray[np.int64],
    slots: Slots,
    map_changes: list[MapChange],
) -> npt.NDArray[np.bool_]:
    """Fill the holes among ``offsets`` that have something to stand on; tell which were filled."""
    component = lane % tree.components_count
    if component:
        held = node.slots[lane]
        holes = all_pages(len(offsets)) if held is None else held[offsets] < 0
        full = node.slots[lane - component]
        holes &= full[offsets] >= 0 if full is not None else False
    else:
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.held_count[lane] < parent.pages:
            return np.zeros(len(offsets), np.bool_)
        # Only the run that continues the prefix, page by page after what is held; offsets ascend, so a gap ends it.
        held_count = node.held_count[lane]
        first = int(offsets.searchsorted(held_count))
        holes = offsets == np.arange(held_count - first, held_count - first + len(offsets))
        holes[:first] = False
    tree.fill(node, lane, offsets[holes], slots[holes], map_changes)
    tree.queues.offer(node, lane)
    return holes


def release(tree: TreeState, transfer: Transfer) -> list[Slots]:
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
