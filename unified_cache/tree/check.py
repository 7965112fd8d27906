"""Prove from scratch that a tree is sound. Tests call it after every step."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from unified_cache.core.pool import Slots, Tier, no_slots
from unified_cache.tree.node import ANYWHERE, ON_DEVICE, Node
from unified_cache.tree.radix import Lock, RadixTree
from unified_cache.tree.transfer import Transfer, nodes_of_pages


def check(tree: RadixTree, locks: Iterable[Lock] | None = None, transfers: Iterable[Transfer] = ()) -> list[Slots]:
    """Assert every invariant of a tree; return the slots held by tier and component.

    The counts in the nodes must be exactly those of its locks, of which ``locks`` alone are out if given, and the pages
    marked as arriving those that ``transfers`` bring.
    """
    if locks is not None:
        assert {held for held in locks if not held.is_void} == set(tree.locks), "other locks are out"
    tier_components = 2 * tree.components_count
    held: list[list[Slots]] = [[] for _ in range(tier_components)]
    _check_roots(tree)
    _check_queues(tree)
    _check_counts(tree)
    for node in tree.nodes():
        _check_place(tree, node)
        for tier in Tier:
            _check_full(tree, node, tier)
        for tier_component in range(tier_components):
            _check_slots(tree, node, tier_component)
            slots = node.slots[tier_component]
            if slots is not None:
                held[tier_component].append(slots[slots >= 0])
        for component in range(1, tree.components_count):
            _check_tombstones(tree, node, component)
    _check_locks(tree)
    _check_marks(tree, transfers)
    return [_distinct(arrays) for arrays in held]


def _check_roots(tree: RadixTree) -> None:
    for seed, root in tree.roots.items():
        assert root.key == seed, "a root stands under another namespace"
        assert root.parent is None
        assert not root.pinned(), "a root is locked"


def _check_place(tree: RadixTree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    assert not node.dead, "a dead node is in the tree"
    assert parent.children[node.first_page(tree.page_size)] is node, "a child stands under another page"
    if parent.last_child is not None:
        assert parent.last_child.parent is parent, "a favourite is not a child"
        assert not parent.last_child.dead, "a favourite is dead"
    assert node.start == parent.end, "a child does not start where its parent ends"
    assert node.pages > 0, "a node has no pages"
    assert len(node.key) == node.pages * tree.page_key_bytes, "key and pages differ in length"
    assert all(node.start <= page < node.end for page in node.media), "a node has media of another's pages"
    if not node.children and not node.pinned():
        assert node.full_end(ANYWHERE) == node.end, "a dead tail is kept"
    for tier_component, marks in (node.in_flight or {}).items():
        assert len(marks) == node.pages, "arriving marks have another length than the run"
        assert marks.any(), "empty arriving marks are kept"
        assert node.first_pinned(tier_component) <= np.flatnonzero(marks)[0], "pages arrive where nothing pins them"


def _check_full(tree: RadixTree, node: Node, tier: Tier) -> None:
    tier_component = int(tier) * tree.components_count
    count = sum(child.held_count[tier_component] > 0 for child in node.children.values())
    assert node.full_children[tier] == count, "full_children is wrong"
    if not node.held_count[tier_component]:
        return
    slots = node.slots[tier_component]
    assert slots is not None
    assert (slots[: node.held_count[tier_component]] >= 0).all(), "Full has a tombstone in a node"
    parent = node.parent
    assert parent is not None
    is_held = parent.parent is None or parent.held_count[tier_component] == parent.pages
    assert is_held, "Full has a tombstone above a node"


def _check_slots(tree: RadixTree, node: Node, tier_component: int) -> None:
    slots = node.slots[tier_component]
    live = 0 if slots is None else int(np.count_nonzero(slots >= 0))
    assert node.held_count[tier_component] == live, "live is wrong"
    assert (slots is None) == (live == 0), "an empty array of slots is kept"
    assert node.locks[tier_component] >= 0, "a lock count is negative"
    if slots is None:
        return
    assert len(slots) == node.pages, "slots have another length than the run"
    assert (slots[slots >= 0] > 0).all(), "the padding slot is held"
    full = node.slots[tier_component - tier_component % tree.components_count]
    assert full is not None, "a component is held without Full"
    assert ((slots < 0) | (full >= 0)).all(), "a page is held without Full"


def _check_queues(tree: RadixTree) -> None:
    """See that what could be evicted is queued, and that no rank has fallen since it was queued."""
    queues = tree.queues
    queued: Counter[Node] = Counter()
    for tier_component in range(2 * tree.components_count):
        entries = list(queues.entries(tier_component))
        assert len({id(node) for node, _ in entries}) == len(entries), "a node stands twice in one queue"
        assert sum(node.dead for node, _ in entries) == queues.stale_count(tier_component), (
            "stale entries are miscounted"
        )
        for node, rank in entries:
            queued[node] |= 1 << tier_component
            assert node.dead or rank <= queues.rank(node, tier_component), "a queued node's rank has fallen"
    for node in tree.nodes():
        assert node.queued == queued[node], "a node says that it stands in other queues than it does"
        for tier_component in range(2 * tree.components_count):
            if queues.evictable(node, tier_component):
                assert node.queued >> tier_component & 1, "an evictable node is not in the queue"


def _check_counts(tree: RadixTree) -> None:
    """Count protected pages from slots and locks alone."""
    tier_components = 2 * tree.components_count
    counted = [tree.counts.protected(tier_component) for tier_component in range(tier_components)]
    protected: set[tuple[Node, int]] = set()
    for node in tree.nodes():
        for tier in Tier:
            at = node if node.locks[int(tier) * tree.components_count] else None
            while at is not None and (at, int(tier)) not in protected:
                protected.add((at, int(tier)))
                at = at.parent
    expected = [0] * tier_components
    for node in (*tree.roots.values(), *tree.nodes()):
        for tier in Tier:
            below = sum((child, int(tier)) in protected for child in node.children.values())
            counted_below = 0 if node.protection is None else node.protection.children[tier]
            assert counted_below == below, f"{counted_below} children protected, not {below}"
        for tier_component, slots in enumerate(node.slots):
            if slots is None:
                continue
            tier_number, component = divmod(tier_component, tree.components_count)
            is_held = slots >= 0
            if component:
                expected[tier_component] += int(np.count_nonzero(is_held[node.first_pinned(tier_component) :]))
            elif (node, tier_number) in protected:
                expected[tier_component] += int(np.count_nonzero(is_held))
    assert counted == expected, f"{counted} pages protected by tier_component, not {expected}"
    for node in tree.nodes():
        in_node = [tree.counts.protected_in(node, tier_component) for tier_component in range(tier_components)]
        counted_here = [0] * tier_components if node.protection is None else node.protection.pages
        assert counted_here == in_node, f"{counted_here} pages of a node protected, not {in_node}"


def _check_tombstones(tree: RadixTree, node: Node, component: int) -> None:
    for view in (ON_DEVICE, ANYWHERE):
        slots = node.seen(view, component)
        tombstones = np.arange(node.pages) if slots is None else np.flatnonzero(slots < 0)
        expected = int(tombstones[-1]) + 1 if tombstones.size else 0
        found = node.last_tombstone[view * tree.components_count + component]
        assert found == expected, f"last_tombstone is {found}, not {expected}"


def _check_marks(tree: RadixTree, transfers: Iterable[Transfer]) -> None:
    """Compare the pages marked as arriving with what transfers bring, each page by one; those at once mark nothing."""
    expected: dict[tuple[int, int], list[int]] = {}
    for transfer in transfers:
        for part in () if transfer.at_once else transfer.parts:
            tier_component = int(transfer.target.tier) * tree.components_count + part.component
            for node, first, last in nodes_of_pages(transfer.target.node, part.pages):
                offsets = (part.pages[first:last] - node.start).tolist()
                expected.setdefault((id(node), tier_component), []).extend(offsets)
    found = {
        (id(node), tier_component): np.flatnonzero(marks).tolist()
        for node in tree.nodes()
        for tier_component, marks in (node.in_flight or {}).items()
    }
    assert found == {place: sorted(pages) for place, pages in expected.items()}, "marks differ from transfers"


def _check_locks(tree: RadixTree) -> None:
    """Compare counts in nodes with the locks that are out, and see that nothing pinned could be evicted."""
    whole: Counter[tuple[int, int]] = Counter()
    begins: Counter[tuple[int, int, int]] = Counter()
    for lock in tree.locks:
        assert lock.tree is tree, "a lock of another tree is out"
        if not lock.end:
            continue
        assert lock.node.end == lock.end, "a lock's node ends elsewhere"
        assert not lock.node.dead, "a locked node died"
        for component, start in lock.held:
            tier_component = int(lock.tier) * tree.components_count + component
            node: Node | None = lock.node
            while node is not None and node.end > start:
                if node.start >= start:
                    whole[id(node), tier_component] += 1
                else:
                    begins[id(node), tier_component, start] += 1
                node = node.parent
    found_begins: Counter[tuple[int, int, int]] = Counter()
    for node in tree.nodes():
        for tier_component, count in enumerate(node.locks):
            found = whole[id(node), tier_component]
            assert count == found, f"{count} locks on a node, not {found}"
        for tier_component, pages in (node.partial_locks or {}).items():
            for page, count in pages.items():
                assert node.start < page < node.end, "a lock begins outside its node"
                found_begins[id(node), tier_component, page] = count
    assert found_begins == begins, "locks that begin inside nodes are wrong"


def _distinct(arrays: list[Slots]) -> Slots:
    slots = np.sort(np.concatenate(arrays)) if arrays else np.empty(0, np.int32)
    assert (np.diff(slots) > 0).all(), "a slot is held twice"
    return slots


def peers(tree: RadixTree, component: int) -> tuple[Slots, Slots]:
    """Return Full's device slots and, for each, that of ``component`` on that page, 0 for a tombstone."""
    full: list[Slots] = [no_slots(0)]
    peers: list[Slots] = [no_slots(0)]
    for node in tree.nodes():
        held = node.slots[0]
        if held is None:
            continue
        other = node.slots[component]
        live = held >= 0
        full.append(held[live])
        peers.append(np.zeros(len(full[-1]), np.int32) if other is None else np.maximum(other[live], 0))
    return np.concatenate(full), np.concatenate(peers)
