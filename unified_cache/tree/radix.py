"""The radix tree: which pages of which prefixes each tier holds, what pins them, and what goes first.

Pure bookkeeping over page slots: no torch, no I/O, no threads, one owner. Every method that takes something from
outside checks it before it changes anything.

A lock pins page intervals that a resume needs, per component, on one tier. It names pages, not nodes, so it survives
splits. It cuts a node only at its end; where a component's window begins inside a node, the node records {page: count}
and a split distributes the entries. Tombstones inside the interval count too, so a tombstone revived meanwhile cannot
unbalance it. Full is special in one respect only: while its last page is held on the tier, the ancestors cannot be
evicted before it, so the lock takes the last node alone. Where that page is not held, the lock takes the whole path.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.config import EvictionConfig
from unified_cache.core.errors import ConfigError, InputError, LockError, SlotError, StaleMatchError, check_kind
from unified_cache.core.page import NO_MEDIA, TOKEN_BYTES, PageMedia, Prompt, media_between
from unified_cache.core.pool import Component, Hits, Slots, Tier, no_slots, numbers_of
from unified_cache.core.slots import MapChange
from unified_cache.core.window import window
from unified_cache.tree.eviction_queues import EvictionQueues
from unified_cache.tree.match import Match, find, node_at, path_slots
from unified_cache.tree.node import ANYWHERE, CHANGED_NODES_MAX, UNNAMED, Node, TreeCounts

NO_HITS = Hits()


class Lock:
    """Receipt for pages pinned on one tier; give it back once."""

    __slots__ = ("end", "held", "hits", "is_void", "node", "released", "tier", "tree")

    def __init__(self, tree: "RadixTree", node: Node, end: int, tier: Tier, held: list[tuple[int, int]]) -> None:
        self.tree = tree
        self.node = node
        """The node that ends at ``end``."""
        self.end = end
        self.tier = tier
        self.held = held
        """(component, first page pinned): pages [that, end) are pinned for it."""
        self.released = False
        self.is_void = False
        """Whether the tree was cleared since: the lock pins nothing any more."""
        self.hits = NO_HITS
        """Pages that a request found, by the tier that they came from; set by ``UnifiedCache.lock``."""

    def pins(self, component: int) -> bool:
        """Return whether any page is pinned for a component."""
        return any(number == component for number, _ in self.held)

    def slots(self, component: int) -> Slots:
        """Return a component's slots of the pages ``[window(end), end)``; -1 for tombstones."""
        start = window(self.end, self.tree.spans[component])
        path: list[Node] = []
        node: Node | None = self.node if self.end else None
        while node is not None and node.end > start:
            path.append(node)
            node = node.parent
        return path_slots(path[::-1], self.tree.tier_component(self.tier, component), start, self.end)


class Inserted(NamedTuple):
    """Result of an insert."""

    node: Node
    """The node that holds the prompt's last page."""
    duplicates: list[Slots]
    """Slots that the tree did not take, by component, because it holds those pages already; the caller frees them."""
    map_changes: list[MapChange]
    """Changes of the page map: Full slots with a new peer, and duplicates, which have none any more."""

    def slot(self, tier: Tier, component: int, page: int) -> int:
        """Return the slot of a page of the prompt that was inserted just now; -1 for a tombstone."""
        node = self.node
        while node.start > page and node.parent is not None:
            node = node.parent
        slots = node.slots[int(tier) * len(self.duplicates) + component]
        return -1 if slots is None else int(slots[page - node.start])


class Freed(NamedTuple):
    """Slots that the tree no longer holds; the caller frees them."""

    slots: list[list[Slots]]
    """Arrays of slots, by tier and component."""
    unmapped: list[Slots]
    """Full slots to be left without a peer in the page map, before the slots are free."""


