"""A run of pages in the radix tree, and what each component holds of it on each tier.

Flat lists have an entry for each component on each tier, at ``tier_component = tier * components_count + component``.
What a reader of the device alone, or of device and host together, sees is indexed by *view* in the same way.
``TreeCounts`` adds up what locks keep of all nodes.
"""

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import NO_MEDIA, TOKEN_BYTES, Namespace, PageMedia, media_between, media_mark
from unified_cache.core.pool import Slots, numbers_of
from unified_cache.core.window import last_end

PRIORITY_BIT = 64
"""Ranks hold the priority above this bit and the stamp below; a stamp counts touches and stays far smaller."""
UNNAMED = -(1 << 31)
"""Priority of pages that no request named one for: they go first."""


ON_DEVICE = 0
"""View of the device tier alone."""
ANYWHERE = 1
"""View of device and host together: a page counts when either holds it."""


class Protection:
    """Pages of one node that locks keep from eviction, as last counted (see ``TreeCounts``)."""

    __slots__ = ("children", "is_protected", "pages")

    def __init__(self, tier_components: int) -> None:
        self.pages = [0] * tier_components
        """Protected pages, by tier and component."""
        self.is_protected = [False, False]
        """True if a lock pins component 0 here or below, by tier."""
        self.children = [0, 0]
        """Number of children that are protected, by tier."""

    def of_upper_part(self) -> "Protection":
        """Return the protection of the upper part of a node that is split, the lower part of which keeps this one."""
        upper = Protection(len(self.pages))
        upper.is_protected = self.is_protected.copy()
        upper.children = [int(protected) for protected in self.is_protected]
        return upper


