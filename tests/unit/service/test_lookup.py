"""The longest restorable prefix, against the definition and over the wire."""

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from tests.support.service import LoopbackServer, Wire
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.core.window import SPAN_ALL, window
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call
from unified_cache.service.requests.lookup import PoolSpan, longest_prefix
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO

Held = dict[str, list[bool]]


def defined(pools: Sequence[PoolSpan], held: Held, end: int) -> bool:
    return all(all(held[pool.name][window(end, pool.span) : end]) for pool in pools)


def asked_of(held: Held, asked: list[tuple[str, int, int]], counts: Sequence[tuple[str, int, int]]) -> list[Answer]:
    asked.extend(counts)
    return Answer.of_reads(there for name, start, end in counts for there in held[name][start:end])


@pytest.mark.parametrize("every_end", [False, True])
def test_the_longest_prefix_is_that_of_the_definition(every_end: bool) -> None:
    choice = random.Random(7)
    for _ in range(400):
        count = choice.randrange(0, 400)
        spans = [choice.choice([SPAN_ALL, 1, 2, 7, 63, 64, 65, 300, 1000]) for _ in range(choice.randrange(1, 5))]
        pools = [PoolSpan(f"p{number}", span) for number, span in enumerate(spans)]
        rate = choice.choice([0.0, 0.005, 0.1, 0.6, 1.0])
        held = {pool.name: [choice.random() >= rate for _ in range(count)] for pool in pools}
        found = longest_prefix(pools, count, partial(asked_of, held, []), every_end=every_end)
        ends = [end for end in range(1, count + 1) if defined(pools, held, end)]
        assert found.end == max(ends, default=0)
        assert (found.bound_by == "") == (found.end == count)
        if every_end:
            assert [end + 1 for end in np.flatnonzero(found.restorable).tolist()] == ends


def test_every_pattern_of_a_short_prefix_is_that_of_the_definition() -> None:
    pools = [PoolSpan("full", SPAN_ALL), PoolSpan("w1", 1), PoolSpan("w2", 2)]
    for bits in itertools.product((False, True), repeat=12):
        held = {"full": list(bits[:4]), "w1": list(bits[4:8]), "w2": list(bits[8:])}
        found = longest_prefix(pools, 4, partial(asked_of, held, []), every_end=False)
        assert found.end == max((end for end in range(1, 5) if defined(pools, held, end)), default=0)


def test_the_pool_that_binds_is_named() -> None:
    pools = [PoolSpan("full", SPAN_ALL), PoolSpan("index", SPAN_ALL), PoolSpan("window", 2)]
    whole = {"full": [True] * 9, "index": [True] * 9, "window": [True] * 9}

    def bound_by(name: str, *missing: int) -> tuple[int, str]:
        held = whole | {name: [page not in missing for page in range(9)]}
        found = longest_prefix(pools, 9, lambda asked: asked_of(held, [], asked), every_end=False)
        return found.end, found.bound_by

    assert bound_by("full") == (9, "")
    assert bound_by("full", 4) == (4, "full")
    assert bound_by("index", 0) == (0, "index")
    assert bound_by("window", 8) == (8, "window")
    assert bound_by("window", 3, 7) == (7, "window")


def test_a_window_is_asked_for_only_as_far_back_as_its_answer_lies() -> None:
    pools = [PoolSpan("full", SPAN_ALL), PoolSpan("window", 8)]
    held = {"full": [True] * 2048, "window": [page >= 2040 for page in range(2048)]}
    asked: list[tuple[str, int, int]] = []
    found = longest_prefix(pools, 2048, lambda counts: asked_of(held, asked, counts), every_end=False)
    assert found.end == 2048
    assert asked == [("full", 0, 2048), ("window", 1984, 2048)]


PAYLOAD_BYTES = 64
LAYOUT = ModelLayout(
    4, (Full((PoolSpec("kv", PAYLOAD_BYTES),)), SlidingWindow(8, 4, (PoolSpec("swa", PAYLOAD_BYTES),)))
)
MANIFEST = manifest_of(Identity("looked/up"), LAYOUT)


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A server with five pages of a prompt, and the windows of the last two."""
    running = LoopbackServer.start(MemoryStorage())
    client = running.client()
    client.register(MANIFEST, {})
    keys = Prompt.of(range(20), 4, Namespace(cache_salt="salt")).keys
    named = [Label(MANIFEST.identity, key, "kv") for key in keys]
    named += [Label(MANIFEST.identity, key, "swa") for key in keys[3:]]
    pages = [PageIO(label, (memoryview(bytearray(HEADER_BYTES + PAYLOAD_BYTES)),)) for label in named]
    for page in pages:
        seal_buffers(page.buffers, page.label)
    assert all(client.put(pages, Level.CACHED))
    wire = Wire(running)
    yield wire
    client.close()
    wire.close()
    running.stop()


def looked_up(wire: Wire, request: pb.LookupRequest) -> pb.LookupReply:
    request.identity = MANIFEST.identity
    return pb.LookupReply.FromString(wire.ask(Call.LOOKUP, request))


def test_tokens_are_hashed_as_an_engine_would(wire: Wire) -> None:
    salted = pb.Namespace(cache_salt="salt")
    reply = looked_up(wire, pb.LookupRequest(tokens=pb.Tokens(ids=range(30), namespace=salted)))
    assert reply == pb.LookupReply(end_max=5, pages_count=7, bound_by="kv")
    assert looked_up(wire, pb.LookupRequest(tokens=pb.Tokens(ids=range(30)))).end_max == 0
    other = pb.Namespace(cache_salt="salt", lora_id="adapter")
    assert looked_up(wire, pb.LookupRequest(tokens=pb.Tokens(ids=range(30), namespace=other))).end_max == 0


def test_tokens_of_bigrams_are_hashed_as_such(wire: Wire) -> None:
    bigrams = Namespace(cache_salt="salt", bigrams=True)
    named = [Label(MANIFEST.identity, key, "kv") for key in Prompt.of(range(20), 4, bigrams).keys[:2]]
    pages = [PageIO(label, (memoryview(bytearray(HEADER_BYTES + PAYLOAD_BYTES)),)) for label in named]
    for page in pages:
        seal_buffers(page.buffers, page.label)
    client = wire.running.client()
    client.register(MANIFEST, {})
    assert all(client.put(pages, Level.CACHED))
    client.close()
    pairs = pb.Namespace(cache_salt="salt", bigrams=True)
    needs = [pb.RequiredPool(name="kv", span=SPAN_ALL)]
    reply = looked_up(wire, pb.LookupRequest(tokens=pb.Tokens(ids=range(20), namespace=pairs), pools=needs))
    assert (reply.end_max, reply.pages_count) == (2, 4)


def test_every_end_is_reported_where_it_is_asked_for(wire: Wire) -> None:
    keys = pb.Keys(keys=Prompt.of(range(20), 4, Namespace(cache_salt="salt")).keys)
    reply = looked_up(wire, pb.LookupRequest(keys=keys, every_end=True))
    assert (reply.end_max, reply.restorable) == (5, bytes([0b10000]))
    full = [pb.RequiredPool(name="kv")]
    assert looked_up(wire, pb.LookupRequest(keys=keys, every_end=True, pools=full)).restorable == bytes([0b11111])
    narrow = [pb.RequiredPool(name="kv"), pb.RequiredPool(name="swa", span=1)]
    assert looked_up(wire, pb.LookupRequest(keys=keys, every_end=True, pools=narrow)).restorable == bytes([0b11000])
