"""Pages put into and got from stores of files, against plain files and one preallocated file. Ratios are plain / ours.

All sides move the same bytes from and into the same buffers on the same file system, in batches that take turns, and
sync as often: a durable put syncs each plain file and their directory, and the preallocated file once a batch. What
was written is removed outside of the timed part, so that little of it ever has to reach the disk; of that the packed
store keeps the room for its next put, up to its bound. The preallocated file is what a store that packs pages could at
best be: no names, no allocation, one descriptor.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from benchmarks.host_pages import announced_pages
from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Level, PageIO, Store
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

BATCHES = {64: (1, 64), 1024: (1, 64), 4096: (1, 64), 12288: (1, 8)}
"""Pages of a batch by the KiB of a page's payload."""
RATIO_MIN = 0.9
SMALL_RATIO_MIN = 0.7
"""Smallest accepted ratio of pages below 1 MiB, for which the calls that name a file cost more than its bytes."""
CALLS_OF_ONE_PAGE = 8
"""Timed calls a round of a batch of one."""

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def files_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Put and get pages in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="unified-cache-bench-", dir=plan.storage_dir) as directory:
        for page_kib, counts in BATCHES.items():
            for pages_count in counts:
                bench = _FileBench.build(Path(directory) / f"{page_kib}-{pages_count}", page_kib, pages_count)
                try:
                    yield from bench.figures(plan)
                finally:
                    bench.close()


class _Store(NamedTuple):
    """One of the stores that are measured side by side."""

    prefix: str
    """Beginning of the names of its figures."""
    storage: Store
    verified: VerifiedStorage


