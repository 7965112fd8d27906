"""Pages got from and put into a service on this machine, against the same bytes over bare gRPC and bare TCP.

Client and server are two processes on loopback, and both keep freed memory as ``unified-cache serve`` does. The bare
streams carry messages of the same size, made beforehand, and keep them where ours does: in host memory at the other
end. What ours does more: it cuts and joins, checks a checksum on arrival of a put, and looks names up. What TCP does
less than either: no HTTP/2 frames and windows, no Python and no change of thread for each message; that, and not the
socket, bounds gRPC. Ratios are bare / ours, so more is better. The store behind is in memory, which copies each page
once more.


Latency of a get and of a look-up while a service is busy is that at 80 % of the calls that it can sustain. The maximum
comes first: ``WORKERS`` callers, each asking again as soon as it is answered, for long enough to be no burst. Then
calls fall due at even times, whether or not earlier ones have been answered, and whichever caller is free makes the
next one. Each counts from when it was due, so that waiting for a free caller is not forgotten. The two follow each
other at once and are repeated, since a machine has slower seconds. Where calls are answered less often than they fall
due, the maximum was none and the percentiles mean nothing: so both rates are told.
"""

import hashlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles
from time import perf_counter_ns

import grpc
import numpy as np

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from benchmarks.remote_server import BARE_GET, BARE_PUT, TCP_GET, TCP_PUT, ListeningPorts, serve
from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.core.sizes import PART_BYTES
from unified_cache.service.operations.process import keep_freed_memory
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

PAGES_KIB = (256, 1024, 4096)
"""Payloads of a page."""
STREAMS = (1, 4)
RATIO_MIN = 0.85


TOTAL_BYTES = 64 << 20
"""Bytes that one subject moves in its turn, about."""

WORKERS = 4
PAGE_KIB = 256
LOAD_SHARE = 0.8
MAXIMUM_S = 1.5
LOAD_S = 2.0
"""Duration of one round, for each of two kinds of calls."""