class Node:
    """One run of pages. Only the tree's modules touch it.

    Component 0 (Full) is prefix-closed on each tier: its live pages are the first ``held_count`` of the run.
    Every other component may have tombstones anywhere (-1 in its slots).
    """

    __slots__ = (
        "children",
        "dead",
        "end",
        "full_children",
        "held_count",
        "in_flight",
        "is_superseded",
        "key",
        "last_child",
        "last_tombstone",
        "locks",
        "media",
        "namespace",
        "parent",
        "partial_locks",
        "priorities",
        "protection",
        "queued",
        "slots",
        "stamps",
        "start",
    )

    def __init__(
        self,
        key: bytes,
        start: int,
        end: int,
        parent: "Node | None",
        components_count: int,
        media: PageMedia = NO_MEDIA,
    ) -> None:
        tier_components = 2 * components_count
        self.key = key
        """Tokens of the run, encoded."""
        self.media = media
        """Media behind them, by the page in which each begins; as much a part of the run's name as its tokens."""
        self.start = start
        self.end = end
        """Pages [start, end) of every prompt that passes here."""
        self.parent = parent
        self.namespace: Namespace | None = None
        """Of a root: the namespace of its prompts, as far as it is known."""
        self.children: dict[bytes, Node] = {}
        """Children, by their first page: its encoded tokens, and the media that begin in it."""
        self.last_child: Node | None = None
        """One of the children: where the last walk went on. One request walks its path several times."""
        self.slots: list[Slots | None] = [None] * tier_components
        """Slot of every page, by tier and component, -1 for a tombstone; None when nothing is held."""
        self.held_count = [0] * tier_components
        """Pages held, by tier and component."""
        self.locks = [0] * tier_components
        """Locks that pin the whole run, by tier and component: the reference count."""
        self.partial_locks: dict[int, dict[int, int]] | None = None
        """{page: count} of the locks that begin strictly inside the run, at that page, by tier and component."""
        self.stamps = [0] * tier_components
        """Clock of the last use, by tier and component. An evicted Full child passes its stamp to its parent."""
        self.priorities: dict[int, int] | None = None
        """By tier and component, the highest priority that requests for the pages have named; None if none has."""
        self.queued = 0
        """Bit ``tier_component`` is set while the node stands in that eviction queue."""
        self.in_flight: dict[int, npt.NDArray[np.bool_]] | None = None
        """Mask of the pages that a transfer is bringing, by tier and component."""
        self.last_tombstone = [end - start] * tier_components
        """One more than the offset of the last tombstone, by view and windowed component; 0 if there is none."""
        self.full_children = [0, 0]
        """Number of children that hold any page of component 0, by tier."""
        self.protection: Protection | None = None
        """Count of the pages that locks keep from eviction; None until a lock here or below is counted."""
        self.is_superseded = False
        """Whether the prompt that was resumed where the node ends has gone on, and so later ones resume below."""
        self.dead = False
        """Pruned: out of the tree for good."""

    @property
    def pages(self) -> int:
        """Length of the run."""
        return self.end - self.start

    def refresh_tombstones(self, component: int) -> None:
        """Recompute ``last_tombstone`` of a windowed component in both views, after its slots changed on a tier."""
        components = len(self.held_count) >> 1
        pages = self.end - self.start
        host = components + component
        if self.held_count[component] == pages:
            self.last_tombstone[component] = self.last_tombstone[host] = 0
            return
        on_device = self.slots[component]
        self.last_tombstone[component] = pages if on_device is None else last_end(on_device < 0)
        if self.held_count[host] == pages:
            self.last_tombstone[host] = 0
        else:
            anywhere = self.seen(ANYWHERE, component)
            self.last_tombstone[host] = pages if anywhere is None else last_end(anywhere < 0)

    def seen(self, view: int, component: int) -> Slots | None:
        """Return an array that is negative exactly at the tombstones of a component in a view; None if all are."""
        on_device = self.slots[component]
        if view == ON_DEVICE:
            return on_device
        on_host = self.slots[(len(self.held_count) >> 1) + component]
        if on_device is None or on_host is None:
            return on_host if on_device is None else on_device
        return np.maximum(on_device, on_host)

    def last_tombstone_before(self, view: int, component: int, end: int) -> int:
        """Return one more than the last absolute page before ``end`` that a component lacks; 0 if it lacks none."""
        tombstone = self.last_tombstone[view * (len(self.held_count) >> 1) + component]
        if not tombstone or self.start + tombstone <= end:
            return self.start + tombstone if tombstone else 0
        slots = self.seen(view, component)
        tombstone = end - self.start if slots is None else last_end(slots[: end - self.start] < 0)
        return self.start + tombstone if tombstone else 0

    def full_end(self, view: int) -> int:
        """Return the page where component 0 ends in a view: its live pages are [start, that)."""
        live = self.held_count[0]
        if view == ANYWHERE:
            on_host = self.held_count[len(self.held_count) >> 1]
            if on_host > live:
                live = on_host
        return self.start + live

    def first_pinned(self, tier_component: int) -> int:
        """Return the offset of the first page that locks pin in a component on a tier; the run's length if none is."""
        if self.locks[tier_component]:
            return 0
        edges = self.partial_locks
        if edges is None or tier_component not in edges:
            return self.end - self.start
        return min(edges[tier_component]) - self.start

    def end_of_oldest(self, tier_component: int, pages: int) -> int:
        """Return the offset behind the oldest ``pages`` that no lock pins, or behind all of them if there are fewer."""
        held = self.slots[tier_component]
        assert held is not None
        end = self.first_pinned(tier_component)
        victims = numbers_of(held[:end] >= 0)
        return int(victims[pages - 1]) + 1 if victims.size > pages else end

    def pinned(self) -> bool:
        """Return whether any lock covers any page of the run."""
        return self.partial_locks is not None or any(self.locks)

    def first_page(self, page_size: int) -> bytes:
        """Return the first page, encoded: what the parent knows this child by."""
        page = self.key[: page_size * TOKEN_BYTES]
        return page + media_mark(self.media, self.start, page_size) if self.media else page

    def split(self, offset: int, page_size: int) -> "Node":
        """Cut off the first ``offset`` pages; return the new node that has them and hangs above this one.

        Locks cover both parts, and both were last used when the whole was.
        """
        cut = self.start + offset
        parent = self.parent
        assert parent is not None
        assert self.start < cut < self.end
        cut_bytes = offset * page_size * TOKEN_BYTES
        components = len(self.held_count) >> 1
        upper = Node(
            self.key[:cut_bytes], self.start, cut, parent, components, media_between(self.media, self.start, cut)
        )
        parent.children[upper.first_page(page_size)] = upper
        if parent.last_child is self:
            parent.last_child = upper
        self.key = self.key[cut_bytes:]
        self.media = media_between(self.media, cut, self.end)
        self.start = cut
        self.parent = upper
        upper.children[self.first_page(page_size)] = self
        upper.locks = self.locks.copy()
        upper.stamps = self.stamps.copy()
        upper.priorities = None if self.priorities is None else self.priorities.copy()
        self._split_locks(upper)
        self._split_arriving(upper, offset)
        for tier_component in range(2 * components):
            self._split_slots(upper, tier_component, offset)
        upper.full_children = [int(self.held_count[0] > 0), int(self.held_count[components] > 0)]
        if self.protection is not None:
            upper.protection = self.protection.of_upper_part()
        for component in range(1, components):
            upper.refresh_tombstones(component)
            self.refresh_tombstones(component)
        return upper

    def _split_locks(self, upper: "Node") -> None:
        """Hand each lock that begins inside the run to the part where it begins; it pins the lower part whole."""
        if self.partial_locks is None:
            return
        above: dict[int, dict[int, int]] = {}
        below: dict[int, dict[int, int]] = {}
        for tier_component, begins in self.partial_locks.items():
            for page, count in begins.items():
                if page <= self.start:
                    self.locks[tier_component] += count
                if page != self.start:
                    (above if page < self.start else below).setdefault(tier_component, {})[page] = count
        upper.partial_locks = above or None
        self.partial_locks = below or None

    def _split_arriving(self, upper: "Node", offset: int) -> None:
        marks = self.in_flight
        if marks is None:
            return
        upper.in_flight = {each: pages[:offset].copy() for each, pages in marks.items() if pages[:offset].any()} or None
        self.in_flight = {each: pages[offset:].copy() for each, pages in marks.items() if pages[offset:].any()} or None

    def _split_slots(self, upper: "Node", tier_component: int, offset: int) -> None:
        held = self.slots[tier_component]
        if held is None:
            return
        above = held[:offset]
        whole = self.held_count[tier_component] == len(held)
        live_above = offset if whole else int(np.count_nonzero(above >= 0))
        upper.held_count[tier_component] = live_above
        self.held_count[tier_component] -= live_above
        # Copies: a view would keep the whole run's array alive for as long as either part lives.
        upper.slots[tier_component] = above.copy() if live_above else None
        self.slots[tier_component] = held[offset:].copy() if self.held_count[tier_component] else None

    def truncate(self, end: int, page_size: int) -> None:
        """Forget the pages from ``end`` on, of which no component holds any."""
        pages = end - self.start
        self.key = self.key[: pages * page_size * TOKEN_BYTES]
        self.media = media_between(self.media, self.start, end)
        self.end = end
        for tier_component, held in enumerate(self.slots):
            if held is not None:
                self.slots[tier_component] = held[:pages]
        for component in range(1, len(self.held_count) >> 1):
            self.refresh_tombstones(component)


