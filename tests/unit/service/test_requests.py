"""Bad inputs of the request path: each has its status, changes nothing, and leaves the server alive."""

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.budget import PHASES, examples
from tests.support.service import LoopbackServer, Wire, refused, wait_for
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.errors import InputError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import Call, decoded, encoded
from unified_cache.service.access.registry import FACTS_MAX, POOLS_MAX, TEXT_CHARS_MAX
from unified_cache.service.limits import MESSAGE_BYTES_MAX, Limits
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Scan

PAYLOAD_BYTES = 1000
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES
LAYOUT = ModelLayout(
    16, (Full((PoolSpec("kv", PAYLOAD_BYTES),)), SlidingWindow(32, 16, (PoolSpec("swa", PAYLOAD_BYTES),)))
)
MODEL = Identity("model", "r1", "bf16")
MANIFEST = manifest_of(MODEL, LAYOUT)
IDENTITY = MANIFEST.identity
LIMITS = Limits(pages_max=100)

BAD = grpc.StatusCode.INVALID_ARGUMENT
DENIED = grpc.StatusCode.PERMISSION_DENIED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
OTHERWISE = grpc.StatusCode.FAILED_PRECONDITION
UNKNOWN = grpc.StatusCode.UNIMPLEMENTED


def key(number: int) -> bytes:
    return hashlib.sha256(b"page %d" % number).digest()


def run(*keys: bytes, pool: str = "kv", identity: bytes = IDENTITY, object_bytes: int = 0) -> pb.PageRun:
    return pb.PageRun(identity=identity, pool=pool, keys=keys, object_bytes=object_bytes)


def page(number: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    content = memoryview(bytearray(HEADER_BYTES + payload_bytes))
    content[HEADER_BYTES:] = bytes([number % 256]) * payload_bytes
    seal_buffers((content,), Label(IDENTITY, key(number), "kv"))
    return bytes(content)


def start(*numbers: int, level: pb.Level = pb.CACHED, object_bytes: int = OBJECT_BYTES) -> pb.PutPart:
    runs = [run(*map(key, numbers), object_bytes=object_bytes)]
    return pb.PutPart(start=pb.PutStart(level=level, runs=runs))


def part(content: bytes, offset: int = 0) -> pb.PutPart:
    return pb.PutPart(offset=offset, content=content)


def changed(**fields: object) -> Manifest:
    manifest = Manifest()
    manifest.CopyFrom(MANIFEST)
    for name, value in fields.items():
        setattr(manifest, name, value)
    return manifest


class ServerOverMemory:
    """A server over memory, with one page stored."""

    def __init__(self) -> None:
        self.backend = MemoryStorage()
        self.running = LoopbackServer.start(self.backend, LIMITS)
        self.wire = Wire(self.running)
        self.wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
        assert pb.PutReply.FromString(self.wire.put([start(0), part(page(0))])).stored == b"\x02"

    def state(self) -> object:
        stats = pb.HelloReply.FromString(self.wire.ask(Call.HELLO, pb.HelloRequest()))
        return stats, dict(self.backend._pages), self.running.usage.by_tenant(), self.running.drains

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.state()
        yield
        assert self.state() == before
        assert self.wire.get(pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)]))
        wait_for(lambda: self.running.scheduler.in_flight_count == 0)

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.running.port), timeout=5)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerOverMemory]:
    server = ServerOverMemory()
    yield server
    server.wire.close()
    server.running.stop()


# Messages that are refused

Send = Callable[[ServerOverMemory], object]


def ask(call: Call, message: Message | bytes, token: str = "") -> Send:
    return lambda server: (Wire(server.running, token) if token else server.wire).ask(call, message)


def get(message: Message | bytes) -> Send:
    return lambda server: server.wire.get(message)


def put(*messages: pb.PutPart | bytes, token: str = "") -> Send:
    return lambda server: (Wire(server.running, token) if token else server.wire).put(messages)


def hello(manifest: Manifest) -> Send:
    return ask(Call.HELLO, pb.HelloRequest(manifest=manifest))


def call_at(path: str) -> Send:
    def send(server: ServerOverMemory) -> None:
        with grpc.insecure_channel(server.running.address) as channel:
            begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            begin(b"", 10.0)

    return send


def layout_of(*pools: PoolSpec) -> ModelLayout:
    return ModelLayout(16, (Full(pools),))


