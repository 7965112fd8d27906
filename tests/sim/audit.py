"""The plain truth, after every operation: which page each slot's bytes are, and who holds the slots that are out.

``UnifiedCache.check`` proves what a cache can know by itself; it walks node by node, and runs every few operations.
Here a tree's pages are laid end to end, so that an invariant is one comparison with what the simulation keeps.

Slots of all components on all tiers stand in one array; each tier and component has a *base*.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.sim.memory import POOLS_MAX, ContentMemory, Contents, KeyNumbers, Rows
from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.page import PageKey, key_chain, media_mark
from unified_cache.core.pool import Slots
from unified_cache.core.window import window
from unified_cache.tree import RadixTree
from unified_cache.tree.node import Node

Numbers = npt.NDArray[np.int64]

KEYS_MAX = 1 << 32
"""Pages of one simulation."""

FREE, OUT, KEPT = range(3)
"""States of a slot, as the allocators write them down."""

_NONE: Numbers = np.empty(0, np.int64)
_NO_SLOTS: Slots = np.empty(0, np.int32)
_TOMBSTONES = [np.full(pages, -1, np.int32) for pages in range(256)]


class Claim(NamedTuple):
    """Pages that one request or one transfer holds, reads and brings; any of it may be nothing."""

    out: Numbers = _NONE
    """Slots that it has been given, each counted from the base of its tier and component."""
    rows: Rows = _NONE
    """Where on the device pages lie that it has written, and ``contents``, what they are."""
    contents: Contents = _NONE
    read_tier_components: Numbers = _NONE
    """Pages that it reads in the tree: tier and component, page number and slot of each."""
    read_numbers: Contents = _NONE
    read_slots: Slots = _NO_SLOTS
    marked: Numbers = _NONE
    """Pages that it brings from tier to tier, which the tree marks: ``tier_component * KEYS_MAX + page number``."""
    full: Slots = _NO_SLOTS
    """Full slots out, and ``peers``, the slots that they must lead to, 0 for none."""
    peers: Slots = _NO_SLOTS


class Picture:
    """A tree's pages at one moment."""

    def __init__(self, tier_components: int, keys_count: int) -> None:
        self.keys_count = keys_count
        self.slot_of: npt.NDArray[np.int32] = np.full((tier_components, keys_count), -1, np.int32)
        """By tier and component and page number: the slot that holds the page, -1 where none does."""
        self.nodes_count = 0
        self.device: tuple[Rows, Contents] = (_NONE, _NONE)
        """Rows of the device that are written, and what must stand there: pages of the tree and of requests."""
        self.host: tuple[Rows, Contents] = (_NONE, _NONE)
        self.mark: tuple[int, ...] = ()
        """Counters that move with any change of tree, slots or map."""

    def held(self, tier_component: int, numbers: Contents) -> npt.NDArray[np.bool_]:
        """Return a mask of the pages that a component holds on a tier."""
        known = np.zeros(len(numbers), np.bool_)
        old = numbers < self.keys_count
        known[old] = self.slot_of[tier_component, numbers[old]] >= 0
        return known


