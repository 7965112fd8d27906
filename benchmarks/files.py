"""Pages put into and got from a file store, against one plain file per page. Ratios are plain / ours, round by round.

Both sides move the same bytes from and into the same buffers on the same file system, in batches that take turns.
What was written is unlinked outside of the timed part, so that little of it ever has to reach the disk. The plain
files lie in one directory; the store's in its own, which the first round has made.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np
import torch

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import Plan
from unified_cache.components.full import Full
from unified_cache.memory import DevicePool, TieredMemory
from unified_cache.pool import Identity, ModelLayout, PoolSpec
from unified_cache.seal import Label
from unified_cache.storage_backends.file import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.storage_backends.verified import VerifiedStorage

__all__ = ["files_figures"]

PAGES = ((64, 128), (1024, 32), (4096, 8))
"""KiB of a page's payload, and pages in a batch: 8 to 32 MiB."""
TARGET_KIB_MIN = 1024
"""Smaller pages are shown without a target."""
RATIO_MIN = 0.9

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def files_figures(plan: Plan) -> Iterator[Figure]:
    """Put and get pages in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="unified-cache-bench-", dir=plan.storage_dir) as directory:
        for page_kib, pages_count in PAGES:
            bench = _FileBench.build(Path(directory) / str(page_kib), page_kib, pages_count)
            try:
                yield from bench.figures(plan)
            finally:
                bench.close()


class _FileBench:
    """One page size: a store, plain files beside it, and a batch of sealed pages in host memory."""

    def __init__(self, path: Path, page_kib: int, storage: FileStorage, pages: Sequence[PageIO]) -> None:
        self._path = path
        self._page_kib = page_kib
        self._storage = storage
        self._verified = VerifiedStorage(storage)
        self._pages = pages
        self._labels = [page.label for page in pages]
        self._buffers = [page.buffers[0] for page in pages]
        self._plain = [path / "plain" / f"{number}" for number in range(len(pages))]
        self._plain_names = [os.fspath(plain) for plain in self._plain]

    @classmethod
    def build(cls, path: Path, page_kib: int, pages_count: int) -> "_FileBench":
        """Make directories, and seal random payloads."""
        (path / "plain").mkdir(parents=True)
        spec = PoolSpec("kv", page_kib << 10)
        layout = ModelLayout(64, (Full((spec,)),))
        identity = Identity("bench")
        layer = torch.from_numpy(np.random.default_rng(7).integers(0, 256, (pages_count + 1, page_kib << 10), np.uint8))
        memory = TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: pages_count})
        slots = np.arange(1, pages_count + 1, dtype=np.int32)
        digest = identity.digest(layout)
        labels = [Label(digest, hashlib.sha256(b"%d" % slot).digest(), spec.name) for slot in slots.tolist()]
        memory.backup(spec, slots, slots)
        memory.seal(spec, slots, labels)
        storage = FileStorage.open(path / "store")
        storage.register(manifest_of(identity, layout), memory.slabs())
        pages = [
            PageIO(label, None, memory.buffers(spec, slot)) for label, slot in zip(labels, slots.tolist(), strict=True)
        ]
        return cls(path, page_kib, storage, pages)

    def close(self) -> None:
        """Close the store and remove what was written."""
        self._verified.close()
        shutil.rmtree(self._path)

    def figures(self, plan: Plan) -> Iterator[Figure]:
        """Measure puts, then gets of what stays put."""
        rounds = plan.effort.file_rounds
        raw_put, put = interleaved([self._plain_put(sync=False), self._put(Level.CACHED)], rounds)
        yield self._figure("put", put, raw_put, "create + write + close")
        raw_durable, durable = interleaved(
            [self._plain_put(sync=True), self._put(Level.DURABLE)], plan.effort.durable_rounds
        )
        yield self._figure("put, durable", durable, raw_durable, "the same and fsync", has_target=False)
        self._storage.put(self._pages, Level.CACHED)
        self._write_plain(sync=False)
        gets = [timed(self._read_plain), self._get(self._storage), self._get(self._verified)]
        raw_get, got, verified = interleaved(gets, rounds)
        yield self._figure("get", got, raw_get, "open + read + close")
        yield self._figure("get, verified", verified, raw_get, "open + read + close", has_target=False)

    def _figure(
        self, name: str, ours: Sequence[int], plain: Sequence[int], against: str, *, has_target: bool = True
    ) -> Figure:
        pages_count = len(self._pages)
        mine, raw = (Spread.of([ns / 1e3 / pages_count for ns in taken]) for taken in (ours, plain))
        at_least = RATIO_MIN if has_target and self._page_kib >= TARGET_KIB_MIN else None
        # Of each round by itself: what the system does to one batch it mostly does to the next one too.
        ratio = median(theirs / own for theirs, own in zip(plain, ours, strict=True))
        comparison = Comparison(against, raw.median, ratio, at_least=at_least)
        size = f"{self._page_kib >> 10} MiB" if self._page_kib >= 1024 else f"{self._page_kib} KiB"
        note = f"per page, batches of {pages_count}"
        return Figure("files", f"{name}, pages of {size}", "us", mine, (comparison,), note)

    def _put(self, level: Level) -> Subject:
        def subject() -> int:
            start = perf_counter_ns()
            stored = self._storage.put(self._pages, level)
            elapsed = perf_counter_ns() - start
            assert all(stored)
            assert self._storage.remove(self._labels) == len(stored)
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

    def _get(self, storage: FileStorage | VerifiedStorage) -> Subject:
        def subject() -> int:
            start = perf_counter_ns()
            hits = storage.get(self._pages)
            elapsed = perf_counter_ns() - start
            assert all(hits)
            return elapsed

        return subject

    def _read_plain(self) -> None:
        for name, buffer in zip(self._plain_names, self._buffers, strict=True):
            fd = os.open(name, READ_FLAGS)
            count = os.readv(fd, [buffer])
            os.close(fd)
            assert count == len(buffer)