CHANGED_NODES_MAX = 64
"""Nodes that may wait to be counted again: the cost of asking."""


class TreeCounts:
    """Changes of a tree, and protected pages by tier and component, so that an engine may ask for them in O(1).

    A page is *protected* when eviction could not give it back now, not even after pages that have to go before it.
    Every other page that the tree holds is *evictable*. A lock protects on its tier:

        Full            every page of the nodes it pins, and every page above them: Full goes from the tail
        any other       the pages from where the lock begins, and no page above

    So *free + evictable* pages can be allocated, of all components on all tiers at once, and neither a new leaf nor an
    eviction changes how many pages are protected. A lock only records the nodes it pins; they are counted when a caller
    asks, or when many are recorded.
    """

    __slots__ = ("_components_count", "_protected", "changed", "changes_count", "version")

    def __init__(self, components_count: int) -> None:
        self._components_count = components_count
        self._protected = [0] * (2 * components_count)
        """Sum of ``Protection.pages`` over all nodes, by tier and component."""
        self.changed: set[Node] = set()
        """Nodes whose locks have changed, or whose slots below locks, since they were counted; some may be dead."""
        self.version = 0
        """Counts changes of structure; a match made under another version is dead."""
        self.changes_count = 0
        """Counts changes of what nodes hold; beside an equal version it says that all is found where it was."""

    def protected(self, tier_component: int) -> int:
        """Return the pages of a component on a tier that locks keep from eviction."""
        if self.changed:
            self.count_changed()
        return self._protected[tier_component]

    def count_changed(self) -> None:
        """Count the nodes that have changed."""
        while self.changed:
            self._count(self.changed.pop())

    def _count(self, node: Node) -> None:
        """Count a node again, and the nodes above it as far up as its locks make a difference."""
        for tier, tier_component in enumerate((0, self._components_count)):
            at = node
            protection = self._recount(at, tier_component)
            while at.parent is not None:
                is_protected = at.locks[tier_component] > 0 or protection.children[tier] > 0
                if is_protected == protection.is_protected[tier]:
                    break
                protection.is_protected[tier] = is_protected
                at = at.parent
                if at.protection is None:
                    at.protection = Protection(len(self._protected))
                at.protection.children[tier] += 1 if is_protected else -1
                protection = self._recount(at, tier_component)
        for tier_component in range(len(self._protected)):
            if tier_component % self._components_count:
                self._recount(node, tier_component)

    def _recount(self, node: Node, tier_component: int) -> Protection:
        protection = node.protection
        if protection is None:
            protection = node.protection = Protection(len(self._protected))
        count = self.protected_in(node, tier_component)
        self._protected[tier_component] += count - protection.pages[tier_component]
        protection.pages[tier_component] = count
        return protection

    def protected_in(self, node: Node, tier_component: int) -> int:
        """Count the protected pages of one node on a tier and component; of Full, once its children are counted."""
        held_count = node.held_count[tier_component]
        if not held_count or node.locks[tier_component]:
            return held_count
        tier, component = divmod(tier_component, self._components_count)
        if not component:
            return held_count if node.protection is not None and node.protection.children[tier] else 0
        slots = node.slots[tier_component]
        first_pinned = node.first_pinned(tier_component)
        if slots is None or first_pinned == node.pages:
            return 0
        return int(np.count_nonzero(slots[first_pinned:] >= 0))