class RadixTree:
    """Prefixes of all namespaces, with slots per component and tier.

    ``components[0]`` (Full) carries all others. The tree never allocates or frees a slot: what it takes over in
    ``insert`` it gives back from ``evict`` or ``clear``. Its methods keep these true, and ``check`` proves it:

    * on each tier component 0 is prefix-closed, and every other component stands on component 0, page by page
    * ``held_count``, ``last_tombstone`` and ``full_children`` of nodes say what the slots say
    * ``counts`` say what locks and slots say, once the nodes that have changed are counted
    * every node that could be evicted from a component on a tier stands in its queue
    * a node without pages on any tier lives only while a lock covers it or children hang below
    """

    __slots__ = (
        "_eviction",
        "_latest",
        "components",
        "components_count",
        "counts",
        "locks",
        "mapped",
        "page_key_bytes",
        "page_size",
        "queues",
        "roots",
        "spans",
    )

    def __init__(
        self,
        components: Sequence[Component],
        page_size: int,
        eviction: EvictionConfig = EvictionConfig(),
    ) -> None:
        """Make an empty tree.

        Raises:
            ConfigError: ``eviction`` names policies for more components than there are.
        """
        if max(len(eviction.device), len(eviction.host)) > len(components):
            raise ConfigError(f"expected policies for {len(components)} components or fewer, found {eviction}")
        self.components = tuple(components)
        self.components_count = len(self.components)
        self.spans = tuple(component.span for component in self.components)
        """Pages before an end that a resume there needs, by component."""
        self.mapped = next((number for number, component in enumerate(self.components) if component.mapped), None)
        """The component whose device slots are reached through Full's; None if there is none."""
        self.page_size = page_size
        self.page_key_bytes = page_size * TOKEN_BYTES
        """Bytes of one encoded page in a node's key."""
        self._eviction = eviction
        self.queues = EvictionQueues(self.spans, eviction)
        self.counts = TreeCounts(self.components_count)
        self.roots: dict[bytes, Node] = {}
        """Roots by name, which is also their key; see ``Prompt.root``. A root has no pages and is never locked."""
        self.locks: dict[Lock, None] = {}
        """Locks that are out, those of transfers too."""
        self._latest: Match | None = None
        """Latest match, for a second look-up of the same prompt."""

    def tier_component(self, tier: Tier, component: int) -> int:
        """Return where flat lists have their entry for a component on a tier."""
        return int(tier) * self.components_count + component

    # ---- match -----------------------------------------------------------------------------------------------

    def match(self, prompt: Prompt, priority: int = UNNAMED) -> Match:
        """Find the longest restorable prefix and make it recent, on device and host. Structure stays as it is.

        A request that asks again gets the same match, as long as what the tree holds is the same. Where pages go by
        priority, that prefix has at least ``priority`` from now on; any number above UNNAMED.

        Raises:
            InputError: as ``check_prompt``, or the priority is no whole number.
        """
        found = self.peek(prompt)
        if type(priority) is not int:
            priority = _whole(priority)
        for node in reversed(found.path):
            # Not the node that the match ends inside of, most of which may have nothing to do with this prompt.
            if node.end <= found.host_end:
                self.queues.touch(node, priority)
                break
        return found

    def peek(self, prompt: Prompt) -> Match:
        """Find what ``match`` finds, and change nothing at all: for moving what nobody asked for."""
        latest = self._latest
        if latest is None or latest.prompt is not prompt or not latest.is_as_found():
            self.check_prompt(prompt)
            root = self.roots.get(prompt.root)
            path, end = ([], 0) if root is None else find(root, prompt, self.page_key_bytes)
            latest = self._latest = Match.of(prompt, path, end, end, self.spans, self.counts)
        return latest

    def prompts_alike(self, prompt: Prompt) -> list[tuple[Prompt, int]]:
        """Return the same tokens below other roots, with the pages that the tree has of them, which may be none."""
        found: list[tuple[Prompt, int]] = []
        for name, root in self.roots.items():
            alike = None if name == prompt.root else prompt.below_root(name, root.namespace)
            if alike is not None:
                found.append((alike, find(root, alike, self.page_key_bytes)[1]))
        return found

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise InputError for what is no prompt, or was cut into pages of another size."""
        check_kind(prompt, Prompt, "a prompt, such as UnifiedCache.prompt makes of token ids")
        if prompt.page_size != self.page_size:
            raise InputError(f"expected a prompt of {self.page_size}-token pages, found {prompt.page_size}")

    # ---- lock ------------------------------------------------------------------------------------------------

    def lock(self, found: Match, end: int, tier: Tier) -> Lock:
        """Pin what a resume after ``end`` pages of a match needs on ``tier``. The match is dead afterwards.

        Raises:
            StaleMatchError: the tree has changed since; nothing was pinned.
            InputError: the tree does not hold ``end`` pages of that prompt.
        """
        if found.counts is not self.counts:
            raise StaleMatchError("the match is another tree's, or the tree was cleared; match again")
        found.check_alive()
        if not 0 <= end <= found.tree_end:
            raise InputError(f"end must be in [0, {found.tree_end}], found {end}")
        return self.lock_node(node_at(found.path, end) if end else self._root(found.prompt), end, tier)

    def lock_node(self, node: Node, end: int, tier: Tier) -> Lock:
        """Pin ``[window(end), end)`` of every component on ``tier``; ``end`` lies in ``node``, or is 0 to pin nothing.

        Splits ``node`` if ``end`` is inside it. The pages need not be held: a lock also keeps the place of pages
        that a transfer will bring. As inc_lock_ref in SGLang 0.5.23.
        """
        held: list[tuple[int, int]] = []
        if end:
            assert not node.dead
            if end < node.end:
                node = self.split(node, end - node.start)
            tier_component = int(tier) * self.components_count
            full_start = node.start if node.held_count[tier_component] == node.end - node.start else 0
            held.append((0, full_start))
            self._pin(node, tier_component, full_start)
            for component in range(1, self.components_count):
                start = window(end, self.spans[component])
                held.append((component, start))
                self._pin(node, tier_component + component, start)
            if len(self.counts.changed) > CHANGED_NODES_MAX:
                self.counts.count_changed()
        lock = Lock(self, node, end, tier, held)
        self.locks[lock] = None
        return lock

    def check_lock(self, held: Lock) -> None:
        """Raise LockError for a lock that was released already, or is another tree's."""
        check_kind(held, Lock, "a lock", LockError)
        if held.released:
            raise LockError(f"the lock on {held.end} pages was released already")
        if held.tree is not self:
            raise LockError("the lock belongs to another tree")

    def release_windows(self, held: Lock) -> None:
        """Unpin all components of a lock but Full, on which they stand, until ``unlock``; errors as ``check_lock``."""
        self.check_lock(held)
        self._unpin_all(held, held.held[1:])
        held.held = held.held[:1]

    def unlock(self, held: Lock) -> None:
        """Take a lock back, once; errors as ``check_lock``. One from before ``clear`` is void: that changes nothing."""
        self.check_lock(held)
        self._unpin_all(held, held.held)
        held.held = []
        held.released = True
        if not held.is_void:
            del self.locks[held]
            if held.end and not held.node.children:
                self._prune(held.node)

    def _pin(self, node: Node, tier_component: int, start: int) -> None:
        """Count one more lock on pages from ``start`` to the end of ``node``."""
        changed = self.counts.changed
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

    def _unpin_all(self, lock: Lock, held: list[tuple[int, int]]) -> None:
        for component, start in () if lock.is_void else held:
            self._unpin(lock.node, self.tier_component(lock.tier, component), start)

    def _unpin(self, node: Node, tier_component: int, start: int) -> None:
        """Count one lock less on pages from ``start`` to the end of ``node``; offer what that frees."""
        changed = self.counts.changed
        at = node
        while at.start >= start and at.parent is not None:
            at.locks[tier_component] -= 1
            assert at.locks[tier_component] >= 0, "unlocked more often than locked"
            if not at.locks[tier_component]:
                changed.add(at)
                self.queues.offer(at, tier_component)
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
            self.queues.offer(at, tier_component)

    def supersede(self, held: Lock, end: int) -> None:
        """Record that a prompt has gone on from what ``held`` pinned to ``end``; if it alone has, its windows go first.

        Later requests resume at ``end`` then, see ``EvictionQueues.supersede``.
        """
        if held.end and not held.is_void and len(held.node.children) == 1:
            held.node.is_superseded = True
            self.queues.supersede(held.node, end)

    def protected_pages(self, tier: Tier, component: int) -> int:
        """Return the pages held that ``evict`` would not give back if asked for all. O(1), see ``TreeCounts``."""
        return self.counts.protected(tier * self.components_count + component)

    # ---- insert ----------------------------------------------------------------------------------------------

    def insert(
        self,
        prompt: Prompt,
        start: int,
        slots: Sequence[Slots],
        tier: Tier,
        priority: int = UNNAMED,
    ) -> Inserted:
        """Put pages [start, prompt.pages_count) on ``tier``; ``slots[c]`` has one entry per page, -1 where not given.

        Pages before ``start`` must be held by component 0 on that tier, and it needs a slot for every page that it
        does not hold there. ``slots`` are copied. A page that the tree holds already is a duplicate; a tombstone is
        filled; new pages become a new leaf, which is split where the longest window before its end begins. Makes the
        prompt recent, and nothing else; where pages go by priority, they get at least ``priority``.

        Raises:
            InputError: as ``match``, or lengths do not fit, or component 0 is not held up to ``start``.
            SlotError: component 0 lacks a slot for a page. Nothing was changed, in all these cases.
        """
        self.check_prompt(prompt)
        if type(priority) is not int:
            priority = _whole(priority)
        total = prompt.pages_count
        root = self._root(prompt)
        path, tree_end = find(root, prompt, self.page_key_bytes)
        self._check_input((path, tree_end), total, start, slots, tier)
        if path and tree_end < path[-1].end:
            path[-1] = self.split(path[-1], tree_end - path[-1].start)
        runs: list[list[Slots]] = [[] for _ in self.spans]
        map_changes: list[MapChange] = []
        for node in path:
            if node.end > start:
                self._merge(node, start, slots, tier, runs, map_changes)
        node = path[-1] if path else root
        if tree_end < total:
            rest = [given[tree_end - start :] for given in slots]
            node = self._add_leaves(node, prompt, rest, tier, map_changes)
        self.queues.touch(node, priority)
        at: Node | None = node
        while at is not None and at.end > start:
            self.queues.offer_all(at)
            at = at.parent
        duplicates = [np.concatenate(arrays) if arrays else no_slots(0) for arrays in runs]
        if self.mapped is not None and tier is Tier.DEVICE and duplicates[0].size:
            # What the tree kept of these pages is reached through its own Full slots.
            map_changes.append(MapChange(duplicates[0], None))
        return Inserted(node, duplicates, map_changes)

    def _check_input(
        self, found: tuple[list[Node], int], total: int, start: int, slots: Sequence[Slots], tier: Tier
    ) -> None:
        """Refuse what would break the tree, before anything is changed."""
        path, tree_end = found
        count = total - start
        if start < 0 or count < 0:
            raise InputError(f"start must be in [0, {total}], found {start}")
        lengths = list(map(len, slots))
        if lengths != [count] * self.components_count:
            raise InputError(f"expected {count} slots for each of {self.components_count} components, found {lengths}")
        lowest = int(slots[0][slots[0].argmin()]) if count else 1
        if not start and lowest > 0:
            return
        held_end = 0
        for node in reversed(path):
            if live := node.held_count[int(tier) * self.components_count]:
                held_end = min(node.start + live, tree_end)
                break
        if held_end < start:
            raise InputError(f"pages before {start} are not held on {tier.name}; nothing was inserted")
        if lowest < 1 and (slots[0][held_end - start :] < 1).any():
            raise SlotError(f"the first component needs a slot for every page that it does not hold, found {lowest}")

    def _merge(
        self,
        node: Node,
        start: int,
        slots: Sequence[Slots],
        tier: Tier,
        duplicates: list[list[Slots]],
        map_changes: list[MapChange],
    ) -> None:
        """Fill the tombstones of an existing node; what it holds already is a duplicate."""
        first = max(start, node.start)
        offset = first - node.start
        for component, given in enumerate(slots):
            tier_component = self.tier_component(tier, component)
            incoming = given[first - start : node.end - start]
            given_offsets = numbers_of(incoming >= 0)
            held = node.slots[tier_component]
            if held is None:
                tombstones = given_offsets
            else:
                is_tombstone = held[offset + given_offsets] < 0
                tombstones = given_offsets[is_tombstone]
                duplicate = incoming[given_offsets[~is_tombstone]]
                if duplicate.size:
                    duplicates[component].append(duplicate)
            self.fill(node, tier_component, tombstones + offset, incoming[tombstones], map_changes)

    def _add_leaves(
        self, parent: Node, prompt: Prompt, slots: Sequence[Slots], tier: Tier, map_changes: list[MapChange]
    ) -> Node:
        """Hang the pages after ``parent`` below it: one leaf, in parts where a component's last window begins."""
        start, total = parent.end, prompt.pages_count
        bounds = {start, total}
        for component in range(1, self.components_count):
            cut = window(total, self.spans[component])
            if cut > start:
                above = slots[component][: cut - start]
                if above[above.argmax()] >= 0:
                    bounds.add(cut)
        node = parent
        for first, last in pairwise(sorted(bounds)):
            tokens = prompt.tokens[first * self.page_key_bytes : last * self.page_key_bytes]
            node = self._add_child(node, tokens, first, media_between(prompt.media, first, last))
            for component, given in enumerate(slots):
                part = given[first - start : last - start]
                whole = component == 0 or part[part.argmin()] >= 0
                held_count = len(part) if whole else int(np.count_nonzero(part >= 0))
                if held_count:
                    self._adopt(node, tier * self.components_count + component, part, held_count, map_changes)
        return node

    # ---- evict -----------------------------------------------------------------------------------------------

    def evict(self, tier: Tier, component: int, pages: int) -> Freed:
        """Free up to ``pages`` slots of a component on a tier, in the order of its policy, and what stands on them.

        Full goes from the tail of a leaf-most run, so that it stays prefix-closed; a windowed component from anywhere,
        oldest page first, leaving tombstones. Components after it stand on it: they lose the same pages. A page that
        the other tier holds as well is thereby demoted; a node that holds nothing any more leaves the tree. Never a
        page that a lock pins. O(log n) per victim. Frees fewer pages only when locks pin everything else.
        """
        freed = self.nothing_freed()
        tier_component = self.tier_component(tier, component)
        got = 0
        while got < pages:
            node = self.queues.next_victim(tier_component)
            if node is None:
                break
            got += self.evict_from(node, tier_component, pages - got, freed)
        return freed

    def evict_from(self, node: Node, tier_component: int, pages: int, freed: Freed) -> int:
        """Free up to ``pages`` slots of the next victim of a component on a tier; return how many."""
        pages = self.queues.pages_at_once(node, tier_component, pages)
        tier, component = divmod(tier_component, self.components_count)
        if component == 0:
            end = node.held_count[tier_component]
            start = max(0, end - pages)
        else:
            start, end = 0, node.end_of_oldest(tier_component, pages)
        for dependant in range((tier + 1) * self.components_count - 1, tier_component, -1):
            self._drop(node, dependant, start, min(end, node.first_pinned(dependant)), freed)
        got = self._drop(node, tier_component, start, end, freed)
        if not node.children:
            self._prune(node)
        return got

    def nothing_freed(self) -> Freed:
        """Return where the slots that are freed are put."""
        return Freed([[] for _ in range(2 * self.components_count)], [])

    def clear(self) -> Freed:
        """Forget everything, pinned or not; return every slot held. Locks, transfers and matches become void."""
        freed = self.nothing_freed()
        for node in self.nodes():
            for tier_component, held in enumerate(node.slots):
                if held is not None:
                    freed.slots[tier_component].append(held[held >= 0])
        if self.mapped is not None:
            freed.unmapped.extend(freed.slots[0])
        for lock in self.locks:
            lock.is_void = True
        self.locks.clear()
        self.roots.clear()
        self.queues = EvictionQueues(self.spans, self._eviction)
        self.counts.version += 1  # what was matched before is dead
        self.counts = TreeCounts(self.components_count)
        return freed

    # ---- structure and slots -----------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents before children."""
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node

    def _root(self, prompt: Prompt) -> Node:
        """Return the root that a prompt hangs below; a new one counts as soon as it has a child."""
        root = self.roots.get(prompt.root)
        if root is None:
            root = Node(prompt.root, 0, 0, None, self.components_count)
        if root.namespace is None:
            root.namespace = prompt.namespace
        return root

    def _add_child(self, parent: Node, key: bytes, start: int, media: PageMedia = NO_MEDIA) -> Node:
        """Hang a new empty node below ``parent``."""
        self.counts.version += 1
        if parent.parent is None:
            self.roots[parent.key] = parent
        child = Node(key, start, start + len(key) // self.page_key_bytes, parent, self.components_count, media)
        parent.children[child.first_page(self.page_size)] = child
        return child

    def split(self, node: Node, offset: int) -> Node:
        """Cut ``node`` after ``offset`` pages; return the new upper part. Not an access; locks cover both parts."""
        self.counts.version += 1
        upper = node.split(offset, self.page_size)
        self.counts.changed |= {upper, node}
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
        self.counts.changes_count += 1
        tier, component = divmod(tier_component, self.components_count)
        held = node.slots[tier_component]
        if held is None:
            held = node.slots[tier_component] = no_slots(node.pages)
        if component == 0 and not node.held_count[tier_component]:
            assert node.parent is not None
            node.parent.full_children[tier] += 1
        held[offsets] = slots
        node.held_count[tier_component] += len(offsets)
        self.counts.changed.add(node)
        if component:
            node.refresh_tombstones(component)
        if tier_component == self.mapped:
            full = node.slots[0]
            assert full is not None
            map_changes.append(MapChange(full[offsets], slots))

    def _adopt(
        self, node: Node, tier_component: int, slots: Slots, held_count: int, map_changes: list[MapChange]
    ) -> None:
        """Copy the slots of a new node's run, ``held_count`` of them held; append what that changes in the page map."""
        self.counts.changes_count += 1
        tier, component = divmod(tier_component, self.components_count)
        node.slots[tier_component] = np.array(slots, np.int32)
        node.held_count[tier_component] = held_count
        if component:
            node.refresh_tombstones(component)
            full = node.slots[0]
            if tier_component == self.mapped and full is not None:
                map_changes.append(MapChange(full[slots >= 0], slots[slots >= 0]))
        else:
            assert node.parent is not None
            node.parent.full_children[tier] += 1

    def _drop(self, node: Node, tier_component: int, start: int, end: int, freed: Freed) -> int:
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
        self.counts.changes_count += 1
        if tier_component == self.mapped:
            full = node.slots[0]
            assert full is not None
            freed.unmapped.append(full[start:end].copy() if whole else full[start:end][segment >= 0])
        component = tier_component % self.components_count
        if count == node.held_count[tier_component]:
            node.slots[tier_component] = None
            node.held_count[tier_component] = 0
            if component == 0:
                self._full_child_left(node, tier_component)
        else:
            segment[:] = -1
            node.held_count[tier_component] -= count
        if component:
            node.refresh_tombstones(component)
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

    def _prune(self, node: Node) -> None:
        """Remove ``node`` and its ancestors as far up as nothing holds or pins them; shorten a dead tail."""
        while node.parent is not None and not node.children and not node.pinned():
            alive_end = node.full_end(ANYWHERE)
            if alive_end == node.end:
                return
            self.counts.version += 1
            if alive_end > node.start:
                node.truncate(alive_end, self.page_size)
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
            self.counts.version += 1
            del self.roots[node.key]


def _whole(priority: int) -> int:
    """Return a priority as an int of any size: one of numpy's would overflow in a rank."""
    try:
        return index(priority)
    except TypeError as error:
        raise InputError(f"a priority must be a whole number, found {priority!r}") from error
