"""Explains a prompt to the engine of a cache: looks at its tree, its memory of what has gone, and its store."""

from unified_cache.config import CacheConfig
from unified_cache.controller import StorageTier
from unified_cache.errors import StorageError
from unified_cache.explain.explanation import Explainer, Explanation
from unified_cache.explain.fates import StoredPages, StoreSilence, present_pages
from unified_cache.explain.near import NearMatch, namespace_differences, near_in_store
from unified_cache.explain.remembered import fates_of
from unified_cache.ledger import Ledger
from unified_cache.page import Prompt
from unified_cache.pool import Identity, Tier
from unified_cache.storage_backends.manifest import Description

__all__ = ["explain"]

TIER_NAMES = (*(tier.name.lower() for tier in Tier), "storage")


def explain(
    ledger: Ledger,
    config: CacheConfig,
    storage: StorageTier | None,
    identity: Identity,
    prompt: Prompt,
    *,
    seeks_near: bool = True,
) -> Explanation:
    """Return the explanation of a prompt; changes nothing, and asks the store what it has of it.

    With ``seeks_near`` it asks for the same tokens under other names, too.
    """
    ledger.changes.take_removals()
    pages = prompt.pages_count
    stored = None if storage is None or not pages else _asked(storage, prompt)
    fates = fates_of(ledger, prompt, stored)
    has_host = len(fates) > 1 + (stored is not None)
    names = [TIER_NAMES[0], *([TIER_NAMES[1]] if has_host else []), *([TIER_NAMES[2]] if stored is not None else [])]
    clock_s = 0.0 if ledger.fates.ring is None else ledger.fates.ring.clock()
    explainer = Explainer(ledger.layout.components, ledger.layout.page_size, config, clock_s)
    near = _near(ledger, storage, identity, prompt, stored) if seeks_near else []
    return explainer.explain(list(zip(names, fates, strict=True)), pages, near, _remembers(ledger))


def _near(
    ledger: Ledger,
    storage: StorageTier | None,
    identity: Identity,
    prompt: Prompt,
    stored: StoredPages | StoreSilence | None,
) -> list[NearMatch]:
    """Return the same tokens in other namespaces of memory, and in a store that has nothing under this name."""
    alike = _alike(ledger, prompt)
    near = [NearMatch("memory", count, differs) for _, count, differs in alike]
    if storage is not None and isinstance(stored, StoredPages) and not stored.present[0].any():
        here = ledger.changes.namespace(prompt.seed)
        others = {prompt.seed: prompt} | {other.seed: other for other, _, _ in alike}
        for seed in ledger.changes.seeds():
            if seed not in others and not prompt.first:
                others[seed] = Prompt(prompt.tokens, prompt.page_size, seed)
        del others[prompt.seed]
        under = [(other, namespace_differences(here, ledger.changes.namespace(seed))) for seed, other in others.items()]
        near += near_in_store(storage.backend, prompt, Description(identity, ledger.layout), storage.owners, under)
    return near


def _remembers(ledger: Ledger) -> str:
    forgotten = ledger.fates.ring
    if forgotten is None:
        return "nothing that has gone is remembered; CacheConfig.forgotten_pages_max says how many pages are to be"
    if forgotten.is_complete:
        return "everything since the cache was opened"
    return f"the last {forgotten.pages_max:,} pages that something happened to (CacheConfig.forgotten_pages_max)"


def _alike(ledger: Ledger, prompt: Prompt) -> list[tuple[Prompt, int, tuple[str, ...]]]:
    """Return the same tokens in other namespaces of the tree: the prompt there, its pages there, and what differs."""
    return [(other, count, _differences(ledger, prompt, other)) for other, count in ledger.tree.prompts_alike(prompt)]


def _differences(ledger: Ledger, prompt: Prompt, other: Prompt) -> tuple[str, ...]:
    """Name what the namespaces of two prompts of the same tokens have otherwise."""
    bigrams = ("bigrams",) if bool(prompt.first) != bool(other.first) else ()
    if prompt.seed == other.seed:
        return bigrams
    here, there = (ledger.changes.namespace(each.seed) for each in (prompt, other))
    return (*namespace_differences(here, there), *bigrams)


def _asked(storage: StorageTier, prompt: Prompt) -> StoredPages | StoreSilence:
    """Ask a store for every object of a prompt, in one call; it is bounded by the guard around the store."""
    pools = [storage.pools(component) for component in range(len(storage.layout.components))]
    labels = [label for specs in pools for pool in specs for label in storage.labels(prompt.keys, pool)]
    try:
        answers = storage.backend.exists(labels)
    except StorageError as error:
        return StoreSilence(str(error))
    return present_pages(answers, [len(specs) for specs in pools], prompt.pages_count)
