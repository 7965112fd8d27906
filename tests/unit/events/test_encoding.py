"""Events as bytes: read by structs as the engines' own consumers define them, and read back by ours."""

from pathlib import Path

import msgspec
import pytest

from unified_cache.errors import EventFormatError
from unified_cache.events.encoding import Consumer, DecodedBatch, Encoding, EventEncoder, decode_batch
from unified_cache.events.values import BlockHash, ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent
from unified_cache.page import Namespace, Prompt
from unified_cache.window import SPAN_ALL

PAGE = 4
PROMPT = Prompt.of(range(3 * PAGE), PAGE)
BIGRAMS = Prompt.of(range(2 * PAGE + 1), PAGE, Namespace(bigrams=True))


class VllmStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """BlockStored as a consumer of vLLM 0.33 sees it, fields in the order of arrays."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
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


class VllmStoredArray(VllmStored, array_like=True, tag="BlockStored"):
    """The same by position."""


class VllmRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """BlockRemoved as a consumer of vLLM 0.33 sees it."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class VllmRemovedArray(VllmRemoved, array_like=True, tag="BlockRemoved"):
    """The same by position."""


class Cleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    """AllBlocksCleared of both."""


class ClearedByPosition(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    """The same by position."""


class SglangStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """BlockStored as a consumer of SGLang 0.5.23 sees it."""

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
    """BlockRemoved as a consumer of SGLang 0.5.23 sees it."""

    block_hashes: list[int]
    medium: str | None = None


class VllmBatch(msgspec.Struct, array_like=True):
    """Batch of maps of vLLM."""

    ts: float
    events: list[VllmStored | VllmRemoved | Cleared]
    data_parallel_rank: int | None = None


class VllmArrayBatch(msgspec.Struct, array_like=True):
    """Batch of arrays of vLLM."""

    ts: float
    events: list[VllmStoredArray | VllmRemovedArray | ClearedByPosition]
    data_parallel_rank: int | None = None


class SglangBatch(msgspec.Struct, array_like=True):
    """Batch of SGLang."""

    ts: float
    events: list[SglangStored | SglangRemoved | Cleared]
    attn_dp_rank: int | None = None


def stored(**fields: object) -> StoredEvent:
    base: dict[str, object] = {
        "medium": Medium.HOST,
        "group": 0,
        "hashes": PROMPT.keys[1:],
        "parent": PROMPT.keys[0],
        "tokens": tuple(range(PAGE, 3 * PAGE)),
        "page_size": PAGE,
    }
    return StoredEvent(**{**base, **fields})  # type: ignore[arg-type]  # fields by name


WINDOW = stored(medium=Medium.STORAGE, group=1, span=2, spans=(SPAN_ALL, 2))
NAMED = stored(
    medium=Medium.DEVICE,
    hashes=PROMPT.keys[:2],
    parent=None,
    tokens=tuple(range(2 * PAGE)),
    lora_name="style",
    extra_keys=(("style", "pepper"), ("style",)),
)
EVENTS: tuple[KvEvent, ...] = (ClearedEvent(), stored(), NAMED, WINDOW, RemovedEvent(Medium.STORAGE, 1, PROMPT.keys))


def encoded(
    consumer: Consumer, encoding: Encoding, events: tuple[KvEvent, ...] = EVENTS, rank: int | None = None
) -> bytes:
    payload = EventEncoder(consumer, encoding, rank).encode(12.5, events)
    assert payload is not None
    return payload


def int64(key: bytes) -> int:
    return int.from_bytes(key[:8], "big", signed=True)


@pytest.mark.parametrize(("encoding", "batch"), [(Encoding.MAPS, VllmBatch), (Encoding.ARRAYS, VllmArrayBatch)])
def test_consumers_of_vllm_read_every_event(encoding: Encoding, batch: type[VllmBatch]) -> None:
    found = msgspec.msgpack.decode(encoded(Consumer.VLLM, encoding, rank=3), type=batch)
    assert (found.ts, found.data_parallel_rank, len(found.events)) == (12.5, 3, len(EVENTS))
    cleared, plain, named, window, removed = found.events
    assert isinstance(cleared, Cleared | ClearedByPosition)
    assert isinstance(plain, VllmStored)
    assert (plain.block_hashes, plain.parent_block_hash) == (list(PROMPT.keys[1:]), PROMPT.keys[0])
    assert (plain.token_ids, plain.block_size) == (list(range(PAGE, 3 * PAGE)), PAGE)
    assert (plain.medium, plain.group_idx, plain.kv_cache_spec_kind) == ("CPU", 0, "full_attention")
    assert isinstance(named, VllmStored)
    assert (named.medium, named.lora_name, named.extra_keys) == ("GPU", "style", [("style", "pepper"), ("style",)])
    assert named.parent_block_hash is None
    assert isinstance(window, VllmStored)
    assert (window.medium, window.group_idx, window.kv_cache_spec_kind) == ("STORAGE", 1, "sliding_window")
    assert window.kv_cache_spec_sliding_window == 2 * PAGE + 1, "the query counts as one of them"
    assert (window.session_id, window.lookahead_token_ids) == (None, None)
    assert isinstance(removed, VllmRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == (list(PROMPT.keys), "STORAGE", 1)


def test_consumers_of_sglang_read_what_full_attention_holds() -> None:
    found = msgspec.msgpack.decode(encoded(Consumer.SGLANG, Encoding.MAPS), type=SglangBatch)
    cleared, plain, named = found.events
    assert isinstance(cleared, Cleared)
    assert isinstance(plain, SglangStored)
    assert (plain.block_hashes, plain.parent_block_hash) == (list(map(int64, PROMPT.keys[1:])), int64(PROMPT.keys[0]))
    assert (plain.medium, plain.token_ids) == ("CPU_PINNED", list(range(PAGE, 3 * PAGE)))
    assert isinstance(named, SglangStored)
    assert (named.medium, named.lora_name) == ("GPU", "style")
    (removed,) = msgspec.msgpack.decode(
        encoded(Consumer.SGLANG, Encoding.MAPS, (RemovedEvent(Medium.STORAGE, 0, PROMPT.keys),)), type=SglangBatch
    ).events
    assert removed == SglangRemoved(list(map(int64, PROMPT.keys)), "DISK")


def test_a_batch_that_a_consumer_has_no_use_for_is_not_sent() -> None:
    assert EventEncoder(Consumer.SGLANG, Encoding.MAPS, None).encode(0.0, [WINDOW]) is None


def test_pages_of_bigrams_are_pairs_for_sglang_and_first_tokens_for_vllm() -> None:
    pairs = [(each, each + 1) for each in range(2 * PAGE)]
    tokens = tuple(token for pair in pairs for token in pair)
    event = stored(hashes=BIGRAMS.keys, parent=None, tokens=tokens)
    (sglang,) = msgspec.msgpack.decode(encoded(Consumer.SGLANG, Encoding.MAPS, (event,)), type=SglangBatch).events
    assert isinstance(sglang, SglangStored)
    assert sglang.token_ids == pairs
    (vllm,) = msgspec.msgpack.decode(encoded(Consumer.VLLM, Encoding.MAPS, (event,)), type=VllmBatch).events
    assert isinstance(vllm, VllmStored)
    assert vllm.token_ids == list(range(2 * PAGE))


def test_maps_come_back_as_they_were() -> None:
    batch = decode_batch(encoded(Consumer.VLLM, Encoding.MAPS, rank=1))
    assert (batch.seconds, batch.rank, batch.events, batch.passed_over) == (12.5, 1, EVENTS, 0)


def test_arrays_come_back_without_the_spans_of_other_components() -> None:
    events = decode_batch(encoded(Consumer.VLLM, Encoding.ARRAYS)).events
    assert events[3] == stored(medium=Medium.STORAGE, group=1, span=2)
    assert events[:3] + events[4:] == EVENTS[:3] + EVENTS[4:]


@pytest.mark.parametrize("encoding", Encoding)
def test_events_for_sglang_come_back_with_numbers_for_keys(encoding: Encoding) -> None:
    _, plain, _ = decode_batch(encoded(Consumer.SGLANG, encoding)).events
    assert plain == stored(hashes=tuple(map(int64, PROMPT.keys[1:])), parent=int64(PROMPT.keys[0]))


def test_what_the_engines_leave_out_or_add_is_understood() -> None:
    first = {"parent_block_hash": None, "lora_id": None}
    batch = [
        1.0,
        [
            {"type": "BlockStored", "block_hashes": [5], "token_ids": [1, 2], "block_size": 2, **first},
            {"type": "BlockRemoved", "block_hashes": [5], "new_field": 1},
            ["BlockStored", [6], 5, [3, 4], 2],
            ["BlockRemoved", [6]],
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "token_ids": [1, 2],
                "block_size": 2,
                "medium": "MOON",
                **first,
            },
        ],
    ]
    found = decode_batch(msgspec.msgpack.encode(batch))
    assert found.events == (
        StoredEvent(Medium.DEVICE, 0, (5,), None, (1, 2), 2),
        RemovedEvent(Medium.DEVICE, 0, (5,)),
        StoredEvent(Medium.DEVICE, 0, (6,), 5, (3, 4), 2),
        RemovedEvent(Medium.DEVICE, 0, (6,)),
    )
    assert found.passed_over == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0, 5]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", "no list"]]]),
        msgspec.msgpack.encode([1.0, [5]]),
        b"\x92" + msgspec.msgpack.encode(1.0) + b"\x91" * 5_000,
        encoded(Consumer.VLLM, Encoding.MAPS)[:-1],
    ],
)
def test_bytes_that_are_no_batch_are_refused(payload: bytes) -> None:
    with pytest.raises(EventFormatError):
        decode_batch(payload)


