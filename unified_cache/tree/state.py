"""State shared by the tree's modules: roots, eviction queues, counts, and the changes of nodes: split, fill, drop."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import (
    NO_MEDIA,
    TOKEN_BYTES,
    Namespace,
    PageMedia,
    Prompt,
    media_between,
    shift_media,
)
from unified_cache.core.pool import Slots, no_slots
from unified_cache.core.slots import MapChange
from unified_cache.tree.eviction_queues import EvictionQueues
from unified_cache.tree.node import ANYWHERE, Node, PageCounts

__all__ = ["Freed", "HeldRun", "TreeState", "held_runs"]


class Freed(NamedTuple):
    """Slots that the tree no longer holds; the caller frees them."""

    slots: list[list[Slots]]
    """Arrays of slots, by tier and component."""
    unmapped: list[Slots]
    """Full slots to be left without a peer in the page map, before the slots are free."""


class TreeState:
    """Nodes and queues of one tree. Every change of structure or slots is one of the methods below.

    They keep these true, and ``check`` proves it:

    * on each tier component 0 is prefix-closed, and every other component stands on component 0, page by page
    * ``held_count``, ``last_tombstone`` and ``full_children`` say what the slots say
    * ``counts`` say what locks and slots say, once the nodes that have changed are counted
    * every node that could be evicted from a component on a tier stands in its queue
    * a node without pages on any tier lives only while a lock covers it or children hang below
    """

    __slots__ = (
        "changes_count",
        "components_count",
        "counts",
        "lineage",
        "mapped",
        "page_key_bytes",
        "page_size",
        "queues",
        "roots",
        "spans",
        "version",
    )

    def __init__(
        self,
        spans: tuple[int, ...],
        page_size: int,
        mapped: int | None,
        lineage: object,
        queues: EvictionQueues,
    ) -> None:
        self.mapped = mapped
        """The component whose device slots are reached through Full's; None if there is none."""
        self.lineage = lineage
        """Identity of the tree for its locks; ``clear`` starts a new state of the same lineage."""
        self.spans = spans
        """Pages before an end that a resume there needs, by component."""
        self.components_count = len(self.spans)
        self.counts = PageCounts(self.components_count)
        self.page_size = page_size
        self.page_key_bytes = page_size * TOKEN_BYTES
        """Bytes of one encoded page in a node's key."""
        self.roots: dict[bytes, Node] = {}
        """Roots by name, which is also their key; see ``Prompt.root``. A root has no pages and is never locked."""
        self.queues = queues
        self.version = 0
        """Counts changes of structure; a match made under another version is dead."""
        self.changes_count = 0
        """Counts changes of what nodes hold; beside an equal version it says that all is found where it was."""

    def root(self, prompt: Prompt) -> Node:
        """Return the root that a prompt hangs below; a new one counts as soon as it has a child."""
        root = self.roots.get(prompt.root)
        if root is None:
            root = Node(prompt.root, 0, 0, None, self.components_count)
        if root.namespace is None:
            root.namespace = prompt.namespace
        return root

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents before children."""
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node

    def add_child(self, parent: Node, key: bytes, start: int, media: PageMedia = NO_MEDIA) -> Node:
        """Hang a new empty node below ``parent``."""
        self.version += 1
        if parent.parent is None:
            self.roots[parent.key] = parent
        child = Node(key, start, start + len(key) // self.page_key_bytes, parent, self.components_count, media)
        parent.children[child.first_page(self.page_size)] = child
        return child

    def split(self, node: Node, offset: int) -> Node:
        """Cut ``node`` after ``offset`` pages; return the new upper part. Not an access; locks cover both parts."""
        self.version += 1
        components = self.components_count
        cut = node.start + offset
        parent = node.parent
        assert parent is not None
        assert node.start < cut < node.end
        media = media_between(node.media, node.start, cut)
        upper = Node(node.key[: offset * self.page_key_bytes], node.start, cut, parent, components, media)
        parent.children[upper.first_page(self.page_size)] = upper
        if parent.last_child is node:
            parent.last_child = upper
        node.key = node.key[offset * self.page_key_bytes :]
        node.media = media_between(node.media, cut, node.end)
        node.start = cut
        node.parent = upper
        upper.children[node.first_page(self.page_size)] = node
        upper.locks = node.locks.copy()
        upper.stamps = node.stamps.copy()
        upper.priorities = None if node.priorities is None else node.priorities.copy()
        _split_edges(upper, node, cut)
        _split_arriving(upper, node, offset)
        for tier_component in range(2 * components):
            _split_slots(upper, node, tier_component, offset)
        upper.full_children = [int(node.held_count[0] > 0), int(node.held_count[components] > 0)]
        if node.protection is not None:
            upper.protection = node.protection.of_upper_part()
        self.counts.changed |= {upper, node}
        for component in range(1, components):
            upper.refresh_tombstones(component)
            node.refresh_tombstones(component)
        self.queues.offer_all(upper)
        self.queues.offer_all(node)
        return upper

    def fill(
        self,
        node: Node,
        tier_component: int,
        offsets: npt.NDArray[np.intp],
        slots: Slots,
        map_changes: list[MapChange],
    ) -> None:
        """Put slots at tombstones of a component on a tier; append what that changes in the page map."""
        if not len(offsets):
            return
        self.changes_count += 1
        component = tier_component % self.components_count
        held = node.slots[tier_component]
        if held is None:
            held = node.slots[tier_component] = no_slots(node.pages)
        if component == 0 and not node.held_count[tier_component]:
            parent = node.parent
            assert parent is not None
            parent.full_children[tier_component // self.components_count] += 1
        held[offsets] = slots
        node.held_count[tier_component] += len(offsets)
        self.counts.changed.add(node)
        if component:
            node.refresh_tombstones(component)
        if tier_component == self.mapped:
            full = node.slots[0]
            assert full is not None
            map_changes.append(MapChange(full[offsets], slots))

    def adopt(
        self, node: Node, tier_component: int, slots: Slots, held_count: int, map_changes: list[MapChange]
    ) -> None:
        """Copy the slots of a new node's run, ``held_count`` of them held; append what that changes in the page map."""
        self.changes_count += 1
        component = tier_component % self.components_count
        node.slots[tier_component] = np.array(slots, np.int32)
        node.held_count[tier_component] = held_count
        if component:
            node.refresh_tombstones(component)
            full = node.slots[0]
            if tier_component == self.mapped and full is not None:
                map_changes.append(MapChange(full[slots >= 0], slots[slots >= 0]))
        else:
            parent = node.parent
            assert parent is not None
            parent.full_children[tier_component // self.components_count] += 1

    def drop(self, node: Node, tier_component: int, start: int, end: int, freed: Freed) -> int:
        """Make the pages at offsets [start, end) tombstones, none protected or stood on; return how many were held."""
        held = node.slots[tier_component]
        if held is None:
            return 0
        segment = held[start:end]
        whole = node.held_count[tier_component] == node.pages
        gone = segment.copy() if whole else segment[segment >= 0]
        count = int(gone.size)
        if not count:
            return 0
        self.changes_count += 1
        if tier_component == self.mapped:
            full = node.slots[0]
            assert full is not None
            freed.unmapped.append(full[start:end].copy() if whole else full[start:end][segment >= 0])
        if count == node.held_count[tier_component]:
            node.slots[tier_component] = None
            node.held_count[tier_component] = 0
            if tier_component % self.components_count == 0:
                self._full_child_left(node, tier_component)
        else:
            segment[:] = -1
            node.held_count[tier_component] -= count
        if tier_component % self.components_count:
            node.refresh_tombstones(tier_component % self.components_count)
        freed.slots[tier_component].append(gone)
        return count

    def _full_child_left(self, node: Node, tier_component: int) -> None:
        """Update the parent of a child that holds nothing of Full any more; it may be the next victim."""
        parent = node.parent
        assert parent is not None
        tier = tier_component // self.components_count
        parent.full_children[tier] -= 1
        if parent.stamps[tier_component] < node.stamps[tier_component]:
            parent.stamps[tier_component] = node.stamps[tier_component]
        if not parent.full_children[tier]:
            self.queues.offer(parent, tier_component)

    def prune(self, node: Node) -> None:
        """Remove ``node`` and its ancestors as far up as nothing holds or pins them; shorten a dead tail."""
        while node.parent is not None and not node.children and not node.pinned():
            alive_end = node.full_end(ANYWHERE)
            if alive_end == node.end:
                return
            self.version += 1
            if alive_end > node.start:
                self._truncate(node, alive_end)
                return
            parent = node.parent
            del parent.children[node.first_page(self.page_size)]
            if parent.last_child is node:
                parent.last_child = None
            node.dead = True
            node.key, node.media = b"", NO_MEDIA  # who still knows the node should not keep its tokens in memory
            self.queues.forget(node)
            node = parent
        if node.parent is None and not node.children and self.roots.get(node.key) is node:
            self.version += 1
            del self.roots[node.key]

    def _truncate(self, node: Node, end: int) -> None:
        pages = end - node.start
        node.key = node.key[: pages * self.page_key_bytes]
        node.media = media_between(node.media, node.start, end)
        node.end = end
        for tier_component, held in enumerate(node.slots):
            if held is not None:
                node.slots[tier_component] = held[:pages]
        for component in range(1, self.components_count):
            node.refresh_tombstones(component)


def _split_edges(upper: Node, lower: Node, cut: int) -> None:
    """Hand each lock that begins inside the run to the part where it begins; it pins the lower part whole."""
    if lower.partial_locks is None:
        return
    above: dict[int, dict[int, int]] = {}
    below: dict[int, dict[int, int]] = {}
    for tier_component, begins in lower.partial_locks.items():
        for page, count in begins.items():
            if page <= cut:
                lower.locks[tier_component] += count
            if page != cut:
                (above if page < cut else below).setdefault(tier_component, {})[page] = count
    upper.partial_locks = above or None
    lower.partial_locks = below or None


def _split_arriving(upper: Node, lower: Node, offset: int) -> None:
    if lower.in_flight is None:
        return
    marks = lower.in_flight
    upper.in_flight = {each: pages[:offset].copy() for each, pages in marks.items() if pages[:offset].any()} or None
    lower.in_flight = {each: pages[offset:].copy() for each, pages in marks.items() if pages[offset:].any()} or None


def _split_slots(upper: Node, lower: Node, tier_component: int, offset: int) -> None:
    held = lower.slots[tier_component]
    if held is None:
        return
    above = held[:offset]
    whole = lower.held_count[tier_component] == len(held)
    live_above = offset if whole else int(np.count_nonzero(above >= 0))
    upper.held_count[tier_component] = live_above
    lower.held_count[tier_component] -= live_above
    # Copies: a view would keep the whole run's array alive for as long as either part lives.
    upper.slots[tier_component] = above.copy() if live_above else None
    lower.slots[tier_component] = held[offset:].copy() if lower.held_count[tier_component] else None


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of pages in the tree. Its keys follow from those of the run that it continues."""

    root: bytes
    """Name of the root, see ``Prompt.root``."""
    namespace: Namespace | None
    """Namespace that the root is of, as far as it is known."""
    parent: int | None
    """Number of the run that it continues, in the same list; None for a run that begins at a root."""
    tokens: bytes
    """Encoded, whole pages."""
    media: PageMedia
    """As in a prompt that begins with the run; before page 0 stands the last one above, which may reach into it."""
    pages_count: int
    slots: tuple[Slots | None, ...]
    """Slot of every page, by tier and component, -1 for a tombstone; None where nothing is held. Copies."""


def held_runs(tree: TreeState) -> list[HeldRun]:
    """Return the tree's runs, each after the one that it continues."""
    runs: list[HeldRun] = []
    numbers: dict[Node, int] = {}
    roots: dict[Node, Node] = {}
    last_media: dict[Node, PageMedia] = {}
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        root = roots.get(parent, parent)
        roots[node] = root
        numbers[node] = len(runs)
        above = last_media.get(parent, NO_MEDIA)
        last_media[node] = dict([max(node.media.items())]) if node.media else above
        media = shift_media({**above, **node.media}, node.start, tree.page_size)
        slots = tuple(None if held is None else held.copy() for held in node.slots)
        assert len(node.key) == node.pages * tree.page_size * TOKEN_BYTES
        runs.append(HeldRun(root.key, root.namespace, numbers.get(parent), node.key, media, node.pages, slots))
    return runs
