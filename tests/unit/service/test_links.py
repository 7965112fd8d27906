"""Calls over links: answered, refused, cut off and ended as those of gRPC, by the same gate."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import grpc
import pytest
from google.protobuf.message import Message

from tests.fuzz.context import DirectContext
from tests.support.certificates import Authority
from tests.support.running_service import CALL_S, credentials
from tests.support.running_service import running as serving
from tests.support.service import AddressWire, LoopbackServer, Wire, limits_with, refused, wait_for
from tests.unit.service.test_access import given
from tests.unit.service.test_requests import MANIFEST, OBJECT_BYTES, key, page, part, run, start
from unified_cache.proto import service_pb2 as pb
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.tokens import remove_token
from unified_cache.service.requests.calls import CallMethods
from unified_cache.service.requests.links import CallLinks
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.wire import local_sockets
from unified_cache.wire.calls import Call
from unified_cache.wire.links import LinkSocket
from unified_cache.wire.local_sockets import SocketOffer

FRAME_BYTES_MAX = 1 << 20
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
NOBODY_UID = 65534

LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[2])
listener.listen()
print("up", flush=True)
sys.stdin.read()
"""

CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[2])
print("up", flush=True)
sys.stdin.read()
"""


class Outcome(NamedTuple):
    """End of a call over a link."""

    code: grpc.StatusCode
    details: str
    messages: list[bytes]


class LinkClient:
    """A client that sends over a link what it is told to, right or wrong."""

    def __init__(self, link: LinkSocket) -> None:
        self.link = link
        link.wait_at_most(CALL_S)

    def begin(self, call: Call | str, *messages: Message | bytes, is_last: bool = True, timeout_s: float = 10) -> None:
        method = call.value if isinstance(call, Call) else call
        self.link.send(pb.LinkedRequest(method=method, timeout_s=timeout_s))
        for message in messages:
            content = message if isinstance(message, bytes) else message.SerializeToString()
            self.link.send(pb.LinkedRequest(message=content))
        if is_last:
            self.link.send(pb.LinkedRequest(is_last=True))

    def end(self) -> Outcome | None:
        """Wait for the end of a call; None where the link ends with it."""
        messages: list[bytes] = []
        while (frame := self.link.receive()) is not None:
            reply = pb.LinkedReply.FromString(frame)
            if reply.HasField("message"):
                messages.append(reply.message)
            if reply.is_last:
                codes = {code.value[0]: code for code in grpc.StatusCode}
                return Outcome(codes[reply.code], reply.details, messages)
        return None

    def ask(self, call: Call | str, *messages: Message | bytes) -> Outcome | None:
        self.begin(call, *messages)
        return self.end()


@contextmanager
def offered() -> Iterator[tuple[SocketOffer, pb.LinkRequest]]:
    offer = SocketOffer.listen()
    with closing(offer):
        yield offer, pb.LinkRequest(name=offer.name, proof=offer.proof)


def accepted(offer: SocketOffer) -> LinkSocket:
    return LinkSocket(offer.accepted(), FRAME_BYTES_MAX)


@contextmanager
def linked(wire: AddressWire) -> Iterator[LinkClient]:
    """Open a link as ``wire`` calls."""
    with offered() as (offer, request):
        wire.ask(Call.LINK, request)
        link = accepted(offer)
    with closing(link):
        yield LinkClient(link)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    server = LoopbackServer.start(MemoryStorage())
    yield server
    server.stop()


@pytest.fixture
def wire(server: LoopbackServer) -> Iterator[Wire]:
    wire = Wire(server)
    wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    yield wire
    wire.close()


@pytest.fixture
def client(wire: Wire) -> Iterator[LinkClient]:
    with linked(wire) as client:
        yield client


def test_pages_put_over_a_link_are_got_over_it_and_over_grpc(wire: Wire, client: LinkClient) -> None:
    put = client.ask(Call.PUT, start(1, 2), part(page(1)), part(page(2), len(page(1))))
    assert put is not None
    assert pb.PutReply.FromString(put.messages[0]).stored == b"\2\2"
    got = client.ask(Call.GET, pb.GetRequest(runs=[run(key(2), key(9), key(1), object_bytes=OBJECT_BYTES)]))
    assert got == Outcome(
        grpc.StatusCode.OK, "", wire.get(pb.GetRequest(runs=[run(key(2), key(9), key(1), object_bytes=OBJECT_BYTES)]))
    )
    found = client.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(1), key(9), key(2))]))
    assert found == Outcome(
        grpc.StatusCode.OK, "", [wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(1), key(9), key(2))]))]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call.EXISTS, b"\xff"),
        (Call.EXISTS, pb.ExistsRequest(runs=[run(key(1))], tenant="another")),
        (Call.EXISTS, pb.ExistsRequest(runs=[pb.PageRun(identity=bytes(32), pool="kv", keys=[key(1)])])),
        (Call.RELEASE, pb.ReleaseRequest(lease="00" * 16)),
        (Call.GET, pb.GetRequest(runs=[run(key(1))], shared=pb.SharedRange(region="none", length=1))),
    ],
    ids=["no message", "another tenant", "an unknown identity", "an unknown lease", "an unknown region"],
)
def test_a_refusal_over_a_link_is_that_of_grpc_and_the_link_goes_on(
    server: LoopbackServer, client: LinkClient, wire: Wire, call: Call, message: Message | bytes
) -> None:
    ended = client.ask(call, message)
    assert ended is not None
    with refused(ended.code, ended.details):
        wire.get(message) if call is Call.GET else wire.ask(call, message)
    assert server.notes.codes[-1] == server.notes.codes[-2] == (call.value, "default", ended.code.name)
    assert client.ask(Call.STATS, pb.StatsRequest()) is not None


def test_trailing_metadata_come_over_a_link(server: LoopbackServer) -> None:
    storage = server.client()
    storage.register(MANIFEST, {})
    server.service._registry.forget("default", MANIFEST.identity)
    # The refusal says in its metadata what helps: Hello.
    assert storage.clear(MANIFEST.identity) == 0
    assert server.notes.codes[-3:] == [
        ("Clear", "default", "FAILED_PRECONDITION"),
        ("Hello", "default", "OK"),
        ("Clear", "default", "OK"),
    ]
    storage.close()


def test_a_call_without_a_message_and_one_of_no_method_are_refused(client: LinkClient) -> None:
    assert client.ask(Call.STATS) == Outcome(grpc.StatusCode.INVALID_ARGUMENT, "a call has a message, found none", [])
    for method in ("", "Nothing", Call.LINK):
        unknown = client.ask(method, b"")
        assert unknown is not None
        assert unknown.code is grpc.StatusCode.UNIMPLEMENTED
    assert client.ask(Call.STATS, pb.StatsRequest()) is not None


def test_what_follows_a_refusal_belongs_to_the_refused_call(client: LinkClient) -> None:
    ended = client.ask(Call.PUT, b"\xff", part(page(1)), part(page(1)))
    assert ended is not None
    assert ended.code is grpc.StatusCode.INVALID_ARGUMENT
    assert client.ask(Call.STATS, pb.StatsRequest()) is not None


@pytest.mark.parametrize(
    "content", [b"\x01\x00\x00\x00\xff", b"\xff\xff\xff\xff", b"\x03\x00"], ids=["no frame", "too long", "cut off"]
)
def test_what_is_no_frame_ends_the_link_and_nothing_else(
    server: LoopbackServer, wire: Wire, client: LinkClient, content: bytes
) -> None:
    client.link._connection.sendall(content)
    client.link._connection.shutdown(socket.SHUT_WR)
    assert client.end() is None
    wait_for(lambda: not server.service._links.count("default"))
    wire.ask(Call.STATS, pb.StatsRequest())


def test_a_put_that_its_client_leaves_open_holds_nothing(server: LoopbackServer, client: LinkClient) -> None:
    client.begin(Call.PUT, start(1, 2), part(page(1)), is_last=False)
    wait_for(lambda: server.gate.in_flight_count == 1)
    client.link.shut()
    wait_for(lambda: server.gate.in_flight_count == 0)
    assert server.notes.codes[-1] == ("Put", "default", "CANCELLED")


def test_a_put_on_which_nothing_moves_is_cut_off_with_its_link() -> None:
    server = LoopbackServer.start(MemoryStorage(), limits_with(stream_idle_s=0.1))
    wire = Wire(server)
    wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    with linked(wire) as client:
        client.begin(Call.PUT, start(1, 2), part(page(1)), is_last=False)
        assert client.end() is None
        wait_for(lambda: server.gate.in_flight_count == 0)
    wire.close()
    server.stop()


def test_a_link_on_which_nothing_is_asked_stays_open() -> None:
    server = LoopbackServer.start(MemoryStorage(), limits_with(stream_idle_s=0.01))
    wire = Wire(server)
    with linked(wire) as client:
        client.link.wait_at_most(0.1)
        with pytest.raises(TimeoutError):
            client.link.receive()
        assert client.ask(Call.STATS, pb.StatsRequest()) is not None
    wire.close()
    server.stop()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_call_that_nobody_waits_for_is_not_carried_out(client: LinkClient, timeout_s: float) -> None:
    lookup = pb.LookupRequest(identity=MANIFEST.identity, keys=pb.Keys(keys=[key(1)]))
    client.begin(Call.LOOKUP, lookup, timeout_s=timeout_s)
    ended = client.end()
    assert ended is not None
    assert ended.code is grpc.StatusCode.CANCELLED


def test_a_tenant_has_at_most_as_many_links_as_it_leaves_to_others() -> None:
    server = LoopbackServer.start(MemoryStorage(), limits_with(links_max=4))
    wire, other = Wire(server), Wire(server, "team:writer")
    with linked(wire), linked(wire):
        with offered() as (_, request), refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "leaves free of 4"):
            wire.ask(Call.LINK, request)
        with linked(other) as client:
            assert client.ask(Call.STATS, pb.StatsRequest(tenant="team")) is not None
    wait_for(lambda: server.service._links.count("default") == server.service._links.count("team") == 0)
    with linked(wire):
        pass
    wire.close()
    other.close()
    server.stop()


@pytest.mark.parametrize(
    "name", ["", "x", "unified-cache-", "unified-cache-" + "A" * 32, "unified-cache-" + "0" * 33, "\0" * 46]
)
def test_a_name_of_another_form_is_refused_for_a_link(wire: Wire, name: str) -> None:
    with refused(PRECONDITION, "of fixed form"):
        wire.ask(Call.LINK, pb.LinkRequest(name=name, proof=bytes(32)))


def test_a_link_that_nobody_listens_for_is_refused_and_not_counted(server: LoopbackServer, wire: Wire) -> None:
    with refused(PRECONDITION, "nobody listens"):
        wire.ask(Call.LINK, pb.LinkRequest(name="unified-cache-" + "0" * 32, proof=bytes(32)))
    assert server.service._links.count("default") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_process_of_another_user_is_refused(server: LoopbackServer, wire: Wire) -> None:
    name = "unified-cache-" + "1" * 32
    command = [sys.executable, "-c", LISTEN, str(NOBODY_UID), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        with refused(PRECONDITION, "of this server's user"):
            wire.ask(Call.LINK, pb.LinkRequest(name=name, proof=bytes(32)))
        listening.kill()
    assert server.service._links.count("default") == 0


def test_a_caller_on_another_machine_has_no_link() -> None:
    class Elsewhere(DirectContext):
        def peer(self) -> str:
            return "ipv4:192.0.2.7:4711"

    links = CallLinks(limits_with(), CallMethods({}, {}))
    with offered() as (offer, request), pytest.raises(Refused, match="on this machine alone"):
        links.open("default", Elsewhere(), request)
    with offered() as (offer, request):
        links.open("default", DirectContext(), request)
        link = accepted(offer)
    links.close()
    assert link.receive() is None
    link.close()


def test_who_does_not_prove_to_be_the_server_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sockets, "CONNECT_S", 0.05)
    with offered() as (offer, _), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + offer.name)
        stranger.sendall(bytes(32))
        with pytest.raises(TimeoutError):
            offer.accepted()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_silent_process_of_another_user_does_not_keep_the_server_out() -> None:
    with offered() as (offer, _):
        command = [sys.executable, "-c", CONNECT, str(NOBODY_UID), offer.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None
            stranger.stdout.readline()
            with local_sockets.connected_socket(offer.name, offer.proof) as server, offer.accepted() as connection:
                server.sendall(b"x")
                assert connection.recv(1) == b"x"
            stranger.kill()


def test_a_stranger_without_a_proof_does_not_keep_the_server_out() -> None:
    with offered() as (offer, _), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + offer.name)
        stranger.sendall(bytes(32))
        with local_sockets.connected_socket(offer.name, offer.proof) as server, offer.accepted() as connection:
            server.sendall(b"x")
            assert connection.recv(1) == b"x"
            assert stranger.recv(1) == b""


def test_a_proof_that_comes_a_byte_at_a_time_is_late_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sockets, "CONNECT_S", 0.05)
    with offered() as (offer, _), socket.socket(socket.AF_UNIX) as slow, ThreadPoolExecutor(1) as sending:
        slow.connect("\0" + offer.name)

        def send() -> None:
            with suppress(OSError):
                for byte in offer.proof:
                    slow.sendall(bytes([byte]))
                    Event().wait(0.005)

        sending.submit(send)
        with pytest.raises(TimeoutError):
            offer.accepted()


def test_a_token_revoked_since_is_refused_over_an_open_link(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token, kept = given(path, "acme"), given(path, "acme")
    with serving(access={"tokens": str(path), "tokens_check_s": 1e-6}) as server:
        wire, other = AddressWire(server.address, token), AddressWire(server.address, kept)
        with closing(wire), closing(other), linked(wire) as client, linked(other) as still:
            assert client.ask(Call.STATS, pb.StatsRequest(tenant="acme")) is not None
            remove_token(path, token.split("_")[1])
            ended = client.ask(Call.STATS, pb.StatsRequest())
            assert ended == Outcome(grpc.StatusCode.UNAUTHENTICATED, "valid credentials are needed", [])
            ended = still.ask(Call.STATS, pb.StatsRequest(tenant="acme"))
            assert ended is not None
            assert ended.code is grpc.StatusCode.OK


def test_a_certificate_revoked_since_is_refused_over_an_open_link(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key_file = authority.issue("server").write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    (tmp_path / "crl.pem").write_bytes(authority.revoked())
    files = {"certificate": certificate, "key": key_file, "client_ca": tmp_path / "ca.pem"}
    tls = {**{name: str(file) for name, file in files.items()}, "client_crl": str(tmp_path / "crl.pem")}
    issued = authority.issue("acme/writer")
    with (
        serving(tls={**tls, "check_s": 1e-6}) as server,
        grpc.secure_channel(server.address, credentials(authority, issued)) as channel,
        offered() as (offer, request),
    ):
        begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.LINK.path)
        begin(request.SerializeToString(), timeout=CALL_S)
        link = accepted(offer)
        with closing(link):
            client = LinkClient(link)
            asked = client.ask(Call.STATS, pb.StatsRequest(tenant="acme"))
            assert asked is not None
            assert asked.code is grpc.StatusCode.OK
            (tmp_path / "crl.pem").write_bytes(authority.revoked(issued))
            asked = client.ask(Call.STATS, pb.StatsRequest(tenant="acme"))
            assert asked is not None
            assert asked.code is grpc.StatusCode.UNAUTHENTICATED


def test_a_drain_lets_a_call_over_a_link_end_and_refuses_the_next() -> None:
    with serving() as server:
        wire = AddressWire(server.address)
        wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
        finished: list[bool] = []
        with linked(wire) as client, linked(wire) as other:
            client.begin(Call.PUT, start(1), is_last=False)
            wait_for(lambda: any(each.running_count for each in server.service._gate._scheduler.by_tenant().values()))
            draining = Thread(target=lambda: finished.append(server.service.drain(CALL_S)))
            draining.start()
            while (asked := other.ask(Call.STATS, pb.StatsRequest())) is not None and not asked.details:
                pass
            assert asked == Outcome(grpc.StatusCode.UNAVAILABLE, "this server is draining; another may do", [])
            assert not finished
            client.link.send(pb.LinkedRequest(message=part(page(1)).SerializeToString(), is_last=True))
            ended = client.end()
            assert ended is not None
            assert ended.code is grpc.StatusCode.OK
            draining.join(CALL_S)
            assert finished == [True]
            assert client.link.receive() is None
        wire.close()
