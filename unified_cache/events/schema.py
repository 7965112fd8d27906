"""Messages of KV events as they are read: those of vLLM 0.33 and SGLang 0.5.23 alike, and older ones.

A batch is an array ``[ts, events, rank]``; ``ts`` is in seconds since 1970. An event is a map with its name under
``type``, or an array that begins with its name. A map leaves out fields with their default; an array has fields by
position, and where it ends early the rest have their default. Fields that are not named here are passed over.
"""

from unified_cache.events.values import BlockHash
from unified_cache.extras import needs_extra

with needs_extra("events", "unified_cache.events"):
    from msgspec import Raw, Struct

__all__ = [
    "ClearedArray",
    "ClearedMap",
    "RawBatch",
    "RemovedArray",
    "RemovedMap",
    "StoredArray",
    "StoredMap",
    "WireEvent",
]


class RawBatch(Struct, array_like=True, gc=False):
    """Events of one step of an engine, not read yet."""

    ts: float
    events: list[Raw]
    rank: int | None = None
    """Data-parallel rank."""


class StoredFields(Struct, gc=False):
    """Fields of BlockStored in the order of arrays."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int | tuple[int, int]]
    """Pairs where SGLang has pages of bigrams."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class StoredMap(StoredFields, tag="BlockStored", gc=False):
    """BlockStored as a map."""

    cache_salt: str | None = None
    """SGLang's; vLLM has the salt among its extra keys."""
    component_spans: list[int] | None = None
    """Ours: span of every component in pages, 0 for all pages; None for a model of one component."""


class StoredArray(StoredFields, tag="BlockStored", array_like=True, gc=False):
    """BlockStored as an array."""


class RemovedFields(Struct, gc=False):
    """Fields of BlockRemoved in the order of arrays."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class RemovedMap(RemovedFields, tag="BlockRemoved", gc=False):
    """BlockRemoved as a map."""


class RemovedArray(RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    """BlockRemoved as an array."""


class ClearedMap(Struct, tag="AllBlocksCleared", gc=False):
    """AllBlocksCleared as a map."""


class ClearedArray(Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    """AllBlocksCleared as an array."""


WireEvent = StoredMap | StoredArray | RemovedMap | RemovedArray | ClearedMap | ClearedArray
