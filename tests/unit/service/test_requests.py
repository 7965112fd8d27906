"""Bad inputs of the request path: each has its status, changes nothing, and leaves the server alive."""

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.support.service import LoopbackServer, Wire, limits_with, refused, wait_for
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.core.settings.limits import MESSAGE_BYTES_MAX
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire.calls import SERVICE, Call
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
LIMITS = limits_with(pages_max=100, tokens_max=1000)

BAD = grpc.StatusCode.INVALID_ARGUMENT


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


class ServerOverMemory:
    """A server over memory, with one page stored."""

    def __init__(self) -> None:
        self.backend = MemoryStorage()
        self.running = LoopbackServer.start(self.backend, LIMITS)
        self.wire = Wire(self.running)
        self.wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST, vocabulary=32_000))
        assert pb.PutReply.FromString(self.wire.put([start(0), part(page(0))])).stored == b"\x02"

    def state(self) -> object:
        stats = pb.StatsReply.FromString(self.wire.ask(Call.STATS, pb.StatsRequest()))
        return stats, dict(self.backend._pages), self.running.usage.by_tenant()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.state()
        yield
        assert self.state() == before
        assert self.wire.get(pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)]))
        wait_for(lambda: self.running.scheduler.in_flight_count == 0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerOverMemory]:
    server = ServerOverMemory()
    yield server
    server.wire.close()
    server.running.stop()


MALFORMED = (
    b"\xff",
    b"\x0a",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x12\x05abc",
    b"\x0a\x02\xff\xfe",
    b"\x0b",
    bytes(range(256)),
)


@pytest.mark.parametrize("message", MALFORMED)
@pytest.mark.parametrize("call", [Call.HELLO, Call.LOOKUP, Call.EXISTS, Call.TOUCH, Call.REMOVE, Call.SCAN, Call.CLEAR])
def test_what_is_no_message_is_an_invalid_argument(server: ServerOverMemory, call: Call, message: bytes) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.ask(call, message)


@pytest.mark.parametrize("message", MALFORMED)
def test_what_is_no_message_is_an_invalid_argument_in_streams_too(server: ServerOverMemory, message: bytes) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.get(message)
    with server.unchanged(), refused(BAD):
        server.wire.put([message])
    with server.unchanged(), refused(BAD):
        server.wire.put([start(1), message])


def test_unknown_fields_are_ignored(server: ServerOverMemory) -> None:
    with server.unchanged():
        known = pb.ExistsRequest(runs=[run(key(0))]).SerializeToString()
        assert pb.ExistsReply.FromString(server.wire.ask(Call.EXISTS, known + b"\xfa\x3f\x03abc")).found == b"\x01"


def test_an_unknown_method_is_unimplemented(server: ServerOverMemory) -> None:
    channel = grpc.insecure_channel(server.running.address)
    begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.HELLO.path + "2")
    with server.unchanged(), refused(grpc.StatusCode.UNIMPLEMENTED):
        begin(b"")
    channel.close()


def test_a_message_beyond_the_limit_exhausts_a_resource(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        server.wire.ask(Call.EXISTS, bytes(MESSAGE_BYTES_MAX + 1))
    channel = grpc.insecure_channel(server.running.address, compression=grpc.Compression.Gzip)
    begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.EXISTS.path)
    with server.unchanged(), refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        begin(bytes(200_000_000), 60.0)
    channel.close()


def test_too_much_metadata_exhausts_a_resource(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        Wire(server.running, "x" * (64 << 10)).ask(Call.STATS, b"")


@pytest.mark.parametrize("asserted", ["", "x" * 65, "a\n", "a\0b", "../a", "A", "é", "-a"])
def test_what_is_no_name_of_a_tenant_is_an_invalid_argument(server: ServerOverMemory, asserted: str) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.STATS, pb.StatsRequest(tenant=asserted))


def test_another_tenant_is_permission_denied_and_the_reserved_one_an_invalid_argument(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.PERMISSION_DENIED):
        server.wire.ask(Call.STATS, pb.StatsRequest(tenant="other"))
    with server.unchanged(), refused(BAD):
        Wire(server.running, "team:admin").ask(Call.STATS, pb.StatsRequest(tenant="default"))
    with server.unchanged(), refused(grpc.StatusCode.PERMISSION_DENIED):
        namespace = pb.Namespace(tenant="other")
        server.wire.ask(
            Call.LOOKUP, pb.LookupRequest(identity=IDENTITY, tokens=pb.Tokens(ids=[1], namespace=namespace))
        )


def test_a_role_that_is_too_low_is_permission_denied(server: ServerOverMemory) -> None:
    reader, writer = Wire(server.running, "default:reader"), Wire(server.running, "default:writer")
    with server.unchanged(), refused(grpc.StatusCode.PERMISSION_DENIED):
        reader.put([start(1), part(page(1))])
    with server.unchanged(), refused(grpc.StatusCode.PERMISSION_DENIED):
        reader.ask(Call.REMOVE, pb.RemoveRequest(runs=[run(key(0))]))
    for call in (Call.CLEAR, Call.DRAIN):
        with server.unchanged(), refused(grpc.StatusCode.PERMISSION_DENIED):
            writer.ask(call, b"")
    assert server.running.drains == []


