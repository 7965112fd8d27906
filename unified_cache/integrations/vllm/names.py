"""Names of vLLM's chunks in a store: facts about the engine → identity and layout; offload key → label.

An offload key of vLLM is the hash of a prefix, then the number of a group of layers. The hash is the page key, and each
group a pool: a chunk of a group is one page of that pool. A row of vLLM's host memory holds one chunk of any group, of
all workers side by side; the payload of a page is the row without its alignment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, dtype_name, facts_of
from unified_cache.core.seal import Label

HASH_BYTES = 32
"""Bytes of a hash that is the same in every process: SHA-256, as vLLM's sha256 and sha256_cbor."""

GROUP_BYTES = 4
"""Bytes of the group's number, big-endian; as make_offload_key in vLLM 0.32."""

POOL_PREFIX = "g"
"""Of the name of a group's pool; what follows is the group's number."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group of layers that vLLM offloads: they share block tables, and so their chunks."""

    number: int
    """Number of the group in vLLM's KV cache configuration, and in its offload keys."""
    tokens_per_chunk: int
    span: int
    """Chunks that a resume needs of this group: ``SPAN_ALL`` for all, ``SPAN_UNKNOWN`` if the engine did not tell."""
    kind: str
    """Kind of its layers and their bytes, as text for the identity."""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """All that the bytes of a page depend on beside the tokens. Engines share pages only where it is equal."""

    model: str
    revision: str
    """Commit or digest of the weights."""
    dtype: str
    """Type of the KV cache's numbers."""
    groups: tuple[GroupFacts, ...]
    others: Mapping[str, str]
    """Anything else by name: quantization, attention backend, hash, parallel sizes, layout of a block."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """One row of vLLM's host memory."""

    stride_bytes: int
    """From the start of a row to the start of the next, aligned to a memory page."""
    payload_bytes: int
    """Of all workers; what follows it in the row is alignment."""

    def __post_init__(self) -> None:
        if not 0 < self.payload_bytes <= self.stride_bytes:
            raise ConfigError(
                f"a row of {self.stride_bytes} bytes must hold the chunk of all workers, found {self.payload_bytes}"
            )


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """Identity and layout of one engine's pages in one generation, and the label of each chunk."""

    identity: Identity
    layout: ModelLayout
    pools: Mapping[int, tuple[bytes, str]]
    """By group: the digest that its pool is stored under, and the pool's name."""

    @classmethod
    def of(cls, facts: VllmFacts, row: RowShape) -> "ChunkNames":
        """Name the pages of an engine.

        Raises:
            ConfigError: no group, or no revision: pages of other weights would be taken for this engine's.
        """
        if not facts.revision:
            raise ConfigError(
                f"a store that outlives the engine needs the revision of {facts.model}'s weights, found none: "
                f"say revision, or use UnifiedCacheConnector, which finds it out"
            )
        if not facts.groups:
            raise ConfigError("an engine that offloads has groups of layers, found none")
        kinds = {f"group {group.number}": group.kind for group in facts.groups}
        others = facts_of({**facts.others, **kinds, "kv dtype": facts.dtype})
        # Those that need most pages first.
        groups = sorted(facts.groups, key=lambda group: (-group.span, group.number))
        components: list[Component] = []
        for group in groups:
            pool = PoolSpec(f"{POOL_PREFIX}{group.number}", row.payload_bytes)
            components.append(Component(pool.name, group.span, (pool,), page_size=group.tokens_per_chunk))
        identity = Identity(facts.model, facts.revision, dtype_name(facts.dtype), facts=others)
        return cls._named(identity, ModelLayout(groups[0].tokens_per_chunk, tuple(components)))

    def renewed(self, generation: int) -> "ChunkNames":
        """Return the names of the same engine in another generation, where none of these pages is found."""
        return self._named(replace(self.identity, generation=generation), self.layout)

    @classmethod
    def _named(cls, identity: Identity, layout: ModelLayout) -> "ChunkNames":
        owners = identity.owners(layout).items()
        return cls(identity, layout, {int(pool.removeprefix(POOL_PREFIX)): (owner, pool) for pool, owner in owners})

    def offload_key(self, label: Label) -> bytes | None:
        """Return the chunk that a label names; None if it is another engine's, or another generation's."""
        for group, pool in self.pools.items():
            if pool == (label.identity, label.pool):
                return label.key + group.to_bytes(GROUP_BYTES, "big")
        return None

    def label(self, offload_key: bytes) -> Label:
        """Return the label of a chunk; ``offload_key`` is one that ``is_stable_key``."""
        owner, pool = self.pools[group_of(offload_key)]
        return Label(owner, offload_key[:HASH_BYTES], pool)


def group_of(offload_key: bytes) -> int:
    """Return the number of the group that a chunk belongs to."""
    return int.from_bytes(offload_key[HASH_BYTES:], "big")


def is_stable_key(offload_key: bytes) -> bool:
    """Return whether another process gives the same chunk the same key: xxhash's are shorter and seeded at random."""
    return len(offload_key) == HASH_BYTES + GROUP_BYTES
