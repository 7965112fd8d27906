"""Transfers between tiers: pin both ends, mark the pages in flight, publish them or give their slots back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import Prompt
from unified_cache.core.pool import PageCopies, Slots, Tier, all_pages, no_slots, numbers_of
from unified_cache.core.slots import MapChange
from unified_cache.core.window import window
from unified_cache.tree.match import Match
from unified_cache.tree.node import Node
from unified_cache.tree.radix import Lock, RadixTree


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
