"""Strangers who do little for long: calls of headers alone, puts of a byte now and then, connections that are idle."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event

from tests.support.raw_http2 import RawConnection
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call

CALLS_PER_CONNECTION = 100
RENEW_S = 5.0
"""Time after which calls and connections that the server has ended are begun anew; a trickled put gets a byte."""

READ_S = 0.002
HEALTH = "/grpc.health.v1.Health/Check"
PATHS = (Call.HELLO.path, Call.GET.path, Call.PUT.path, Call.EXISTS.path, HEALTH)
MESSAGE_BYTES = 1 << 20
"""Length that a trickled message claims."""


@dataclass(frozen=True, slots=True)
class FloodSize:
    """Numbers of each kind at a time."""

    half_open: int
    """Calls of headers alone: half of them with the token of a tenant."""
    trickled: int
    """Puts to which a byte comes now and then."""
    idle: int
    """Connections without a call."""


@dataclass(slots=True)
class FloodFigures:
    """Counts of what was tried, and of what the server did not let stand."""

    connections_begun: int = 0
    calls_ended: int = 0
    """Calls that the server ended."""


class SlowFlood:
    """A flood that lasts from ``begins_s`` to ``ends_s`` of a monotonic clock, on one thread."""

    def __init__(self, port: int, token: str, size: FloodSize, begins_s: float, ends_s: float) -> None:
        self.figures = FloodFigures()
        self.begins_s = begins_s
        self.ends_s = ends_s
        self._port = port
        self._token = token
        self._size = size

    def run_until_stopped(self, stopped: Event) -> None:
        """Wait for the begin, flood, and close everything at the end."""
        stopped.wait(max(0.0, self.begins_s - time.monotonic()))
        calls: list[RawConnection] = []
        trickles: list[tuple[RawConnection, int]] = []
        idle: list[RawConnection] = []
        while not stopped.is_set() and time.monotonic() < self.ends_s:
            calls = self._kept(calls)
            idle = self._kept(idle)
            trickles = [each for each in trickles if each[1] in each[0].open]
            idle += self._connected(self._size.idle - len(idle))
            self._begin_calls(calls)
            trickles += self._begin_trickles(self._size.trickled - len(trickles))
            for connection, number in trickles:
                connection.send(number, b"\0")
            stopped.wait(min(RENEW_S, max(0.0, self.ends_s - time.monotonic())))
            self._read([*calls, *idle, *(connection for connection, _ in trickles)])
        for connection in {*calls, *idle, *(connection for connection, _ in trickles)}:
            connection.close()

    def _kept(self, connections: Sequence[RawConnection]) -> list[RawConnection]:
        return [connection for connection in connections if not connection.is_closed]

    def _connected(self, count: int) -> list[RawConnection]:
        made: list[RawConnection] = []
        for _ in range(max(0, count)):
            self.figures.connections_begun += 1
            with suppress(OSError):
                made.append(RawConnection(self._port))
        return made

    def _begin_calls(self, connections: list[RawConnection]) -> None:
        """Bring each connection to its number of calls, every second of them with a token."""
        connections += self._connected(self._size.half_open // CALLS_PER_CONNECTION - len(connections))
        for number, connection in enumerate(connections):
            missing_count = CALLS_PER_CONNECTION - len(connection.open)
            token = self._token if number % 2 else ""
            connection.begin(PATHS[number % len(PATHS)], missing_count, token)

    def _begin_trickles(self, count: int) -> list[tuple[RawConnection, int]]:
        begun: list[tuple[RawConnection, int]] = []
        start = pb.PutPart(start=pb.PutStart()).SerializeToString()
        for connection in self._connected(count):
            (number,) = connection.begin(Call.PUT.path, 1, self._token)
            connection.send(number, _prefix(len(start)) + start + _prefix(MESSAGE_BYTES))
            begun.append((connection, number))
        return begun

    def _read(self, connections: Sequence[RawConnection]) -> None:
        for connection in connections:
            before_count = len(connection.open)
            connection.read_for(READ_S)
            self.figures.calls_ended += before_count - len(connection.open)


def _prefix(message_bytes: int) -> bytes:
    """Return what gRPC puts before a message: not compressed, and its length."""
    return b"\0" + message_bytes.to_bytes(4)
