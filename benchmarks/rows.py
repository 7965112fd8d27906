"""Pages that lie in an engine's rows, behind a header in a buffer of its own. Ratios are reference / ours.

Each is put, got, and got and verified, against plain files read into the same buffers, and against the same store with
the page in one buffer; and read from memory by who asks, verified, as under an engine. All subjects take turns.
"""

import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from xxhash import xxh3_64

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Level, PageIO, Store
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

PAYLOADS_KIB = (7, 64, 256, 2048, 12288)
ROWS = 8
"""Rows of a page: one of each layer, say."""
BATCH_PAGES = 8

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def rows_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Put and get pages in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="unified-cache-bench-", dir=plan.storage_dir) as directory:
        for payload_kib in PAYLOADS_KIB:
            path = Path(directory) / f"{payload_kib}"
            path.mkdir()
            for prefix, storage in (
                ("", FileStorage.open(path / "file")),
                ("packed ", PackedStorage.open(path / "pack")),
            ):
                bench = _RowsBench(path, prefix, storage, payload_kib)
                try:
                    yield from bench.figures(plan.effort.file_rounds)
                finally:
                    storage.close()


class _RowsBench:
    """One store and one page size, with the same pages in rows and in one buffer each."""

    def __init__(self, path: Path, prefix: str, storage: FileStorage | PackedStorage, payload_kib: int) -> None:
        spec = PoolSpec("kv", payload_kib << 10)
        layout, identity = ModelLayout(64, (Full((spec,)),)), Identity("bench")
        storage.register(manifest_of(identity, layout), {})
        keys = [hashlib.sha256(b"%d" % number).digest() for number in range(BATCH_PAGES)]
        labels = [Label(identity.digest(layout), key, spec.name) for key in keys]
        self._prefix = prefix
        self._storage = storage
        self._verified = VerifiedStorage(storage)
        self._payload_kib = payload_kib
        self._labels = labels
        self._rows = [_page_of(label, payload_kib << 10, ROWS) for label in labels]
        self._joined = [_page_of(label, payload_kib << 10, 0) for label in labels]
        self._names = [os.fspath(path / f"plain-{prefix}{number}") for number in range(BATCH_PAGES)]

    def figures(self, rounds: int) -> Iterator[Figure]:
        """Measure puts, then gets of what stays put."""
        puts = [self._put(self._rows), self._put(self._joined), self._plain_put]
        yield self._figure("put", interleaved(puts, rounds), "create + writev + close")
        self._storage.put(self._rows, Level.CACHED)
        self._write_plain()
        for name, storage, reference in (
            ("get", self._storage, "open + readv + close"),
            ("get, verified", self._verified, "the same and xxh3"),
        ):
            gets = [timed(partial(self._get, storage, pages)) for pages in (self._rows, self._joined)]
            gets.append(timed(partial(self._read_plain, verified=storage is self._verified)))
            yield self._figure(name, interleaved(gets, rounds), reference)
        at_once = [timed(self._read_memory), timed(partial(self._get, self._verified, self._rows))]
        at_once.append(timed(partial(self._read_plain, verified=True)))
        yield self._figure("from memory, verified", interleaved(at_once, rounds), "the same and xxh3", "get, verified")

    def _figure(
        self, name: str, times: Sequence[Sequence[int]], reference: str, other: str = "in one buffer"
    ) -> Figure:
        ours, joined, plain = times
        comparisons = tuple(
            Comparison(
                against,
                median(theirs) / 1e3 / BATCH_PAGES,
                median(their / own for their, own in zip(theirs, ours, strict=True)),
            )
            for against, theirs in ((reference, plain), (other, joined))
        )
        size = f"{self._payload_kib} KiB" if self._payload_kib < 1024 else f"{self._payload_kib >> 10} MiB"
        title = f"{self._prefix}{name}, header and {ROWS} rows, {BATCH_PAGES} of {size}"
        spread = Spread.of([ns / 1e3 / BATCH_PAGES for ns in ours])
        return Figure("rows", title, "us", spread, comparisons, f"per page, batches of {BATCH_PAGES}")

    def _put(self, pages: Sequence[PageIO]) -> Subject:
        put = timed(partial(self._storage.put, pages, Level.CACHED))

        def subject() -> int:
            elapsed = put()
            assert self._storage.remove(self._labels) == len(pages)
            return elapsed

        return subject

    def _get(self, storage: Store, pages: Sequence[PageIO]) -> None:
        assert all(storage.get(pages))

    def _read_memory(self) -> None:
        if not all(self._storage.read_memory(self._rows)):
            self._get(self._storage, self._rows)  # times of use were due

    def _plain_put(self) -> int:
        elapsed = timed(self._write_plain)()
        for name in self._names:
            Path(name).unlink()
        return elapsed

    def _write_plain(self) -> None:
        for name, page in zip(self._names, self._rows, strict=True):
            fd = os.open(name, WRITE_FLAGS, 0o600)
            os.writev(fd, page.buffers)
            os.close(fd)

    def _read_plain(self, *, verified: bool) -> None:
        for name, page in zip(self._names, self._rows, strict=True):
            fd = os.open(name, READ_FLAGS)
            os.readv(fd, page.buffers)
            os.close(fd)
            if verified:
                checksum = xxh3_64()
                for buffer in page.buffers[1:]:
                    checksum.update(buffer)
                checksum.intdigest()


def _page_of(label: Label, payload_bytes: int, rows_count: int) -> PageIO:
    """Seal a random payload in page-aligned memory: rows behind a header of its own, or one buffer without rows."""
    payload = memoryview(mmap.mmap(-1, HEADER_BYTES + payload_bytes))
    if rows_count:
        row_bytes = payload_bytes // rows_count
        rows = [payload[start : start + row_bytes] for start in range(0, rows_count * row_bytes, row_bytes)]
        buffers = (memoryview(bytearray(HEADER_BYTES)), *rows)
    else:
        buffers = (payload,)
    random = np.random.default_rng(7).bytes(HEADER_BYTES + payload_bytes)
    start = 0
    for buffer in buffers:
        buffer[:] = random[start : start + len(buffer)]
        start += len(buffer)
    seal_buffers(buffers, label)
    return PageIO(label, buffers)