def in_every_call(*runs: pb.PageRun) -> list[Send]:
    """Name pages in each call that takes some."""
    return [
        ask(Call.EXISTS, pb.ExistsRequest(runs=runs)),
        ask(Call.TOUCH, pb.TouchRequest(runs=runs)),
        ask(Call.REMOVE, pb.RemoveRequest(runs=runs)),
        get(pb.GetRequest(runs=runs)),
        put(pb.PutPart(start=pb.PutStart(runs=runs))),
    ]


def flipped(at: int) -> bytes:
    spoilt = bytearray(page(1))
    spoilt[at] ^= 1
    return bytes(spoilt)


ONE_MESSAGE = (Call.HELLO, Call.EXISTS, Call.TOUCH, Call.REMOVE, Call.SCAN, Call.CLEAR)
MALFORMED = (
    b"\xff",
    b"\x0a",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x12\x05abc",
    b"\x0b",
    bytes(range(256)),
)
NAMES = [b"", b" ", b"../x", b"/etc/passwd", b"a/../../b", b"%2e%2e%2f", b"..\\x", b"\0", b"\n", b"x" * 10_240]
NAMES += ["\u202e\u200b".encode(), bytes(31), bytes(33), b"z" * 64]
NAMES += [key(1).hex().encode(), key(1).hex().upper().encode()]
CURSORS = ("../x", "x", "memory", "memory:../x", "elsewhere:", "x" * 10_240, "a\0", "a b", "\u202e")
LENGTHS = (OBJECT_BYTES - 1, OBJECT_BYTES + 1, 0, HEADER_BYTES, 2 * OBJECT_BYTES)
MANY = [key(number) for number in range(LIMITS.pages_max + 1)]
CONTROLS = ("\x1b", "\x9b", "\n", "\u202e", "\u2066", "\u2028")
PICKLE = b"cbuiltins\nexec\n(S'raise SystemExit'\ntR."
"""Bytes that would run code elsewhere."""