def recorded(name: str) -> bytes:
    return bytes.fromhex((Path(__file__).parent / "recorded" / name).read_text(encoding="ascii"))


def test_a_batch_that_vllm_encoded_is_read() -> None:
    first, second = b"\1" * 32, b"\2" * 32
    extra = (("style", "pepper"), ("style",))
    assert decode_batch(recorded("vllm_0.32.hex")) == DecodedBatch(
        2.5,
        1,
        (
            ClearedEvent(),
            StoredEvent(Medium.DEVICE, 0, (first, second), None, (1, 2, 3, 4), 2, "style", extra),
            StoredEvent(Medium.HOST, 1, (second,), first, (3, 4), 2, span=2),
            RemovedEvent(Medium.STORAGE, 1, (first,), "disk"),
        ),
        0,
    )


def test_a_batch_that_sglang_encoded_is_read() -> None:
    first, second = -7164637995261029506, 3374555260141370485
    assert decode_batch(recorded("sglang_0.5.23.hex")) == DecodedBatch(
        2.5,
        1,
        (
            ClearedEvent(),
            StoredEvent(Medium.DEVICE, 0, (first, second), None, (1, 2, 3, 4), 2, extra_keys=(("pepper",), None)),
            StoredEvent(Medium.HOST, 0, (second,), first, (3, 4, 4, 5), 2),
            RemovedEvent(Medium.STORAGE, 0, (first,)),
        ),
        0,
    )
