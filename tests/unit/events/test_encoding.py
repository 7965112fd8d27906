"""Events as bytes: read by structs as the engines' own consumers define them."""

import msgspec

from tests.support.events import (
    Cleared,
    SglangBatch,
    SglangRemoved,
    SglangStored,
    VllmBatch,
    VllmRemoved,
    VllmStored,
)
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.window import SPAN_ALL
from unified_cache.observe.events.encoding import Consumer, EventEncoder
from unified_cache.observe.events.values import ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent

PAGE = 4
PROMPT = Prompt.of(range(3 * PAGE), PAGE)
BIGRAMS = Prompt.of(range(2 * PAGE + 1), PAGE, Namespace(bigrams=True))


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


def encoded(consumer: Consumer, events: tuple[KvEvent, ...] = EVENTS, rank: int | None = None) -> bytes:
    payload = EventEncoder(consumer, rank).encode(12.5, events)
    assert payload is not None
    return payload


def int64(key: bytes) -> int:
    return int.from_bytes(key[:8], "big", signed=True)


def test_consumers_of_vllm_read_every_event() -> None:
    found = msgspec.msgpack.decode(encoded(Consumer.VLLM, rank=3), type=VllmBatch)
    assert (found.ts, found.data_parallel_rank, len(found.events)) == (12.5, 3, len(EVENTS))
    cleared, plain, named, window, removed = found.events
    assert isinstance(cleared, Cleared)
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
    found = msgspec.msgpack.decode(encoded(Consumer.SGLANG), type=SglangBatch)
    cleared, plain, named = found.events
    assert isinstance(cleared, Cleared)
    assert isinstance(plain, SglangStored)
    assert (plain.block_hashes, plain.parent_block_hash) == (list(map(int64, PROMPT.keys[1:])), int64(PROMPT.keys[0]))
    assert (plain.medium, plain.token_ids) == ("CPU_PINNED", list(range(PAGE, 3 * PAGE)))
    assert isinstance(named, SglangStored)
    assert (named.medium, named.lora_name) == ("GPU", "style")
    (removed,) = msgspec.msgpack.decode(
        encoded(Consumer.SGLANG, (RemovedEvent(Medium.STORAGE, 0, PROMPT.keys),)), type=SglangBatch
    ).events
    assert removed == SglangRemoved(list(map(int64, PROMPT.keys)), "DISK")


def test_a_batch_that_a_consumer_has_no_use_for_is_not_sent() -> None:
    assert EventEncoder(Consumer.SGLANG, None).encode(0.0, [WINDOW]) is None


def test_pages_of_bigrams_are_pairs_for_sglang_and_first_tokens_for_vllm() -> None:
    pairs = [(each, each + 1) for each in range(2 * PAGE)]
    tokens = tuple(token for pair in pairs for token in pair)
    event = stored(hashes=BIGRAMS.keys, parent=None, tokens=tokens)
    (sglang,) = msgspec.msgpack.decode(encoded(Consumer.SGLANG, (event,)), type=SglangBatch).events
    assert isinstance(sglang, SglangStored)
    assert sglang.token_ids == pairs
    (vllm,) = msgspec.msgpack.decode(encoded(Consumer.VLLM, (event,)), type=VllmBatch).events
    assert isinstance(vllm, VllmStored)
    assert vllm.token_ids == list(range(2 * PAGE))


def test_a_map_says_the_span_of_every_component_and_0_for_all_pages() -> None:
    (window,) = msgspec.msgpack.decode(encoded(Consumer.VLLM, (WINDOW,)))[1]
    assert window["component_spans"] == [0, 2]
    (plain,) = msgspec.msgpack.decode(encoded(Consumer.VLLM, (stored(),)))[1]
    assert "component_spans" not in plain, "of a model of one component there is nothing to say"
