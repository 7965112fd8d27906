"""Pages put into and got from a Mooncake cluster, against the bare calls of its client. Ratios are bare / ours in time.

All sides move the same bytes from and into the same registered slab, in calls of the same size, and take turns. In two
processes a storage node has the pages, and bytes travel over loopback; in one process this process is the storage node,
and bytes are copied once. What was put is removed outside of the timed part. A get is asked for as an engine does: it
has been told before, by exists, where the pages are.
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from time import perf_counter_ns

import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks.host_pages import announced_pages
from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from tests.support.mooncake import LASTING, LocalCluster
from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.mooncake.client import MooncakeClient, batches, object_buffers
from unified_cache.storage_backends.mooncake.native import new_put_config, usable_wheel
from unified_cache.storage_backends.mooncake.store import MooncakeStorage, open_url
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

SECTION = "mooncake"
PAGES_KIB = (256, 1024)
BATCH_BYTES = 32 << 20
"""Handed over in one put or get: what a cache does for a prompt of 32 pages of 1 MiB."""
SEGMENT_BYTES = 160 << 20
"""Twice the pages of both sides, and small enough to be touched whole in the first rounds."""
RATIO_MIN = 0.95
VERIFIED_RATIO_MIN = 0.9

PEER = """
import socket, sys

pages_bytes = int(sys.argv[2])
memory = memoryview(bytearray(pages_bytes))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    while order := peer.recv(1):
        if order == b"g":
            peer.sendall(memory)
            continue
        taken = 0
        while taken < pages_bytes:
            taken += peer.recv_into(memory[taken:])
        peer.sendall(b"k")
"""
"""The other end of a plain connection: sends all pages when told g, takes them when told p."""


def mooncake_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Put and get pages in clusters that are gone afterwards; nothing where Mooncake cannot run."""
    try:
        usable_wheel()
    except ConfigError:
        return
    with LocalCluster.running(1, SEGMENT_BYTES, LASTING) as cluster, closing(_store(cluster.url)) as storage:
        for page_kib in PAGES_KIB:
            with closing(_Bench(storage, page_kib, "two processes")) as bench:
                yield from bench.figures(plan, is_remote=True)
    with (
        LocalCluster.running(0, settings=LASTING) as cluster,
        closing(_store(f"{cluster.url}&segment_bytes={SEGMENT_BYTES}")) as storage,
    ):
        for page_kib in PAGES_KIB:
            with closing(_Bench(storage, page_kib, "one process")) as bench:
                yield from bench.figures(plan, is_remote=False)


def _store(url: str) -> MooncakeStorage:
    return open_url(url.partition(":")[2], None)


class _Bare:
    """The client's own calls over the same buffers, in calls of the same size."""

    def __init__(self, client: MooncakeClient, pages: Sequence[PageIO]) -> None:
        self._client = client
        objects = [object_buffers(number, page) for number, page in enumerate(pages)]
        self._calls = [
            (
                [f"bare/{item.name}" for item in batch],
                [item.pointers[0] for item in batch],
                [item.object_bytes for item in batch],
            )
            for batch in batches(objects)
        ]
        self._config = new_put_config()

    def put(self) -> None:
        for names, pointers, sizes in self._calls:
            assert not any(self._client._store.batch_put_from(names, pointers, sizes, self._config))

    def get(self) -> None:
        for names, pointers, sizes in self._calls:
            assert self._client._store.batch_get_into(names, pointers, sizes) == sizes

    def remove(self) -> None:
        for names, _, _ in self._calls:
            assert not any(self._client._store.batch_remove(names, True))