def remote_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Start a server, and measure streams."""
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        ports: ListeningPorts = ours.recv()
        for page_kib in PAGES_KIB:
            for streams in STREAMS:
                with ExitStack() as opened:
                    yield from _Streams(ports, page_kib, streams, opened).figures(plan)
        yield from load_figures(f"127.0.0.1:{ports.service}", plan)
    finally:
        server.terminate()
        server.join()


class _Streams:
    """One page size and one number of streams: a share of the pages for each stream."""

    def __init__(self, ports: ListeningPorts, page_kib: int, streams: int, opened: ExitStack) -> None:
        address = f"127.0.0.1:{ports.service}"
        self._moved = MovedPages(address, page_kib, streams, opened)
        self._total_bytes = self._moved.total_bytes // streams // PART_BYTES * PART_BYTES
        self._channels = [
            grpc.insecure_channel(
                address, [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 8 << 20)]
            )
            for _ in range(streams)
        ]
        self._sockets = [socket.create_connection(("127.0.0.1", ports.tcp)) for _ in range(streams)]
        for channel in self._channels:
            opened.callback(channel.close)
        for connection in self._sockets:
            opened.enter_context(connection)
        self._made = [bytes([number]) * PART_BYTES for number in range(self._total_bytes // PART_BYTES)]
        self._landing = [memoryview(bytearray(self._total_bytes)) for _ in range(streams)]

    def figures(self, plan: BenchmarkPlan) -> Iterator[Figure]:
        """Measure puts, then gets of what was put."""
        moved = self._moved
        rounds = plan.effort.file_rounds // 4 + 1
        put, bare, tcp = interleaved([moved.put, moved.each(self._bare_put), moved.each(self._tcp_put)], rounds)
        yield self._figure("put", put, (("bare gRPC", bare), ("bare TCP", tcp)))
        moved.put_all()
        got, verified, bare, tcp = interleaved(
            [
                moved.each(moved.get),
                moved.each(moved.get_verified),
                moved.each(self._bare_get),
                moved.each(self._tcp_get),
            ],
            rounds,
        )
        yield self._figure("get", got, (("bare gRPC", bare), ("bare TCP", tcp)))
        yield self._figure("get, verified", verified, (("bare gRPC", bare),), has_target=False)
        moved.remove_all()

    def _bare_put(self, stream: int) -> None:
        begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channels[stream].stream_unary(BARE_PUT)
        assert int(begin(iter(self._made))) == self._total_bytes

    def _bare_get(self, stream: int) -> None:
        begin: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channels[stream].unary_stream(BARE_GET)
        landing, start = self._landing[stream], 0
        for message in begin(b"%d" % self._total_bytes):
            landing[start : start + len(message)] = message
            start += len(message)
        assert start == self._total_bytes

    def _tcp_put(self, stream: int) -> None:
        connection = self._sockets[stream]
        connection.sendall(TCP_PUT + b"%d\n" % self._total_bytes)
        for message in self._made:
            connection.sendall(message)
        assert connection.recv(1) == b"\n"

    def _tcp_get(self, stream: int) -> None:
        connection = self._sockets[stream]
        connection.sendall(TCP_GET + b"%d\n" % self._total_bytes)
        landing = self._landing[stream]
        while landing:
            landing = landing[connection.recv_into(landing) :]

    def _figure(
        self, name: str, ours: Sequence[int], against: Sequence[tuple[str, Sequence[int]]], *, has_target: bool = True
    ) -> Figure:
        """Compare times for equal bytes; the first reference is what the target is about."""
        total_bytes = self._moved.total_bytes
        bare_bytes = self._total_bytes * self._moved.streams
        comparisons = tuple(
            Comparison(
                reference,
                median(bare_bytes / ns for ns in taken),
                median(theirs / bare_bytes * total_bytes / own for theirs, own in zip(taken, ours, strict=True)),
                at_least=RATIO_MIN if has_target and not number else None,
            )
            for number, (reference, taken) in enumerate(against)
        )
        note = "loopback, a store in memory; HTTP/2 framing in Python bounds it, not the socket"
        rate = self._moved.rate(ours)
        return Figure("remote", f"{name}, {self._moved.name}", "GB/s", rate, comparisons, note)


class MovedPages:
    """Pages of one size, an equal share of them for each stream; a client for each."""

    def __init__(self, address: str, page_kib: int, streams: int, opened: ExitStack) -> None:
        self.streams = streams
        self.name = _name(page_kib, streams)
        count = TOTAL_BYTES // streams // (page_kib << 10)
        spec = PoolSpec("kv", page_kib << 10)
        manifest = manifest_of(Identity(f"bench-{page_kib}"), ModelLayout(64, (Full((spec,)),)))
        self._pool = opened.enter_context(ThreadPoolExecutor(streams))
        self._remotes = [RemoteStorage.open(RemoteOptions((address,), channels=1)) for _ in range(streams)]
        content = np.random.default_rng(7).integers(0, 256, (streams, count, HEADER_BYTES + spec.page_bytes), np.uint8)
        self.pages = [
            [
                sealed(manifest.identity, spec, stream * count + number, memoryview(page))
                for number, page in enumerate(row)
            ]
            for stream, row in enumerate(content)
        ]
        self.total_bytes = content.nbytes
        for remote in self._remotes:
            opened.callback(remote.close)
            remote.register(manifest, {})

    def each(self, call: Callable[[int], None]) -> Subject:
        """Time what all streams do at the same time."""

        def run() -> None:
            for done in [self._pool.submit(call, stream) for stream in range(self.streams)]:
                done.result()

        return timed(run)

    def put(self) -> int:
        """Put all pages; return how long that took. They are removed again."""
        start = perf_counter_ns()
        self.put_all()
        elapsed = perf_counter_ns() - start
        self.remove_all()
        return elapsed

    def put_all(self) -> None:
        """Put all pages."""
        stored = self._pool.map(lambda remote, pages: remote.put(pages, Level.CACHED), self._remotes, self.pages)
        assert all(map(all, stored))

    def remove_all(self) -> None:
        """Remove all pages."""
        for remote, pages in zip(self._remotes, self.pages, strict=True):
            remote.remove([page.label for page in pages])

    def get(self, stream: int) -> None:
        """Get a stream's pages as they come."""
        assert all(self._remotes[stream].get(self.pages[stream]))

    def get_verified(self, stream: int) -> None:
        """Get a stream's pages and verify them."""
        assert all(VerifiedStorage(self._remotes[stream]).get(self.pages[stream]))

    def get_one(self, stream: int) -> None:
        """Get the first page of a stream."""
        assert self._remotes[stream].get(self.pages[stream][:1]) == [Answer.HIT]

    def look_up(self, stream: int) -> None:
        """Ask which pages of a stream there are."""
        assert all(self._remotes[stream].exists([page.label for page in self.pages[stream]]))

    def rate(self, taken_ns: Sequence[int]) -> Spread:
        """Return bytes per nanosecond, of payloads and headers."""
        return Spread.of([self.total_bytes / ns for ns in taken_ns])


