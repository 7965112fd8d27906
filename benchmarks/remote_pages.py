"""Sealed pages that several streams move to and from a service; shared by the benchmarks of the service."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter_ns

import numpy as np

from benchmarks.measure import Spread, Subject, timed
from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.verified import VerifiedStorage

__all__ = ["MovedPages", "sealed"]

TOTAL_BYTES = 64 << 20
"""Bytes that one subject moves in its turn, about."""


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
