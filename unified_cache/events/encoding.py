"""KV events to bytes, as the consumers of vLLM's or of SGLang's events expect them, and back from any of these.

consumer   pages              tiers                    components                   pages of bigrams
vLLM       key, 32 bytes      GPU, CPU, STORAGE        each by ``group_idx``        first token of each pair
SGLang     first 8 bytes of   GPU, CPU_PINNED, DISK    Full alone: its consumers    pairs
           the key, as int64                           know no groups
"""

from collections.abc import Iterable, Iterator
from enum import Enum

from unified_cache.errors import EventFormatError
from unified_cache.events.schema import (
    ClearedArray,
    ClearedMap,
    RawBatch,
    RemovedArray,
    RemovedFields,
    RemovedMap,
    StoredArray,
    StoredFields,
    StoredMap,
    WireEvent,
)
from unified_cache.events.values import BlockHash, ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent
from unified_cache.extras import needs_extra
from unified_cache.window import SPAN_ALL

with needs_extra("events", "unified_cache.events"):
    import msgspec

__all__ = ["Consumer", "DecodedBatch", "Encoding", "EventEncoder", "decode_batch"]

HASH_BYTES = 8
"""Of a page key, where consumers take a number for it; as hash_str_to_int64 in SGLang 0.5.23."""

ARRAY_HEADS = (*range(0x90, 0xA0), 0xDC, 0xDD)
"""First bytes of an array in msgpack."""

FULL_KIND = "full_attention"
SLIDING_KIND = "sliding_window"
STATE_KIND = "mamba"
WHOLE_KINDS = frozenset({FULL_KIND, "mla_attention", "sink_full_attention"})
"""Kinds of KV cache groups, as KVCacheSpecKind in vLLM 0.32, that need all pages of a prefix."""