def sealed(identity: bytes, spec: PoolSpec, number: int, page: memoryview) -> PageIO:
    """Seal a page as the ``number``-th of a model."""
    label = Label(identity, hashlib.sha256(b"%d" % number).digest(), spec.name)
    seal_buffers((page,), label)
    return PageIO(label, (page,))


def _name(page_kib: int, streams: int) -> str:
    size = f"{page_kib >> 10} MiB" if page_kib >= 1024 else f"{page_kib} KiB"
    return f"{size}, 1 stream" if streams == 1 else f"{size}, {streams} streams"


@dataclass(frozen=True, slots=True)
class _Round:
    """One measurement: the sustained rate, the rates asked for and answered after it, and the time of each call."""

    maximum_per_s: float
    offered_per_s: float
    achieved_per_s: float
    taken_ms: list[float]


def load_figures(address: str, plan: BenchmarkPlan) -> Iterator[Figure]:
    """Measure gets of one page and look-ups of all pages of a stream."""
    rounds_count = plan.effort.durable_rounds // 2 + 1
    with ExitStack() as opened:
        moved = MovedPages(address, PAGE_KIB, WORKERS, opened)
        pool = opened.enter_context(ThreadPoolExecutor(WORKERS))
        moved.put_all()
        for name, call in ((f"get, {PAGE_KIB} KiB", moved.get_one), ("look-up, 64 pages", moved.look_up)):
            rounds = [_round(call, pool) for _ in range(rounds_count)]
            taken_ms = [ms for each in rounds for ms in each.taken_ms]
            maximum = median(each.maximum_per_s for each in rounds)
            offered = median(each.offered_per_s for each in rounds)
            achieved = median(each.achieved_per_s for each in rounds)
            note = (
                f"p50; p99 {quantiles(taken_ms, n=100)[98]:.2f} ms; offered {offered:.0f}/s, "
                f"achieved {achieved:.0f}/s; {maximum:.0f}/s sustained by {WORKERS} callers"
            )
            yield Figure("remote", f"{name}, at 80 % load", "ms", Spread.of(taken_ms), (), note)
        moved.remove_all()


def _round(call: Callable[[int], None], pool: ThreadPoolExecutor) -> _Round:
    maximum_per_s = _sustained_per_s(call, pool)
    offered_per_s = maximum_per_s * LOAD_SHARE
    due_s = [number / offered_per_s for number in range(round(offered_per_s * LOAD_S))]
    ended_s, taken_ms = _asked_when_due(call, pool, due_s)
    return _Round(maximum_per_s, offered_per_s, len(due_s) / ended_s, taken_ms)


def _sustained_per_s(call: Callable[[int], None], pool: ThreadPoolExecutor) -> float:
    """Return how many calls are answered when every caller asks all the time."""
    start_s = time.perf_counter()

    def ask(worker: int) -> int:
        calls_count = 0
        while time.perf_counter() - start_s < MAXIMUM_S:
            call(worker)
            calls_count += 1
        return calls_count

    calls_count = sum(pool.map(ask, range(WORKERS)))
    return calls_count / (time.perf_counter() - start_s)


def _asked_when_due(
    call: Callable[[int], None], pool: ThreadPoolExecutor, due_s: list[float]
) -> tuple[float, list[float]]:
    """Make calls, due at seconds from now; return when all were answered, and by call after how many milliseconds."""
    numbers = count()
    start_s = time.perf_counter()

    def ask(worker: int) -> list[float]:
        taken_ms: list[float] = []
        while (number := next(numbers)) < len(due_s):
            time.sleep(max(0.0, start_s + due_s[number] - time.perf_counter()))
            call(worker)
            taken_ms.append((time.perf_counter() - start_s - due_s[number]) * 1000)
        return taken_ms

    taken_ms = [ms for part in pool.map(ask, range(WORKERS)) for ms in part]
    return time.perf_counter() - start_s, taken_ms
