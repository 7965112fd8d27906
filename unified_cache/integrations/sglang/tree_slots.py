"""Prefix tree over device slots that the engine allocates: taken in ``insert``, given back from ``evict`` as values.

The engine owns its slots and counts tokens; the tree owns what prefixes they hold and counts pages. Between the two:

    engine's allocator --insert--> tree --evict, or a duplicate of insert--> engine's allocator

A match cuts the node in which it ends, and eviction takes whole nodes, least recent first, as the trees of SGLang
0.5.23 do: so that the same calls find, free and keep the same slots. No torch and nothing of the engine in here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unified_cache.components import Full
from unified_cache.errors import StaleMatchError
from unified_cache.page import TOKEN_BYTES, Prompt
from unified_cache.pool import PoolSpec, Slots, Tier
from unified_cache.tree import Lock, Match, RadixTree

__all__ = ["EngineSlotTree", "SlotsTaken", "TreePrefix", "in_subtree_order"]

ALL_PAGES = 1 << 30
"""More pages than any node has."""

_NO_SLOTS: Slots = np.empty(0, np.int32)


class TreePrefix(NamedTuple):
    """The first pages of a prompt, as an engine holds on to what it matched; true until they are evicted."""

    prompt: Prompt
    end: int
    """Pages on the device."""
    host_end: int
    """Pages on device and host together; ``end`` where there is no host tier."""

    @classmethod
    def whole(cls, prompt: Prompt) -> "TreePrefix":
        """Return all pages of a prompt, on the device."""
        return cls(prompt, prompt.pages_count, prompt.pages_count)


@dataclass(frozen=True, slots=True)
class SlotsTaken:
    """Result of an insert."""

    matched_end: int
    """Pages that the tree held before."""
    duplicates: Slots
    """Slots that the tree did not take, since it holds their pages already; they are the engine's to free."""


class EngineSlotTree:
    """Prefixes of all namespaces in full attention, on the device alone. One thread calls it."""

    __slots__ = ("_held_pages", "_tree", "page_size")

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._tree = RadixTree((Full((PoolSpec("kv", 0),)),), page_size)
        self._held_pages = 0

    # ---- asking ------------------------------------------------------------------------------------------------

    def match(self, prompt: Prompt) -> TreePrefix:
        """Find the longest prefix held and make it recent; a node that it ends in is cut there.

        The part that is cut off counts as used just before, as in SGLang: ``_split_node`` stamps it anew.
        """
        self._cut_at_end_of(prompt)
        end = self._tree.match(prompt).device_end
        return TreePrefix(prompt, end, end)

    def slots(self, prefix: TreePrefix) -> Slots:
        """Return the slots of a prefix, one a page.

        Raises:
            StaleMatchError: some of it was evicted.
        """
        return self._tree.slots(self._find(prefix), Tier.DEVICE, 0, 0, prefix.end)

    # ---- changing ----------------------------------------------------------------------------------------------

    def insert(self, prompt: Prompt, start: int, slots: Slots) -> SlotsTaken:
        """Hand over pages [start, pages_count) of ``prompt``, which becomes recent; ``slots`` has one for each.

        Raises:
            InputError: the tree does not hold the pages before ``start``, or the lengths do not fit.
            SlotError: a slot below 1.
        """
        if not prompt.pages_count:
            return SlotsTaken(0, _NO_SLOTS)
        matched_end = self._cut_at_end_of(prompt)
        inserted = self._tree.insert(prompt, start, [slots], Tier.DEVICE)
        duplicates = inserted.duplicates[0]
        self._held_pages += len(slots) - len(duplicates)
        return SlotsTaken(matched_end, duplicates)

    def lock(self, prefix: TreePrefix) -> Lock:
        """Pin a prefix against eviction until ``unlock``.

        Raises:
            StaleMatchError: some of it was evicted.
        """
        return self._tree.lock(self._find(prefix), prefix.end, Tier.DEVICE)

    def unlock(self, lock: Lock) -> None:
        """Take a lock back, once. One from before ``clear`` is void.

        Raises:
            LockError: released already.
        """
        self._tree.unlock(lock)

    def evict(self, pages: int) -> list[Slots]:
        """Give back at least ``pages`` slots, by node in the order of eviction; fewer only if locks pin the rest."""
        freed: list[Slots] = []
        missing = pages
        while missing > 0:
            victim = self._tree.next_victim(Tier.DEVICE, 0)
            if victim is None:
                break
            freed.append(np.concatenate(self._tree.evict_from(victim, ALL_PAGES).slots[0]))
            missing -= len(freed[-1])
            self._held_pages -= len(freed[-1])
        return freed

    def clear(self) -> None:
        """Forget everything, pinned or not. The slots are the engine's, which clears its allocator itself."""
        self._tree.clear()
        self._held_pages = 0

    # ---- counting, in O(1) -------------------------------------------------------------------------------------

    @property
    def held_pages(self) -> int:
        """Pages in the tree."""
        return self._held_pages

    @property
    def protected_pages(self) -> int:
        """Pages in the tree that locks keep from eviction."""
        return self._tree.protected_pages(Tier.DEVICE, 0)

    @property
    def evictable_pages(self) -> int:
        """Pages in the tree that ``evict`` could give back now."""
        return self._held_pages - self.protected_pages

    def check(self) -> None:
        """Assert every invariant from scratch. For tests and for an engine at rest; slow."""
        (held, _) = self._tree.check()
        assert len(held) == self._held_pages, f"{len(held)} pages are held and {self._held_pages} were counted"

    def _cut_at_end_of(self, prompt: Prompt) -> int:
        """Cut the node in which the tree and a prompt part; return the pages that they share."""
        found = self._tree.peek(prompt)
        whole = self._tree.cut(found, found.tree_end)
        if whole is not None:
            self._tree.match(whole)
        return found.tree_end

    def _find(self, prefix: TreePrefix) -> Match:
        found = self._tree.peek(prefix.prompt)
        if self._tree.full_end(found, Tier.DEVICE) < prefix.end:
            raise StaleMatchError(f"{prefix.end} pages were matched, and some have been evicted since")
        return found


def in_subtree_order(prefixes: Sequence[TreePrefix]) -> list[int]:
    """Return the indexes of ``prefixes`` depth first, the subtree that most of them lie in first.

    Those that end where others go on come after these; as ``dfs_weight_order`` of SGLang 0.5.23. Subtrees are those of
    the prefixes themselves: where two of them part, a tree that holds both parts too.
    """
    keys = [_page_key(prefix) for prefix in prefixes]
    order: list[int] = []
    todo: list[tuple[int, list[int], bool]] = [(0, list(range(len(keys))), False)]
    while todo:
        depth, members, is_done_below = todo.pop()
        if is_done_below:
            order += members
            continue
        ending = [index for index in members if len(keys[index]) == depth]
        children: dict[bytes, list[int]] = {}
        for index in members:
            if len(keys[index]) > depth:
                children.setdefault(keys[index][depth], []).append(index)
        todo.append((depth, ending, True))
        most_first = sorted(children.values(), key=len, reverse=True)
        todo += [(depth + 1, child, False) for child in reversed(most_first)]
    return order


def _page_key(prefix: TreePrefix) -> list[bytes]:
    """Return what tells the pages of a prefix apart: the root of its tree, then the tokens of each."""
    tokens, page_bytes = prefix.prompt.tokens, prefix.prompt.page_size * TOKEN_BYTES
    pages = [tokens[page * page_bytes : (page + 1) * page_bytes] for page in range(prefix.end)]
    return [prefix.prompt.root + pages[0], *pages[1:]] if pages else []