class Consumer(Enum):
    """Engine whose events a consumer knows."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Encoding(Enum):
    """Form of an event in msgpack."""

    MAPS = "maps"
    """A map with names, as the engines send now."""
    ARRAYS = "arrays"
    """An array with positions, as they sent before; some consumers read only these."""


_MEDIUM_NAMES = {
    Consumer.VLLM: ("GPU", "CPU", "STORAGE"),
    Consumer.SGLANG: ("GPU", "CPU_PINNED", "DISK"),
}
_MEDIA = {
    "GPU": Medium.DEVICE,
    "CPU": Medium.HOST,
    "CPU_PINNED": Medium.HOST,
    "STORAGE": Medium.STORAGE,
    "DISK": Medium.STORAGE,
    "EXTERNAL": Medium.STORAGE,
}


class EventEncoder:
    """Batches of one publisher as bytes. Not thread-safe."""

    __slots__ = ("_consumer", "_encoder", "_is_map", "_media", "_rank")

    def __init__(self, consumer: Consumer, encoding: Encoding, rank: int | None) -> None:
        """``rank`` is the data-parallel rank that batches name; None for an engine without."""
        self._consumer = consumer
        self._is_map = encoding is Encoding.MAPS
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

    def _fields(self, event: KvEvent) -> dict[str, object] | list[object] | None:
        if isinstance(event, ClearedEvent):
            return self._written("AllBlocksCleared", {}, ())
        if self._consumer is Consumer.SGLANG:
            return self._sglang_fields(event)
        medium = self._media[event.medium]
        if isinstance(event, RemovedEvent):
            removed: dict[str, object] = {"block_hashes": event.hashes, "medium": medium}
            return self._written("BlockRemoved", removed, (("group_idx", event.group),))
        kind = FULL_KIND if event.span == SPAN_ALL else STATE_KIND if event.span == 1 else SLIDING_KIND
        required: dict[str, object] = {
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": _single_tokens(event),
            "block_size": event.page_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": event.lora_name,
        }
        window = event.span * event.page_size + 1 if kind is SLIDING_KIND else None
        optional: list[tuple[str, object]] = [
            ("extra_keys", _all_extra_keys(event)),
            ("group_idx", event.group),
            ("kv_cache_spec_kind", kind),
            ("kv_cache_spec_sliding_window", window),
        ]
        if self._is_map and len(event.spans) > 1:
            optional.append(("component_spans", [0 if span == SPAN_ALL else span for span in event.spans]))
        return self._written("BlockStored", required, optional)

    def _sglang_fields(self, event: StoredEvent | RemovedEvent) -> dict[str, object] | list[object] | None:
        if event.group:
            return None
        hashes = [_number(each) for each in event.hashes]
        medium = self._media[event.medium]
        if isinstance(event, RemovedEvent):
            return self._written("BlockRemoved", {"block_hashes": hashes, "medium": medium}, ())
        required: dict[str, object] = {
            "block_hashes": hashes,
            "parent_block_hash": None if event.parent is None else _number(event.parent),
            "token_ids": _tokens_or_pairs(event),
            "block_size": event.page_size,
            "lora_id": None,
            "medium": medium,
        }
        # Arrays are of the time before there were more fields.
        named = [("lora_name", event.lora_name)] if self._is_map else []
        return self._written("BlockStored", required, named)

    def _written(
        self, name: str, required: dict[str, object], optional: Iterable[tuple[str, object]]
    ) -> dict[str, object] | list[object]:
        if self._is_map:
            return {"type": name, **required, **{key: value for key, value in optional if value is not None}}
        return [name, *required.values(), *(value for _, value in optional)]


def _number(block: BlockHash) -> int:
    return block if isinstance(block, int) else int.from_bytes(block[:HASH_BYTES], "big", signed=True)


def _single_tokens(event: StoredEvent) -> tuple[int, ...]:
    return event.tokens[::2] if _is_of_bigrams(event) else event.tokens


def _tokens_or_pairs(event: StoredEvent) -> tuple[int, ...] | list[tuple[int, int]]:
    if not _is_of_bigrams(event):
        return event.tokens
    return list(zip(event.tokens[::2], event.tokens[1::2], strict=True))


def _is_of_bigrams(event: StoredEvent) -> bool:
    return len(event.tokens) == 2 * event.page_size * len(event.hashes)


def _all_extra_keys(event: StoredEvent) -> list[tuple[str, ...] | None] | None:
    return list(event.extra_keys) or None


class DecodedBatch(msgspec.Struct, frozen=True, gc=False):
    """Events of one batch, in order."""

    seconds: float
    """Time since 1970 at the publisher."""
    rank: int | None
    events: tuple[KvEvent, ...]
    passed_over: int
    """Events about tiers that are none of ours."""


_BATCHES = msgspec.msgpack.Decoder(RawBatch)
_MAPS = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap)
_ARRAYS = msgspec.msgpack.Decoder(StoredArray | RemovedArray | ClearedArray)


def decode_batch(payload: bytes) -> DecodedBatch:
    """Read a batch of any engine.

    Raises:
        EventFormatError: no batch, or an event that is none of the three: what it would have said is not known.
    """
    try:
        raw = _BATCHES.decode(payload)
        events = [event for part in raw.events for event in _read(bytes(part))]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventFormatError(
            f"expected a batch of KV events of {len(payload)} bytes, found other bytes: {error}"
        ) from error
    return DecodedBatch(raw.ts, raw.rank, tuple(events), len(raw.events) - len(events))


def _read(part: bytes) -> Iterator[KvEvent]:
    event: WireEvent = (_ARRAYS if part[0] in ARRAY_HEADS else _MAPS).decode(part)
    if isinstance(event, ClearedMap | ClearedArray):
        yield ClearedEvent()
        return
    medium = _MEDIA.get(event.medium or "GPU")
    if medium is None:
        return
    if isinstance(event, RemovedFields):
        yield RemovedEvent(medium, event.group_idx or 0, tuple(event.block_hashes), event.ownership or "")
    else:
        yield _stored(event, medium)


def _stored(event: StoredFields, medium: Medium) -> StoredEvent:
    tokens: list[int] = []
    for token in event.token_ids:
        if isinstance(token, int):
            tokens.append(token)
        else:
            tokens.extend(token)
    extra = tuple(None if keys is None else tuple(map(_text, keys)) for keys in event.extra_keys or ())
    spans: tuple[int, ...] = ()
    if isinstance(event, StoredMap):
        spans = tuple(span or SPAN_ALL for span in event.component_spans or ())
        if event.cache_salt is not None and not extra and event.parent_block_hash is None:
            extra = ((event.cache_salt,), *(None for _ in event.block_hashes[1:]))
    return StoredEvent(
        medium,
        event.group_idx or 0,
        tuple(event.block_hashes),
        event.parent_block_hash,
        tuple(tokens),
        event.block_size,
        event.lora_name,
        extra,
        _span(event),
        spans,
        event.ownership or "",
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _span(event: StoredFields) -> int:
    """Return the pages that a resume needs of a group; all of them where the event does not say it clearly."""
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    if kind == STATE_KIND:
        return 1
    if kind is None or kind in WHOLE_KINDS or not window or event.block_size < 1:
        return SPAN_ALL
    return max(1, -(-(window - 1) // event.block_size))