class _Bench:
    """One page size in one cluster: sealed pages in a slab that is registered."""

    def __init__(self, storage: MooncakeStorage, page_kib: int, where: str) -> None:
        self._storage = storage
        self._verified = VerifiedStorage(storage)
        self._where = f"{page_kib >> 10} MiB" if page_kib >= 1024 else f"{page_kib} KiB"
        self._where += f", {where}"
        self._pages = announced_pages(storage, page_kib, BATCH_BYTES // (page_kib << 10))
        self._labels = [page.label for page in self._pages]
        self._bytes = sum(page.buffers[0].nbytes for page in self._pages)
        self._bare = _Bare(storage._client, self._pages)
        self._copy = np.empty(self._bytes, np.uint8)
        self._source = np.ones(self._bytes, np.uint8)

    def close(self) -> None:
        """Remove what was put."""
        self._storage.remove(self._labels)
        self._bare.remove()

    def figures(self, plan: BenchmarkPlan, *, is_remote: bool) -> Iterator[Figure]:
        """Measure puts, then gets of what stays put."""
        rounds = plan.effort.mooncake_rounds
        target, verified_target = (RATIO_MIN, VERIFIED_RATIO_MIN) if is_remote else (RATIO_MIN, None)
        with _Peer([page.buffers[0] for page in self._pages]) as peer:
            puts = [
                self._then_removed(lambda: self._storage.put(self._pages, Level.CACHED), self._remove),
                self._then_removed(self._bare.put, self._bare.remove),
                timed(peer.put),
                timed(self._memcpy),
            ]
            put, bare, tcp, plain = interleaved(puts, rounds)
            yield self._figure("put", put, (("bare", bare), ("TCP", tcp), ("memcpy", plain)), target)
            self._storage.put(self._pages, Level.CACHED)
            self._bare.put()
            gets = [
                self._get(self._storage),
                self._get(self._verified),
                timed(self._bare.get),
                timed(peer.get),
                timed(self._memcpy),
                timed(partial(self._memcpy, checked=True)),
            ]
            got, verified, bare, tcp, plain, summed = interleaved(gets, rounds)
        yield self._figure("get", got, (("bare", bare), ("TCP", tcp), ("memcpy", plain)), target)
        against = (("bare", bare), ("memcpy + xxh3", summed))
        yield self._figure("get, verified", verified, against, verified_target)

    def _figure(
        self, name: str, ours: Sequence[int], against: Sequence[tuple[str, Sequence[int]]], target: float | None
    ) -> Figure:
        """Compare with references; the first one is what the target is about."""
        comparisons = tuple(
            Comparison(
                reference,
                median(self._bytes / ns for ns in taken),
                median(theirs / own for theirs, own in zip(taken, ours, strict=True)),
                at_least=None if number else target,
            )
            for number, (reference, taken) in enumerate(against)
        )
        rate = Spread.of([self._bytes / ns for ns in ours])
        note = f"{len(self._pages)} pages a call"
        return Figure(SECTION, f"{name}, {self._where}", "GB/s", rate, comparisons, note)

    def _then_removed(self, put: Callable[[], object], remove: Callable[[], None]) -> Subject:
        def subject() -> int:
            start = perf_counter_ns()
            put()
            elapsed = perf_counter_ns() - start
            remove()
            return elapsed

        return subject

    def _remove(self) -> None:
        assert self._storage.remove(self._labels) == len(self._labels)

    def _get(self, storage: MooncakeStorage | VerifiedStorage) -> Subject:
        def subject() -> int:
            assert all(self._storage.exists(self._labels))
            start = perf_counter_ns()
            hits = storage.get(self._pages)
            elapsed = perf_counter_ns() - start
            assert all(hits)
            return elapsed

        return subject

    def _memcpy(self, *, checked: bool = False) -> None:
        start = 0
        for page in self._pages:
            (buffer,) = page.buffers
            end = start + buffer.nbytes
            np.copyto(self._copy[start:end], self._source[start:end])
            if checked:
                xxh3_64_intdigest(self._copy[start:end].data)
            start = end


class _Peer:
    """A plain connection to another process."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._undo = ExitStack()

    def __enter__(self) -> "_Peer":
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-c", PEER, str(server.getsockname()[1]), str(sum(map(len, self._buffers)))]
            self._undo.enter_context(subprocess.Popen(command))
            self._socket, _ = server.accept()
        self._undo.enter_context(self._socket)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def put(self) -> None:
        """Send every page, and wait until all have been taken."""
        self._socket.sendall(b"p")
        for buffer in self._buffers:
            self._socket.sendall(buffer)
        assert self._socket.recv(1) == b"k"

    def get(self) -> None:
        """Receive as many bytes into the pages' places; they are put back from ``_Bench``'s store by the next get."""
        self._socket.sendall(b"g")
        for buffer in self._buffers:
            taken = 0
            while taken < len(buffer):
                taken += self._socket.recv_into(buffer[taken:])
