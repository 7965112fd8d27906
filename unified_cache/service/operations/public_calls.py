"""Calls that need no credentials, bounded: everybody may make them, and each takes a thread."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from unified_cache.service.access.callers import Refused
from unified_cache.service.access.timeouts import CallTimeouts, TimedCall

__all__ = ["PublicCalls", "parsed_request"]

Parsed = TypeVar("Parsed", bound=Message)


class PublicCalls:
    """Places for public calls of one kind. Thread-safe.

    Where all are taken, a call that is still half open gives its place up: the oldest of the host, and there of the
    connection, that has most of them. So who sends headers alone cannot shut out who also sends a message. Where each
    call has sent one, the new call is refused.
    """

    def __init__(self, calls_max: int, timeouts: CallTimeouts) -> None:
        self._calls_max = calls_max
        self._timeouts = timeouts
        self._open: dict[TimedCall, None] = {}
        """Those with a place, the oldest first."""
        self._guard = Lock()

    @contextmanager
    def admitted(self, context: grpc.ServicerContext) -> Iterator[TimedCall]:
        """Give a call a place for the length of the with block; ends the call where there is none."""
        call = TimedCall(context, self._timeouts)
        with self._timeouts.over(call):
            if not self._enter(call):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls of this kind")
            try:
                yield call
            except Refused as error:
                context.abort(error.code, error.message)
            finally:
                with self._guard:
                    self._open.pop(call, None)

    def _enter(self, call: TimedCall) -> bool:
        with self._guard:
            self._open[call] = None
            if len(self._open) <= self._calls_max:
                return True
            silent = self._least_missed(call)
            del self._open[silent or call]
        if silent is not None:
            silent.cut("another call needed its place")
        return silent is not None

    def _least_missed(self, entering: TimedCall) -> TimedCall | None:
        """Return the call that is to make room; None if all but the entering one have sent a message."""
        connections = Counter(call.peer for call in self._open)
        hosts = Counter(_host(call.peer) for call in self._open)
        half_open = [call for call in self._open if call.is_half_open and call is not entering]
        return max(half_open, key=lambda call: (hosts[_host(call.peer)], connections[call.peer]), default=None)


def parsed_request(kind: type[Parsed], message: bytes) -> Parsed:
    """Read the message of a public call.

    gRPC does not: a stream whose message its deserializer cannot read stays open in the server for ever.

    Raises:
        Refused: it is no such message.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"expected a {kind.DESCRIPTOR.name}") from error


def _host(peer: str) -> str:
    """Return where a connection comes from, without its port."""
    return peer.rpartition(":")[0]