WHOLE = page(1)
UNKNOWN_LEVEL = b"\x22\x02\x10\x07"
"""A start of level 7, as bytes: a later start of the same message adds its fields."""
STREAMS: dict[str, list[pb.PutPart | bytes]] = {
    "no messages": [],
    "no start": [part(WHOLE)],
    "two starts": [start(1), start(1), part(WHOLE)],
    "a start with another page": [pb.PutPart(start=start(1).start, content=page(2))],
    "a start with an offset": [pb.PutPart(start=start(1).start, content=WHOLE, offset=1)],
    "a start with half a page": [pb.PutPart(start=start(1).start, content=WHOLE[:-1])],
    "a start with more than it names": [pb.PutPart(start=start(1).start, content=WHOLE + b"x")],
    "a second start with content": [start(1), pb.PutPart(start=start(1).start, content=WHOLE)],
    "a gap": [start(1), part(WHOLE[:500]), part(WHOLE[501:], 501)],
    "an overlap": [start(1), part(WHOLE[:500]), part(WHOLE[499:], 499)],
    "too long": [start(1), part(WHOLE + b"x")],
    "longer by a part": [start(1), part(WHOLE), part(b"x", len(WHOLE))],
    "a page and a half": [start(1, 2), part(WHOLE + page(2)[: OBJECT_BYTES // 2])],
    "an early end": [start(1), part(WHOLE[:-1])],
    "an end at once": [start(1)],
    "an empty part": [start(1), part(b""), part(WHOLE)],
    "an unknown level": [b"".join((UNKNOWN_LEVEL, start(1).SerializeToString())), part(WHOLE)],
}

INVALID: dict[str, list[Send]] = {
    "no message": [ask(call, message) for call in ONE_MESSAGE for message in (*MALFORMED, PICKLE)],
    "no message of a stream": [
        send for message in MALFORMED for send in (get(message), put(message), put(start(1), message))
    ],
    "a key that is no digest": [
        *(send for name in NAMES for runs in ([run(name)], [run(key(0), name)]) for send in in_every_call(*runs)),
    ],
    "an identity that is no digest": [
        *(send for name in NAMES for send in in_every_call(run(key(0), identity=name))),
        *(ask(Call.SCAN, pb.ScanRequest(identity=name)) for name in NAMES),
    ],
    "no keys": [ask(Call.EXISTS, pb.ExistsRequest(runs=[run()]))],
    "a cursor that no scan returned": [
        ask(Call.SCAN, pb.ScanRequest(identity=IDENTITY, cursor=cursor)) for cursor in CURSORS
    ],
    "more than may be": [
        ask(Call.EXISTS, pb.ExistsRequest(runs=[run(*MANY[:60]), run(*MANY[60:])])),
        get(pb.GetRequest(runs=[run(*MANY)])),
    ],
    "a page of another length": [put(start(1, object_bytes=count), part(bytes(count))) for count in LENGTHS],
    "a checksum that does not hold": [
        *(put(start(1), part(flipped(at))) for at in (*range(0, HEADER_BYTES, 7), HEADER_BYTES, OBJECT_BYTES - 1)),
        put(start(1), part(page(2))),
        put(start(1), part(PICKLE.ljust(OBJECT_BYTES))),
    ],
    "a pool whose name is no text": [
        *(ask(call, b"\x12\x04\x12\x02\xff\xfe") for call in (Call.EXISTS, Call.TOUCH, Call.REMOVE)),
        get(b"\x12\x04\x12\x02\xff\xfe"),
    ],
    "a pool that the layout does not have": [
        ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0), pool=pool)])) for pool in ("other", "", "../kv", "KV")
    ],
    **{name: [put(*messages)] for name, messages in STREAMS.items()},
    "a manifest that makes no sense": [
        hello(Manifest(format_version=1)),
        hello(Manifest(format_version=1, model="model")),
        *(hello(changed(**{name: value})) for name, value in (("identity", bytes(32)), ("page_size", 0))),
        *(hello(changed(model=model)) for model in ("", "a\0")),
        *(hello(manifest_of(Identity(f"m{sign}"), LAYOUT)) for sign in CONTROLS),
    ],
    "a manifest of more than is kept": [
        hello(manifest_of(Identity("m" * (TEXT_CHARS_MAX + 1)), LAYOUT)),
        hello(
            manifest_of(Identity("m", facts=tuple((f"{number:02}", "x") for number in range(FACTS_MAX + 1))), LAYOUT)
        ),
        hello(manifest_of(MODEL, layout_of(*(PoolSpec(f"pool_{number}", 1) for number in range(POOLS_MAX + 1))))),
        hello(manifest_of(MODEL, layout_of(PoolSpec("kv", LIMITS.page_bytes_max + 1)))),
    ],
}
REFUSED: dict[grpc.StatusCode, dict[str, list[Send]]] = {
    BAD: INVALID,
    DENIED: {
        "a role that is too low": [
            put(start(1), part(page(1)), token="default:reader"),
            ask(Call.REMOVE, pb.RemoveRequest(runs=[run(key(0))]), "default:reader"),
            *(ask(call, b"", "default:writer") for call in (Call.CLEAR, Call.DRAIN)),
        ],
    },
    EXHAUSTED: {
        "a message beyond the limit": [ask(Call.EXISTS, bytes(MESSAGE_BYTES_MAX + 1))],
        "a part beyond the limit": [put(start(1), part(bytes(MESSAGE_BYTES_MAX)))],
        "too much metadata": [ask(Call.HELLO, b"", "x" * (64 << 10))],
    },
    OTHERWISE: {
        "pages of another format": [hello(changed(format_version=2))],
        "an identity without a hello": [ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0), identity=key(5))]))],
    },
    UNKNOWN: {
        "an unknown method": [call_at(f"{Call.HELLO.path}2"), call_at("/unified_cache.service.v1.Cache/")],
        "another service": [call_at(path) for path in ("/x/y", "/", "//", "/unified_cache.service.v2.Cache/Get")],
    },
    grpc.StatusCode.DEADLINE_EXCEEDED: {
        "a deadline that is over": [lambda server: server.wire.put([start(1), part(WHOLE)], timeout_s=-1.0)],
    },
}


@pytest.mark.threat("bad input")
@pytest.mark.threat("huge messages")
@pytest.mark.threat("escapes on a terminal")
@pytest.mark.parametrize(
    ("code", "sends"),
    [pytest.param(code, sends, id=name) for code, named in REFUSED.items() for name, sends in named.items()],
)
def test_a_bad_input_has_its_status_and_changes_nothing(
    server: ServerOverMemory, code: grpc.StatusCode, sends: list[Send]
) -> None:
    for send in sends:
        with server.unchanged(), refused(code):
            send(server)


