"""Pages got from and put into a service on this machine, against the same bytes over bare gRPC and bare TCP.

Client and server are two processes on loopback, and both keep freed memory as ``unified-cache serve`` does. The bare
streams carry messages of the same size, made beforehand, and keep them where ours does: in host memory at the other
end. What ours does more: it cuts and joins, checks a checksum on arrival of a put, and looks names up. Ratios are
bare / ours, so more is better. The store behind has no room: what is measured is the way to the server's memory.
"""

import hashlib
import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter_ns

import grpc
import numpy as np

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import Plan
from benchmarks.remote_server import BARE_GET, BARE_PUT, TCP_GET, TCP_PUT, Ports, serve
from unified_cache.components import Full, SlidingWindow
from unified_cache.pool import Identity, ModelLayout, PoolSpec
from unified_cache.proto import service_pb2 as pb
from unified_cache.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.service.allocator import keep_freed_memory
from unified_cache.storage_backends._remote_url import RemoteOptions
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.storage_backends.remote import RemoteStorage
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.wire.calls import PART_BYTES, Call

__all__ = ["remote_figures"]

PAGES_KIB = (256, 1024, 4096)
"""Payloads of a page."""
STREAMS = (1, 4)
TOTAL_BYTES = 64 << 20
"""Of one subject's turn, about."""
RATIO_MIN = 0.85
LOOKUP_PAGES = 2048
WINDOW_PAGES = 8
LOOKUP_MS_MAX = 3.0
LOOKUP_CALLS = 5


def remote_figures(plan: Plan) -> Iterator[Figure]:
    """Start a server, and measure streams and look-ups."""
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        ports: Ports = ours.recv()
        for page_kib in PAGES_KIB:
            for streams in STREAMS:
                with ExitStack() as opened:
                    yield from _Streams(ports, page_kib, streams, opened).figures(plan)
        yield from _lookup_figures(ports, plan)
    finally:
        server.terminate()
        server.join()


