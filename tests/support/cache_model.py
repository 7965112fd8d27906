"""Invariants of a cache at every moment: read from its tree, its allocators, its jobs.

``UnifiedCache.check`` proves what the cache can know by itself. Here stands what only the world around it knows: what
the bytes in a slot must be, which slots requests and transfers hold, and what a match must answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.support.cache import ToyEngine, payload
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller.jobs import BackupJob, ClearJob, FetchJob, LoadJob, ProbeJob, StoreJob
from unified_cache.controller.memory import TieredMemory
from unified_cache.controller.operation import Job
from unified_cache.core.page import PageKey, Prompt, key_chain, media_mark
from unified_cache.core.pool import PageCopies, PoolSpec, Slots, Tier
from unified_cache.core.seal import Label, verify
from unified_cache.core.window import window
from unified_cache.tree import Lock, Match, RadixTree
from unified_cache.tree.match import path_slots
from unified_cache.tree.node import Node

Held = dict[PageKey, int]
"""Slot of every page that one component holds on one tier."""

FLOWS: Mapping[type, tuple[Tier | None, Tier | None]] = {
    # job: (where the tree holds what it reads, where the slots are that it fills)
    BackupJob: (Tier.DEVICE, Tier.HOST),
    LoadJob: (Tier.HOST, Tier.DEVICE),
    StoreJob: (Tier.HOST, None),
    FetchJob: (None, Tier.HOST),
    ProbeJob: (None, None),
    ClearJob: (None, None),
}


@dataclass(frozen=True)
class Flow:
    """One live transfer: the pages it reads and fills."""

    prompt: Prompt
    source: Tier | None
    target: Tier | None
    parts: Sequence[PageCopies]


def flow_of(job: Job, prompt: Prompt) -> Flow:
    """Say what a job of an operation on ``prompt`` moves."""
    source, target = FLOWS[type(job)]
    found: Mapping[int, PageCopies] | Sequence[PageCopies] = vars(job).get("_parts", ())
    return Flow(prompt, source, target, tuple(found.values()) if isinstance(found, Mapping) else found)


def prompt_of(job: Job) -> Prompt:
    """Return the prompt whose pages a job moves, of the jobs that know it."""
    found = vars(job)["_prompt"]
    assert isinstance(found, Prompt)
    return found


def walk(tree: RadixTree) -> Iterator[tuple[Node, tuple[PageKey, ...]]]:
    """Yield every node but the roots with the keys of its pages, parents first."""
    todo = [(child, seed) for seed, root in tree._state.roots.items() for child in root.children.values()]
    while todo:
        node, above = todo.pop()
        marks = {page - node.start: media_mark(node.media, page, tree.page_size) for page in node.media}
        keys = key_chain(above, node.key, tree.page_size, marks)
        todo += [(child, keys[-1]) for child in node.children.values()]
        yield node, keys


@dataclass(frozen=True)
class Census:
    """Contents of a tree, page by page."""

    spans: tuple[int, ...]
    held: tuple[Held, ...]
    """By tier and component."""
    in_flight: tuple[frozenset[PageKey], ...]
    """By tier and component: pages marked as being brought."""

    @classmethod
    def take(cls, tree: RadixTree) -> "Census":
        spans = tuple(component.span for component in tree.components)
        held: tuple[Held, ...] = tuple({} for _ in range(2 * len(spans)))
        in_flight: tuple[set[PageKey], ...] = tuple(set() for _ in held)
        for node, keys in walk(tree):
            for pages, slots in zip(held, node.slots, strict=True):
                if slots is not None:
                    pages.update((key, slot) for key, slot in zip(keys, slots.tolist(), strict=True) if slot >= 0)
            for tier_component, marks in (node.in_flight or {}).items():
                in_flight[tier_component].update(keys[page] for page in np.flatnonzero(marks))
        return cls(spans, held, tuple(map(frozenset, in_flight)))

    def tier_component(self, tier: Tier, component: int) -> int:
        return int(tier) * len(self.spans) + component

    def longest(self, prompt: Prompt, tiers: Sequence[Tier]) -> int:
        """Return the longest prefix of which every component holds its window on ``tiers``: the definition itself."""
        holders = [
            [self.held[self.tier_component(tier, number)] for tier in tiers] for number in range(len(self.spans))
        ]

        def whole(end: int) -> bool:
            return all(
                any(prompt.keys[page] in pages for pages in holders[number])
                for number, span in enumerate(self.spans)
                for page in range(window(end, span), end)
            )

        return next(end for end in range(prompt.pages_count, -1, -1) if whole(end))

    def verify_match(self, found: Match) -> None:
        """A match is restorable for every component at its end, and no longer prefix is."""
        assert found.device_end == self.longest(found.prompt, [Tier.DEVICE]), "not the longest device prefix"
        assert found.host_end == self.longest(found.prompt, list(Tier)), "not the longest prefix"

    def verify_lock(self, cache: UnifiedCache, prompt: Prompt, lock: Lock) -> None:
        """The slots that a lock names are those of its prompt's pages."""
        for number, span in enumerate(self.spans):
            pages = self.held[self.tier_component(lock.tier, number)]
            expected = [pages.get(prompt.keys[page], -1) for page in range(window(lock.end, span), lock.end)]
            assert cache.slots(lock, number).tolist() == expected, "a lock names other slots than its prompt's"

    def verify_flows(self, flows: Sequence[Flow]) -> None:
        """What live transfers read is still the page they were told to read; what they bring is marked, once."""
        marked: list[list[PageKey]] = [[] for _ in self.held]
        for flow in flows:
            for part in flow.parts:
                keys = [flow.prompt.keys[page] for page in part.pages.tolist()]
                if flow.source is not None:
                    pages = self.held[self.tier_component(flow.source, part.component)]
                    assert [pages.get(key) for key in keys] == part.source.tolist(), "a page in flight was moved"
                if flow.source is not None and flow.target is not None:
                    marked[self.tier_component(flow.target, part.component)] += keys
        assert [sorted(keys) for keys in marked] == list(map(sorted, self.in_flight)), "marks differ from transfers"


