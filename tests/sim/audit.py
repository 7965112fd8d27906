"""Every invariant, after every operation: what ``UnifiedCache.check`` says node by node, said over arrays at once.

The walk lays all nodes' pages end to end, so that an invariant is one comparison, and compares them with the plain
truth that the simulation keeps by itself: which page each slot's bytes are, and who holds the slots that are out.
``check`` itself runs now and then beside it; a test shows that each sees what the other sees.

Slots, pages and queues of all components on all tiers stand in one array each; each tier and component has a *base*.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.sim.memory import POOLS_MAX, ContentMemory, Contents, KeyNumbers, Rows
from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.page import PageKey, key_chain
from unified_cache.core.pool import Slots, Tier
from unified_cache.core.window import window
from unified_cache.tree import Lock, RadixTree
from unified_cache.tree.node import Node

Numbers = npt.NDArray[np.int64]

KEYS_MAX = 1 << 32
"""Pages of one simulation."""

FREE, OUT, KEPT = range(3)
"""States of a slot, as the allocators write them down."""

_NONE: Numbers = np.empty(0, np.int64)
_NO_SLOTS: Slots = np.empty(0, np.int32)
_TOMBSTONES = [np.full(pages, -1, np.int32) for pages in range(256)]

_columns = attrgetter(
    "start", "end", "held_count", "locks", "last_tombstone", "slots", "full_children", "queued", "partial_locks"
)
_more_columns = attrgetter("in_flight", "parent", "key", "dead")
_node = itemgetter(3)


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
        self.depth_of: dict[Lock, int] = {}
        """Nodes from the root to the end of each lock that is out."""
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
        self._lines: dict[int, list[int]] = {}
        """By ``Node.queued``: its bits."""
        self.picture = Picture(self._tier_components, 0)

    def look(self, claims: Sequence[Claim]) -> Picture:
        """Assert everything; return what was seen."""
        state = self._tree._state
        for seed, root in state.roots.items():
            assert (root.key, root.parent, root.pinned()) == (seed, None, False), "a root is not what it should be"
            assert root.children, "a root without children is kept"
        nodes = [child for root in state.roots.values() for child in root.children.values()]
        for node in nodes:
            if node.children:
                nodes.extend(node.children.values())
        known = len(self.numbers.keys)
        numbers = self._number(nodes, state.page_key_bytes)
        assert len(self.numbers.keys) == known, "the tree holds a page that nobody has asked for"
        picture = Picture(self._tier_components, known)
        picture.nodes_count = len(nodes)
        locks = self._tree.locks_out()
        if nodes:
            walk = _Walk(nodes, self._components, state.page_key_bytes)
            walk.check_live()
            walk.check_tombstones()
            self._check_locks(walk, locks)
            walk.check_place()
            self._check_queues(walk)
            picture.slot_of[:, numbers] = walk.slots
            assert np.count_nonzero(picture.slot_of >= 0) == walk.held_count, "a page stands in the tree twice"
            self._check_marks(walk, numbers, claims)
            before = self.picture.depth_of if self.picture.mark[:1] == (state.version,) else {}
            picture.depth_of = {lock: before.get(lock) or _depth(lock.node) for lock in locks}
        else:
            assert not any(lock.end for lock in locks), "locks on an empty tree"
        self._check_contents(picture, claims)
        self._check_owners(picture, claims)
        self._check_map(picture, claims)
        picture.mark = self.mark()
        self.picture = picture
        return picture

    def _number(self, nodes: list[Node], page_key_bytes: int) -> Contents:
        """Number all pages, and see that each node hangs where it should.

        What a node's pages are called is computed when it is new or was cut.
        """
        chains: dict[Node, tuple[bytes, Contents, PageKey]] = {}
        found = self._chains.get
        for node in nodes:
            key = node.key
            parent = node.parent
            assert parent is not None
            assert parent.children[key[:page_key_bytes]] is node, "a child stands under another page"
            favourite = node.last_child
            assert favourite is None or (favourite.parent is node and not favourite.dead), "a favourite is no child"
            known = found(node)
            if known is None or known[0] is not key:
                above = chains[parent][2] if parent in chains else parent.key
                keys = key_chain(above, key, self._tree.page_size)
                known = (key, self.numbers.of(keys), keys[-1])
            chains[node] = known
        self._chains = chains
        return np.concatenate([numbers for _, numbers, _ in chains.values()]) if chains else _NONE

    def _check_locks(self, walk: "_Walk", locks: Sequence[Lock]) -> None:
        """Compare the counts in the nodes with the locks that are out."""
        expected: dict[int, list[int]] = {}
        begins: dict[tuple[int, int, int], int] = {}
        index = walk.index
        for lock in locks:
            if not lock.end:
                continue
            assert lock.node in index, "a locked node died"
            assert lock.node.end == lock.end, "a lock's node ends elsewhere"
            first = int(lock.tier) * self._components
            for component, start in lock.held:
                tier_component = first + component
                node: Node | None = lock.node
                while node is not None and node.end > start:
                    number = index[node]
                    if node.start >= start:
                        if number not in expected:
                            expected[number] = [0] * self._tier_components
                        expected[number][tier_component] += 1
                    else:
                        place = (number, tier_component, start)
                        begins[place] = begins.get(place, 0) + 1
                    node = node.parent
        none = [0] * self._tier_components
        counts = [expected.get(number, none) for number in range(len(walk.nodes))]
        assert list(walk.locks) == counts, "the lock counts of nodes are not those of the locks that are out"
        walk.locked = expected
        found = {
            (number, tier_component, page): edge_count
            for number, edges in walk.partial_locks.items()
            for tier_component, pages in edges.items()
            for page, edge_count in pages.items()
        }
        assert found == begins, "locks that begin inside nodes are wrong"

    def _check_queues(self, walk: "_Walk") -> None:
        """What could be evicted stands in its queue, once, and stale entries are counted."""
        queues = self._tree._state.queues
        nodes_count, number_of = len(walk.nodes), walk.index.get
        standing: list[int] = []
        dead = [0] * self._tier_components
        for line, queue in enumerate(queues._queues):
            if not queue:
                continue
            found = list(map(number_of, map(_node, queue)))
            alive = [number + line * nodes_count for number in found if number is not None]
            dead[line % self._tier_components] += len(found) - len(alive)
            if len(alive) < len(found):
                assert len(set(map(_node, queue))) == len(queue), "a node stands twice in one queue"
            standing += alive
        said = [
            number + line * nodes_count for number, queued in enumerate(walk.queued) for line in self._lines_of(queued)
        ]
        assert sorted(standing) == sorted(said), "a node stands in other queues than it says, or twice in one"
        lines, numbers = np.divmod(np.array(said, np.int64), nodes_count)
        tier_components_said = np.bincount(
            lines % self._tier_components * nodes_count + numbers, minlength=self._tier_components * nodes_count
        )
        beyond_one = np.maximum(tier_components_said.reshape(self._tier_components, -1) - 1, 0).sum(axis=1)
        assert (beyond_one + dead).tolist() == queues._stale_counts, "stale entries are miscounted"
        evictable = walk.held_counts > 0
        evictable[0] &= walk.full_children[0] == 0
        evictable[self._components] &= walk.full_children[1] == 0
        locked = [
            (tier_component, number)
            for number, tier_components in walk.locked.items()
            for tier_component, lock_count in enumerate(tier_components)
            if lock_count
        ]
        if locked:
            evictable[tuple(zip(*locked, strict=True))] = False
        for number, edges in walk.partial_locks.items():
            for tier_component in edges:
                evictable[tier_component, number] = queues.evictable(walk.nodes[number], tier_component)
        # Policies, preferences and the predictor put a node into other queues than the first of its tier and component.
        is_by_tier_component = self._tree._state.adaptive is None
        for number, tier_component in np.argwhere(evictable.T).tolist():
            node = walk.nodes[number]
            line = (
                tier_component if is_by_tier_component and not node.history else queues.queue_id(node, tier_component)
            )
            assert node.queued >> line & 1, "an evictable node is not in the queue"

    def _lines_of(self, queued: int) -> list[int]:
        """Return the queues that a node says it stands in: the bits of ``Node.queued``, which many nodes share."""
        known = self._lines.get(queued)
        if known is None:
            known = self._lines[queued] = [line for line in range(queued.bit_length()) if queued >> line & 1]
        return known

    def _check_marks(self, walk: "_Walk", numbers: Contents, claims: Sequence[Claim]) -> None:
        """What the tree says will arrive is what transfers bring, each page by one."""
        found = [_NONE]
        for number, arriving in walk.in_flight.items():
            first = int(walk.offsets[number])
            for tier_component, marks in arriving.items():
                assert len(marks) == walk.nodes[number].pages, "marks of another length than the run"
                found.append(numbers[first : first + len(marks)][marks] + tier_component * KEYS_MAX)
        expected = _joined([claim.marked for claim in claims if len(claim.marked)])
        if len(expected) or len(found) > 1:
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
        state, paired = self._tree._state, self._cache._ledger.paired
        free_counts = [allocator.free_count for allocator in self._allocators]
        kept_counts = [allocator._kept_count for allocator in self._allocators]
        version = paired.map.version if paired is not None else 0
        return (state.version, state.queues.clock, state.queues._sequence, version, *free_counts, *kept_counts)

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
                allocator._free[: allocator._free_count] + base
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
        assert [allocator._kept_count for allocator in self._allocators] == kept_counts, "kept slots are miscounted"

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


class _Walk:
    """All nodes of a tree, parents first, as columns; arrays are by tier and component, then by node or page."""

    def __init__(self, nodes: list[Node], components: int, page_key_bytes: int) -> None:
        self.nodes = nodes
        self.components = components
        self.index = {node: number for number, node in enumerate(nodes)}
        (starts, ends, self._live, self.locks, self._last_tombstone, slots, self._full_children, self.queued, edges) = (
            zip(*map(_columns, nodes), strict=True)
        )
        arriving, parents, keys, dead = zip(*map(_more_columns, nodes), strict=True)
        assert True not in dead, "a dead node is in the tree"
        self.starts = np.array(starts)
        self.ends = np.array(ends)
        self.pages = self.ends - self.starts
        pages = self.pages.tolist()
        assert min(pages) > 0, "a node has no pages"
        assert list(map(len, keys)) == [count * page_key_bytes for count in pages], "key and pages differ in length"
        self.partial_locks = {number: begins for number, begins in enumerate(edges) if begins is not None}
        self.in_flight = {number: marks for number, marks in enumerate(arriving) if marks is not None}
        get = self.index.get
        self.parents = np.array([get(parent, -1) for parent in parents])
        self.below = self.parents >= 0
        self.offsets = np.cumsum(self.pages) - self.pages
        by_tier_component = list(zip(*slots, strict=True))
        tombstones = [_TOMBSTONES[count] for count in pages]
        arrays = [
            none if held is None else held
            for tier_component in by_tier_component
            for held, none in zip(tier_component, tombstones, strict=True)
        ]
        tier_components = 2 * components
        assert list(map(len, arrays)) == pages * tier_components, "slots have another length than the run"
        # Joined as bytes, which takes a third of the time; another type would have another length.
        self.slots: Slots = np.frombuffer(b"".join(arrays), np.int32).reshape(tier_components, -1)
        assert self.slots.shape[1] == sum(pages), "slots of another type"
        self.held = self.slots >= 0
        self.held_count = np.count_nonzero(self.held)
        self.held_counts = np.add.reduceat(self.held, self.offsets, axis=1, dtype=np.int64)
        """Counted, not read."""
        nothing = list(map(is_, chain.from_iterable(by_tier_component), repeat(None)))
        assert nothing == (self.held_counts == 0).reshape(-1).tolist(), "an empty array of slots is kept"
        self.position = np.arange(self.slots.shape[1]) - np.repeat(self.offsets, self.pages)
        self.full_children = np.empty((2, len(nodes)), np.int64)
        self.locked: dict[int, list[int]] = {}
        """By node: its lock counts, as far as there are any."""

    def check_place(self) -> None:
        assert _same(self.starts, np.where(self.below, self.ends[self.parents], 0)), "a child starts elsewhere"
        leaf = np.ones(len(self.nodes), np.bool_)
        leaf[self.parents[self.below]] = False
        leaf[list(self.locked)] = False
        leaf[list(self.partial_locks)] = False
        alive = np.maximum(self.held_counts[0], self.held_counts[self.components])
        assert (alive == self.pages)[leaf].all(), "a dead tail is kept"

    def check_live(self) -> None:
        held = self.held
        assert self.slots.all(), "the padding slot is held"
        assert self.held_counts.T.tolist() == list(self._live), "live is wrong"
        for tier in Tier:
            first = int(tier) * self.components
            full = self.held_counts[first]
            assert _same(held[first], self.position < np.repeat(full, self.pages)), "Full has a tombstone in a node"
            below = self.below & (full > 0)
            assert not (below & (full != self.pages)[self.parents]).any(), "Full has a tombstone above a node"
            self.full_children[int(tier)] = np.bincount(self.parents[below], minlength=len(self.nodes))
            if self.components > 1:
                assert not (held[first + 1 : first + self.components] & ~held[first]).any(), "a page without Full"
        assert self.full_children.T.tolist() == list(self._full_children), "full_children is wrong"

    def check_tombstones(self) -> None:
        if self.components == 1:
            return
        missing = np.logical_not(self.held)
        missing[self.components :] &= missing[: self.components]
        last = np.maximum.reduceat(np.where(missing, self.position + 1, 0), self.offsets, axis=1)
        windowed = [tier_component for tier_component in range(2 * self.components) if tier_component % self.components]
        found = list(map(itemgetter(*windowed), self._last_tombstone))
        assert list(zip(*last[windowed].tolist(), strict=True)) == found, "last_tombstone is wrong"


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


def _depth(node: Node) -> int:
    depth = 0
    at = node
    while at.parent is not None:
        depth += 1
        at = at.parent
    return depth
