"""A whole server on loopback, as ``unified-cache serve`` opens it, and calls to it."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from threading import Event
from urllib.request import urlopen

import grpc
from google.protobuf.message import Message

from tests.support.certificates import Authority, Issued
from tests.support.service_settings import service_settings
from unified_cache.core.drain import Drain
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.service.limits import Limits
from unified_cache.service.operations.logs import JsonLines, Log, LogRateLimit
from unified_cache.service.server import Service

CALL_S = 20.0
"""Longest wait for an answer; reached only by a bug."""

REQUESTS: Mapping[Call, type[Message]] = {
    Call.HELLO: pb.HelloRequest,
    Call.REMOVE: pb.RemoveRequest,
    Call.IDENTITIES: pb.IdentitiesRequest,
    Call.CLEAR: pb.ClearRequest,
    Call.DRAIN: pb.DrainRequest,
}
"""Unary calls that mean something without pages."""


@dataclass(frozen=True, slots=True)
class RunningService:
    """A server and what it wrote."""

    service: Service
    log: StringIO
    drain: Drain

    @property
    def address(self) -> str:
        """Address that it listens at."""
        return f"127.0.0.1:{self.service.port}"

    @property
    def kinds(self) -> list[str]:
        """Kinds of the lines it has logged, those of the audit log aside."""
        return [str(line["kind"]) for line in self.lines if line["level"] != "audit"]

    @property
    def lines(self) -> list[dict[str, object]]:
        """Lines that it has logged, and those of the audit log among them."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def metrics(self) -> dict[str, float]:
        """Read every series over HTTP."""
        return read_metrics(self.service.metrics_port)


def read_metrics(port: int | None) -> dict[str, float]:
    """Read every series of a server of this machine over HTTP."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=CALL_S) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@contextmanager
def running(limits: Limits | None = None, **settings: object) -> Iterator[RunningService]:
    """Open a server over memory that looks at its files at every call; ``settings`` go over what it needs."""
    access = settings.pop("access", {})
    assert isinstance(access, Mapping)
    flags = {
        "access": {"check_s": 1e-6, **access},
        "listen": "127.0.0.1:0",
        "storage": "memory:",
        "metrics": {"listen": "127.0.0.1:0"},
    }
    stream, drain = StringIO(), Drain()
    log = Log(JsonLines.on(stream, time.time), LogRateLimit(100, 1.0, time.monotonic))
    service = Service.open(service_settings(None, {**flags, **settings}), log, drain, limits)
    try:
        yield RunningService(service, stream, drain)
    finally:
        service.close()


class OpenPut:
    """A put that is under way until told to end."""

    def __init__(self, channel: grpc.Channel, token: str | None = None) -> None:
        self._go_on = Event()
        put: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(Call.PUT.path)
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._answer = put.future(self._messages(), timeout=CALL_S, metadata=metadata)

    def _messages(self) -> Iterator[bytes]:
        yield pb.PutPart(start=pb.PutStart()).SerializeToString()
        self._go_on.wait(CALL_S)

    def end(self) -> grpc.StatusCode:
        """Let it end, and return its status."""
        self._go_on.set()
        code = self._answer.code()
        assert isinstance(code, grpc.StatusCode)
        return code


def called(channel: grpc.Channel, call: Call, request: Message | None = None, token: str | None = None) -> bytes:
    """Make a unary call, with an empty request unless there is one, and return the reply's bytes."""
    message = (request or REQUESTS[call]()).SerializeToString()
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
    return ask(message, timeout=CALL_S, metadata=metadata)


def refusal(
    channel: grpc.Channel, call: Call, request: Message | None = None, token: str | None = None
) -> tuple[grpc.StatusCode, str] | None:
    """Make a unary call that is to be refused; return status and message, None if it was answered."""
    try:
        called(channel, call, request, token)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return None


def credentials(authority: Authority, client: Issued | None = None) -> grpc.ChannelCredentials:
    """Trust servers of an authority, and show a client's certificate."""
    if client is None:
        return grpc.ssl_channel_credentials(authority.pem)
    return grpc.ssl_channel_credentials(authority.pem, client.key, client.chain)
