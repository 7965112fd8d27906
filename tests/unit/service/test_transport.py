"""Input below the contract: bytes that are no HTTP/2, idle connections, calls that end early."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest

from tests.support.service import refused, wait_for
from tests.unit.service.test_requests import OBJECT_BYTES, WHOLE, ServerOverMemory, key, part, run, start
from unified_cache.core.settings.limits import MESSAGE_BYTES_MAX
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"

NO_CALLS = {
    "zeros": bytes(1 << 16),
    "every byte": bytes(range(256)) * 64,
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/1 with a body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a preface alone": PREFACE,
    "half a preface": PREFACE[:10],
    "a frame too long": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\x01" + bytes(1 << 16),
    "an unknown frame": PREFACE + SETTINGS + b"\0\0\x04\xee\0\0\0\0\x01abcd",
    "headers that do not decompress": PREFACE + SETTINGS + b"\0\0\x08\x01\x05\0\0\0\x01" + b"\xff" * 8,
    "bytes of no stream": PREFACE + SETTINGS + b"\0\0\x04\0\x01\0\0\0\x05abcd",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerOverMemory]:
    server = ServerOverMemory()
    yield server
    server.wire.close()
    server.running.stop()


def connected(server: ServerOverMemory) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.running.port), timeout=5)


@pytest.mark.parametrize("sent", NO_CALLS.values(), ids=NO_CALLS.keys())
def test_bytes_that_are_no_call_change_nothing(server: ServerOverMemory, sent: bytes) -> None:
    with server.unchanged(), ExitStack() as opened:
        for _ in range(5):
            connection = opened.enter_context(connected(server))
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            except OSError:
                continue  # the server may close before it has read all


def test_a_connection_closed_by_one_end_is_left(server: ServerOverMemory) -> None:
    with server.unchanged(), connected(server) as connection:
        connection.sendall(PREFACE + SETTINGS)
        connection.shutdown(socket.SHUT_WR)
        assert server.wire.ask(Call.STATS, b"")


def test_a_connection_that_is_reset_changes_nothing(server: ServerOverMemory) -> None:
    with server.unchanged():
        for _ in range(20):
            connection = connected(server)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.sendall(PREFACE + SETTINGS)
            connection.close()


def test_a_thousand_idle_connections_leave_the_others_served(server: ServerOverMemory) -> None:
    with server.unchanged(), ExitStack() as opened:
        for number in range(1000):
            connection = opened.enter_context(connected(server))
            if number % 2:
                connection.sendall(PREFACE + SETTINGS)
        for _ in range(10):
            assert server.wire.ask(Call.STATS, b"", timeout_s=5.0)


def test_a_method_of_another_service_is_unimplemented(server: ServerOverMemory) -> None:
    channel = grpc.insecure_channel(server.running.address)
    for path in ("/x/y", "/", "//", "/unified_cache.service.v1.Cache/", "/unified_cache.service.v2.Cache/Get"):
        begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        with server.unchanged(), refused(grpc.StatusCode.UNIMPLEMENTED):
            begin(b"", 5.0)
    channel.close()


def test_a_part_beyond_the_limit_exhausts_a_resource(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        server.wire.put([start(1), part(bytes(MESSAGE_BYTES_MAX))])


@pytest.mark.threat("huge messages")
def test_a_compressed_bomb_in_a_stream_exhausts_a_resource(server: ServerOverMemory) -> None:
    channel = grpc.insecure_channel(server.running.address, compression=grpc.Compression.Gzip)
    begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(Call.PUT.path)
    with server.unchanged(), refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        begin(iter([start(1).SerializeToString(), bytes(100_000_000)]), 60.0)
    channel.close()


def test_a_deadline_that_is_over_leaves_nothing(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        server.wire.put([start(1), part(WHOLE)], timeout_s=-1.0)


def test_a_get_that_its_client_cancels_gives_its_place_back(server: ServerOverMemory) -> None:
    channel = grpc.insecure_channel(server.running.address, [("grpc.use_local_subchannel_pool", 1)])
    begin: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(Call.GET.path)
    request = pb.GetRequest(runs=[run(*[key(0)] * 100, object_bytes=OBJECT_BYTES)])
    with server.unchanged():
        for _ in range(20):
            parts = begin(request.SerializeToString(), 10.0)
            next(parts)
            parts.cancel()
        wait_for(lambda: server.running.scheduler.in_flight_count == 0)
    channel.close()


def test_a_put_whose_connection_goes_leaves_nothing(server: ServerOverMemory) -> None:
    stop = threading.Event()

    def messages() -> Iterator[bytes]:
        yield start(1).SerializeToString()
        yield part(WHOLE[:500]).SerializeToString()
        stop.wait(10)

    channel = grpc.insecure_channel(server.running.address, [("grpc.use_local_subchannel_pool", 1)])
    begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(Call.PUT.path)
    with server.unchanged():
        call = begin.future(messages(), 30.0)  # without a name for it, gRPC would cancel it at once
        wait_for(lambda: server.running.scheduler.in_flight_count == 1)
        channel.close()
        wait_for(lambda: server.running.scheduler.in_flight_count == 0)
        stop.set()
        assert call.done()
