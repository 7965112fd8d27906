"""KV events to bytes, as the consumers of vLLM's or of SGLang's events expect them.

consumer   pages              tiers                    components                   pages of bigrams
vLLM       key, 32 bytes      GPU, CPU, STORAGE        each by ``group_idx``        first token of each pair
SGLang     first 8 bytes of   GPU, CPU_PINNED, DISK    Full alone: its consumers    pairs
           the key, as int64                           know no groups
"""

from collections.abc import Iterable
from enum import Enum

from unified_cache.core.extras import needs_extra
from unified_cache.core.page import PageKey
from unified_cache.core.window import SPAN_ALL
from unified_cache.observe.events.values import ClearedEvent, KvEvent, RemovedEvent, StoredEvent

with needs_extra("events", "unified_cache.observe.events"):
    import msgspec

HASH_BYTES = 8
"""Of a page key, where consumers take a number for it; as hash_str_to_int64 in SGLang 0.5.23."""

FULL_KIND = "full_attention"
SLIDING_KIND = "sliding_window"
STATE_KIND = "mamba"
"""Kinds of KV cache groups, as KVCacheSpecKind in vLLM 0.32."""


class Consumer(Enum):
    """Engine whose events a consumer knows."""

    VLLM = "vllm"
    SGLANG = "sglang"


_MEDIUM_NAMES = {
    Consumer.VLLM: ("GPU", "CPU", "STORAGE"),
    Consumer.SGLANG: ("GPU", "CPU_PINNED", "DISK"),
}


class EventEncoder:
    """Batches of one publisher as bytes, each event a map with names, as the engines send. Not thread-safe."""

    __slots__ = ("_consumer", "_encoder", "_media", "_rank")

    def __init__(self, consumer: Consumer, rank: int | None) -> None:
        """``rank`` is the data-parallel rank that batches name; None for an engine without."""
        self._consumer = consumer
        self._media = _MEDIUM_NAMES[consumer]
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, seconds: float, events: Iterable[KvEvent]) -> bytes | None:
        """Return a batch of events of our own; None if the consumer has no use for any of them.

        ``seconds`` is the time since 1970.
        """
        written = [fields for event in events if (fields := self._fields(event)) is not None]
        if not written:
            return None
        batch: list[object] = [seconds, written]
        if self._rank is not None:
            batch.append(self._rank)
        return self._encoder.encode(batch)

    def _fields(self, event: KvEvent) -> dict[str, object] | None:
        if isinstance(event, ClearedEvent):
            return {"type": "AllBlocksCleared"}
        if self._consumer is Consumer.SGLANG:
            return None if event.group else self._sglang_fields(event)
        medium = self._media[event.medium]
        if isinstance(event, RemovedEvent):
            removed = {"block_hashes": event.hashes, "medium": medium, "group_idx": event.group}
            return {"type": "BlockRemoved", **removed}
        kind = FULL_KIND if event.span == SPAN_ALL else STATE_KIND if event.span == 1 else SLIDING_KIND
        fields: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.tokens[::2] if _is_of_bigrams(event) else event.tokens,
            "block_size": event.page_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": event.lora_name,
            "group_idx": event.group,
            "kv_cache_spec_kind": kind,
        }
        if event.extra_keys:
            fields["extra_keys"] = event.extra_keys
        if kind is SLIDING_KIND:
            fields["kv_cache_spec_sliding_window"] = event.span * event.page_size + 1
        if len(event.spans) > 1:
            fields["component_spans"] = [0 if span == SPAN_ALL else span for span in event.spans]
        return fields

    def _sglang_fields(self, event: StoredEvent | RemovedEvent) -> dict[str, object]:
        hashes, medium = [_number(each) for each in event.hashes], self._media[event.medium]
        if isinstance(event, RemovedEvent):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        fields: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if event.parent is None else _number(event.parent),
            "token_ids": _tokens_or_pairs(event),
            "block_size": event.page_size,
            "lora_id": None,
            "medium": medium,
        }
        if event.lora_name is not None:
            fields["lora_name"] = event.lora_name
        return fields


def _number(key: PageKey) -> int:
    return int.from_bytes(key[:HASH_BYTES], "big", signed=True)


def _tokens_or_pairs(event: StoredEvent) -> tuple[int, ...] | list[tuple[int, int]]:
    if not _is_of_bigrams(event):
        return event.tokens
    return list(zip(event.tokens[::2], event.tokens[1::2], strict=True))


def _is_of_bigrams(event: StoredEvent) -> bool:
    return len(event.tokens) == 2 * event.page_size * len(event.hashes)