NAMES = [b"", b" ", b"../x", b"/etc/passwd", b"a/../../b", b"%2e%2e%2f", b"..\\x", b"\0", b"\n", b"x" * 10_240]
NAMES += [
    "\u202e\u200b".encode(),
    bytes(31),
    bytes(33),
    key(1).hex().encode(),
    key(1).hex().upper().encode(),
    b"z" * 64,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_no_digest_is_an_invalid_argument(server: ServerOverMemory, name: bytes) -> None:
    for runs in ([run(name)], [run(key(0), name)], [run(key(0), identity=name)]):
        for call, request in (
            (Call.EXISTS, pb.ExistsRequest(runs=runs)),
            (Call.TOUCH, pb.TouchRequest(runs=runs)),
            (Call.REMOVE, pb.RemoveRequest(runs=runs)),
        ):
            with refused(BAD):
                server.wire.ask(call, request)
        with refused(BAD):
            server.wire.get(pb.GetRequest(runs=runs))
        with refused(BAD):
            server.wire.put([pb.PutPart(start=pb.PutStart(runs=runs))])
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.LOOKUP, pb.LookupRequest(identity=IDENTITY, keys=pb.Keys(keys=[name])))
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.SCAN, pb.ScanRequest(identity=name))


def test_a_run_without_keys_is_an_invalid_argument(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run()]))


@pytest.mark.parametrize(
    "cursor", ["../x", "x", "memory", "memory:../x", "elsewhere:", "x" * 10_240, "a\0", "a b", "\u202e"]
)
def test_a_cursor_that_no_scan_returned_is_an_invalid_argument(server: ServerOverMemory, cursor: str) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.SCAN, pb.ScanRequest(identity=IDENTITY, cursor=cursor))


@pytest.mark.parametrize("token", [-1, 2**31, 2**63 - 1, -(2**63), 32_000])
def test_a_token_out_of_range_is_an_invalid_argument(server: ServerOverMemory, token: int) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.LOOKUP, pb.LookupRequest(identity=IDENTITY, tokens=pb.Tokens(ids=[1, token])))


def test_no_tokens_at_all_hit_nothing(server: ServerOverMemory) -> None:
    for request in (pb.LookupRequest(identity=IDENTITY, tokens=pb.Tokens()), pb.LookupRequest(identity=IDENTITY)):
        with server.unchanged():
            assert pb.LookupReply.FromString(server.wire.ask(Call.LOOKUP, request)) == pb.LookupReply()


def test_more_tokens_or_keys_than_may_be_are_an_invalid_argument(server: ServerOverMemory) -> None:
    many = [key(number) for number in range(LIMITS.pages_max + 1)]
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.LOOKUP, pb.LookupRequest(identity=IDENTITY, tokens=pb.Tokens(ids=[1] * 1001)))
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.LOOKUP, pb.LookupRequest(identity=IDENTITY, keys=pb.Keys(keys=many)))
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(*many[:60]), run(*many[60:])]))
    with server.unchanged(), refused(BAD):
        server.wire.get(pb.GetRequest(runs=[run(*many)]))


@pytest.mark.parametrize("object_bytes", [OBJECT_BYTES - 1, OBJECT_BYTES + 1, 0, HEADER_BYTES, 2 * OBJECT_BYTES])
def test_a_page_of_another_length_is_an_invalid_argument(server: ServerOverMemory, object_bytes: int) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.put([start(1, object_bytes=object_bytes), part(bytes(object_bytes))])


def test_a_page_whose_checksum_does_not_hold_is_an_invalid_argument(server: ServerOverMemory) -> None:
    for at in (*range(0, HEADER_BYTES, 7), HEADER_BYTES, OBJECT_BYTES - 1):
        flipped = bytearray(page(1))
        flipped[at] ^= 1
        with refused(BAD):
            server.wire.put([start(1), part(bytes(flipped))])
    with server.unchanged(), refused(BAD):
        server.wire.put([start(1), part(page(2))])


def test_a_pool_that_the_layout_does_not_have_is_an_invalid_argument(server: ServerOverMemory) -> None:
    for pool in ("other", "", "../kv", "KV"):
        with server.unchanged(), refused(BAD):
            server.wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0), pool=pool)]))
        with server.unchanged(), refused(BAD):
            pools = [pb.RequiredPool(name=pool)]
            server.wire.ask(Call.LOOKUP, pb.LookupRequest(identity=IDENTITY, keys=pb.Keys(keys=[key(0)]), pools=pools))


