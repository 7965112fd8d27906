"""Pages got from and put into a service on this machine, against the same bytes over bare gRPC and bare TCP.

Client and server are two processes on loopback, and both keep freed memory as ``unified-cache serve`` does. The bare
streams carry messages of the same size, made beforehand, and keep them where ours does: in host memory at the other
end. What ours does more: it cuts and joins, checks a checksum on arrival of a put, and looks names up. What TCP does
less than either: no HTTP/2 frames and windows, no Python and no change of thread for each message; that, and not the
socket, bounds gRPC. Ratios are bare / ours, so more is better. The store behind is in memory, which copies each page
once more.
"""

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median

import grpc

from benchmarks.measure import Comparison, Figure, interleaved
from benchmarks.plan import BenchmarkPlan
from benchmarks.remote_load import load_figures
from benchmarks.remote_pages import MovedPages
from benchmarks.remote_server import BARE_GET, BARE_PUT, TCP_GET, TCP_PUT, ListeningPorts, serve
from unified_cache.core.byte_sizes import PART_BYTES
from unified_cache.service.operations.process import keep_freed_memory

__all__ = ["remote_figures"]

PAGES_KIB = (256, 1024, 4096)
"""Payloads of a page."""
STREAMS = (1, 4)
RATIO_MIN = 0.85


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
