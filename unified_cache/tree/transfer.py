"""Transfers, victims and held runs of a tree: the part of it that who moves pages or follows them takes.

A transfer pins both ends, marks the pages in flight, and publishes them or gives their slots back. A caller that saves
pages to the host before they go takes victims of eviction one by one. Who follows a tree begins with its held runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import NO_MEDIA, Namespace, PageMedia, Prompt, shift_media
from unified_cache.core.pool import PageCopies, Slots, Tier, all_pages, no_slots, numbers_of
from unified_cache.core.slots import MapChange
from unified_cache.core.window import window
from unified_cache.tree.match import Match
from unified_cache.tree.node import Node
from unified_cache.tree.radix import Freed, Lock, RadixTree


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

    tree: RadixTree
    prompt: Prompt
    source: Lock
    target: Lock
    wanted: list[Wanted]
    at_once: bool
    """Whether it cannot wait for others: it leaves no page to them, and marks none, so both may bring one."""
    parts: tuple[PageCopies, ...] = field(default=())
    """Pages in flight: empty until ``expect``, and again after ``publish`` or ``release``."""

    @classmethod
    def begin(
        cls, tree: RadixTree, found: Match, end: int, source: Tier, target: Tier, *, at_once: bool = False
    ) -> "Transfer":
        """Pin what a resume after ``end`` pages of a match needs on both tiers, and say which pages ``target`` lacks.

        Both, since allocating evicts. Pages that another transfer is bringing are left to it, unless this one ends
        ``at_once``. The match is dead afterwards; errors as ``RadixTree.lock``.
        """
        source_lock = tree.lock(found, end, source)
        target_lock = tree.lock_node(source_lock.node, end, target)
        begun = cls(tree, found.prompt, source_lock, target_lock, [], at_once)
        for component in range(tree.components_count):
            wanted = begun._missing(component)
            if wanted is not None:
                begun.wanted.append(wanted)
        return begun

    def coming(self) -> tuple[Slots, ...]:
        """Return by component the target slots of pages [window(end), end); -1 for what another transfer brings."""
        slots = tuple(map(self.target.slots, range(self.tree.components_count)))
        for part in self.parts:
            given = slots[part.component]
            pages = part.pages - window(self.target.end, self.tree.spans[part.component])
            given[pages] = np.where(given[pages] < 0, part.target, given[pages])
        return slots

    def _missing(self, component: int) -> Wanted | None:
        """Collect the pages of a window that the source holds and the target does not, nor, unless at once, expects."""
        on_source = self.tree.tier_component(self.source.tier, component)
        on_target = self.tree.tier_component(self.target.tier, component)
        start = window(self.target.end, self.tree.spans[component])
        pages: list[npt.NDArray[np.int64]] = []
        slots: list[Slots] = []
        at: Node | None = self.source.node
        while at is not None and at.end > start:
            held = at.slots[on_source]
            if held is not None and at.held_count[on_target] < at.pages:
                lacking = held >= 0
                present = at.slots[on_target]
                if present is not None:
                    lacking &= present < 0
                if not self.at_once and at.in_flight is not None and on_target in at.in_flight:
                    lacking &= ~at.in_flight[on_target]
                if at.start < start:
                    lacking[: start - at.start] = False
                offsets = numbers_of(lacking)
                if offsets.size:
                    pages.append(offsets + at.start)
                    slots.append(held[offsets])
            at = at.parent
        return Wanted(component, np.concatenate(pages[::-1]), np.concatenate(slots[::-1])) if pages else None

    def expect(self, targets: Sequence[Slots]) -> None:
        """Take the slots that will be filled, one array per entry of ``wanted``, and mark their pages arriving."""
        self.parts = tuple(
            PageCopies(wanted.component, wanted.pages, wanted.source, slots)
            for wanted, slots in zip(self.wanted, targets, strict=True)
        )
        for part in self.parts:
            self._mark(part, nodes_of_pages(self.target.node, part.pages), arriving=True)

    def _mark(self, part: PageCopies, nodes: Sequence[tuple[Node, int, int]], *, arriving: bool) -> None:
        """Mark the pages of a part, which lie in these nodes, as on their way, or as so no longer."""
        if self.at_once:
            return
        tier_component = self.tree.tier_component(self.target.tier, part.component)
        for node, first, last in nodes:
            marks = node.in_flight if node.in_flight is not None else {}
            pages = marks.get(tier_component)
            if pages is None:
                pages = marks[tier_component] = np.zeros(node.pages, np.bool_)
            pages[part.pages[first:last] - node.start] = arriving
            if not arriving and not np.count_nonzero(pages):
                del marks[tier_component]
            node.in_flight = marks or None

    def publish(self) -> Published:
        """Publish what arrived, root first, and unpin the source; the target stays pinned until ``release``.

        A page filled meanwhile is a duplicate; a page whose prefix went missing has nothing to stand on. Both go back,
        as all pages do where the tree was cleared meanwhile.
        """
        taken: list[PageCopies] = []
        leftovers = [no_slots(0) for _ in self.tree.spans]
        map_changes: list[MapChange] = []
        for part in self.parts:
            nodes = nodes_of_pages(self.target.node, part.pages)
            self._mark(part, nodes, arriving=False)
            tier_component = self.tree.tier_component(self.target.tier, part.component)
            took = np.zeros(len(part), np.bool_)
            for node, first, last in () if self.target.is_void else nodes:
                offsets = part.pages[first:last] - node.start
                took[first:last] = self._publish(node, tier_component, offsets, part.target[first:last], map_changes)
            taken.append(part.where(took))
            leftovers[part.component] = part.target[~took]
        self.parts = ()
        self.tree.unlock(self.source)
        return Published(tuple(taken), leftovers, map_changes)

    def _publish(
        self,
        node: Node,
        tier_component: int,
        offsets: npt.NDArray[np.int64],
        slots: Slots,
        map_changes: list[MapChange],
    ) -> npt.NDArray[np.bool_]:
        """Fill the tombstones among ``offsets`` that have something to stand on; return which were filled."""
        component = tier_component % self.tree.components_count
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
        self.tree.fill(node, tier_component, offsets[tombstones], slots[tombstones], map_changes)
        self.tree.queues.offer(node, tier_component)
        return tombstones

    def release(self) -> list[Slots]:
        """End: unpin what is still pinned; return by component the slots of pages that were not published."""
        leftovers = [no_slots(0) for _ in self.tree.spans]
        for part in self.parts:
            self._mark(part, nodes_of_pages(self.target.node, part.pages), arriving=False)
            leftovers[part.component] = part.target
        self.parts = ()
        for held in (self.target, self.source):
            if not held.released:
                self.tree.unlock(held)
        return leftovers


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


class Victim(NamedTuple):
    """A node that eviction from a component on a tier takes next, until the tree's next change."""

    tree: RadixTree
    node: Node
    tier_component: int

    @classmethod
    def next(cls, tree: RadixTree, tier: Tier, component: int) -> "Victim | None":
        """Return what ``RadixTree.evict`` would take from next; None if locks pin everything."""
        tier_component = tree.tier_component(tier, component)
        node = tree.queues.next_victim(tier_component)
        return None if node is None else cls(tree, node, tier_component)

    def evict(self, pages: int) -> Freed:
        """Free up to ``pages`` slots."""
        freed = self.tree.nothing_freed()
        self.tree.evict_from(self.node, self.tier_component, pages, freed)
        return freed

    def would_lose(self, pages: int, *, with_superseded: bool) -> bool:
        """Return whether evicting up to ``pages`` takes any page that the other tier lacks.

        Superseded windows count ``with_superseded`` alone.
        """
        node, components = self.node, self.tree.components_count
        tier, component = divmod(self.tier_component, components)
        if component == 0:
            start, end = max(0, node.held_count[self.tier_component] - pages), node.pages
        else:
            start, end = 0, node.end_of_oldest(self.tier_component, pages)
        is_superseded = not with_superseded and node.is_superseded and len(node.children) == 1
        for dependant in range(component, 1 if is_superseded else components):
            held = node.slots[tier * components + dependant]
            if held is not None:
                lost = held[start:end] >= 0
                other = node.slots[(1 - tier) * components + dependant]
                if other is not None:
                    lost &= other[start:end] < 0
                if lost.any():
                    return True
        return False

    def prompt(self) -> Prompt:
        """Return a prompt that needs the pages of the victim.

        Where a window may reach from there into what is below, it follows the branch used last.
        """
        tier, component = divmod(self.tier_component, self.tree.components_count)
        full = self.tree.tier_component(Tier(tier), 0)
        lowest = self.node
        reach = lowest.end + (self.tree.spans[component] - 1 if component else 0)
        while lowest.end < reach:
            children = [child for child in lowest.children.values() if child.held_count[full]]
            if not children:
                break
            lowest = max(children, key=lambda child: child.stamps[self.tier_component])
        path = [lowest]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        root = path.pop()
        media = {page: items for part in path for page, items in part.media.items()}
        tokens = b"".join(part.key for part in reversed(path))
        return Prompt.below(root.key, tokens, self.tree.page_size, media, root.namespace)


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


def held_runs(tree: RadixTree) -> list[HeldRun]:
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
        assert len(node.key) == node.pages * tree.page_key_bytes
        runs.append(HeldRun(root.key, root.namespace, numbers.get(parent), node.key, media, node.pages, slots))
    return runs
