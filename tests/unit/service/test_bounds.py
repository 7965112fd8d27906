"""Bounds of one call in memory and time: what it may name, what it holds, how long it may take."""

import threading
from collections.abc import Iterator, Sequence

import grpc
import pytest

from tests.support.service import LoopbackServer, Wire, limits_with, refused, wait_for
from tests.unit.service.test_requests import BAD, IDENTITY, MANIFEST, key, part, run
from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.settings.access import Role
from unified_cache.core.settings.limits import LimitSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire.calls import Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.registry import Registry
from unified_cache.service.requests.assembler import page_in
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer

POOLS = 8
PAGES_MAX = 64
LARGE_BYTES = HEADER_BYTES + (1 << 20)
WIDE = ModelLayout(1, (Full(tuple(PoolSpec(f"pool_{number}", 16) for number in range(POOLS))),))
WIDE_MANIFEST = manifest_of(Identity("wide"), WIDE)
LARGE_MANIFEST = manifest_of(Identity("large"), ModelLayout(16, (Full((PoolSpec("kv", 1 << 20),)),)))


class AskedStorage(MemoryStorage):
    """A store that counts what it is asked, and answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_counts: list[int] = []
        self.is_free = threading.Event()
        self.is_free.set()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self.asked_counts.append(len(labels))
        self.is_free.wait(20)
        return super().exists(labels)


@pytest.fixture
def store() -> AskedStorage:
    return AskedStorage()


def serving(store: AskedStorage, limits: LimitSettings) -> Iterator[Wire]:
    running = LoopbackServer.start(store, limits)
    wire = Wire(running)
    for manifest in (MANIFEST, WIDE_MANIFEST, LARGE_MANIFEST):
        wire.ask(Call.HELLO, pb.HelloRequest(manifest=manifest))
    yield wire
    store.is_free.set()
    wire.close()
    running.stop()


@pytest.fixture
def wire(store: AskedStorage) -> Iterator[Wire]:
    limits = limits_with(pages_max=PAGES_MAX, lookup_pages_max=PAGES_MAX * 2, batch_bytes=1 << 18)
    yield from serving(store, limits)


@pytest.fixture
def short(store: AskedStorage) -> Iterator[Wire]:
    yield from serving(store, limits_with(call_s_max=0.3, pages_max=PAGES_MAX, lookup_pages_max=PAGES_MAX * 2))


def lookup(pages_count: int, *pools: str, identity: bytes = WIDE_MANIFEST.identity) -> pb.LookupRequest:
    keys = pb.Keys(keys=[key(number) for number in range(pages_count)])
    return pb.LookupRequest(identity=identity, keys=keys, pools=[pb.RequiredPool(name=name) for name in pools])


@pytest.mark.threat("costly requests")
def test_a_lookup_names_each_pool_once(wire: Wire, store: AskedStorage) -> None:
    with refused(BAD, "names each pool once, found 1 pools named 20000 times"):
        wire.ask(Call.LOOKUP, lookup(1, *["pool_0"] * 20_000))
    assert store.asked_counts == []


@pytest.mark.threat("costly requests")
def test_a_lookup_asks_for_a_bounded_number_of_pages_of_all_its_pools(wire: Wire, store: AskedStorage) -> None:
    most = 2 * PAGES_MAX // POOLS
    with refused(BAD, f"at most {2 * PAGES_MAX} pages of all its pools, found {most + 1} of {POOLS} pools each"):
        wire.ask(Call.LOOKUP, lookup(most + 1))
    tokens = pb.Tokens(ids=[1] * (most + 1))
    with refused(BAD, "pages of all its pools"):
        wire.ask(Call.LOOKUP, pb.LookupRequest(identity=WIDE_MANIFEST.identity, tokens=tokens))
    assert store.asked_counts == []
    wire.ask(Call.LOOKUP, lookup(most))
    assert sum(store.asked_counts) == 2 * PAGES_MAX
    assert max(store.asked_counts) <= PAGES_MAX


def test_a_run_of_too_many_pages_is_refused_before_they_are_named(wire: Wire, store: AskedStorage) -> None:
    with refused(BAD, f"1 to {PAGES_MAX} pages"):
        wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(*[b"no digest"] * (PAGES_MAX + 1))]))
    assert store.asked_counts == []


@pytest.mark.threat("costly requests")
@pytest.mark.parametrize("call", [Call.EXISTS, Call.LOOKUP])
def test_a_call_of_one_message_ends_in_time(short: Wire, store: AskedStorage, call: Call) -> None:
    store.is_free.clear()
    request = pb.ExistsRequest(runs=[run(key(0))]) if call is Call.EXISTS else lookup(1, identity=IDENTITY)
    with refused(grpc.StatusCode.CANCELLED):
        short.ask(call, request)
    store.is_free.set()
    wait_for(lambda: short.running.scheduler.in_flight_count == 0)


@pytest.mark.threat("costly requests")
def test_a_lookup_that_was_cut_off_asks_for_nothing_more(short: Wire, store: AskedStorage) -> None:
    store.is_free.clear()
    with refused(grpc.StatusCode.CANCELLED):
        short.ask(Call.LOOKUP, lookup(2 * PAGES_MAX // POOLS))
    store.is_free.set()
    wait_for(lambda: short.running.scheduler.in_flight_count == 0)
    assert store.asked_counts == [PAGES_MAX]
    assert ("Lookup", "default", "CANCELLED") in short.running.notes.codes
    assert "cut_off" in short.running.notes.kinds


@pytest.mark.threat("costly requests")
def test_what_nobody_knows_of_a_manifest_is_not_kept() -> None:
    padded = Manifest.FromString(MANIFEST.SerializeToString() + b"\xfa\x7f\x80\x80\x40" + bytes(1 << 20))
    assert padded.ByteSize() > 1 << 20
    registration = Registry(LimitSettings()).add(Caller("acme", Role.WRITER), padded, 0)
    assert registration.manifest == MANIFEST
    assert registration.manifest.ByteSize() == MANIFEST.ByteSize()
    assert registration.stored.ByteSize() < 2 * MANIFEST.ByteSize()


@pytest.mark.threat("costly requests")
def test_a_call_counts_the_largest_page_that_it_names(wire: Wire) -> None:
    large = run(key(0), identity=LARGE_MANIFEST.identity, object_bytes=LARGE_BYTES)
    small = run(key(0), identity=IDENTITY, object_bytes=HEADER_BYTES + 1000)
    for runs, largest_bytes in (([small], 1 << 18), ([small, large], LARGE_BYTES)):
        wire.running.scheduler.held.clear()
        wire.get(pb.GetRequest(runs=runs))
        assert max(wire.running.scheduler.held) == largest_bytes
        wire.running.scheduler.held.clear()
        start = pb.PutPart(start=pb.PutStart(runs=runs))
        with refused(BAD, "whole ones"):
            wire.put([start, part(bytes(10))])
        assert max(wire.running.scheduler.held) == largest_bytes


def test_a_small_page_does_not_keep_the_message_alive_that_it_came_in() -> None:
    message = bytes(10_000)
    small = page_in([memoryview(message)[:500]])
    large = page_in([memoryview(message)[:9_000]])
    assert [piece.obj is message for piece in small[1:]] == [False]
    assert [piece.obj is message for piece in large[1:]] == [True]
    assert sum(map(len, small)) == 500
