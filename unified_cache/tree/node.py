"""A run of pages in the radix tree, and what each component holds of it on each tier.

Everything per component and tier is kept in flat lists indexed by *lane*: ``tier * components_count + component``.
What a reader of the device alone, or of device and host together, sees is indexed by *view* in the same way.
"""

import numpy as np
import numpy.typing as npt

from unified_cache.page import TOKEN_BYTES
from unified_cache.page_digests import PageDigests
from unified_cache.pool import Slots
from unified_cache.tree.policy import History

__all__ = ["ANYWHERE", "ON_DEVICE", "Node", "Protection"]

ON_DEVICE = 0
"""View of the device tier alone."""
ANYWHERE = 1
"""View of device and host together: a page counts when either holds it."""


class Protection:
    """Pages of one node that locks keep from eviction, as last counted (see ``page_counts``)."""

    __slots__ = ("children", "is_protected", "pages")

    def __init__(self, lanes: int) -> None:
        self.pages = [0] * lanes
        """Protected pages, by lane."""
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

    Component 0 (Full) is prefix-closed on each tier: its live pages are the first ``held_count[lane]`` of the run.
    Every other component may have holes, which are tombstones, anywhere (-1 in its slots).
    """

    __slots__ = (
        "asked_end",
        "cell",
        "children",
        "dead",
        "digests",
        "end",
        "full_children",
        "held_count",
        "history",
        "in_flight",
        "key",
        "last_child",
        "last_hole",
        "locks",
        "moved_past",
        "parent",
        "partial_locks",
        "protection",
        "queued",
        "request",
        "slots",
        "stamps",
        "start",
    )

    def __init__(self, key: bytes, start: int, end: int, parent: "Node | None", components_count: int) -> None:
        lanes = 2 * components_count
        self.key = key
        """Tokens of the run, encoded."""
        self.start = start
        self.end = end
        """Pages [start, end) of every prompt that passes here."""
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        """Children, by their encoded first page."""
        self.last_child: Node | None = None
        """One of the children: where the last walk went on. One request walks its path several times."""
        self.slots: list[Slots | None] = [None] * lanes
        """Slot of every page, by lane, -1 for a tombstone; None when nothing is held."""
        self.held_count = [0] * lanes
        """Pages held, by lane."""
        self.locks = [0] * lanes
        """Locks that pin the whole run, by lane: the reference count."""
        self.partial_locks: dict[int, dict[int, int]] | None = None
        """{page: count} of the locks that begin strictly inside the run, at that page, by lane."""
        self.stamps = [0] * lanes
        """Clock of the last use, by lane. When a Full child is evicted, its stamp passes to its parent."""
        self.history: dict[int, History] | None = None
        """Priority and preferences, by lane; None where no lane has either."""
        self.queued = 0
        """Bit ``queue id`` is set while the node stands in that eviction queue."""
        self.in_flight: dict[int, npt.NDArray[np.bool_]] | None = None
        """Mask of the pages that a transfer is bringing, by lane."""
        self.last_hole = [end - start] * lanes
        """One more than the offset of the last hole, by view and windowed component; 0 if there is none."""
        self.full_children = [0, 0]
        """Number of children that hold any page of component 0, by tier."""
        self.protection: Protection | None = None
        """Count of the pages that locks keep from eviction; None until a lock here or below is counted."""
        self.dead = False
        """Pruned: out of the tree for good."""
        self.digests: PageDigests = b""
        """Digests of the pages; empty where nothing is to be remembered of them."""
        self.request = 0
        """Number of the last request that ended with the pages; see ``forecast``, as the two below."""
        self.cell = 0
        self.asked_end = 0
        """Pages that it asked for; of a prefix that sessions share, how many have begun below it."""
        self.moved_past = False
        """Whether the session has gone on below, so that hardly anybody resumes from windows here."""

    @property
    def pages(self) -> int:
        """Length of the run."""
        return self.end - self.start

    def refresh_holes(self, component: int) -> None:
        """Recompute ``last_hole`` of a windowed component in both views, after its slots changed on a tier."""
        components = len(self.held_count) >> 1
        pages = self.end - self.start
        host = components + component
        if self.held_count[component] == pages:
            self.last_hole[component] = self.last_hole[host] = 0
            return
        on_device = self.slots[component]
        self.last_hole[component] = pages if on_device is None else _last_hole(on_device)
        if self.held_count[host] == pages:
            self.last_hole[host] = 0
        else:
            anywhere = self.seen(ANYWHERE, component)
            self.last_hole[host] = pages if anywhere is None else _last_hole(anywhere)

    def seen(self, view: int, component: int) -> Slots | None:
        """Return an array that is negative exactly at the holes of a component in a view; None if all are."""
        on_device = self.slots[component]
        if view == ON_DEVICE:
            return on_device
        on_host = self.slots[(len(self.held_count) >> 1) + component]
        if on_device is None or on_host is None:
            return on_host if on_device is None else on_device
        return np.maximum(on_device, on_host)

    def last_hole_before(self, view: int, component: int, end: int) -> int:
        """Return one more than the last absolute page before ``end`` that a component lacks; 0 if it lacks none."""
        hole = self.last_hole[view * (len(self.held_count) >> 1) + component]
        if not hole or self.start + hole <= end:
            return self.start + hole if hole else 0
        slots = self.seen(view, component)
        hole = end - self.start if slots is None else _last_hole(slots[: end - self.start])
        return self.start + hole if hole else 0

    def full_end(self, view: int) -> int:
        """Return the page where component 0 ends in a view: its live pages are [start, that)."""
        live = self.held_count[0]
        if view == ANYWHERE:
            on_host = self.held_count[len(self.held_count) >> 1]
            if on_host > live:
                live = on_host
        return self.start + live

    def first_pinned(self, lane: int) -> int:
        """Return the offset of the first page that locks pin in a lane; the run's length if none is."""
        if self.locks[lane]:
            return 0
        edges = self.partial_locks
        if edges is None or lane not in edges:
            return self.end - self.start
        return min(edges[lane]) - self.start

    def pinned(self) -> bool:
        """Tell whether any lock on any lane covers any page of the run."""
        return self.partial_locks is not None or any(self.locks)

    def page_tokens(self, page_size: int) -> bytes:
        """Return the first page, encoded: what the parent knows this child by."""
        return self.key[: page_size * TOKEN_BYTES]


def _last_hole(slots: Slots) -> int:
    holes = np.flatnonzero(slots < 0)
    return int(holes[-1]) + 1 if holes.size else 0
