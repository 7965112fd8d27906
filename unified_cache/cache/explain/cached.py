"""Explains a prompt to the engine of a cache: looks at its tree and its store as they are now."""

from contextlib import suppress

from unified_cache.cache.explain.explanation import Explanation, explanation_of
from unified_cache.cache.explain.stored import NearMatch, near_in_store, stored_pages
from unified_cache.controller import StorageTier
from unified_cache.controller.ledger import Ledger
from unified_cache.core.config import WritePolicy
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, Pages, Tier
from unified_cache.storage_backends.manifest import Description


def explain(
    ledger: Ledger,
    write: WritePolicy,
    storage: StorageTier | None,
    identity: Identity,
    prompt: Prompt,
    *,
    seeks_near: bool = True,
) -> Explanation:
    """Return the explanation of a prompt; see ``UnifiedCache.explain``."""
    tree, layout = ledger.tree, ledger.layout
    found, numbers = tree.peek(prompt), range(len(layout.components))
    tiers: dict[str, list[Pages] | None] = {}
    for tier in Tier:
        if ledger.capacity(tier, 0):
            tiers[tier.name.lower()] = [found.held_pages(tier, number) for number in numbers]
    alike = tree.prompts_alike(prompt) if seeks_near else []
    near = [NearMatch("memory", pages, prompt.differences(other)) for other, pages in alike if pages]
    if storage is not None:
        tiers["storage"] = None
        with suppress(StorageError):  # what a store has that fails is not known
            tiers["storage"] = stored_pages(storage.backend, layout, storage.owners, prompt)
        stored = tiers["storage"]
        if seeks_near and stored is not None and not stored[0].any():
            here, others = Description(identity, layout), [other for other, _ in alike]
            near += near_in_store(storage.backend, prompt, here, storage.owners, others)
    return explanation_of(layout, prompt.pages_count, tiers, near, write)
