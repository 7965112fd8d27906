"""Calls of one request to the servers: which pages go in one, how long all of them may take, what a put sends."""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import groupby
from threading import Lock
from typing import NamedTuple

from unified_cache.core.byte_sizes import PART_BYTES
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.parts import parts_of
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.storage_backends.remote.server import STREAM_BYTES_MAX, Server

__all__ = [
    "PAGES_PER_CALL",
    "GatedMessages",
    "RequestTime",
    "ServerBatch",
    "cut",
    "put_messages",
    "sized_runs",
]

PAGES_PER_CALL = 4096
"""Pages named in one request, where the server takes as many: their names fit into a message."""


class RequestTime:
    """Time that all calls of one request may take together, and what is left of it for the next one."""

    __slots__ = ("_clock", "_ends_s", "_timeout_s")

    def __init__(self, clock: Callable[[], float], timeout_s: float, total_s: float) -> None:
        """``timeout_s`` is that of one call, ``total_s`` of all."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._ends_s = clock() + total_s

    def left_s(self) -> float:
        """Return the seconds until the request is over; 0 once it is."""
        return max(0.0, self._ends_s - self._clock())

    def timeout_s(self) -> float:
        """Return how long a call that begins now may take."""
        return min(self._timeout_s, self.left_s())


class ServerBatch(NamedTuple):
    """Pages of one call to one server."""

    server: Server
    numbers: list[int]
    """Positions in what was asked for."""
    time: RequestTime
    """Of the request that it is a part of."""
    is_only: bool = False
    """Whether nothing else is asked for meanwhile, so that the waiting caller may as well make the call."""


class GatedMessages:
    """Messages of one put, made from its pages when they are asked for: by a thread of gRPC's, until it is over.

    gRPC ends a call without waiting for that thread, which may be at a message then. The waiting caller closes these:
    no message is under way after that, none is made any more, and nothing refers to the pages. Thread-safe.
    """

    __slots__ = ("_guard", "_messages")

    def __init__(self, messages: Generator[bytes, None, None]) -> None:
        self._messages = messages
        self._guard = Lock()

    def __iter__(self) -> "GatedMessages":
        return self

    def __next__(self) -> bytes:
        with self._guard:
            return next(self._messages)

    def close(self) -> None:
        """Wait for the message that is being made, about a MiB, and make no other."""
        with self._guard:
            self._messages.close()


def cut(server: Server, numbers: Sequence[int], sizes: Sequence[int], time: RequestTime) -> Iterator[ServerBatch]:
    """Cut the pages of one server into calls."""
    pages_max = min(PAGES_PER_CALL, server.agreed.pages_max if server.agreed is not None else PAGES_PER_CALL)
    some: list[int] = []
    total_bytes = 0
    for number in numbers:
        size = sizes[number] if sizes else 0
        if some and (len(some) == pages_max or total_bytes + size > STREAM_BYTES_MAX):
            yield ServerBatch(server, some, time)
            some, total_bytes = [], 0
        some.append(number)
        total_bytes += size
    yield ServerBatch(server, some, time)


def put_messages(server: Server, pages: Sequence[PageIO], level: Level) -> Generator[bytes, None, None]:
    """Yield the start of a put, then its pages."""
    wanted = pb.DURABLE if level is Level.DURABLE else pb.CACHED
    start = pb.PutStart(tenant=server.tenant, level=wanted, runs=sized_runs(pages))
    yield pb.PutPart(start=start).SerializeToString()
    part_bytes = min(PART_BYTES, server.agreed.part_bytes if server.agreed is not None else PART_BYTES)
    yield from parts_of(((b"", page.buffers) for page in pages), part_bytes)


def sized_runs(pages: Sequence[PageIO]) -> list[pb.PageRun]:
    """Name pages with their lengths and, as far as known, their parents."""
    runs: list[pb.PageRun] = []
    for (identity, pool, object_bytes), run in groupby(pages, _run_of):
        members = list(run)
        parents = [page.parent or b"" for page in members]
        keys = [page.label.key for page in members]
        runs.append(
            pb.PageRun(
                identity=identity,
                pool=pool,
                keys=keys,
                parents=parents if any(parents) else [],
                object_bytes=object_bytes,
            )
        )
    return runs


def _run_of(page: PageIO) -> tuple[bytes, str, int]:
    return page.label.identity, page.label.pool, page_bytes(page)
