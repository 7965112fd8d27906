"""A prefetch of many small pages that no cache of the system holds, against the disk itself at a fixed depth.

The reference reads as many pieces as long, at places in disorder, out of one file, directly (``O_DIRECT``) and with
DEPTH threads that wait for one piece each: what a disk gives to whoever keeps that many reads in flight. It is raw
``preadv`` and not ``fio``, which few machines have. Ours is a whole prefetch of a cache, with what that adds: opening,
copying, verifying, grafting. Before each turn its files are dropped from the page cache. Ratios are reference / ours.
"""

import gc
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np
import torch

from benchmarks.measure import Comparison, Figure, Spread, interleaved
from benchmarks.plan import BenchmarkPlan
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full
from unified_cache.controller.memory import DevicePool
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import open_storage

PAGES = 2048
PAGE_BYTES = 64 << 10
PAGE_SIZE = 16
"""Tokens of a page."""
DEPTH = 32
"""Reads that the reference keeps in flight."""
RATIO_MIN = 0.9
SETTLE_S = 120.0
STORES = ("file", "packed")


def depth_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Prefetch from each store in turns with the reference, in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="unified-cache-bench-", dir=plan.storage_dir) as directory:
        reference = DeepReads.prepare(Path(directory) / "raw")
        benches = [_PrefetchBench.prepare(scheme, Path(directory) / scheme) for scheme in STORES]
        try:
            subjects = [bench.timed_prefetch for bench in benches]
            *ours, raw = interleaved([*subjects, reference.timed], plan.effort.depth_rounds)
            for bench, taken in zip(benches, ours, strict=True):
                yield _figure(bench.scheme, taken, raw)
        finally:
            for bench in benches:
                bench.close()
            reference.close()


def _figure(scheme: str, ours: Sequence[int], raw: Sequence[int]) -> Figure:
    total_bytes = PAGES * PAGE_BYTES
    rate = Spread.of([total_bytes * 1e3 / ns for ns in ours])
    ratio = median(theirs / own for theirs, own in zip(raw, ours, strict=True))
    against = Comparison(f"raw preadv, {DEPTH} deep", total_bytes * 1e3 / median(raw), ratio, at_least=RATIO_MIN)
    return Figure("depth", f"prefetch of {PAGES} cold pages of 64 KiB, {scheme}:", "MB/s", rate, (against,))


class DeepReads:
    """Direct reads of pieces of one file, as many at a time as the depth says."""

    def __init__(self, fd: int, landing: mmap) -> None:
        self._fd = fd
        self._landing = landing
        self._threads = ThreadPoolExecutor(DEPTH)
        self._random = random.Random(7)

    @classmethod
    def prepare(cls, path: Path) -> "DeepReads":
        """Write the file, and take memory for all of it."""
        total_bytes = PAGES * PAGE_BYTES
        with path.open("wb") as written:
            for _ in range(total_bytes >> 20):
                written.write(os.urandom(1 << 20))
            os.fsync(written.fileno())
        landing = mmap(-1, total_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        np.frombuffer(landing, np.uint8).fill(1)
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), landing)

    def timed(self) -> int:
        """Read every piece once, in disorder; return the nanoseconds."""
        pieces = self._random.sample(range(PAGES), PAGES)
        began = perf_counter_ns()
        list(self._threads.map(self._read, [pieces[number::DEPTH] for number in range(DEPTH)]))
        return perf_counter_ns() - began

    def close(self) -> None:
        """Let go of threads and file."""
        self._threads.shutdown()
        os.close(self._fd)

    def _read(self, pieces: Sequence[int]) -> None:
        buffers = memoryview(self._landing)
        for number in pieces:
            start = number * PAGE_BYTES
            count = os.preadv(self._fd, [buffers[start : start + PAGE_BYTES]], start)
            assert count == PAGE_BYTES


class _PrefetchBench:
    """A cache over a store that holds a prompt of all pages, and whose host memory is emptied before each turn."""

    def __init__(self, scheme: str, path: Path, cache: UnifiedCache, prompt: Prompt) -> None:
        self.scheme = scheme
        self._path = path
        self._cache = cache
        self._prompt = prompt

    @classmethod
    def prepare(cls, scheme: str, path: Path) -> "_PrefetchBench":
        """Store the prompt, and forget it in memory."""
        spec = PoolSpec("kv", PAGE_BYTES)
        layout = ModelLayout(PAGE_SIZE, (Full((spec,)),))
        pages = torch.from_numpy(np.random.default_rng(7).integers(0, 256, (PAGES + 1, PAGE_BYTES), np.uint8))
        config = CacheConfig((PAGES,), (PAGES,), write=WritePolicy.ON_CALL)
        store: Store = open_storage(f"{scheme}:{path}")
        cache = UnifiedCache.open(
            layout, config, [DevicePool(spec, [pages])], identity=Identity("depth"), storage=store
        )
        prompt = cache.prompt(np.arange(PAGES * PAGE_SIZE, dtype=np.int32), whole=True)
        lock = cache.lock(cache.match(prompt))
        fresh = cache.allocate(cache.pages_to_allocate(0, PAGES, ()))
        assert fresh is not None
        cache.release(cache.insert(prompt, fresh, lock))
        assert cache.backup(prompt)
        cache.wait_all(SETTLE_S)
        return cls(scheme, path, cache, prompt)

    def timed_prefetch(self) -> int:
        """Empty memory, drop the files, and read all of them; return the nanoseconds."""
        self._cache.reset()
        for name in self._path.rglob("*"):
            if name.is_file():
                _drop(name)
        gc.collect()
        began = perf_counter_ns()
        operation = self._cache.prefetch(self._prompt)
        self._cache.wait_all(SETTLE_S)
        elapsed = perf_counter_ns() - began
        assert operation
        assert self._cache.match(self._prompt).host_end == PAGES
        return elapsed

    def close(self) -> None:
        """Close the cache and its store."""
        unfinished = self._cache.close()
        assert not unfinished, unfinished


def _drop(path: Path) -> None:
    """Have the system forget what it has of a file in memory; what is not on the disk yet is written first."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