# Whatever comes

MEANT: list[tuple[Call, list[bytes]]] = [
    (Call.HELLO, [pb.HelloRequest(manifest=MANIFEST).SerializeToString()]),
    (Call.EXISTS, [pb.ExistsRequest(runs=[run(key(0))]).SerializeToString()]),
    (Call.GET, [pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)] * 2).SerializeToString()]),
    (Call.TOUCH, [pb.TouchRequest(runs=[run(key(0))]).SerializeToString()]),
    (Call.REMOVE, [pb.RemoveRequest(runs=[run(key(0))]).SerializeToString()]),
    (Call.SCAN, [pb.ScanRequest(identity=IDENTITY, cursor="a").SerializeToString()]),
    (Call.IDENTITIES, [pb.IdentitiesRequest(after=IDENTITY).SerializeToString()]),
    (Call.CLEAR, [pb.ClearRequest(identity=IDENTITY).SerializeToString()]),
    (Call.DRAIN, [b""]),
    (Call.PUT, [start(0, level=pb.DURABLE).SerializeToString(), part(page(0)).SerializeToString()]),
    (Call.PUT, [pb.PutPart(start=start(0).start, content=page(0)).SerializeToString()]),
]
"""A message of each call that means something."""
PARTS = [
    pb.GetPart(offset=1 << 63, hits=b"\1").SerializeToString(),
    encoded(300, b"\1\x12", [memoryview(b"page")]),
]


@st.composite
def spoilt(draw: st.DrawFn, meant: Sequence[bytes]) -> list[bytes]:
    """Draw messages in which some bytes are others, more or fewer."""
    messages = list(meant)
    for _ in range(draw(st.integers(0, 3))):
        number = draw(st.integers(0, len(messages) - 1))
        at = draw(st.integers(0, len(messages[number])))
        gone = at + draw(st.integers(0, 12) | st.just(1 << 20))
        messages[number] = messages[number][:at] + draw(st.binary(max_size=12)) + messages[number][gone:]
    return messages


def status_of(send: Callable[[], object]) -> grpc.StatusCode | None:
    """Return what a call was refused with, None where it was answered."""
    try:
        send()
    except grpc.RpcError as error:
        return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    return None


@pytest.mark.threat("bad input")
def test_any_bytes_are_answered_or_refused_with_a_status_of_the_contract() -> None:
    server = ServerOverMemory()
    wire, notes = server.wire, server.running.notes

    @settings(max_examples=examples(400, 20_000), deadline=None, phases=PHASES)
    @given(st.sampled_from(MEANT).flatmap(lambda meant: st.tuples(st.just(meant[0]), spoilt(meant[1]))))
    def check(asked: tuple[Call, list[bytes]]) -> None:
        call, messages = asked
        wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))

        def send() -> object:
            if call is Call.PUT:
                return wire.put(messages)
            return wire.get(messages[0]) if call is Call.GET else wire.ask(call, messages[0])

        assert status_of(send) in {None, BAD, DENIED, EXHAUSTED, OTHERWISE}, notes.anomalies

    check()
    assert "internal" not in notes.kinds
    server.wire.close()
    server.running.stop()


@settings(max_examples=examples(500, 20_000), deadline=None, phases=PHASES)
@given(st.sampled_from(PARTS).flatmap(lambda meant: spoilt([meant])))
@example([b"\x12\x02\1\2\x32\1\1"])  # two hits and one reason
def test_a_part_is_what_protobuf_reads_and_refused_where_that_reads_none(messages: list[bytes]) -> None:
    try:
        theirs = pb.GetPart.FromString(messages[0])
    except DecodeError:
        with pytest.raises(InputError):
            decoded(messages[0])
        return
    with suppress(InputError):
        ours = decoded(messages[0])
        # A number of more than 64 bits protobuf cuts; here it stays, and whoever takes the part refuses it.
        assert ours.offset % (1 << 64) == theirs.offset
        assert (ours.hits, bytes(ours.content), ours.reasons) == (theirs.hits, theirs.content, theirs.reasons)
        assert len(ours.reasons) in (0, len(ours.hits))


# Messages that only look bad


