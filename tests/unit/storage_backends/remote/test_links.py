"""Clients that call over links: when they do, and what they do where they cannot."""

import gc
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import grpc
import pytest

from tests.support.service import LoopbackServer, limits_with, wait_for
from tests.unit.service.test_requests import MANIFEST
from tests.unit.storage_backends.remote.test_bounded import PATIENCE_S
from tests.unit.storage_backends.remote.test_sharing import come_and_go, pages_of
from unified_cache.errors import InputError, StorageError
from unified_cache.proto import service_pb2 as pb
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.remote.links import LINKS_MAX, LinkedCall, ServerLinks
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.wire.calls import Call
from unified_cache.wire.links import LinkSocket, framed
from unified_cache.wire.local_sockets import SocketOffer

THREADS = 3 * LINKS_MAX
FRAME_BYTES_MAX = 1 << 20
STEP_S = 0.002
WAIT_S = 0.05
STEPS = 2500
"""Of ``STEP_S``: more than a hundred times as long as anybody waits."""
READ_BYTES = 40 << 10
"""Read at a time: more than what the system sends as one piece."""


@pytest.fixture
def running() -> Iterator[LoopbackServer]:
    running = LoopbackServer.start(MemoryStorage())
    yield running
    running.stop()


def links_of(running: LoopbackServer) -> int:
    return running.service._links.count("default")