def verify_slots_out(cache: UnifiedCache, requests: Iterable[Sequence[Slots]], flows: Iterable[Flow]) -> None:
    """Every slot that is out is with one request or one transfer: none is lost, none is shared, none is free.

    ``requests`` holds by request and component its device slots, -1 for none.
    """
    tier_components: dict[tuple[Tier, int], list[int]] = {
        (tier, number): [] for tier in Tier for number in range(len(cache.layout.components))
    }
    for pages in requests:
        for number, slots in enumerate(pages):
            tier_components[Tier.DEVICE, number] += slots[slots >= 0].tolist()
    for flow in flows:
        if flow.target is not None:
            for part in flow.parts:
                tier_components[flow.target, part.component] += part.target.tolist()
    for (tier, number), named in tier_components.items():
        allocator = cache._ledger._allocators[tier][number]
        assert len(set(named)) == len(named), f"a slot of {tier.name}, component {number}, is in two hands"
        assert allocator.is_out(np.array(named, np.int32)), f"a slot of {tier.name}, component {number}, is not out"
        assert allocator.out_count == len(named), f"a slot of {tier.name}, component {number}, is in nobody's hands"


def verify_map(cache: UnifiedCache, requests: Iterable[Sequence[Slots]]) -> None:
    """Through a Full slot that a request has been given, the peer is reached that it was given for the same page."""
    ledger, number = cache._ledger, cache.layout.mapped
    for pages in requests:
        if ledger.paired is not None and number is not None:
            assert ledger.paired.map.peers(pages[0]).tolist() == np.maximum(pages[number], 0).tolist()


class Payloads:
    """Expected bytes of every page, made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[PageKey, str], npt.NDArray[np.uint8]] = {}

    def rows(self, keys: Iterable[PageKey], pool: PoolSpec) -> npt.NDArray[np.uint8]:
        """Return the only right payloads, shape (pages, page_bytes)."""
        return np.array([self._row(key, pool) for key in keys], np.uint8).reshape(-1, pool.page_bytes)

    def _row(self, key: PageKey, pool: PoolSpec) -> npt.NDArray[np.uint8]:
        row = self._made.get((key, pool.name))
        if row is None:
            row = self._made[key, pool.name] = np.frombuffer(payload(key, pool), np.uint8)
        return row


def verify_bytes(engine: ToyEngine, payloads: Payloads, census: Census) -> None:
    """Every page that the tree holds has the right bytes on its tier, and on the host a seal that names it."""
    memory = engine.cache._memory
    assert isinstance(memory, TieredMemory)
    for number in range(len(census.spans)):
        for pool in engine.byte_pools(number):
            on_device = census.held[census.tier_component(Tier.DEVICE, number)]
            expected = payloads.rows(on_device, pool)
            assert np.array_equal(engine.rows(pool, list(on_device.values())), expected), f"wrong bytes in {pool.name}"
            on_host = census.held[census.tier_component(Tier.HOST, number)]
            host = memory._host[pool.name]
            assert np.array_equal(host.payload[list(on_host.values())], payloads.rows(on_host, pool))
            for key, slot in on_host.items():
                assert verify(host.page(slot), Label(engine.digest, key, pool.name)) is None, (
                    "a host page is not sealed"
                )


@dataclass(frozen=True)
class Pinned:
    """Slots that a lock pins, at one moment."""

    nodes_count: int
    """From the root to where the lock ends."""
    starts: tuple[int, ...]
    """By component: the first page that its window needs."""
    slots: tuple[Slots, ...]
    """By component, of all pages up to the lock's end; -1 for tombstones."""

    @classmethod
    def by(cls, lock: Lock) -> "Pinned":
        path: list[Node] = []
        node: Node | None = lock.node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        first = int(lock.tier) * lock.tree.components_count
        starts = tuple(window(lock.end, span) for span in lock.tree.spans)
        return cls(
            len(path),
            starts,
            tuple(path_slots(path[::-1], first + number, 0, lock.end) for number in range(len(starts))),
        )

    def changes_since(self, before: "Pinned") -> list[str]:
        """Name what happened to the path, and assert that no pinned page went away or got another slot."""
        changes = ["split"] if self.nodes_count > before.nodes_count else []
        for start, now, then in zip(self.starts, self.slots, before.slots, strict=True):
            held = then >= 0
            held[:start] = False
            assert np.array_equal(now[held], then[held]), "a pinned page went away or got another slot"
            came = (then < 0) & (now >= 0)
            if came[start:].any():
                changes.append("revived")
            if came[:start].any():
                changes.append("recovered")
        return changes
