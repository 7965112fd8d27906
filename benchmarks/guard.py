"""Calls of one page to a store: bare, verified, and verified behind the default guard. Ratios are microseconds added.

The guard is measured as the cache's workers call it: on a thread that is watched, where calls run in place. Beside it
stands the same guard on a thread that nobody watches, as a service's requests call it: such a call is handed over to
another thread, and the caller waits.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.host_pages import announced_pages
from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.core.config import GuardConfig
from unified_cache.storage_backends.common.bounded_call import run_here
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Level, Store
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

PAGE_KIB = 64
ADDED_US_MAX = 25.0
"""Most that the guard may add to a call of a worker."""
CALLS_PER_ROUND = 20


def guard_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Get one page, and ask for one, in a directory that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="unified-cache-bench-", dir=plan.storage_dir))
    bare = FileStorage.open(path / "file")
    guard = StorageGuard(bare, bare.capability(), GuardConfig())
    try:
        pages = announced_pages(bare, PAGE_KIB, 1)
        bare.put(pages, Level.CACHED)
        stores: tuple[Store, ...] = (bare, VerifiedStorage(bare), VerifiedStorage(guard))
        labels = [page.label for page in pages]
        yield from _figures("get", [partial(store.get, pages) for store in stores], plan)
        yield from _figures("exists", [partial(store.exists, labels) for store in stores], plan)
    finally:
        guard.close()
        shutil.rmtree(path)


def _figures(name: str, calls: list[Callable[[], object]], plan: BenchmarkPlan) -> Iterator[Figure]:
    """Time the calls of the bare store, the verified and the guarded one in turns, the last on both kinds of thread."""
    guarded = timed(calls[2])

    def watched() -> int:
        return run_here(guarded).result()

    subjects = [timed(calls[0]), timed(calls[1]), watched, guarded]
    bare, verified, in_place, handed_over = (
        Spread.of([ns / 1e3 for ns in taken])
        for taken in interleaved(subjects, plan.effort.file_rounds, calls=CALLS_PER_ROUND)
    )
    note = f"a call of one page of {PAGE_KIB} KiB"
    yield Figure("guard", f"{name}, bare", "us", bare, (), note)
    yield Figure("guard", f"{name}, verified", "us", verified, (_added(verified, "bare", bare),), note)
    comparison = _added(in_place, "verified", verified, ADDED_US_MAX)
    yield Figure("guard", f"{name}, verified and guarded", "us", in_place, (comparison,), note)
    comparison = _added(handed_over, "verified", verified)
    yield Figure("guard", f"{name}, the same, handed over", "us", handed_over, (comparison,), note)


def _added(spread: Spread, against: str, reference: Spread, at_most: float | None = None) -> Comparison:
    return Comparison(against, reference.median, spread.median - reference.median, at_most=at_most)
