"""Conversations that lie in storage turn by turn, and a store of which some of it does not come."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from tests.support.cache import IDENTITY
from tests.support.operations import engine, serve
from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.protocol import Store

ROOM = 60
"""Pages that each component can hold on each tier."""


def store_turns(layout: ModelLayout, store: Store, turns: Iterable[int], identity: Identity = IDENTITY) -> None:
    """Have another cache serve and store the conversation as it was after each turn, in pages."""
    toy = engine(store, layout=layout, device=ROOM, identity=identity)
    for end in turns:
        toy.cache.backup(serve(toy, end))
        toy.cache.wait_all(5)
    toy.cache.wait_all(5)


@dataclass(frozen=True)
class HostModel:
    """Pages that a host must hold, by component: told from the objects that came, page by page."""

    layout: ModelLayout
    prompt: Prompt
    pages: list[set[int]] = field(default_factory=list)

    @classmethod
    def of(cls, layout: ModelLayout, prompt: Prompt, objects: Collection[Label], memory: list[set[int]]) -> "HostModel":
        """Take what came of storage and, by component, the pages that were in memory before."""
        names = {(label.key, label.pool) for label in objects}
        pages: list[set[int]] = []
        for component, had in zip(layout.components, memory, strict=True):
            pools = [pool.name for pool in component.pools if pool.page_bytes]
            pages.append(
                had | {page for page, key in enumerate(prompt.keys) if all((key, pool) in names for pool in pools)}
            )
        full_end = next(page for page in range(prompt.pages_count + 1) if page not in pages[0])
        return cls(layout, prompt, [{page for page in held if page < full_end} for held in pages])

    @property
    def end(self) -> int:
        """The longest end at which every component has its window."""
        return next(end for end in range(self.prompt.pages_count, -1, -1) if self.resumable(end))

    def resumable(self, end: int) -> bool:
        return all(
            set(range(max(0, end - component.span), end)) <= held
            for component, held in zip(self.layout.components, self.pages, strict=True)
        )


def pages_on(cache: UnifiedCache, prompt: Prompt, *tiers: Tier) -> list[set[int]]:
    """Return by component the pages of a prompt that the tree holds on any of these tiers."""
    tree = cache._ledger.tree
    found = tree.match(prompt)
    return [
        {
            page
            for tier in tiers
            for page in np.flatnonzero(found.slots(tier, component, 0, found.tree_end) >= 0).tolist()
        }
        for component in range(len(cache.layout.components))
    ]