def test_unknown_fields_are_ignored(server: ServerOverMemory) -> None:
    with server.unchanged():
        known = pb.ExistsRequest(runs=[run(key(0))]).SerializeToString()
        assert pb.ExistsReply.FromString(server.wire.ask(Call.EXISTS, known + b"\xfa\x3f\x03abc")).found == b"\x01"


def test_a_put_of_one_message_is_a_put_whatever_the_order_of_its_fields(server: ServerOverMemory) -> None:
    both = [start(9).SerializeToString(), part(page(9)).SerializeToString()]
    for message in (b"".join(both), b"".join(reversed(both))):
        assert pb.PutReply.FromString(server.wire.put([message])).stored == b"\x02"
        removed = server.wire.ask(Call.REMOVE, pb.RemoveRequest(runs=[run(key(9))]))
        assert pb.RemoveReply.FromString(removed).removed_count == 1


def test_the_same_put_many_times_over_is_stored_once(server: ServerOverMemory) -> None:
    with server.unchanged():
        futures = [server.wire.begin_put([start(0), part(page(0))]) for _ in range(100)]
        assert {pb.PutReply.FromString(future.result()).stored for future in futures} == {b"\x02"}


def test_a_page_in_many_parts_arrives_whole(server: ServerOverMemory) -> None:
    whole = page(9)
    parts = [part(whole[at : at + 100], at) for at in range(0, len(whole), 100)]
    assert pb.PutReply.FromString(server.wire.put([start(9), *parts])).stored == b"\x02"
    (answer,) = map(
        pb.GetPart.FromString, server.wire.get(pb.GetRequest(runs=[run(key(9), object_bytes=OBJECT_BYTES)]))
    )
    assert (answer.hits, answer.content) == (b"\x02", whole)
    server.wire.ask(Call.REMOVE, pb.RemoveRequest(runs=[run(key(9))]))


# Calls that end early


@contextmanager
def half_a_put() -> Iterator[Iterator[pb.PutPart]]:
    """Send half a page, and the rest of the stream never, until the block ends."""
    stop = threading.Event()

    def messages() -> Iterator[pb.PutPart]:
        yield start(1)
        yield part(WHOLE[:500])
        stop.wait(10)

    yield messages()
    stop.set()


@pytest.mark.parametrize("end", ["cancelled", "deadline", "connection"])
def test_a_put_whose_client_goes_leaves_nothing(server: ServerOverMemory, end: str) -> None:
    wire = Wire(server.running)
    with server.unchanged(), half_a_put() as messages:
        call = wire.begin_put(messages, 0.2 if end == "deadline" else 30.0)
        if end == "deadline":
            with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
                call.result()
        else:
            wait_for(lambda: server.running.scheduler.in_flight_count == 1)
            call.cancel() if end == "cancelled" else wire.close()
        wait_for(lambda: server.running.scheduler.in_flight_count == 0)
        wait_for(call.done)
    wire.close()


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


def test_a_fault_of_the_server_is_internal_and_tells_no_text() -> None:
    class FailingScan(MemoryStorage):
        def scan(self, identity: bytes, cursor: str = "") -> Scan:
            raise ZeroDivisionError("the secret")

    running = LoopbackServer.start(FailingScan(), LIMITS)
    wire = Wire(running)
    wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    with pytest.raises(grpc.RpcError) as caught:
        wire.ask(Call.SCAN, pb.ScanRequest(identity=IDENTITY))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    number = (caught.value.details() or "").rpartition(" ")[2]
    assert "secret" not in (caught.value.details() or "")
    ((kind, text),) = running.notes.anomalies
    assert kind == "internal"
    assert number in text
    assert "the secret" in text
    wire.close()
    running.stop()


# Below the contract

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


@pytest.mark.parametrize("sent", NO_CALLS.values(), ids=NO_CALLS.keys())
def test_bytes_that_are_no_call_change_nothing(server: ServerOverMemory, sent: bytes) -> None:
    with server.unchanged(), ExitStack() as opened:
        for _ in range(5):
            connection = opened.enter_context(server.connected())
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            except OSError:
                continue  # the server may close before it has read all


def test_a_connection_that_is_reset_changes_nothing(server: ServerOverMemory) -> None:
    with server.unchanged():
        for _ in range(20):
            connection = server.connected()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.sendall(PREFACE + SETTINGS)
            connection.close()