def methods_over_grpc(running: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Watch the calls that come over gRPC."""
    seen: list[str] = []
    admitted = running.gate.admitted

    def watched(context: grpc.ServicerContext, needs: object, *, method: str) -> object:
        if isinstance(context, grpc.ServicerContext):
            seen.append(method)
        return admitted(context, needs, method=method)  # type: ignore[arg-type]

    monkeypatch.setattr(running.gate, "admitted", watched)
    return seen


def test_a_client_of_this_machine_greets_and_asks_for_memory_and_a_link_over_grpc_and_all_else_over_the_link(
    running: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = methods_over_grpc(running, monkeypatch)
    storage = running.client()
    come_and_go(storage)
    assert storage.exists([each.label for each in pages_of(1, 9)]) == [Answer.HIT, Answer.MISS]
    assert links_of(running) == 1
    assert seen == ["Hello", "Share", "Link"]
    storage.close()
    wait_for(lambda: links_of(running) == 0)


def test_a_server_that_makes_no_links_is_called_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    running = LoopbackServer.start(MemoryStorage(), limits_with(links_max=0))
    seen = methods_over_grpc(running, monkeypatch)
    storage = running.client()
    come_and_go(storage)
    assert seen == ["Hello", "Share", "Put", "Get"]
    storage.close()
    running.stop()


def test_a_client_whose_link_is_refused_goes_on_over_grpc() -> None:
    running = LoopbackServer.start(MemoryStorage(), limits_with(links_max=1))
    first, second = running.client(), running.client()
    come_and_go(first)
    come_and_go(second)
    assert links_of(running) == 1
    first.close()
    second.close()
    running.stop()


def test_many_calls_at_a_time_have_a_bounded_number_of_links(running: LoopbackServer) -> None:
    storage = running.client()
    come_and_go(storage)
    labels = [each.label for each in pages_of(1, 2, 9)]
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda _: storage.exists(labels), range(20 * THREADS)):
            assert found == [Answer.HIT, Answer.HIT, Answer.MISS]
        assert 1 <= links_of(running) <= LINKS_MAX
    storage.close()
    wait_for(lambda: links_of(running) == 0)


def test_a_client_whose_links_have_ended_makes_others_and_no_call_fails(running: LoopbackServer) -> None:
    storage = RemoteStorage.open(RemoteOptions((running.address,), retries=0))
    come_and_go(storage)
    for connected in list(running.service._links._open):
        connected.shut()
    wait_for(lambda: links_of(running) == 0)
    assert storage.exists([pages_of(1)[0].label]) == [Answer.HIT]
    assert links_of(running) == 1
    storage.close()


def test_a_server_that_comes_back_is_called_over_a_link_again(running: LoopbackServer) -> None:
    storage = RemoteStorage.open(RemoteOptions((running.address,), retries=0))
    come_and_go(storage)
    running.stop()
    with pytest.raises(StorageError, match="UNAVAILABLE"):
        storage.exists([pages_of(1)[0].label])
    again = LoopbackServer.start(MemoryStorage(), port=running.port)

    def answers() -> bool:
        try:
            return storage.exists([pages_of(1)[0].label]) == [Answer.MISS]
        except StorageError:
            return False

    wait_for(lambda: answers() and links_of(again) == 1)
    storage.close()
    again.stop()


class PausedStore(MemoryStorage):
    """A store that returns from a put when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        assert self.goes_on.wait(PATIENCE_S)
        return super().put(pages, level)


def test_a_put_that_is_late_ends_in_time_with_its_link_and_its_memory() -> None:
    store = PausedStore()
    running = LoopbackServer.start(store, host_bytes=0)
    storage = RemoteStorage.open(RemoteOptions((running.address,), timeout_s=0.3, retries=0))
    storage.register(MANIFEST, {})
    assert storage.exists([pages_of(1)[0].label]) == [Answer.MISS]
    with pytest.raises(StorageError, match="Put: DEADLINE_EXCEEDED"):
        storage.put(pages_of(1), Level.CACHED)
    assert storage.exists([pages_of(1)[0].label]) == [Answer.MISS]
    store.goes_on.set()
    wait_for(lambda: links_of(running) == 1)
    storage.close()
    running.stop()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x01\x00\x00\x00\xff", grpc.StatusCode.INTERNAL),
        (b"\xff\xff\xff\xff", grpc.StatusCode.INTERNAL),
        (b"", grpc.StatusCode.UNAVAILABLE),
        (b"\x02\x00", grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["no frame", "a frame too long", "nothing", "half a frame"],
)
def test_an_answer_that_makes_no_sense_fails_its_call_and_ends_the_link(sent: bytes, code: grpc.StatusCode) -> None:
    answering: list[threading.Thread] = []

    def connect(offer: SocketOffer, timeout_s: float) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.connect("\0" + offer.name)
        server.sendall(offer.proof)

        def answer() -> None:
            with server:
                assert server.recv(1 << 16)
                server.sendall(sent)

        answering.append(threading.Thread(target=answer))
        answering[-1].start()

    links = ServerLinks(connect, lambda: 0.0)
    call = links.call(PATIENCE_S)
    assert call is not None
    call.begin(Call.STATS, b"")
    with pytest.raises(grpc.RpcError) as caught:
        call.answer()
    assert caught.value.code() is code
    for thread in answering:
        thread.join(PATIENCE_S)
    links.close()
    gc.collect()  # what was left open would be told now


@contextmanager
def stepping(server: socket.socket, step: Callable[[socket.socket], object]) -> Iterator[None]:
    """Have one end of a socket do something over and over, as long as its other end stands it."""
    is_over = threading.Event()

    def repeat() -> None:
        with suppress(OSError):
            while not is_over.wait(STEP_S):
                step(server)

    doing = threading.Thread(target=repeat)
    doing.start()
    try:
        yield
    finally:
        is_over.set()
        server.shutdown(socket.SHUT_RDWR)
        doing.join(PATIENCE_S)


def test_a_frame_that_comes_a_byte_at_a_time_is_late_as_a_whole() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(LinkSocket(ours, FRAME_BYTES_MAX)) as link:
        theirs.sendall(STEPS.to_bytes(4, "little"))
        link.wait_at_most(WAIT_S)
        with stepping(theirs, lambda server: server.sendall(b"x")), pytest.raises(TimeoutError):
            link.receive()


def test_a_frame_that_is_read_a_little_at_a_time_is_late_as_a_whole() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(LinkSocket(ours, FRAME_BYTES_MAX)) as link:
        reads: list[bytes] = []
        link.wait_at_most(WAIT_S)
        with stepping(theirs, lambda server: reads.append(server.recv(READ_BYTES))), pytest.raises(TimeoutError):
            link.send(pb.LinkedRequest(message=bytes(STEPS * READ_BYTES)))
        assert len(reads) < STEPS / 10


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda call: call.answer(), grpc.StatusCode.INTERNAL),
        (deque, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=["one answer", "a stream"],
)
def test_a_server_that_always_has_one_more_answer_ends_no_call_late(
    ask: Callable[[LinkedCall], object], code: grpc.StatusCode
) -> None:
    reply = framed(pb.LinkedReply(message=b"x"))
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as answering:

        def connect(offer: SocketOffer, timeout_s: float) -> None:
            server.connect("\0" + offer.name)
            server.sendall(offer.proof)
            answering.enter_context(stepping(server, lambda server: server.sendall(STEPS * reply)))

        with closing(ServerLinks(connect, lambda: 0.0)) as links:
            call = links.call(WAIT_S)
            assert call is not None
            call.begin(Call.STATS, b"")
            with pytest.raises(grpc.RpcError) as caught:
                ask(call)
            assert caught.value.code() is code


