"""Stores that fail, streams that stall: misses and statuses, never wrong bytes, nothing left behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.files import flip, object_paths
from tests.support.service import LoopbackServer, Wire, refused, wait_for
from tests.support.store_calls import ScriptedStorage, raising
from tests.support.wrappers import bounded
from tests.unit.service.test_requests import (
    BAD,
    IDENTITY,
    MANIFEST,
    OBJECT_BYTES,
    half_a_put,
    key,
    page,
    part,
    run,
    start,
)
from tests.unit.service.test_tenancy import put
from unified_cache.components import Full
from unified_cache.core.errors import NotOfferedError, StorageError, StorageFullError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.settings.service import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import Call, decoded, encoded
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.registry import Registry
from unified_cache.service.limits import Limits
from unified_cache.service.servicer import NamedRun, PageAssembler
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import Method

CALLS = (Method.EXISTS, Method.GET, Method.PUT, Method.TOUCH, Method.SCAN)
PAGES_MAX = 64
LARGE_BYTES = HEADER_BYTES + (1 << 20)
LARGE_MANIFEST = manifest_of(Identity("large"), ModelLayout(16, (Full((PoolSpec("kv", 1 << 20),)),)))

Serve = Callable[..., tuple[LoopbackServer, Wire]]


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStorage:
    return ScriptedStorage(FileStorage.open(tmp_path))


@pytest.fixture
def serve(store: ScriptedStorage) -> Iterator[Serve]:
    opened: list[tuple[LoopbackServer, Wire]] = []

    def serve(limits: Limits | None = None, *, deadline_s: float = 0.0) -> tuple[LoopbackServer, Wire]:
        backend = bounded(store, deadline_s, 4) if deadline_s else store
        running = LoopbackServer.start(backend, limits)
        wire = Wire(running)
        for manifest in (MANIFEST, LARGE_MANIFEST):
            wire.ask(Call.HELLO, pb.HelloRequest(manifest=manifest))
        opened.append((running, wire))
        return running, wire

    yield serve
    for running, wire in opened:
        wire.close()
        running.stop()


@pytest.fixture
def hung(store: ScriptedStorage) -> Iterator[threading.Event]:
    """Hang every call of the store, until the event is set or the test is over."""
    goes_on = threading.Event()
    store.before = dict.fromkeys(CALLS, goes_on.wait)
    yield goes_on
    goes_on.set()


def got(wire: Wire, *numbers: int) -> list[int]:
    request = pb.GetRequest(runs=[run(*map(key, numbers), object_bytes=OBJECT_BYTES)])
    parts = [pb.GetPart.FromString(message) for message in wire.get(request)]
    hits = [hit for answer in parts for hit in answer.hits]
    expected = [page(number) for number, hit in zip(numbers, hits, strict=True) if hit]
    assert b"".join(answer.content for answer in parts) == b"".join(expected)
    return hits


def put_durable(wire: Wire, number: int) -> bytes:
    return pb.PutReply.FromString(wire.put([start(number, level=pb.DURABLE), part(page(number))])).stored


def test_what_a_store_does_not_offer_is_no_outage(store: ScriptedStorage, serve: Serve) -> None:
    store.before[Method.SCAN] = raising(NotOfferedError("it lists nothing"))
    running, wire = serve()
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "the store cannot do this"):
        wire.ask(Call.SCAN, pb.ScanRequest(identity=IDENTITY))
    assert "store_failed" not in {kind for kind, _ in running.notes.anomalies}


@pytest.mark.threat("a store that fails or hangs")
def test_a_store_that_is_down_costs_misses_and_makes_puts_unavailable(store: ScriptedStorage, serve: Serve) -> None:
    running, wire = serve()
    store.before = dict.fromkeys(CALLS, raising(StorageError("/secret/path is down", retryable=True)))
    with refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer"):
        put(wire, 0)
    assert running.usage.held_bytes("default") == 0
    assert got(wire, 0, 1) == [0, 0]
    with refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer"):
        put_durable(wire, 1)
    assert got(wire, 1) == [0]
    with refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer"):
        wire.ask(Call.SCAN, pb.ScanRequest(identity=IDENTITY))
    store.before.clear()
    store.answers[Method.EXISTS] = Answer.UNAVAILABLE
    assert put(wire, 0) == b"\x00"
    store.answers.clear()
    assert put(wire, 0) == b"\x02"
    assert put_durable(wire, 1) == b"\x02"
    kinds = {kind for kind, _ in running.notes.anomalies}
    assert kinds == {"store_get", "store_put", "store_exists", "store_failed"}


def test_a_touch_of_a_store_that_is_down_is_an_anomaly_and_no_error(store: ScriptedStorage, serve: Serve) -> None:
    running, wire = serve()
    assert put(wire, 0) == b"\x02"
    store.before[Method.TOUCH] = raising(StorageError("down", retryable=True))
    wire.ask(Call.TOUCH, pb.TouchRequest(runs=[run(key(0))]))
    assert running.notes.kinds == ["store_touch"]


@pytest.mark.threat("a store that fails or hangs")
def test_a_store_that_hangs_is_waited_for_in_bounds(serve: Serve, hung: threading.Event) -> None:
    _, wire = serve(deadline_s=0.05)
    with refused(grpc.StatusCode.UNAVAILABLE):
        put(wire, 0)
    assert got(wire, 0, 1) == [0, 0]
    with refused(grpc.StatusCode.UNAVAILABLE):
        put_durable(wire, 2)
    hung.set()


def test_a_full_store_exhausts_a_resource_and_reads_go_on(store: ScriptedStorage, serve: Serve) -> None:
    _, wire = serve()
    put(wire, 0)
    store.before[Method.PUT] = raising(StorageFullError("no space left on /secret/path"))
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the store is full"):
        put_durable(wire, 1)
    assert got(wire, 0) == [2]


def test_a_page_damaged_in_the_store_is_a_miss_and_can_be_put_again(tmp_path: Path, serve: Serve) -> None:
    running, wire = serve()
    for at in (0, HEADER_BYTES - 1, HEADER_BYTES + 1, OBJECT_BYTES - 1):
        assert put(wire, 0) == b"\x02"
        (file,) = object_paths(tmp_path)
        flip(file, 8 * at)
        assert got(wire, 0) == [0]
    assert put(wire, 0) == b"\x02"
    assert got(wire, 0) == [2]
    assert running.usage.by_tenant() == {"default": 4096}, "counted once, as the block that it takes"


@pytest.mark.threat("endless streams")
def test_a_put_on_which_nothing_moves_is_cancelled(serve: Serve) -> None:
    running, wire = serve(Limits(stream_idle_s=0.1))
    with half_a_put() as messages, refused(grpc.StatusCode.CANCELLED):
        wire.put(messages)
    wait_for(lambda: running.scheduler.in_flight_count == 0)
    assert got(wire, 1) == [0]


@pytest.mark.threat("endless streams")
def test_a_reader_that_never_reads_is_cut_off(serve: Serve) -> None:
    running, wire = serve(Limits(stream_idle_s=0.3, part_bytes=OBJECT_BYTES))
    put(wire, *range(4))
    runs = [run(*[key(number) for number in range(4)] * 2_500, object_bytes=OBJECT_BYTES)]
    channel = grpc.insecure_channel(running.address, [("grpc.use_local_subchannel_pool", 1)])
    begin: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(Call.GET.path)
    parts = begin(pb.GetRequest(runs=runs).SerializeToString(), 20.0)
    wait_for(lambda: ("Get", "default", "CANCELLED") in running.notes.codes)
    wait_for(lambda: running.scheduler.in_flight_count == 0)
    parts.cancel()
    channel.close()


@pytest.mark.threat("endless streams")
def test_a_stream_that_goes_on_for_ever_is_cut_off(serve: Serve) -> None:
    running, wire = serve(Limits(stream_idle_s=0.2, call_s_max=0.3))
    stop = threading.Event()

    def messages() -> Iterator[pb.PutPart]:
        yield start(0)
        for at, byte in enumerate(page(0)):
            if stop.wait(0.02):
                return
            yield part(bytes([byte]), at)

    with refused(grpc.StatusCode.CANCELLED):
        wire.put(messages())
    stop.set()
    wait_for(lambda: running.scheduler.in_flight_count == 0)


# Bounds of one call in memory and time: what it may name, what it holds, how long it may take


def test_a_run_of_too_many_pages_is_refused_before_they_are_named(store: ScriptedStorage, serve: Serve) -> None:
    _, wire = serve(Limits(pages_max=PAGES_MAX))
    with refused(BAD, f"1 to {PAGES_MAX} pages"):
        wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(*[b"no digest"] * (PAGES_MAX + 1))]))
    assert Method.EXISTS not in store.calls


@pytest.mark.threat("costly requests")
def test_a_call_of_one_message_ends_in_time(serve: Serve, hung: threading.Event) -> None:
    running, wire = serve(Limits(call_s_max=0.3))
    with refused(grpc.StatusCode.CANCELLED):
        wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0))]))
    hung.set()
    wait_for(lambda: running.scheduler.in_flight_count == 0)


@pytest.mark.threat("costly requests")
def test_what_nobody_knows_of_a_manifest_is_not_kept() -> None:
    padded = Manifest.FromString(MANIFEST.SerializeToString() + b"\xfa\x7f\x80\x80\x40" + bytes(1 << 20))
    assert padded.ByteSize() > 1 << 20
    registration = Registry(Limits()).add(Caller("acme", Role.WRITER), padded)
    assert registration.manifest == MANIFEST
    assert registration.manifest.ByteSize() == MANIFEST.ByteSize()
    assert registration.stored.ByteSize() < 2 * MANIFEST.ByteSize()


@pytest.mark.threat("costly requests")
def test_a_call_counts_the_largest_page_that_it_names(serve: Serve) -> None:
    _, wire = serve(Limits(batch_bytes=1 << 18))
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


def test_content_does_not_keep_a_message_alive_of_which_it_is_little() -> None:
    registration = Registry(Limits()).add(Caller("tenant", Role.WRITER), MANIFEST)
    for around_bytes in (100, 10 * OBJECT_BYTES):
        message = encoded(0, bytes(around_bytes), [memoryview(page(1))])
        arrivals = PageAssembler([NamedRun(registration, "kv", [key(1)], OBJECT_BYTES)])
        ((_, (_, payload), _),) = arrivals.take(decoded(message))
        assert payload == page(1)[HEADER_BYTES:]
        assert memoryview(payload.obj).nbytes < 2 * OBJECT_BYTES
