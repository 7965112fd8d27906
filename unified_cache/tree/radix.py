"""The radix tree: which pages of which prefixes each tier holds, what pins them, and what goes first.

Pure bookkeeping over page slots: no torch, no I/O, no threads, one owner. Every method that takes something from
outside checks it before it changes anything.
"""

from collections.abc import Iterable, Sequence
from operator import index

import numpy as np

from unified_cache.core.config import EvictionConfig
from unified_cache.core.errors import ConfigError, InputError, LockError, StaleMatchError, check_kind
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, Pages, Slots, Tier
from unified_cache.core.window import window
from unified_cache.tree import evict as eviction
from unified_cache.tree import lock as locks
from unified_cache.tree.check import check
from unified_cache.tree.eviction_queues import EvictionQueues
from unified_cache.tree.lock import (
    Lock,
    Published,
    Transfer,
    evictable_mask,
    fitting_end,
    lock,
    release_windows,
    unlock,
)
from unified_cache.tree.match import Inserted, Match, find, held_pages, insert, make_recent, node_at, path_slots, peek
from unified_cache.tree.node import UNNAMED, Node
from unified_cache.tree.state import Freed, HeldRun, TreeState, held_runs

__all__ = ["RadixTree"]


class RadixTree:
    """Prefixes of all namespaces, with slots per component and tier.

    ``components[0]`` (Full) carries all others. The tree never allocates or frees a slot: what it takes over in
    ``insert`` it gives back from ``evict`` or ``clear``.
    """

    __slots__ = (
        "_eviction",
        "_latest",
        "_lineage",
        "_locks",
        "_state",
        "_transfers",
        "components",
        "page_size",
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
        self.page_size = page_size
        self._eviction = eviction
        self._lineage = object()
        self._state = self._empty()
        self._latest: Match | None = None
        """Latest match, for a second look-up of the same prompt."""
        self._locks: dict[Lock, None] = {}
        self._transfers: dict[Transfer, None] = {}
        """Transfers in flight. ``check`` counts pins from scratch from them and from ``_locks``."""

    def _empty(self) -> TreeState:
        spans = tuple(component.span for component in self.components)
        mapped = next((number for number, component in enumerate(self.components) if component.mapped), None)
        queues = EvictionQueues(spans, self._eviction)
        return TreeState(spans, self.page_size, mapped, self._lineage, queues)

    def match(self, prompt: Prompt, priority: int = UNNAMED) -> Match:
        """Find the longest restorable prefix; make it recent. Structure stays as it is.

        A request that asks again gets the same match, as long as what the tree holds is the same. Where pages go by
        priority, that prefix has at least ``priority`` from now on; any number above UNNAMED.

        Raises:
            InputError: as ``check_prompt``, or the priority is no whole number.
        """
        found = self.peek(prompt)
        make_recent(found, _whole(priority))
        return found

    def peek(self, prompt: Prompt) -> Match:
        """Find what ``match`` finds, and change nothing at all: for moving what nobody asked for."""
        latest = self._latest
        if latest is None or latest.prompt is not prompt or latest.tree is not self._state or not latest.is_as_found():
            self.check_prompt(prompt)
            latest = self._latest = peek(self._state, prompt)
        return latest

    def slots(self, found: Match, tier: Tier, component: int, start: int, end: int) -> Slots:
        """Return the slots of pages [start, end) of a match, a new array; -1 for tombstones."""
        self._check_alive(found)
        return path_slots(found.path, self._tier_component(tier, component), start, min(end, found.tree_end))

    def held_pages(self, found: Match, tier: Tier, component: int) -> Pages:
        """Return a mask of the pages of a match's prompt that a component holds on a tier, a new array."""
        self._check_alive(found)
        return held_pages(found.path, self._tier_component(tier, component), found.tree_end, found.prompt.pages_count)

    def node_ends(self, found: Match) -> list[int]:
        """Return where the nodes of a match end, ascending: where prompts end, were resumed, or leave each other."""
        self._check_alive(found)
        return [node.end for node in found.path if node.end <= found.host_end]

    def full_end(self, found: Match, tier: Tier) -> int:
        """Return the first page of a match that component 0 does not hold on ``tier``."""
        self._check_alive(found)
        tier_component = self._tier_component(tier, 0)
        for node in reversed(found.path):
            if node.held_count[tier_component]:
                return min(node.start + node.held_count[tier_component], found.tree_end)
        return 0

    def lock(self, found: Match, end: int, tier: Tier) -> Lock:
        """Pin what a resume after ``end`` pages of a match needs on ``tier``. The match is dead afterwards.

        Raises:
            StaleMatchError: the tree has changed since; nothing was pinned.
            InputError: the tree does not hold ``end`` pages of that prompt.
        """
        return self._lock(self._node(found, end), end, tier)

    def lock_inserted(self, inserted: Inserted, prompt: Prompt, tier: Tier) -> Lock:
        """Pin on ``tier`` what a resume after all of a prompt needs that was inserted just now; nothing is sought."""
        return self._lock(inserted.node, prompt.pages_count, tier)

    def _lock(self, node: Node, end: int, tier: Tier) -> Lock:
        held = lock(self._state, node, end, tier)
        self._locks[held] = None
        return held

    def check_lock(self, held: Lock) -> None:
        """Raise LockError for a lock that was released already, or is another tree's."""
        check_kind(held, Lock, "a lock", LockError)
        if held.released:
            raise LockError(f"the lock on {held.end} pages was released already")
        if held.tree.lineage is not self._lineage:
            raise LockError("the lock belongs to another tree")

    def release_windows(self, held: Lock) -> None:
        """Unpin all components of a lock but Full, which stays pinned until ``unlock``; errors as ``check_lock``."""
        self.check_lock(held)
        release_windows(held)

    def unlock(self, held: Lock) -> None:
        """Take a lock back, once; errors as ``check_lock``. One from before ``clear`` is void: that changes nothing."""
        self.check_lock(held)
        unlock(held)
        self._locks.pop(held, None)

    def lock_slots(self, held: Lock, component: int) -> Slots:
        """Return a component's slots of the pages ``[window(end), end)`` of a lock; -1 for tombstones."""
        start = window(held.end, self.components[component].span)
        path: list[Node] = []
        node: Node | None = held.node if held.end else None
        while node is not None and node.end > start:
            path.append(node)
            node = node.parent
        return path_slots(path[::-1], self._tier_component(held.tier, component), start, held.end)

    def insert(
        self,
        prompt: Prompt,
        start: int,
        slots: Sequence[Slots],
        tier: Tier,
        priority: int = UNNAMED,
    ) -> Inserted:
        """Hand over pages [start, pages_count) of ``prompt``; see ``tree.match.insert``, and for errors ``match``."""
        self.check_prompt(prompt)
        return insert(self._state, prompt, start, slots, tier, _whole(priority))

    def supersede(self, held: Lock, end: int) -> None:
        """Record that a prompt has gone on from what ``held`` pinned to ``end``; if it alone has, its windows go first.

        Later requests resume at ``end`` then, see ``EvictionQueues.supersede``.
        """
        if held.end and held.tree is self._state and len(held.node.children) == 1:
            held.node.is_superseded = True
            self._state.queues.supersede(held.node, end)

    def superseded_ends(self, found: Match, end: int) -> Pages:
        """Return a mask of the ends in [1, end] of a match before one that its prompt alone has gone on from."""
        self._check_alive(found)
        last = max([node.end for node in found.path if node.is_superseded and len(node.children) == 1], default=0)
        superseded = np.arange(end) < last
        superseded[[node.end - 1 for node in found.path if node.end <= end and len(node.children) > 1]] = False
        return superseded

    def inserted_slot(self, inserted: Inserted, tier: Tier, component: int, page: int) -> int:
        """Return the slot of a page of the prompt that was inserted just now; -1 for a tombstone."""
        node = inserted.node
        while node.start > page and node.parent is not None:
            node = node.parent
        slots = node.slots[self._tier_component(tier, component)]
        return -1 if slots is None else int(slots[page - node.start])

    def evict(self, tier: Tier, component: int, pages: int) -> Freed:
        """Free up to ``pages`` slots of a component, in the order of its policy; see ``tree.evict``."""
        return eviction.evict(self._state, tier, component, pages)

    def next_victim(self, tier: Tier, component: int) -> eviction.Victim | None:
        """Return what ``evict`` would take from next; None if locks pin everything. It is one until the next change."""
        return eviction.next_victim(self._state, tier, component)

    def evict_from(self, victim: eviction.Victim, pages: int) -> Freed:
        """Free up to ``pages`` slots of the next victim."""
        freed = Freed([[] for _ in range(2 * len(self.components))], [])
        eviction.evict_from(self._state, *victim, pages, freed)
        return freed

    def would_lose(self, victim: eviction.Victim, pages: int, *, with_superseded: bool) -> bool:
        """Return whether evicting up to ``pages`` of a victim loses any, see ``tree.would_lose``."""
        return eviction.would_lose(self._state, victim, pages, with_superseded=with_superseded)

    def prompt_of(self, victim: eviction.Victim) -> Prompt:
        """Return a prompt that needs the pages of a victim."""
        return eviction.prompt_of(self._state, victim)

    def pass_over(self, victim: eviction.Victim) -> None:
        """Skip this victim until it is offered again."""
        self._state.queues.pass_over(*victim)

    def offer(self, victim: eviction.Victim) -> None:
        """Put a victim that was passed over back in its place."""
        self._state.queues.offer(*victim)

    def fitting_end(self, found: Match, source: Tier, target: Tier, available_pages: Sequence[int]) -> int:
        """Return the longest end of a match that can be brought from ``source`` to ``target``, or 0; changes nothing.

        ``available_pages[c]`` are free or evictable on the target.
        """
        self._check_alive(found)
        return fitting_end(self._state, found, source, target, available_pages)

    def evictable_mask(self, found: Match, tier: Tier, component: int) -> Pages:
        """Return a mask of the pages of a match in the tree that ``evict`` could free on ``tier`` now."""
        self._check_alive(found)
        return evictable_mask(self._state, found.path, self._tier_component(tier, component), found.tree_end)

    def begin(self, found: Match, end: int, source: Tier, target: Tier, *, at_once: bool = False) -> Transfer:
        """Pin ``end`` pages of a match on both tiers and say what ``target`` lacks. The match is dead afterwards.

        ``at_once`` says that it can wait for no other transfer, see ``Transfer.at_once``; errors as ``lock``.
        """
        transfer = locks.begin_transfer(self._state, self._node(found, end), end, source, target, at_once=at_once)
        self._transfers[transfer] = None
        return transfer

    def expect(self, transfer: Transfer, targets: Sequence[Slots]) -> None:
        """Give a transfer one array of slots for each entry of its ``wanted``."""
        locks.expect_pages(self._state, transfer, targets)

    def publish(self, transfer: Transfer) -> Published:
        """Publish what a transfer brought and unpin its source; its target stays pinned."""
        return locks.publish_transfer(transfer.target.tree, transfer)

    def release(self, transfer: Transfer) -> list[Slots]:
        """End a transfer: unpin the rest; return by component the slots of pages that were not published."""
        self._transfers.pop(transfer, None)
        return locks.release_transfer(transfer.target.tree, transfer)

    def locks_out(self) -> list[Lock]:
        """Return the locks that are out, those of transfers too; none that ``clear`` made void."""
        ends = [held for transfer in self._transfers for held in (transfer.source, transfer.target)]
        return [*self._locks, *(held for held in ends if not held.released)]

    def peers(self, component: int) -> tuple[Slots, Slots]:
        """Return Full's device slots and, for each, that of ``component`` on that page, 0 for a tombstone. Walks."""
        full: list[Slots] = []
        peers: list[Slots] = []
        for node in self._state.nodes():
            held = node.slots[0]
            if held is None:
                continue
            other = node.slots[component]
            live = held >= 0
            full.append(held[live])
            peers.append(np.zeros(len(full[-1]), np.int32) if other is None else np.maximum(other[live], 0))
        return _joined(full), _joined(peers)

    def held_runs(self) -> list[HeldRun]:
        """Return all that is held, run by run, each after the one that it continues; copies. Walks."""
        return held_runs(self._state)

    def clear(self) -> Freed:
        """Forget everything, pinned or not; return every slot held. Locks, pins and matches become void."""
        freed = Freed([[] for _ in range(2 * len(self.components))], [])
        for node in self._state.nodes():
            for tier_component, held in enumerate(node.slots):
                if held is not None:
                    freed.slots[tier_component].append(held[held >= 0])
        if self._state.mapped is not None:
            freed.unmapped.extend(freed.slots[0])
        self._state = self._empty()
        self._locks.clear()
        self._transfers.clear()
        return freed

    def check(self, locks: Iterable[Lock] | None = None) -> list[Slots]:
        """Verify all from scratch, and that ``locks`` alone are out; return by tier and component the slots held."""
        out = self.locks_out()
        if locks is not None:
            assert {held for held in locks if held.tree is self._state} == set(out), "other locks are out"
        return check(self._state, out, list(self._transfers))

    def arriving(self, prompt: Prompt) -> list[Pages]:
        """Return a mask by tier and component of the pages of a prompt that a transfer is bringing."""
        masks = [np.zeros(prompt.pages_count, np.bool_) for _ in range(len(Tier) * len(self.components))]
        found = peek(self._state, prompt)
        for node in found.path:
            for tier_component, pages in (node.in_flight or {}).items():
                masks[tier_component][node.start : min(node.end, found.tree_end)] = pages[: found.tree_end - node.start]
        return masks

    def prompts_alike(self, prompt: Prompt) -> list[tuple[Prompt, int]]:
        """Return the same tokens below other roots, with the pages that the tree has of them, which may be none."""
        found: list[tuple[Prompt, int]] = []
        for name, root in self._state.roots.items():
            alike = None if name == prompt.root else prompt.below_root(name, root.namespace)
            if alike is not None:
                found.append((alike, find(root, alike, self._state.page_key_bytes)[1]))
        return found

    def nodes_count(self) -> int:
        """Count nodes; walks the tree."""
        return sum(1 for _ in self._state.nodes())

    def protected_pages(self, tier: Tier, component: int) -> int:
        """Return the pages held that ``evict`` would not give back if asked for all. O(1), see ``PageCounts``."""
        return self._state.counts.protected(self._tier_component(tier, component))

    def _tier_component(self, tier: Tier, component: int) -> int:
        return int(tier) * len(self.components) + component

    def _node(self, found: Match, end: int) -> Node:
        self._check_alive(found)
        if not 0 <= end <= found.tree_end:
            raise InputError(f"end must be in [0, {found.tree_end}], found {end}")
        return node_at(found.path, end) if end else self._state.root(found.prompt)

    def _check_alive(self, found: Match) -> None:
        if found.version != self._state.version or found.tree is not self._state:
            raise StaleMatchError("the tree has changed since this match; match again")

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise InputError for what is no prompt, or was cut into pages of another size."""
        check_kind(prompt, Prompt, "a prompt, such as UnifiedCache.prompt makes of token ids")
        if prompt.page_size != self.page_size:
            raise InputError(f"expected a prompt of {self.page_size}-token pages, found {prompt.page_size}")


def _whole(priority: int) -> int:
    """Return a priority as an int of any size: one of numpy's would overflow in a rank."""
    try:
        return index(priority)
    except TypeError as error:
        raise InputError(f"a priority must be a whole number, found {priority!r}") from error


def _joined(arrays: list[Slots]) -> Slots:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
