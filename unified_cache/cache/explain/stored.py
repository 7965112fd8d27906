"""Pages of a prompt that a store has: under its own name, and under others.

A silent hit ratio of 0 % is most often a near match: another salt, another adapter, another dtype, another generation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, Pages, all_pages
from unified_cache.core.seal import Label
from unified_cache.storage_backends.manifest import Description, described_by
from unified_cache.storage_backends.protocol import Answer, Store

ALIKE_MAX = 64
"""Other names of the same tokens that a store is asked for at most."""

_StoredUnder = tuple[Prompt, bytes, str, tuple[str, ...]]
"""Another name that a store may have a prompt's pages under: owner and pool, and what it has otherwise."""


def stored_pages(
    storage: Store, layout: ModelLayout, owners: Mapping[str, bytes], prompt: Prompt
) -> list[Pages] | None:
    """Ask a store, in one call, which pages it has of every pool, by component; None where it does not say.

    ``owners`` names by pool whose pages the prompt's own are.
    """
    pools = [[pool.name for pool in component.pools if pool.page_bytes] for component in layout.components]
    labels = [Label(owners[name], key, name) for names in pools for name in names for key in prompt.keys]
    answers = storage.exists(labels)
    if Answer.UNAVAILABLE in answers and Answer.HIT not in answers:
        return None
    hits = np.array([answer is Answer.HIT for answer in answers], np.bool_)
    rows = iter(hits.reshape(sum(map(len, pools)), prompt.pages_count))
    present: list[Pages] = []
    for names in pools:  # one without objects has all that Full has, and Full all
        without = present[0].copy() if present else all_pages(prompt.pages_count)
        present.append(np.logical_and.reduce([next(rows) for _ in names]) if names else without)
    return present


@dataclass(frozen=True, slots=True)
class NearMatch:
    """The same tokens under another name, and how many pages there are of them."""

    place: str
    """memory or storage."""
    pages: int
    differs: tuple[str, ...]
    """What the other name has otherwise, as in ``cache_salt`` or ``dtype (float8 there, bfloat16 here)``."""

    @property
    def text(self) -> str:
        """The match in words."""
        pages = pages_text(self.pages)
        return f"{self.place} has {pages} of the same tokens under another {', '.join(self.differs)}"


def pages_text(pages: int) -> str:
    """Return a number of pages in words."""
    return "1 page" if pages == 1 else f"{pages:,} pages"


def near_in_store(
    storage: Store,
    prompt: Prompt,
    here: Description,
    owners: Mapping[str, bytes],
    alike: Iterable[Prompt] = (),
) -> list[NearMatch]:
    """Ask a store for a prompt's tokens under other identities and namespaces; nothing where it does not answer.

    ``alike`` are the same tokens in other namespaces that are known; that without a name is always asked for.
    """
    pool = next((pool.name for pool in here.layout.components[0].pools if pool.page_bytes), None)
    if pool is None:
        return []  # a store has no first page of a prompt that only windows are kept of
    named = {other.root: other for other in alike}
    if prompt.root and not prompt.first:
        named[b""] = Prompt(prompt.tokens, prompt.page_size, b"", media=prompt.media)
    others: list[_StoredUnder] = [(other, owners[pool], pool, prompt.differences(other)) for other in named.values()]
    try:
        for digest, manifest in (storage.manifests() or {}).items():
            if digest in owners.values() or manifest is None:
                continue
            with suppress(StorageError):  # nobody knows what its pages are
                there = described_by(manifest)
                pools = [each.name for each in there.layout.components[0].pools if each.page_bytes]
                if pools and there.layout.page_size == prompt.page_size:
                    others.append((prompt, digest, pools[0], here.differences(there)))
        return list(_asked(storage, [other for other in others[:ALIKE_MAX] if other[0].pages_count]))
    except StorageError:
        return []


def _asked(storage: Store, others: Sequence[_StoredUnder]) -> Iterator[NearMatch]:
    firsts = storage.exists([Label(owner, prompt.keys[0], pool) for prompt, owner, pool, _ in others])
    for (prompt, owner, pool, differs), answer in zip(others, firsts, strict=True):
        if answer is Answer.HIT:
            answers = storage.exists([Label(owner, key, pool) for key in prompt.keys])
            pages = next((page for page, each in enumerate(answers) if each is not Answer.HIT), len(answers))
            yield NearMatch("storage", max(pages, 1), differs)