class Audit:
    """Looks at one cache again and again."""

    def __init__(self, cache: UnifiedCache, tree: RadixTree, memory: ContentMemory, numbers: KeyNumbers) -> None:
        self._cache = cache
        self._tree = tree
        self.memory = memory
        self.numbers = numbers
        self._components = len(cache.layout.components)
        self._tier_components = 2 * self._components
        self._allocators = [allocator for tier in cache._ledger._allocators for allocator in tier]
        capacities = [allocator.capacity + 1 for allocator in self._allocators]
        self.bases: Numbers = np.cumsum([0, *capacities])
        """By tier and component: where its slots begin in an array of all slots."""
        self._chains: dict[Node, tuple[bytes, Contents, PageKey]] = {}
        """Of each node: its tokens, the numbers of its pages, and the key of the last one."""
        self.picture = Picture(self._tier_components, 0)

    def look(self, claims: Sequence[Claim]) -> Picture:
        """Assert everything; return what was seen."""
        roots = self._tree.roots.values()
        assert all(root.children for root in roots), "a root without children is kept"
        nodes = [child for root in roots for child in root.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
        known = len(self.numbers.keys)
        numbers = self._number(nodes)
        assert len(self.numbers.keys) == known, "the tree holds a page that nobody has asked for"
        picture = Picture(self._tier_components, known)
        picture.nodes_count = len(nodes)
        if nodes:
            slots = self._slots(nodes)
            picture.slot_of[:, numbers] = slots
            held_count = np.count_nonzero(slots >= 0)
            assert np.count_nonzero(picture.slot_of >= 0) == held_count, "a page stands in the tree twice"
        self._check_marks(nodes, numbers, claims)
        self._check_contents(picture, claims)
        self._check_owners(picture, claims)
        self._check_map(picture, claims)
        picture.mark = self.mark()
        self.picture = picture
        return picture

    def _number(self, nodes: list[Node]) -> Contents:
        """Number all pages; what a node's pages are called is computed when it is new or was cut."""
        chains: dict[Node, tuple[bytes, Contents, PageKey]] = {}
        for node in nodes:
            key, parent, known = node.key, node.parent, self._chains.get(node)
            assert parent is not None
            if known is None or known[0] is not key:
                above = chains[parent][2] if parent in chains else parent.key
                page_size = self._tree.page_size
                marks = {page - node.start: media_mark(node.media, page, page_size) for page in node.media}
                keys = key_chain(above, key, page_size, marks)
                known = (key, self.numbers.of(keys), keys[-1])
            chains[node] = known
        self._chains = chains
        return _joined([numbers for _, numbers, _ in chains.values()])

    def _slots(self, nodes: list[Node]) -> Slots:
        """Return by tier and component the slots of all pages, -1 for a tombstone."""
        arrays = [
            _TOMBSTONES[node.pages] if slots is None else slots
            for of_nodes in zip(*(node.slots for node in nodes), strict=True)
            for node, slots in zip(nodes, of_nodes, strict=True)
        ]
        return np.concatenate(arrays).reshape(self._tier_components, -1)

    def _check_marks(self, nodes: list[Node], numbers: Contents, claims: Sequence[Claim]) -> None:
        """What the tree says will arrive is what transfers bring, each page by one."""
        found = [_NONE]
        first = 0
        for node in nodes:
            for tier_component, marks in (node.in_flight or {}).items():
                found.append(numbers[first : first + len(marks)][marks] + tier_component * KEYS_MAX)
            first += node.pages
        expected = _joined([claim.marked for claim in claims])
        assert _same(np.sort(np.concatenate(found)), np.sort(expected)), "marks differ from transfers"

    def _check_contents(self, picture: Picture, claims: Sequence[Claim]) -> None:
        """The bytes of every page held are that page's, on both tiers; what transfers read is where it was."""
        memory = self.memory
        device_rows, device_contents, host_rows, host_contents = [], [], [], []
        for number, component in enumerate(self._cache.layout.components):
            on_device, on_host = picture.slot_of[number], picture.slot_of[self._components + number]
            device_pages, host_pages = np.flatnonzero(on_device >= 0), np.flatnonzero(on_host >= 0)
            device_slots, host_slots = on_device[device_pages], on_host[host_pages]
            device_pages *= POOLS_MAX
            host_pages *= POOLS_MAX
            for pool in component.pools:
                if pool.page_bytes:
                    device_rows.append(memory.on_device(pool, device_slots))
                    device_contents.append(device_pages + memory.numbers[pool.name])
                    host_rows.append(memory.on_host(pool, host_slots))
                    host_contents.append(host_pages + memory.numbers[pool.name])
        for claim in claims:
            device_rows.append(claim.rows)
            device_contents.append(claim.contents)
        picture.device = _joined(device_rows), _joined(device_contents)
        picture.host = _joined(host_rows), _joined(host_contents)
        self._check_bytes(picture)
        reading = [claim for claim in claims if len(claim.read_tier_components)]
        read = _joined([claim.read_tier_components * picture.keys_count + claim.read_numbers for claim in reading])
        slots = _joined([claim.read_slots for claim in reading]).astype(np.int32)
        assert _same(picture.slot_of.reshape(-1)[read], slots), "a page that a transfer reads has moved or gone"

    def _check_bytes(self, picture: Picture) -> None:
        for stored, (rows, contents) in ((self.memory.device, picture.device), (self.memory.host, picture.host)):
            assert _same(stored[rows], contents), "wrong bytes in a page"

    def mark(self) -> tuple[int, ...]:
        """Return counters that move with any change of tree, slots or map."""
        tree, paired = self._tree, self._cache._ledger.paired
        free_counts = [allocator.free_count for allocator in self._allocators]
        kept_counts = [allocator.kept_count for allocator in self._allocators]
        version = paired.map.version if paired is not None else 0
        return (tree.counts.version, tree.queues.clock, tree.queues._sequence, version, *free_counts, *kept_counts)

    def look_at_bytes(self) -> Picture:
        """Assert that a job's slice has left every byte right that was, and all else alone: it never sees the tree.

        What stands where is as in the picture before, and is not walked again.
        """
        assert self.mark() == self.picture.mark, "a job has changed what only its owner may"
        self._check_bytes(self.picture)
        return self.picture

    def _check_owners(self, picture: Picture, claims: Sequence[Claim]) -> None:
        """Every slot is free, in the tree, or in one hand; in one of these only."""
        tier_components, pages = np.nonzero(picture.slot_of >= 0)
        kept = picture.slot_of[tier_components, pages] + self.bases[tier_components]
        out = _joined([claim.out for claim in claims])
        free = _joined(
            [
                allocator._free[: allocator.free_count] + base
                for allocator, base in zip(self._allocators, self.bases.tolist(), strict=False)
            ]
        )
        states = np.concatenate([allocator._states for allocator in self._allocators])
        times = np.bincount(np.concatenate((kept, out, free, self.bases[:-1])), minlength=len(states))
        assert len(times) == len(states), "a slot is out of range"
        assert (times == 1).all(), "a slot is in no hand, or in two"
        assert (states[kept] == KEPT).all(), "the tree holds a slot that is not its own"
        assert (states[out] == OUT).all(), "a slot is with somebody, and not out"
        assert (states[free] == FREE).all(), "a slot is free, and not"
        kept_counts = np.bincount(tier_components, minlength=self._tier_components).tolist()
        assert [allocator.kept_count for allocator in self._allocators] == kept_counts, "kept slots are miscounted"

    def _check_map(self, picture: Picture, claims: Sequence[Claim]) -> None:
        """Full slots lead to the peers of their pages, in the tree and with requests; all others lead nowhere."""
        ledger, mapped = self._cache._ledger, self._cache.layout.mapped
        if ledger.paired is None or mapped is None:
            return
        table = ledger.paired.map.table
        expected = np.zeros(len(table), np.int32)
        expected[-1] = -1
        full = picture.slot_of[0]
        held = full >= 0
        expected[full[held]] = np.maximum(picture.slot_of[mapped][held], 0)
        for claim in claims:
            expected[claim.full] = claim.peers
        assert _same(table, expected), "the map differs from the pages"


def longest(picture: Picture, numbers: Contents, spans: Sequence[int]) -> tuple[int, int]:
    """Return the longest prefix of which every component holds its window, on the device and on any tier.

    The definition itself, tried from the end.
    """
    on_device = [picture.held(component, numbers) for component in range(len(spans))]
    on_host = [picture.held(len(spans) + component, numbers) for component in range(len(spans))]
    anywhere = [one | other for one, other in zip(on_device, on_host, strict=True)]

    def end_of(held: list[list[bool]]) -> int:
        return next(
            end
            for end in range(len(numbers), -1, -1)
            if all(all(pages[window(end, span) : end]) for pages, span in zip(held, spans, strict=True))
        )

    return end_of([pages.tolist() for pages in on_device]), end_of([pages.tolist() for pages in anywhere])


def _joined(arrays: Sequence[Numbers | Slots]) -> Numbers:
    return np.concatenate((_NONE, *arrays))


def _same(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    """Compare two arrays of one type; several times as fast as ``np.array_equal``."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
