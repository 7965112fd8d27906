"""KV events as the consumers of vLLM 0.33 and SGLang 0.5.23 define them: structs that read what is published."""

import msgspec


class VllmStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """BlockStored of vLLM."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[int] | None = None


class VllmRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """BlockRemoved of vLLM."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    """AllBlocksCleared of both."""


class SglangStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """BlockStored of SGLang."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SglangRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """BlockRemoved of SGLang."""

    block_hashes: list[int]
    medium: str | None = None


class VllmBatch(msgspec.Struct, array_like=True):
    """Batch of maps of vLLM."""

    ts: float
    events: list[VllmStored | VllmRemoved | Cleared]
    data_parallel_rank: int | None = None


class SglangBatch(msgspec.Struct, array_like=True):
    """Batch of SGLang."""

    ts: float
    events: list[SglangStored | SglangRemoved | Cleared]
    attn_dp_rank: int | None = None
