"""Pages put into and got from a bucket on this machine, against bare obstore. Ratios are bare / ours in time.

Both sides make as many requests at a time, in threads, to the same service: SeaweedFS's S3 server, which
shares the cores. What ours does more: it copies a page before a put and into its place after a get, and names,
counts and answers for each. A verified get reads every byte once more. Every put is of names that are not there.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from statistics import median

import obstore
import pytest

from benchmarks.host_pages import announced_pages
from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from tests.support.bucket import LocalBucket
from unified_cache.core.page import PageKey
from unified_cache.storage_backends.object.address import REQUESTS
from unified_cache.storage_backends.protocol import Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

SECTION = "bucket"
PAGES_KIB = (64, 256, 1024, 4096)
BATCH_BYTES = 32 << 20
"""Handed over in one put or get, or a page for each request at a time where that is more."""
WANTED_FROM_KIB = 256
GET_RATIO_MIN = 0.85
PUT_RATIO_MIN = 0.8


def bucket_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Put and get pages of each size in a bucket that is gone afterwards."""
    with LocalBucket.running() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        for page_kib in PAGES_KIB:
            with (
                closing(open_storage(bucket.new_url())) as storage,
                ThreadPoolExecutor(REQUESTS) as threads,
            ):
                yield from _BucketBench(storage, bucket, page_kib, threads).figures(plan)


class _BucketBench:
    """One page size: sealed pages in a slab."""

    def __init__(self, storage: Store, bucket: LocalBucket, page_kib: int, threads: ThreadPoolExecutor) -> None:
        self._storage = storage
        self._verified = VerifiedStorage(storage)
        self._bare = bucket.client(f"bare-{page_kib}")
        self._threads = threads
        self._kib = page_kib
        self._pages = announced_pages(storage, page_kib, max(BATCH_BYTES // (page_kib << 10), REQUESTS))
        self._bytes = sum(page.buffers[0].nbytes for page in self._pages)
        self._rounds = count(1)
        self._bare_rounds = count(1)

    def figures(self, plan: BenchmarkPlan) -> Iterator[Figure]:
        """Measure puts, then gets of what was put first."""
        rounds = plan.effort.bucket_rounds
        self._storage.put(self._pages, Level.CACHED)
        self._put_bare(0)
        put, bare = interleaved([timed(self._put), timed(lambda: self._put_bare(next(self._bare_rounds)))], rounds)
        yield self._figure("put", put, bare, PUT_RATIO_MIN)
        gets: list[Subject] = [
            timed(partial(self._get, self._storage)),
            timed(partial(self._get, self._verified)),
            timed(self._get_bare),
        ]
        got, verified, bare = interleaved(gets, rounds)
        yield self._figure("get", got, bare, GET_RATIO_MIN)
        yield self._figure("get, verified", verified, bare, None)

    def _put(self) -> None:
        number = next(self._rounds)
        renamed = [_renamed(page, number) for page in self._pages]
        assert all(self._storage.put(renamed, Level.CACHED))

    def _put_bare(self, number: int) -> None:
        def put(page: PageIO) -> None:
            obstore.put(self._bare, f"{number}/{page.label.page_name}", page.buffers[0], mode="create")

        assert len(list(self._threads.map(put, self._pages))) == len(self._pages)

    def _get(self, storage: Store) -> None:
        assert all(storage.get(self._pages))

    def _get_bare(self) -> None:
        def get(page: PageIO) -> int:
            return len(obstore.get(self._bare, f"0/{page.label.page_name}").bytes())

        assert sum(self._threads.map(get, self._pages)) == self._bytes

    def _figure(self, name: str, ours: Sequence[int], bare: Sequence[int], target: float | None) -> Figure:
        where = f"{self._kib >> 10} MiB" if self._kib >= 1024 else f"{self._kib} KiB"
        comparison = Comparison(
            "bare",
            median(self._bytes * 1e3 / ns for ns in bare),
            median(theirs / own for theirs, own in zip(bare, ours, strict=True)),
            at_least=target if self._kib >= WANTED_FROM_KIB else None,
        )
        rate = Spread.of([self._bytes * 1e3 / ns for ns in ours])
        note = f"{len(self._pages)} pages a call, {REQUESTS} requests at a time, {os.cpu_count()} cores"
        return Figure(SECTION, f"{name}, {where}", "MB/s", rate, (comparison,), note)


def _renamed(page: PageIO, number: int) -> PageIO:
    """Return the same bytes under another key."""
    key = PageKey(number.to_bytes(4, "little") + page.label.key[4:])
    return page._replace(label=page.label._replace(key=key))
