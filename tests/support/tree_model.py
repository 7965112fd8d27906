"""A naive model of the tree: one dict entry per page, component and tier; and slots that remember their bytes.

It shares no code with the tree. Restorable ends come from the definition, evictions are checked by counting. In which
order pages go is looked up by brute force over the nodes; that the nodes' histories are right is another test's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.support.components import toy_components
from unified_cache.core.config import EvictionConfig
from unified_cache.core.page import PageMedia, Prompt
from unified_cache.core.pool import Slots, Tier
from unified_cache.tree import Freed, Lock, Match, RadixTree
from unified_cache.tree.check import check
from unified_cache.tree.node import Node
from unified_cache.tree.transfer import Transfer

Prefix = bytes
Where = tuple[Tier, int]
Pinned = tuple[Tier, int, Prefix]


@dataclass(eq=False)
class Held:
    """A lock that is out, with the pages it pins."""

    lock: Lock
    prefixes: list[Prefix]

    def pinned(self) -> set[Pinned]:
        tier = self.lock.tier
        return {(tier, c, self.prefixes[p]) for c, start in self.lock.held for p in range(start, self.lock.end)}


@dataclass(eq=False)
class PendingTransfer:
    """A transfer in flight, with the pages it pins on both tiers."""

    transfer: Transfer
    locks: tuple[Held, Held]
    prefixes: list[Prefix]


@dataclass
class TreeModel:
    """The tree under test, the naive truth about it, and free lists of slots."""

    spans: tuple[int, ...]
    page_size: int
    capacity: dict[Where, int]
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    tree: RadixTree = field(init=False)
    pages: dict[Where, dict[Prefix, int]] = field(init=False)
    """The truth: slot of every page held."""
    content: dict[Where, dict[int, Prefix]] = field(init=False)
    """What the bytes in a slot are: the prefix they belong to."""
    free: dict[Where, list[int]] = field(init=False)
    held: list[Held] = field(default_factory=list)
    moving: list[PendingTransfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = RadixTree(toy_components(self.spans), self.page_size, self.eviction)
        self.pages = {where: {} for where in self.capacity}
        self.content = {where: {} for where in self.capacity}
        self.free = {where: list(range(count, 0, -1)) for where, count in self.capacity.items()}

    # ---- the definition ------------------------------------------------------------------------------------

    def window(self, end: int, component: int) -> range:
        return range(max(0, end - self.spans[component]), end)

    def restorable(self, prefixes: list[Prefix], tiers: Iterable[Tier]) -> list[int]:
        """Return the ends at which every component has its window on these tiers."""
        tiers = tuple(tiers)
        return [
            end
            for end in range(len(prefixes) + 1)
            if all(
                any(prefixes[page] in self.pages[tier, component] for tier in tiers)
                for component in range(len(self.spans))
                for page in self.window(end, component)
            )
        ]

    def prefixes(self, prompt: Prompt) -> list[Prefix]:
        return self._chained(prompt.root + b"|", prompt.tokens, prompt.media, 0)

    def _chained(self, above: Prefix, tokens: bytes, media: PageMedia, first: int) -> list[Prefix]:
        """Return the prefix of each page of encoded tokens, the first of which has that number."""
        prefixes: list[Prefix] = []
        for start in range(0, len(tokens), self.page_size * 4):
            behind = media.get(first + len(prefixes), ())
            above += (repr(behind).encode() if behind else b"") + tokens[start : start + self.page_size * 4]
            prefixes.append(above)
        return prefixes

    def pinned(self) -> set[Pinned]:
        out: set[Pinned] = set()
        for held in self.locks():
            out |= held.pinned()
        return out

    def locks(self) -> list[Held]:
        return [*self.held, *(lock for moving in self.moving for lock in moving.locks)]

    # ---- slots -----------------------------------------------------------------------------------------------

    def release(self, where: Where, slots: Slots) -> None:
        for slot in slots.tolist():
            assert slot > 0
            assert slot not in self.free[where], "a slot is freed twice"
            self.content[where].pop(slot, None)
            self.free[where].append(slot)

    def allocate(self, where: Where, count: int) -> Slots | None:
        short = count - len(self.free[where])
        if short > 0:
            self.evict(*where, short)
        if len(self.free[where]) < count:
            return None
        return np.array([self.free[where].pop() for _ in range(count)], np.int32)

    def evict(self, tier: Tier, component: int, count: int) -> None:
        """Evict, and see that exactly what was asked for went, that nothing locked did, and who depended on it."""
        pinned = self.pinned()
        free_pages = self._evictable(tier, component, pinned)
        got = 0
        if count <= 3:
            for _ in range(min(count, free_pages)):
                got += self._evict_one(tier, component, pinned)
        else:
            freed = self.tree.evict(tier, component, count)
            got = self._take_back(freed, tier, component, pinned)
        assert got == min(count, free_pages), f"evicted {got} of {count}, {free_pages} could go"

    def _evict_one(self, tier: Tier, component: int, pinned: set[Pinned]) -> int:
        """Evict one page, and see that it is one of those that the policy lets go first."""
        tier_component = int(tier) * len(self.spans) + component
        owner: dict[int, Node] = {}
        for node in self.tree.nodes():
            held = node.slots[tier_component]
            if held is not None and self.tree.queues.evictable(node, tier_component):
                owner.update(dict.fromkeys(held[held >= 0].tolist(), node))
        freed = self.tree.evict(tier, component, 1)
        (slot,) = [slot for slots in freed.slots[tier_component] for slot in slots.tolist()]
        turns = {node: self.tree.queues.rank(node, tier_component) for node in owner.values()}
        assert turns[owner[slot]] == min(turns.values()), "a page went before its turn"
        return self._take_back(freed, tier, component, pinned)

    def _evictable(self, tier: Tier, component: int, pinned: set[Pinned]) -> int:
        live = self.pages[tier, component]
        if component:
            return sum((tier, component, prefix) not in pinned for prefix in live)
        # Full goes from the tail: a page stays while anything below it is pinned, in any component.
        keep: set[Prefix] = set()
        for pinned_tier, _, prefix in pinned:
            if pinned_tier == tier:
                keep |= {page for page in live if prefix.startswith(page)}
        return len(live) - len(keep)

    def _room(self, where: Where, pinned: set[Pinned]) -> int:
        return len(self.free[where]) + self._evictable(*where, pinned)

    def _take_back(self, freed: Freed, tier: Tier, component: int, pinned: set[Pinned]) -> int:
        got = 0
        for tier_component, arrays in enumerate(freed.slots):
            where = Tier(tier_component // len(self.spans)), tier_component % len(self.spans)
            owner = {slot: prefix for prefix, slot in self.pages[where].items()}
            for slots in arrays:
                for slot in slots.tolist():
                    prefix = owner.pop(slot)
                    assert (*where, prefix) not in pinned, "a pinned page was evicted"
                    assert where[0] == tier
                    assert where[1] >= component, "a component was evicted for one that stands on it"
                    del self.pages[where][prefix]
                    got += where[1] == component
                self.release(where, slots)
        return got

    # ---- operations ------------------------------------------------------------------------------------------

    def match(self, prompt: Prompt) -> None:
        before = self.snapshot()
        found = self.tree.match(prompt)
        prefixes = self.prefixes(prompt)
        assert found.device_end == self.restorable(prefixes, [Tier.DEVICE])[-1]
        assert found.host_end == self.restorable(prefixes, Tier)[-1]
        got = found.slots(Tier.DEVICE, 0, 0, found.device_end).tolist()
        assert got == [self.pages[Tier.DEVICE, 0][prefix] for prefix in prefixes[: found.device_end]]
        assert self.snapshot() == before, "match changed something but recency"

    def insert(self, prompt: Prompt, reuse: bool, floors: list[int], priority: int = 0) -> None:
        """Run a request: lock what can be reused, allocate the rest, insert it, unlock."""
        found = self.tree.match(prompt)
        self._publish(found, found.device_end if reuse else 0, Tier.DEVICE, floors, priority)

    def graft(self, prompt: Prompt, floors: list[int]) -> None:
        """Publish pages that storage brought: from the end of the host-live prefix on, as far as they came."""
        found = self.tree.match(prompt)
        self._publish(found, found.full_end(Tier.HOST), Tier.HOST, floors)

    def _publish(self, found: Match, start: int, tier: Tier, floors: list[int], priority: int = 0) -> None:
        """Insert all pages from ``start`` on, windowed components' from their floors, while those before are locked."""
        prefixes = self.prefixes(found.prompt)
        held = Held(self.tree.lock(found, start, tier), prefixes)
        self.held.append(held)
        slots = self._allocate_from(len(prefixes) - start, tier, floors)
        if slots is not None:
            duplicates = [
                self._fill((tier, component), prefixes[start:], given) for component, given in enumerate(slots)
            ]
            inserted = self.tree.insert(found.prompt, start, slots, tier, priority)
            for given in slots:
                given[:] = 77_777  # the caller may reuse its arrays
            for component, returned in enumerate(inserted.duplicates):
                assert sorted(returned.tolist()) == sorted(duplicates[component])
                self.release((tier, component), returned)
        self.unlock(held)

    def _allocate_from(self, count: int, tier: Tier, floors: list[int]) -> list[Slots] | None:
        """Return by component slots of ``count`` pages, -1 before a floor; None, and nothing taken, without room."""
        slots: list[Slots] = []
        for component in range(len(self.spans)):
            first = 0 if component == 0 else min(count, floors[component % len(floors)])
            fresh = self.allocate((tier, component), count - first)
            if fresh is None:
                for other, undo in enumerate(slots):
                    self.release((tier, other), undo[undo >= 0])
                return None
            slots.append(np.concatenate((np.full(first, -1, np.int32), fresh)))
        return slots

    def _fill(self, where: Where, prefixes: list[Prefix], slots: Slots) -> list[int]:
        """Put pages into slots, -1 for none; return the slots of those that are held already."""
        duplicates: list[int] = []
        for prefix, slot in zip(prefixes, slots.tolist(), strict=True):
            if slot > 0:
                self.content[where][slot] = prefix
                if self.pages[where].setdefault(prefix, slot) != slot:
                    duplicates.append(slot)
        return duplicates

    def lock(self, prompt: Prompt, tier: Tier, share: float) -> None:
        found = self.tree.match(prompt)
        histories = self.histories()
        lock = self.tree.lock(found, int(found.host_end * share), tier)
        assert self.histories() == histories, "a split is not an access"
        self.held.append(Held(lock, self.prefixes(prompt)))

    def unlock(self, held: Held) -> None:
        self.tree.unlock(held.lock)
        self.held.remove(held)

    def coming(self, target: Tier, component: int) -> set[Prefix]:
        """Return the pages of a component that transfers under way bring to a tier."""
        return {
            moving.prefixes[page]
            for moving in self.moving
            for part in moving.transfer.parts
            if (moving.transfer.target.tier, part.component) == (target, component)
            for page in part.pages.tolist()
        }

    def fits(self, prefixes: list[Prefix], end: int, source: Tier, target: Tier) -> bool:
        """Tell whether a target has room for what it lacks of a resume at ``end``, once that is pinned there."""
        pinned = self.pinned()
        for component in range(len(self.spans)):
            pinned |= {(target, component, prefixes[page]) for page in self.window(end, component)}
        for component in range(len(self.spans)):
            there = self.pages[target, component].keys() | self.coming(target, component)
            needed = {prefixes[page] for page in self.window(end, component)} & self.pages[source, component].keys()
            if len(needed - there) > self._room((target, component), pinned):
                return False
        return True

    def fitting_end(self, prompt: Prompt, source: Tier, target: Tier) -> tuple[int, int]:
        """Return the longest end to resume at from ``source``, and the longest that ``target`` has room for."""
        found = self.tree.match(prompt)
        pinned = self.pinned()
        available = [self._room((target, component), pinned) for component in range(len(self.spans))]
        prefixes = self.prefixes(prompt)
        ends = self.restorable(prefixes, [Tier.DEVICE] if source is Tier.DEVICE else Tier)
        fitting = max(end for end in ends if self.fits(prefixes, end, source, target))
        assert found.fitting_end(source, target, available) == fitting
        return ends[-1], fitting

    def begin(self, prompt: Prompt, source: Tier, target: Tier) -> None:
        """Begin to bring as much of a prompt as the target has room for; more than that is refused."""
        longest, fitting = self.fitting_end(prompt, source, target)
        if fitting < longest:
            assert not self.begin_at(prompt, longest, source, target), "there was room for more"
            _, fitting = self.fitting_end(prompt, source, target)  # it has evicted some all the same
        assert not fitting or self.begin_at(prompt, fitting, source, target), "there was no room for so much"

    def begin_at(self, prompt: Prompt, end: int, source: Tier, target: Tier) -> bool:
        prefixes = self.prefixes(prompt)
        transfer = Transfer.begin(self.tree, self.tree.match(prompt), end, source, target)
        moving = PendingTransfer(transfer, (Held(transfer.source, prefixes), Held(transfer.target, prefixes)), prefixes)
        for wanted in transfer.wanted:
            brought = {prefixes[page] for page in wanted.pages.tolist()}
            assert not brought & self.coming(target, wanted.component), "two bring one page"
        self.moving.append(moving)
        targets: list[Slots] = []
        for wanted in transfer.wanted:
            fresh = self.allocate((target, wanted.component), len(wanted.pages))
            if fresh is None:
                for given, undo in zip(transfer.wanted, targets, strict=False):
                    self.release((target, given.component), undo)
                self.moving.remove(moving)
                assert not any(len(left) for left in transfer.release())
                return False
            targets.append(fresh)
        transfer.expect(targets)
        return True

    def finish(self, moving: PendingTransfer, ok: bool) -> None:
        self.moving.remove(moving)
        transfer = moving.transfer
        source, target = transfer.source.tier, transfer.target.tier
        expected: list[set[int]] = [set() for _ in self.spans]
        for part in transfer.parts:
            live = self.pages[target, part.component]
            for page, src, dst in zip(part.pages.tolist(), part.source.tolist(), part.target.tolist(), strict=True):
                prefix = moving.prefixes[page]
                assert self.content[source, part.component].get(src) == prefix, "a source slot was reused in flight"
                if not ok or prefix in live or not self._stands(moving.prefixes, page, part.component, target):
                    expected[part.component].add(dst)
                    continue
                self.content[target, part.component][dst] = prefix
                live[prefix] = dst
        if ok:
            leftovers = transfer.publish().leftovers
            assert not any(len(left) for left in transfer.release())
        else:
            leftovers = transfer.release()
        for component, left in enumerate(leftovers):
            assert set(left.tolist()) == expected[component]
            self.release((target, component), left)

    def _stands(self, prefixes: list[Prefix], page: int, component: int, tier: Tier) -> bool:
        full = self.pages[tier, 0]
        return prefixes[page] in full if component else page == 0 or prefixes[page - 1] in full

    # ---- proof -----------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Everything the tree says is what the model says, and no slot is lost."""
        tier_components = check(
            self.tree, [held.lock for held in self.locks()], [moving.transfer for moving in self.moving]
        )
        assert self.snapshot() == self.pages, "the tree differs from the model"
        pinned = self.pinned()
        for where, pages in self.pages.items():
            assert self.tree.protected_pages(*where) == len(pages) - self._evictable(*where, pinned)
            tier_component = int(where[0]) * len(self.spans) + where[1]
            assert tier_components[tier_component].tolist() == sorted(pages.values())
            for prefix, slot in pages.items():
                assert self.content[where][slot] == prefix, "a slot holds another page's bytes"
            in_flight_count = len(self.coming(*where))
            assert len(pages) + len(self.free[where]) + in_flight_count == self.capacity[where], "a slot is lost"

    def snapshot(self) -> dict[Where, dict[Prefix, int]]:
        """Read every page's slot straight out of the nodes."""
        out: dict[Where, dict[Prefix, int]] = {where: {} for where in self.capacity}
        for node, prefixes in self._nodes():
            for pages, slots in zip(out.values(), node.slots, strict=True):
                if slots is not None:
                    pages |= {prefix: slot for prefix, slot in zip(prefixes, slots.tolist(), strict=True) if slot >= 0}
        return out

    def histories(self) -> dict[Prefix, tuple[object, ...]]:
        """Read every page's history straight out of the nodes."""
        out: dict[Prefix, tuple[object, ...]] = {}
        for node, prefixes in self._nodes():
            out |= dict.fromkeys(prefixes, (tuple(node.stamps), node.priorities))
        return out

    def _nodes(self) -> Iterator[tuple[Node, list[Prefix]]]:
        """Yield every node but the roots, with the prefixes of its pages."""
        todo = [(child, seed + b"|") for seed, root in self.tree.roots.items() for child in root.children.values()]
        while todo:
            node, above = todo.pop()
            prefixes = self._chained(above, node.key, node.media, node.start)
            yield node, prefixes
            todo += [(child, prefixes[-1]) for child in node.children.values()]