class LentForACall:
    """Part of the messages of a call."""


def test_a_call_that_fails_while_it_is_sent_keeps_nothing_of_what_it_was_made_of(running: LoopbackServer) -> None:
    storage = running.client()
    come_and_go(storage)
    server = storage._servers[0]

    def messages(lent: LentForACall) -> Iterator[bytes]:
        yield b""
        raise InputError(f"not to be sent: {lent}")

    lent = LentForACall()
    alive = weakref.ref(lent)
    gc.disable()  # memory lent to a call goes back when it is over, and not some time later
    try:
        call = server._linked(server._clock() + PATIENCE_S)
        assert call is not None
        call.begin_stream(Call.PUT, messages(lent))
        with suppress(InputError):
            call.answer()
        del call, lent
        assert alive() is None
    finally:
        gc.enable()


def test_a_link_that_cannot_be_made_keeps_nothing_of_the_call_that_it_was_for() -> None:
    running = LoopbackServer.start(MemoryStorage())
    storage = running.client()
    come_and_go(storage)
    server = storage._servers[0]
    running.stop()

    def call_with(lent: LentForACall) -> None:
        assert server._linked(server._clock() + PATIENCE_S) is None, lent

    lent = LentForACall()
    alive = weakref.ref(lent)
    gc.disable()  # memory lent to a call goes back when it is over, and not some time later
    try:
        call_with(lent)
        del lent
        assert alive() is None
    finally:
        gc.enable()
    storage.close()


def test_a_call_that_is_left_before_its_end_takes_its_link_along(running: LoopbackServer) -> None:
    storage = running.client()
    come_and_go(storage)
    server = storage._servers[0]
    call = server._linked(server._clock() + PATIENCE_S)
    assert call is not None
    call.begin(Call.STATS, pb.StatsRequest().SerializeToString())
    call.cancel()
    wait_for(lambda: links_of(running) == 0)
    assert storage.exists([pages_of(1)[0].label]) == [Answer.HIT]
    assert links_of(running) == 1
    storage.close()


def test_nothing_is_taken_from_a_link_before_all_of_it_has_come() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(LinkSocket(ours, FRAME_BYTES_MAX)) as link:
        link.wait_at_most(0.001)
        content = bytes(range(256)) * 300
        sent = len(content).to_bytes(4, "little") + content + b"\0\0\0\0"
        for cut in (2, 4, 70_000):
            theirs.sendall(sent[:cut])
            with pytest.raises(TimeoutError):
                link.receive()
            sent = sent[cut:]
        theirs.sendall(sent)
        assert link.receive() == content
        assert not link.is_quiet
        assert link.receive() == b""
        assert link.is_quiet
        assert link.is_open
        theirs.shutdown(socket.SHUT_WR)
        assert not link.is_open
        assert link.receive() is None
