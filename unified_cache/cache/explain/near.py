"""Near matches: the same tokens under another namespace, or in a store under another identity.

A silent hit ratio of 0 % is most often this: another salt, another adapter, another dtype, another generation.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from unified_cache.core.errors import StorageError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.seal import Label
from unified_cache.storage_backends.catalog import catalog_in
from unified_cache.storage_backends.manifest import Description, described_by
from unified_cache.storage_backends.protocol import Answer, StorageReader

__all__ = ["NearMatch", "StoredUnder", "identity_differences", "namespace_differences", "near_in_store"]

ALIKE_MAX = 64
"""Other names of the same tokens that a store is asked for at most."""


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
        pages = "1 page" if self.pages == 1 else f"{self.pages:,} pages"
        return f"{self.place} has {pages} of the same tokens under another {', '.join(self.differs)}"


@dataclass(frozen=True, slots=True)
class StoredUnder:
    """Another name that a store may have a prompt's pages under."""

    prompt: Prompt
    owner: bytes
    pool: str
    differs: tuple[str, ...]


def namespace_differences(here: Namespace | None, there: Namespace | None) -> tuple[str, ...]:
    """Name the fields of two namespaces that differ, without their values, which may be secret.

    None is a namespace of which nothing but a digest is known.
    """
    if here is None or there is None:
        return ("namespace",)
    theirs = asdict(there)
    return tuple(name for name, value in asdict(here).items() if theirs[name] != value) or ("namespace",)


def identity_differences(mine: Description, there: Description) -> tuple[str, ...]:
    """Name what another identity has otherwise, with both values."""
    here, other = mine.identity, there.identity
    pairs: list[tuple[str, object, object]] = [
        ("model", here.model, other.model),
        ("revision", here.revision, other.revision),
        ("dtype", here.dtype, other.dtype),
        ("shard", here.shard.text, other.shard.text),
        ("generation", here.generation, other.generation),
        ("facts", dict(here.facts), dict(other.facts)),
        ("page size", mine.layout.page_size, there.layout.page_size),
        ("tensors", _tensors(mine), _tensors(there)),
    ]
    differing = [
        f"{name} ({_shown(theirs)} there, {_shown(ours)} here)" for name, ours, theirs in pairs if ours != theirs
    ]
    return tuple(differing) or ("layout of its pools",)


def _tensors(described: Description) -> str:
    return "; ".join(pool.tensors for pool in described.layout.pools if pool.tensors)


def _shown(value: object) -> str:
    return "none" if value in ("", {}) else str(value)


def near_in_store(
    storage: StorageReader,
    prompt: Prompt,
    here: Description,
    owners: Mapping[str, bytes],
    namespaces: Iterable[tuple[Prompt, tuple[str, ...]]],
) -> tuple[NearMatch, ...]:
    """Ask a store for the tokens of a prompt under other identities and namespaces; nothing where it does not answer.

    ``owners`` names by pool whose pages the prompt's own are; ``namespaces`` are the same tokens under other
    namespaces, and what these have otherwise.
    """
    pool = next((pool.name for pool in here.layout.components[0].pools if pool.page_bytes), None)
    if pool is None:
        return ()  # a store has no first page of a prompt that only windows are kept of
    others = [StoredUnder(alike, owners[pool], pool, differs) for alike, differs in namespaces]
    try:
        others += _under_identities(storage, prompt, here, set(owners.values()))
        return tuple(_asked(storage, [other for other in others[:ALIKE_MAX] if other.prompt.pages_count]))
    except StorageError:
        return ()


def _under_identities(
    storage: StorageReader, prompt: Prompt, here: Description, ours: Collection[bytes]
) -> Iterator[StoredUnder]:
    """Yield the names of a prompt's pages under the other identities that a store lists."""
    catalog = catalog_in(storage)
    for digest, manifest in ({} if catalog is None else catalog.manifests()).items():
        if digest in ours or manifest is None:
            continue
        try:
            there = described_by(manifest)
        except StorageError:
            continue  # what its pages are nobody knows
        pools = [each.name for each in there.layout.components[0].pools if each.page_bytes]
        if pools and there.layout.page_size == prompt.page_size:
            yield StoredUnder(prompt, digest, pools[0], identity_differences(here, there))


def _asked(storage: StorageReader, others: Sequence[StoredUnder]) -> Iterator[NearMatch]:
    if not others:
        return
    firsts = storage.exists([Label(other.owner, other.prompt.keys[0], other.pool) for other in others])
    for other, answer in zip(others, firsts, strict=True):
        if answer is Answer.HIT:
            answers = storage.exists([Label(other.owner, key, other.pool) for key in other.prompt.keys])
            pages = next((page for page, each in enumerate(answers) if each is not Answer.HIT), len(answers))
            yield NearMatch("storage", max(pages, 1), other.differs)