WHOLE = page(1)
UNKNOWN_LEVEL = b"\x22\x02\x10\x07"
"""A start of level 7, as bytes: a later start of the same message adds its fields."""
STREAMS: dict[str, list[pb.PutPart | bytes]] = {
    "no messages": [],
    "no start": [part(WHOLE)],
    "two starts": [start(1), start(1), part(WHOLE)],
    "a start with content": [pb.PutPart(start=start(1).start, content=WHOLE)],
    "a second start with content": [start(1), pb.PutPart(start=start(1).start, content=WHOLE)],
    "a gap": [start(1), part(WHOLE[:500]), part(WHOLE[501:], 501)],
    "an overlap": [start(1), part(WHOLE[:500]), part(WHOLE[499:], 499)],
    "too long": [start(1), part(WHOLE + b"x")],
    "longer by a part": [start(1), part(WHOLE), part(b"x", len(WHOLE))],
    "an early end": [start(1), part(WHOLE[:-1])],
    "an end at once": [start(1)],
    "an empty part": [start(1), part(b""), part(WHOLE)],
    "an unknown level": [b"".join((UNKNOWN_LEVEL, start(1).SerializeToString())), part(WHOLE)],
    "parents that do not match": [
        pb.PutPart(
            start=pb.PutStart(
                runs=[
                    pb.PageRun(
                        identity=IDENTITY, pool="kv", keys=[key(1)], parents=[key(2)] * 2, object_bytes=OBJECT_BYTES
                    )
                ]
            )
        ),
        part(WHOLE),
    ],
}


@pytest.mark.parametrize("messages", STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_out_of_order_is_an_invalid_argument(
    server: ServerOverMemory, messages: list[pb.PutPart | bytes]
) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.put(messages)


def test_a_put_that_its_client_cancels_leaves_nothing(server: ServerOverMemory) -> None:
    stop = threading.Event()

    def messages() -> Iterator[pb.PutPart]:
        yield start(1)
        yield part(WHOLE[:500])
        stop.wait(10)

    with server.unchanged():
        future = server.wire.begin_put(messages())
        wait_for(lambda: server.running.scheduler.in_flight_count == 1)
        future.cancel()
        wait_for(lambda: server.running.scheduler.in_flight_count == 0)
        stop.set()


def test_a_put_whose_deadline_passes_leaves_nothing(server: ServerOverMemory) -> None:
    stop = threading.Event()

    def messages() -> Iterator[pb.PutPart]:
        yield start(1)
        yield part(WHOLE[:500])
        stop.wait(10)

    with server.unchanged(), refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        server.wire.put(messages(), timeout_s=0.2)
    stop.set()


def changed(**fields: object) -> Manifest:
    manifest = Manifest()
    manifest.CopyFrom(MANIFEST)
    for name, value in fields.items():
        setattr(manifest, name, value)
    return manifest


def test_pages_of_another_format_are_a_failed_precondition_that_names_it(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.FAILED_PRECONDITION, "format version: expected 1, found 2"):
        server.wire.ask(Call.HELLO, pb.HelloRequest(manifest=changed(format_version=2)))


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(format_version=1),
        changed(identity=bytes(32)),
        changed(model=""),
        changed(model="a\0"),
        changed(page_size=0),
    ],
)
def test_a_manifest_that_makes_no_sense_is_an_invalid_argument(server: ServerOverMemory, manifest: Manifest) -> None:
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.HELLO, pb.HelloRequest(manifest=manifest))


def test_an_identity_without_hello_is_a_failed_precondition(server: ServerOverMemory) -> None:
    with server.unchanged(), refused(grpc.StatusCode.FAILED_PRECONDITION):
        server.wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0), identity=key(5))]))


def test_bytes_that_would_run_code_elsewhere_are_only_bytes(server: ServerOverMemory) -> None:
    pickled = b"cbuiltins\nexec\n(S'raise SystemExit'\ntR."
    with server.unchanged(), refused(BAD):
        server.wire.put([start(1), part(pickled + bytes(OBJECT_BYTES - len(pickled)))])
    with server.unchanged(), refused(BAD):
        server.wire.ask(Call.EXISTS, pickled)


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


@pytest.mark.parametrize("name", ["Share", "Unshare", "Link", "Prefetch", "Release"])
def test_a_call_of_an_earlier_version_is_unimplemented(name: str, server: ServerOverMemory) -> None:
    with grpc.insecure_channel(server.running.address) as channel:
        begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/{name}")
        with server.unchanged(), refused(grpc.StatusCode.UNIMPLEMENTED):
            begin(b"", 10.0)


def test_a_request_with_a_field_of_an_earlier_version_is_answered_in_the_stream(server: ServerOverMemory) -> None:
    request = pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)]).SerializeToString()
    range_of_memory = b"\x1a\x04\x0a\x00\x18\x40"  # field 3: a name, and a length
    (reply,) = server.wire.get(request + range_of_memory)
    assert pb.GetPart.FromString(reply).content == page(0)


def test_a_look_up_that_asks_for_a_lease_is_answered_without_one(server: ServerOverMemory) -> None:
    request = pb.LookupRequest(identity=IDENTITY, keys=pb.Keys(keys=[key(0)]), pools=[pb.RequiredPool(name="kv")])
    seconds = b"\x31" + struct.pack("<d", 5.0)  # field 6
    reply = server.wire.ask(Call.LOOKUP, request.SerializeToString() + seconds)
    assert pb.LookupReply.FromString(reply) == pb.LookupReply(end_max=1, pages_count=1)
