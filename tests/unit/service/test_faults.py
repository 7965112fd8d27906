"""Stores that fail, streams that stall: misses and statuses, never wrong bytes, nothing left behind."""

import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest

from tests.support.service import LoopbackServer, Wire, limits_with, refused, wait_for
from tests.support.wrappers import bounded
from tests.unit.service.test_requests import MANIFEST, OBJECT_BYTES, half_a_put, key, page, part, run, start
from tests.unit.service.test_tenancy import put
from unified_cache.core.errors import StorageError, StorageFullError
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.settings.limits import LimitSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO


class RaisingStorage(MemoryStorage):
    """A durable store that raises what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: StorageError | None = None
        self.hung = threading.Event()
        self.hung.set()

    def capability(self) -> Capability:
        return Capability("failing", durable=True, bytes_max=None)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self._check()
        return super().exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self._check()
        return super().get(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self._check()
        return super().put(pages, Level.CACHED)

    def touch(self, labels: Sequence[Label]) -> None:
        self._check()
        super().touch(labels)

    def _check(self) -> None:
        self.hung.wait(20)
        if self.error is not None:
            raise self.error


Serve = Callable[..., tuple[LoopbackServer, Wire]]


@pytest.fixture
def store() -> RaisingStorage:
    return RaisingStorage()


@pytest.fixture
def serve(store: RaisingStorage) -> Iterator[Serve]:
    opened: list[tuple[LoopbackServer, Wire]] = []

    def serve(limits: LimitSettings | None = None, *, deadline_s: float = 0.0) -> tuple[LoopbackServer, Wire]:
        backend = bounded(store, deadline_s, 4) if deadline_s else store
        running = LoopbackServer.start(backend, limits)
        wire = Wire(running)
        wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
        opened.append((running, wire))
        return running, wire

    yield serve
    store.error = None
    store.hung.set()
    for running, wire in opened:
        wire.close()
        running.stop()


def got(wire: Wire, *numbers: int) -> list[int]:
    request = pb.GetRequest(runs=[run(*map(key, numbers), object_bytes=OBJECT_BYTES)])
    parts = [pb.GetPart.FromString(message) for message in wire.get(request)]
    hits = [hit for answer in parts for hit in answer.hits]
    expected = [page(number) for number, hit in zip(numbers, hits, strict=True) if hit]
    assert b"".join(answer.content for answer in parts) == b"".join(expected)
    return hits


def put_durable(wire: Wire, number: int) -> bytes:
    return pb.PutReply.FromString(wire.put([start(number, level=pb.DURABLE), part(page(number))])).stored


@pytest.mark.threat("a store that fails or hangs")
def test_a_store_that_is_down_costs_misses_and_makes_puts_unavailable(store: RaisingStorage, serve: Serve) -> None:
    running, wire = serve()
    store.error = StorageError("/secret/path is down", retryable=True)
    with refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer"):
        put(wire, 0)
    assert running.usage.held_bytes("default") == 0
    assert got(wire, 0, 1) == [0, 0]
    with refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer"):
        put_durable(wire, 1)
    assert got(wire, 1) == [0]
    store.error = None
    assert put(wire, 0) == b"\x02"
    assert put_durable(wire, 1) == b"\x02"
    assert {kind for kind, _ in running.notes.anomalies} == {"store_get", "store_put", "store_exists"}


def test_a_touch_of_a_store_that_is_down_is_an_anomaly_and_no_error(store: RaisingStorage, serve: Serve) -> None:
    running, wire = serve()
    assert put(wire, 0) == b"\x02"
    store.error = StorageError("down", retryable=True)
    wire.ask(Call.TOUCH, pb.TouchRequest(runs=[run(key(0))]))
    assert running.notes.kinds == ["store_touch"]


@pytest.mark.threat("a store that fails or hangs")
def test_a_store_that_hangs_is_waited_for_in_bounds(store: RaisingStorage, serve: Serve) -> None:
    _, wire = serve(deadline_s=0.05)
    store.hung.clear()
    with refused(grpc.StatusCode.UNAVAILABLE):
        put(wire, 0)
    assert got(wire, 0, 1) == [0, 0]
    with refused(grpc.StatusCode.UNAVAILABLE):
        put_durable(wire, 2)


def test_a_full_store_exhausts_a_resource_and_reads_go_on(store: RaisingStorage, serve: Serve) -> None:
    _, wire = serve()
    put(wire, 0)
    full = StorageFullError("no space left on /secret/path")
    with_full = store.put
    store.put = lambda pages, level: (_ for _ in ()).throw(full)  # type: ignore[method-assign]
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the store is full"):
        put_durable(wire, 1)
    assert got(wire, 0) == [2]
    store.put = with_full  # type: ignore[method-assign]


def test_a_store_that_declines_declines_for_the_service_and_pages_are_counted_by_answer() -> None:
    running = LoopbackServer.start(MemoryStorage(2 * OBJECT_BYTES))
    wire = Wire(running)
    wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    assert put(wire, 0, 1, 2) == b"\x02\x02\x00"
    assert running.usage.by_tenant() == {"default": 2 * OBJECT_BYTES}
    assert running.notes.puts_count == {Answer.STORED: 2, Answer.DECLINED: 1}
    wire.close()
    running.stop()


def test_a_page_damaged_in_the_store_is_a_miss_and_can_be_put_again(store: RaisingStorage, serve: Serve) -> None:
    _, wire = serve()
    for at in (*range(0, HEADER_BYTES, 5), HEADER_BYTES + 1, OBJECT_BYTES - 1):
        put(wire, 0)
        ((label, whole),) = store._pages.items()
        store._pages[label] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        assert got(wire, 0) == [0]
    for damaged in (bytes(OBJECT_BYTES), page(1), page(0)[1:] + b"x"):
        put(wire, 0)
        store._pages[label] = damaged
        assert got(wire, 0) == [0]


@pytest.mark.threat("endless streams")
def test_a_put_on_which_nothing_moves_is_cancelled(serve: Serve) -> None:
    running, wire = serve(limits_with(stream_idle_s=0.1))
    with half_a_put() as messages, refused(grpc.StatusCode.CANCELLED):
        wire.put(messages)
    wait_for(lambda: running.scheduler.in_flight_count == 0)
    assert got(wire, 1) == [0]


@pytest.mark.threat("endless streams")
def test_a_reader_that_never_reads_is_cut_off(serve: Serve) -> None:
    running, wire = serve(limits_with(stream_idle_s=0.3, part_bytes=OBJECT_BYTES))
    put(wire, *range(100))
    runs = [run(*[key(number) for number in range(100)] * 100, object_bytes=OBJECT_BYTES)]
    channel = grpc.insecure_channel(running.address, [("grpc.use_local_subchannel_pool", 1)])
    begin: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(Call.GET.path)
    parts = begin(pb.GetRequest(runs=runs).SerializeToString(), 20.0)
    wait_for(lambda: ("Get", "default", "CANCELLED") in running.notes.codes)
    wait_for(lambda: running.scheduler.in_flight_count == 0)
    parts.cancel()
    channel.close()


@pytest.mark.threat("endless streams")
def test_a_stream_that_goes_on_for_ever_is_cut_off(serve: Serve) -> None:
    running, wire = serve(limits_with(stream_idle_s=0.2, call_s_max=0.3))
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


def test_drain_asks_whoever_runs_the_server(serve: Serve) -> None:
    running, wire = serve()
    wire.ask(Call.DRAIN, pb.DrainRequest())
    assert len(running.drains) == 1
