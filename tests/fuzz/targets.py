"""Fuzz targets: each takes any bytes, and raises only where a promise is broken."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError, Message

from tests.fuzz.context import Aborted, DirectContext
from tests.support.service import HeaderTenants, NotedScheduler, Notes
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.errors import InputError
from unified_cache.core.page import PAGE_KEY_BYTES
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers, verify_buffers
from unified_cache.core.settings.service import QuotaSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call, decoded
from unified_cache.service.access.gate import CallTimeouts, ServiceGate
from unified_cache.service.access.usage import COUNTED_PAGES_MAX, TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.service.servicer import CacheService
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

PAYLOAD_BYTES = 64
LAYOUT = ModelLayout(
    16, (Full((PoolSpec("kv", PAYLOAD_BYTES),)), SlidingWindow(32, 16, (PoolSpec("swa", PAYLOAD_BYTES),)))
)
MANIFEST = manifest_of(Identity("fuzz"), LAYOUT)
LABEL = Label(MANIFEST.identity, hashlib.sha256(b"page").digest(), "kv")
LENGTH_BYTES = 2
"""Before each message of a stream."""

UINT64 = 1 << 64

CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""What a call may be refused with where neither store nor server fails."""


def whole_page() -> bytes:
    page = memoryview(bytearray(HEADER_BYTES) + bytes(range(PAYLOAD_BYTES)))
    seal_buffers((page,), LABEL)
    return bytes(page)


class Requests:
    """Every call of the contract, and the parts of its streams; the first byte says which."""

    def __init__(self) -> None:
        limits = Limits(pages_max=64, identities_max=8)
        self._notes = Notes()
        usage = TenantUsage(QuotaSettings(stored_bytes_max=1 << 20), COUNTED_PAGES_MAX, None)
        store = TenantStore(VerifiedStorage(MemoryStorage(1 << 20)), usage, self._notes)
        gate = ServiceGate(HeaderTenants().caller, NotedScheduler(), CallTimeouts(limits, time.monotonic), self._notes)
        self._service = CacheService(store, gate, limits, lambda: None)
        self._answers = {call: self._answer_of(call) for call in Call}

    def take(self, content: bytes) -> None:
        """Make the call that the bytes stand for; any status of the contract is right, and nothing else."""
        if not content:
            return
        self._notes.anomalies.clear()
        self._notes.codes.clear()
        calls = list(Call)
        chosen, rest = content[0] % (len(calls) + 1), content[1:]
        if chosen == len(calls):
            self._take_part(rest)
            return
        self._make(Call.HELLO, pb.HelloRequest(manifest=MANIFEST).SerializeToString())
        self._make(calls[chosen], rest)

    def seeds(self) -> Iterator[bytes]:
        """Yield a message of each call that means something, and a part."""
        run = pb.PageRun(identity=LABEL.identity, pool="kv", keys=[LABEL.key], object_bytes=len(whole_page()))
        put = [pb.PutPart(start=pb.PutStart(runs=[run], level=pb.DURABLE)), pb.PutPart(content=whole_page())]
        messages: list[tuple[Call, Message]] = [
            (Call.HELLO, pb.HelloRequest(manifest=MANIFEST)),
            (Call.EXISTS, pb.ExistsRequest(runs=[run])),
            (Call.GET, pb.GetRequest(runs=[run, run])),
            (Call.TOUCH, pb.TouchRequest(runs=[run])),
            (Call.REMOVE, pb.RemoveRequest(runs=[run])),
            (Call.SCAN, pb.ScanRequest(identity=LABEL.identity, cursor="a")),
            (Call.IDENTITIES, pb.IdentitiesRequest(after=LABEL.identity)),
            (Call.CLEAR, pb.ClearRequest(identity=LABEL.identity)),
            (Call.DRAIN, pb.DrainRequest()),
        ]
        order = list(Call)
        for call, message in messages:
            yield bytes([order.index(call)]) + message.SerializeToString()
        framed = [len(each).to_bytes(LENGTH_BYTES) + each for each in (message.SerializeToString() for message in put)]
        yield bytes([order.index(Call.PUT)]) + b"".join(framed)
        yield bytes([len(order)]) + pb.GetPart(offset=1 << 63, hits=b"\1").SerializeToString()
        yield bytes([len(order)]) + pb.GetPart(offset=300, hits=b"\1\2", content=whole_page()).SerializeToString()

    def _make(self, call: Call, message: bytes) -> None:
        try:
            self._answers[call](message)
        except Aborted as ended:
            if ended.code not in CODES:
                raise AssertionError(f"{call.value}: {self._notes.anomalies}") from ended

    def _answer_of(self, call: Call) -> Callable[[bytes], object]:
        found = self._service.rpc_methods().service(_Details(call.path))
        assert found is not None
        streamed, collected = found.stream_stream, found.stream_unary
        if streamed is not None:
            return lambda message: list(streamed(iter([message]), DirectContext()))
        assert collected is not None
        framed = _framed if call is Call.PUT else _alone
        return lambda message: collected(framed(message), DirectContext())

    def _take_part(self, message: bytes) -> None:
        """Read a part; it must be what protobuf reads, wherever both can."""
        with suppress(InputError, DecodeError):
            ours, theirs = decoded(message), pb.GetPart.FromString(message)
            # A number of more than 64 bits protobuf cuts; here it stays, and whoever takes the part refuses it.
            assert ours.offset % UINT64 == theirs.offset
            assert (ours.hits, bytes(ours.content)) == (theirs.hits, theirs.content)


@dataclass
class _Details(grpc.HandlerCallDetails):
    """Details of a call, as gRPC gives them."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


def _alone(content: bytes) -> Iterator[bytes]:
    yield content


def _framed(content: bytes) -> Iterator[bytes]:
    while len(content) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES])
        yield content[LENGTH_BYTES:end]
        content = content[end:]


class Pages:
    """The header of a page, and what it claims; the first byte says where a page is cut in two."""

    def take(self, content: bytes) -> None:
        """Verify; only what sealing its payload gives is a page, however its bytes lie in memory."""
        cut = content[0] if content else 0
        page = memoryview(content[1:])
        flaw = verify_buffers((page,), LABEL)
        pieces = verify_buffers((page[:cut], page[cut:]), LABEL)
        assert flaw is pieces, f"found {flaw} whole and {pieces} in pieces"
        if flaw is None:
            again = memoryview(bytearray(page))
            seal_buffers((again,), LABEL)
            assert again == page
        other = LABEL._replace(key=bytes(PAGE_KEY_BYTES))
        assert verify_buffers((page,), other) is not None

    def seeds(self) -> Iterator[bytes]:
        """Yield a page, its header alone, and a page of nothing."""
        for count in (HEADER_BYTES + PAYLOAD_BYTES, HEADER_BYTES, 0):
            yield b"\x40" + whole_page()[:count]


TARGETS: Mapping[str, Callable[[], Requests | Pages]] = {"requests": Requests, "pages": Pages}