class _FileBench:
    """One page size: stores, plain files beside them, and a batch of sealed pages in host memory."""

    def __init__(self, path: Path, page_kib: int, stores: Sequence[_Store], pages: Sequence[PageIO]) -> None:
        self._path = path
        self._page_kib = page_kib
        self._stores = stores
        self._pages = pages
        self._labels = [page.label for page in pages]
        self._buffers = [page.buffers[0] for page in pages]
        self._plain = [path / "plain" / f"{number}" for number in range(len(pages))]
        self._plain_names = [os.fspath(plain) for plain in self._plain]
        self._allocated_fd = os.open(path / "allocated", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._allocated_fd, 0, sum(map(len, self._buffers)))

    @classmethod
    def build(cls, path: Path, page_kib: int, pages_count: int) -> "_FileBench":
        """Make directories, and seal random payloads."""
        (path / "plain").mkdir(parents=True)
        file, packed = FileStorage.open(path / "file"), PackedStorage.open(path / "packed")
        announced_pages(packed, page_kib, 1)  # of the same identity
        pages = announced_pages(file, page_kib, pages_count)
        stores = [_Store("", file, VerifiedStorage(file)), _Store("packed ", packed, VerifiedStorage(packed))]
        return cls(path, page_kib, stores, pages)

    def close(self) -> None:
        """Close the stores and remove what was written."""
        for store in self._stores:
            store.verified.close()
        os.close(self._allocated_fd)
        shutil.rmtree(self._path)

    def figures(self, plan: BenchmarkPlan) -> Iterator[Figure]:
        """Measure puts, then gets of what stays put."""
        effort = plan.effort
        calls = CALLS_OF_ONE_PAGE if len(self._pages) == 1 else 1

        def taken(subjects: Sequence[Subject], rounds: int) -> list[list[int]]:
            return interleaved(subjects, rounds, calls=calls)

        puts = [self._put(store, Level.CACHED) for store in self._stores]
        puts += [self._plain_put(sync=False), timed(partial(self._write_allocated, sync=False))]
        *ours, plain, allocated = taken(puts, effort.file_rounds)
        against = (("create + write + close", plain), ("preallocated", allocated))
        yield from self._figures("put", ours, against)
        puts = [self._put(store, Level.DURABLE) for store in self._stores]
        puts += [self._plain_put(sync=True), timed(partial(self._write_allocated, sync=True))]
        *ours, plain, allocated = taken(puts, effort.durable_rounds)
        against = (("the same and fsync", plain), ("preallocated, fdatasync", allocated))
        yield from self._figures("put, durable", ours, against, has_target=False)
        for store in self._stores:
            store.storage.put(self._pages, Level.CACHED)
        self._write_plain(sync=False)
        gets = [self._get(store.storage) for store in self._stores]
        gets += [timed(partial(self._read_plain, verified=False)), timed(self._read_allocated)]
        gets += [self._get(store.verified) for store in self._stores]
        gets += [timed(partial(self._read_plain, verified=True))]
        times = taken(gets, effort.file_rounds)
        stores_count = len(self._stores)
        plain, allocated = times[stores_count : stores_count + 2]
        against = (("open + read + close", plain), ("preallocated", allocated))
        yield from self._figures("get", times[:stores_count], against)
        verified, summed = times[stores_count + 2 : -1], times[-1]
        yield from self._figures("get, verified", verified, (("the same and xxh3", summed),))

    def _figures(
        self,
        name: str,
        ours: Sequence[Sequence[int]],
        against: Sequence[tuple[str, Sequence[int]]],
        *,
        has_target: bool = True,
    ) -> Iterator[Figure]:
        """Hold what each store took against the same references."""
        for store, taken in zip(self._stores, ours, strict=True):
            yield self._figure(f"{store.prefix}{name}", taken, against, has_target=has_target)

    def _figure(
        self, name: str, ours: Sequence[int], against: Sequence[tuple[str, Sequence[int]]], *, has_target: bool
    ) -> Figure:
        """Compare with references; the first one is what the target is about."""
        pages_count = len(self._pages)
        mine = Spread.of([ns / 1e3 / pages_count for ns in ours])
        ratio_min = RATIO_MIN if self._page_kib >= 1024 else SMALL_RATIO_MIN
        # Of each round by itself: what the system does to one batch it mostly does to the next one too.
        comparisons = tuple(
            Comparison(
                reference,
                median(taken) / 1e3 / pages_count,
                median(theirs / own for theirs, own in zip(taken, ours, strict=True)),
                at_least=ratio_min if has_target and not number else None,
            )
            for number, (reference, taken) in enumerate(against)
        )
        size = f"{self._page_kib >> 10} MiB" if self._page_kib >= 1024 else f"{self._page_kib} KiB"
        note = f"per page, batches of {pages_count}"
        return Figure("files", f"{name}, {pages_count} of {size}", "us", mine, comparisons, note)

    def _put(self, store: _Store, level: Level) -> Subject:
        def subject() -> int:
            start = perf_counter_ns()
            stored = store.storage.put(self._pages, level)
            elapsed = perf_counter_ns() - start
            assert all(stored)
            assert store.storage.remove(self._labels) == len(stored)
            return elapsed

        return subject

    def _plain_put(self, *, sync: bool) -> Subject:
        def subject() -> int:
            start = perf_counter_ns()
            self._write_plain(sync=sync)
            elapsed = perf_counter_ns() - start
            for plain in self._plain:
                plain.unlink()
            return elapsed

        return subject

    def _write_plain(self, *, sync: bool) -> None:
        for name, buffer in zip(self._plain_names, self._buffers, strict=True):
            fd = os.open(name, WRITE_FLAGS, 0o600)
            count = os.write(fd, buffer)
            if sync:
                os.fsync(fd)
            os.close(fd)
            assert count == len(buffer)
        if sync:
            fd = os.open(self._path / "plain", READ_FLAGS)
            os.fsync(fd)
            os.close(fd)

    def _get(self, storage: Store) -> Subject:
        def subject() -> int:
            start = perf_counter_ns()
            hits = storage.get(self._pages)
            elapsed = perf_counter_ns() - start
            assert all(hits)
            return elapsed

        return subject

    def _read_plain(self, *, verified: bool) -> None:
        for name, buffer in zip(self._plain_names, self._buffers, strict=True):
            fd = os.open(name, READ_FLAGS)
            count = os.readv(fd, [buffer])
            os.close(fd)
            assert count == len(buffer)
            if verified:
                xxh3_64_intdigest(buffer)

    def _write_allocated(self, *, sync: bool) -> None:
        offset = 0
        for buffer in self._buffers:
            offset += os.pwrite(self._allocated_fd, buffer, offset)
        if sync:
            os.fdatasync(self._allocated_fd)
        assert offset == sum(map(len, self._buffers))

    def _read_allocated(self) -> None:
        offset = 0
        for buffer in self._buffers:
            offset += os.preadv(self._allocated_fd, [buffer], offset)
        assert offset == sum(map(len, self._buffers))