class _Streams:
    """One page size and one number of streams: a share of the pages for each stream."""

    def __init__(self, ports: Ports, page_kib: int, streams: int, opened: ExitStack) -> None:
        self._page_kib = page_kib
        self._streams = streams
        count = TOTAL_BYTES // streams // (page_kib << 10)
        self._total_bytes = count * (HEADER_BYTES + (page_kib << 10)) // PART_BYTES * PART_BYTES
        spec = PoolSpec("kv", page_kib << 10)
        layout = ModelLayout(64, (Full((spec,)),))
        manifest = manifest_of(Identity(f"bench-{page_kib}"), layout)
        self._pool = opened.enter_context(ThreadPoolExecutor(streams))
        address = f"127.0.0.1:{ports.service}"
        self._remotes = [RemoteStorage.open(RemoteOptions((address,), channels=1)) for _ in range(streams)]
        self._channels = [
            grpc.insecure_channel(
                address, [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 8 << 20)]
            )
            for _ in range(streams)
        ]
        self._sockets = [socket.create_connection(("127.0.0.1", ports.tcp)) for _ in range(streams)]
        for close in [each.close for each in self._remotes] + [each.close for each in self._channels]:
            opened.callback(close)
        for connection in self._sockets:
            opened.enter_context(connection)
        content = np.random.default_rng(7).integers(0, 256, (streams, count, HEADER_BYTES + spec.page_bytes), np.uint8)
        self._pages = [
            [
                _sealed(manifest.identity, spec, stream * count + number, memoryview(page))
                for number, page in enumerate(row)
            ]
            for stream, row in enumerate(content)
        ]
        self._made = [bytes([number]) * PART_BYTES for number in range(self._total_bytes // PART_BYTES)]
        self._landing = [memoryview(bytearray(self._total_bytes)) for _ in range(streams)]
        for remote in self._remotes:
            remote.register(manifest, {})

    def figures(self, plan: Plan) -> Iterator[Figure]:
        """Measure puts, then gets of what was put."""
        rounds = plan.effort.file_rounds // 4 + 1
        put, bare, tcp = interleaved([self._put, self._each(self._bare_put), self._each(self._tcp_put)], rounds)
        yield self._figure("put", put, (("bare gRPC", bare), ("bare TCP", tcp)))
        self._put_all()
        got, verified, bare, tcp = interleaved(
            [
                self._each(lambda stream: self._get(stream, verified=False)),
                self._each(lambda stream: self._get(stream, verified=True)),
                self._each(self._bare_get),
                self._each(self._tcp_get),
            ],
            rounds,
        )
        yield self._figure("get", got, (("bare gRPC", bare), ("bare TCP", tcp)))
        yield self._figure("get, verified", verified, (("bare gRPC", bare),), has_target=False)
        self._remove_all()

    def _each(self, call: Callable[[int], None]) -> Subject:
        def run() -> None:
            for done in [self._pool.submit(call, stream) for stream in range(self._streams)]:
                done.result()

        return timed(run)

    def _put(self) -> int:
        start = perf_counter_ns()
        self._put_all()
        elapsed = perf_counter_ns() - start
        self._remove_all()
        return elapsed

    def _put_all(self) -> None:
        stored = self._pool.map(lambda remote, pages: remote.put(pages, Level.CACHED), self._remotes, self._pages)
        assert all(map(all, stored))

    def _remove_all(self) -> None:
        for remote, pages in zip(self._remotes, self._pages, strict=True):
            remote.remove([page.label for page in pages])

    def _get(self, stream: int, *, verified: bool) -> None:
        storage = VerifiedStorage(self._remotes[stream]) if verified else self._remotes[stream]
        assert all(storage.get(self._pages[stream]))

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
        total_bytes = sum(len(page.buffers[0]) for pages in self._pages for page in pages)
        bare_bytes = self._total_bytes * self._streams
        comparisons = tuple(
            Comparison(
                reference,
                median(bare_bytes / ns for ns in taken),
                median(theirs / bare_bytes * total_bytes / own for theirs, own in zip(taken, ours, strict=True)),
                at_least=RATIO_MIN if has_target and not number else None,
            )
            for number, (reference, taken) in enumerate(against)
        )
        size = f"{self._page_kib >> 10} MiB" if self._page_kib >= 1024 else f"{self._page_kib} KiB"
        streams = "1 stream" if self._streams == 1 else f"{self._streams} streams"
        rate = Spread.of([total_bytes / ns for ns in ours])
        return Figure("remote", f"{name}, {size}, {streams}", "GB/s", rate, comparisons, "loopback, server's memory")


def _sealed(identity: bytes, spec: PoolSpec, number: int, page: memoryview) -> PageIO:
    label = Label(identity, hashlib.sha256(b"%d" % number).digest(), spec.name)
    seal_buffers((page,), label)
    return PageIO(label, None, (page,))


def _lookup_figures(ports: Ports, plan: Plan) -> Iterator[Figure]:
    """Look up a prefix of which Full has every page and the window its last ones."""
    layout = ModelLayout(
        64, (Full((PoolSpec("kv", 64),)), SlidingWindow(WINDOW_PAGES * 64, 64, (PoolSpec("swa", 64),)))
    )
    manifest = manifest_of(Identity("bench-lookup"), layout)
    address = f"127.0.0.1:{ports.service}"
    remote = RemoteStorage.open(RemoteOptions((address,)))
    remote.register(manifest, {})
    kv, swa = layout.pools
    pages = [
        _sealed(manifest.identity, kv, number, memoryview(bytearray(HEADER_BYTES + 64)))
        for number in range(LOOKUP_PAGES)
    ]
    windows = range(LOOKUP_PAGES - WINDOW_PAGES, LOOKUP_PAGES)
    pages += [_sealed(manifest.identity, swa, number, memoryview(bytearray(HEADER_BYTES + 64))) for number in windows]
    assert all(remote.put(pages, Level.CACHED))
    keys = [page.label.key for page in pages[:LOOKUP_PAGES]]
    channel = grpc.insecure_channel(address)
    begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.LOOKUP.path)

    def look_up(lease_s: float | None) -> None:
        request = pb.LookupRequest(identity=manifest.identity, keys=pb.Keys(keys=keys), lease_s=lease_s)
        reply = pb.LookupReply.FromString(begin(request.SerializeToString()))
        assert reply.end_max == LOOKUP_PAGES
        if reply.lease:
            release(pb.ReleaseRequest(lease=reply.lease).SerializeToString())

    release: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.RELEASE.path)
    rounds = plan.effort.match_rounds
    (plain, leased) = interleaved(
        [timed(partial(look_up, None)), timed(partial(look_up, 5.0))], rounds, calls=LOOKUP_CALLS
    )
    for name, taken, at_most in (("lookup", plain, LOOKUP_MS_MAX), ("lookup, lease, release", leased, None)):
        spread = Spread.of([ns / 1e6 for ns in taken])
        held = Comparison("the target", LOOKUP_MS_MAX, spread.median, at_most=at_most)
        yield Figure(
            "remote", f"{name}, {LOOKUP_PAGES} pages, trailing window", "ms", spread, (held,), "client to client"
        )
    channel.close()
    remote.close()
