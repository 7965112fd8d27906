"""Links to clients of this machine: calls that come over them are those of gRPC, through the same gate.

A link speaks for whoever made the call that opened it. That call's token and certificate are presented again with every
call over the link, so what has been revoked since, or is over, is refused as on a connection that is open.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from threading import Lock, Thread
from typing import NamedTuple, Never

import grpc
from google.protobuf.message import DecodeError

from unified_cache.errors import InputError
from unified_cache.proto import service_pb2 as pb
from unified_cache.service.access.callers import AnsweringContext, CallContext
from unified_cache.service.access.errors import Refused
from unified_cache.service.requests.calls import CallMethods
from unified_cache.settings.limits import LimitSettings
from unified_cache.wire.links import LinkSocket
from unified_cache.wire.local_sockets import connected_socket
from unified_cache.wire.sharing import is_local_peer

__all__ = ["CallLinks", "LinkOrigin"]

FRAME_BYTES = 256
"""Around the message in a frame."""

END_S = 1.0
"""Time that calls over links have to notice that these are closed."""

_PRESENTED = frozenset({"authorization"})
"""Metadata of the call that opened a link which count for every call over it."""


class LinkOrigin(NamedTuple):
    """Call that opened a link."""

    tenant: str
    peer: str
    metadata: tuple[tuple[str, str | bytes], ...]
    authenticated: Mapping[str, bytes]


class _Aborted(Exception):  # noqa: N818  # as in gRPC, where a call that is refused ends so
    """End of a call with a status, which its context has."""


class _ClientGone(grpc.RpcError):
    """The other end of a link has gone, or its call was cut off."""


class CallLinks:
    """Links of all tenants, a thread for each. Thread-safe.

    A tenant has at most as many as it leaves to others: one without goes on over gRPC.
    """

    def __init__(
        self, limits: LimitSettings, methods: CallMethods, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._methods = methods
        self._clock = clock
        self._count: Counter[str] = Counter()
        """Links by tenant, those that are being made included."""
        self._open: dict[LinkSocket, Thread] = {}
        self._is_closed = False
        self._guard = Lock()

    @property
    def links_max(self) -> int:
        """Most links of all tenants; 0 where none are made."""
        return self._limits.links_max

    def open(self, tenant: str, context: CallContext, request: pb.LinkRequest) -> None:
        """Connect to the socket that a caller offers and answer calls over it from now on.

        Raises:
            Refused: the caller is not on this machine, not of this user, or has enough links.
        """
        peer = context.peer()
        if not is_local_peer(peer):
            raise _refusal("links are made to callers on this machine alone")
        metadata = tuple((key, value) for key, value in context.invocation_metadata() if key in _PRESENTED)
        origin = LinkOrigin(tenant, peer, metadata, context.auth_context())
        with self._guard:
            if self._is_closed or self._count[tenant] >= self._limits.links_max - self._count.total():
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"a tenant has at most as many links as it leaves free of {self._limits.links_max}",
                )
            self._count[tenant] += 1
        try:
            connection = connected_socket(request.name, request.proof)
        except InputError as error:
            with self._guard:
                self._give_back(tenant)
            raise _refusal(str(error)) from error
        connected = LinkSocket(connection, self._limits.message_bytes_max + FRAME_BYTES)
        thread = Thread(target=self._serve, args=(connected, origin), name="unified-cache-link", daemon=True)
        with self._guard:
            self._open[connected] = thread
            if self._is_closed:
                connected.shut()
            try:
                thread.start()
            except RuntimeError as error:
                self._end(connected, tenant)
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "this server has no thread left") from error

    def count(self, tenant: str) -> int:
        """Return how many links a tenant has."""
        with self._guard:
            return self._count[tenant]

    def close(self) -> None:
        """Take no further call, let answers out that are under way, and end every link a moment later."""
        with self._guard:
            self._is_closed = True
            open_links = dict(self._open)
        for connected in open_links:
            connected.deafen()
        ends_s = time.monotonic() + END_S
        for connected, thread in open_links.items():
            thread.join(max(0.0, ends_s - time.monotonic()))
            connected.shut()

    def _serve(self, connected: LinkSocket, origin: LinkOrigin) -> None:
        """Answer the calls of one link until either end closes it."""
        try:
            self.answer_all(connected, origin)
        finally:
            with self._guard:
                self._end(connected, origin.tenant)

    def answer_all(self, connected: LinkSocket, origin: LinkOrigin) -> None:
        """Answer calls until the other end has gone, or sends what makes no sense: it sees the link end either way."""
        connected.wait_at_most(self._limits.stream_idle_s)
        with suppress(OSError, InputError, DecodeError, grpc.RpcError):
            while (first := _first_request(connected)) is not None:
                self._answer(connected, origin, first)

    def _answer(self, connected: LinkSocket, origin: LinkOrigin, first: pb.LinkedRequest) -> None:
        """Answer one call, and read all of it.

        Raises:
            OSError, grpc.RpcError: the link cannot go on.
        """
        wait_s = first.timeout_s if math.isfinite(first.timeout_s) else 0.0
        context = _LinkedContext(origin, connected, self._clock() + min(wait_s, self._limits.call_s_max), self._clock)
        messages = _messages(connected, first)
        try:
            last = self._answered(connected, first.method, messages, context)
        except _Aborted:
            last = context.last_reply
        for _ in messages:
            pass
        connected.send(last)

    def _answered(
        self, connected: LinkSocket, name: str, messages: Iterator[bytes], context: AnsweringContext
    ) -> pb.LinkedReply:
        """Answer one call but for its last frame, which is returned."""
        single, streamed = self._methods.single.get(name), self._methods.streamed.get(name)
        if single is not None:
            return pb.LinkedReply(message=single(messages, context), is_last=True)
        if streamed is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this server has no method {name[:64]!r}")
        with closing(streamed(messages, context)) as replies:
            for reply in replies:
                connected.send(pb.LinkedReply(message=reply))
        return pb.LinkedReply(is_last=True)

    def _end(self, connected: LinkSocket, tenant: str) -> None:
        connected.shut()
        connected.close()
        del self._open[connected]
        self._give_back(tenant)

    def _give_back(self, tenant: str) -> None:
        self._count[tenant] -= 1
        if not self._count[tenant]:
            del self._count[tenant]


class _LinkedContext:
    """One call over a link, as what answers it sees it: an ``AnsweringContext``."""

    def __init__(self, origin: LinkOrigin, connected: LinkSocket, ends_s: float, clock: Callable[[], float]) -> None:
        self._origin = origin
        self._connected = connected
        self._ends_s = ends_s
        self._clock = clock
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self.last_reply = pb.LinkedReply(is_last=True)
        """Last frame of a call that was aborted."""

    def peer(self) -> str:
        """Say where the caller is, as the call that opened the link did."""
        return self._origin.peer

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return what the caller presented to open the link."""
        return self._origin.metadata

    def auth_context(self) -> Mapping[str, bytes]:
        """Return what the connection proved that the link was opened over."""
        return self._origin.authenticated

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Tell whether the caller is there; nobody watches for its end, so a turn is waited for as long as may be."""
        return self.is_active()

    def is_active(self) -> bool:
        """Tell whether the caller is there and still waits."""
        return self.time_remaining() > 0 and self._connected.is_open

    def time_remaining(self) -> float:
        """Return how long the caller still waits, in seconds."""
        return max(0.0, self._ends_s - self._clock())

    def cancel(self) -> bool:
        """Cut the call off, and with it the link. From any thread."""
        self._connected.shut()
        return True

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Say what goes with the status."""
        self._trailing = trailing_metadata

    def abort(self, code: grpc.StatusCode, details: str) -> Never:
        """End the call with a status.

        Raises:
            _Aborted: always.
        """
        trailing = [pb.TrailingEntry(name=name, value=str(value)) for name, value in self._trailing]
        self.last_reply = pb.LinkedReply(is_last=True, code=code.value[0], details=details, trailing=trailing)
        raise _Aborted


def _first_request(connected: LinkSocket) -> pb.LinkedRequest | None:
    """Wait for the next call, however long; None where the client has gone."""
    while True:
        try:
            frame = connected.receive()
        except TimeoutError:
            continue
        return None if frame is None else pb.LinkedRequest.FromString(frame)


def _messages(connected: LinkSocket, first: pb.LinkedRequest) -> Iterator[bytes]:
    """Yield the messages of a call.

    Raises:
        _ClientGone: there is no next one: the client has gone, is late, sends what is none, or the call was cut off.
            The link has ended.
    """
    request = first
    while True:
        if request.HasField("message"):
            yield request.message
        if request.is_last:
            return
        try:
            frame = connected.receive()
            request = pb.LinkedRequest.FromString(frame or b"")
        except (TimeoutError, InputError, DecodeError) as error:
            connected.shut()
            raise _ClientGone from error
        if frame is None:
            connected.shut()
            raise _ClientGone


def _refusal(text: str) -> Refused:
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, text)
