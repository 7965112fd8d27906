"""Calls of one page to a store: bare, verified, and verified behind the default guard. Ratios are microseconds added.

The guard is measured as the cache's workers call it: on a thread that is watched, where calls run in place. Beside it
stands the same guard on a thread that nobody watches, as a service's requests call it: such a call is handed over to
another thread, and the caller waits.

And what an engine's store adds to one that does nothing: by call, and by page of a call of many.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

from benchmarks.host_pages import announced_pages
from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.components import Full
from unified_cache.core.config import GuardConfig
from unified_cache.core.page import PageKey
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.storage_backends.common.bounded_call import run_here
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, Store
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

PAGE_KIB = 64
ADDED_US_MAX = 25.0
"""Most that the guard may add to a call of a worker."""
CALLS_PER_ROUND = 20

IDLE_BYTES = 256
IDLE_PAGES = 256
CALL_US_MAX, PAGE_US_MAX = 40.0, 2.0
"""Most that an engine's store may add."""


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
    yield from _engine_figures(plan)


class IdleStore(Store):
    """A store that does next to nothing: it copies one sealed page for each that is got, and keeps none."""

    def __init__(self, sealed: Mapping[PageKey, bytes]) -> None:
        self._sealed = sealed
        self.answer = Answer.HIT

    def capability(self) -> Capability:
        return Capability("idle", durable=False, bytes_max=None, call_s_max=1.0)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return [self.answer] * len(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        for page in pages:
            page.buffers[0][:] = self._sealed[page.label.key]
        return [Answer.HIT] * len(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        return [Answer.STORED] * len(pages)

    def remove(self, labels: Sequence[Label]) -> int:
        return 0

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return Scan([], "")

    def clear(self, identity: bytes) -> int:
        return 0


def _engine_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Time an engine's store over an idle one, with one page a call and with many."""
    layout, identity = ModelLayout(16, (Full((PoolSpec("kv", IDLE_BYTES),)),)), Identity("idle")
    digest = identity.digest(layout)
    labels = [Label(digest, sha256(b"%d" % number).digest(), "kv") for number in range(IDLE_PAGES)]
    pages = [EnginePage(label, (memoryview(bytearray(IDLE_BYTES)),)) for label in labels]
    sealed: dict[PageKey, bytes] = {}
    for label in labels:
        page = memoryview(bytearray(HEADER_BYTES + IDLE_BYTES))
        seal_buffers((page,), label)
        sealed[label.key] = bytes(page)
    idle = IdleStore(sealed)
    with EngineStore.opened_by(lambda: idle) as store:
        store.register(identity, layout)
        calls: dict[str, Callable[[int], list[Answer]]] = {
            "exists": lambda count: store.exists(labels[:count]),
            "get": lambda count: store.get(pages[:count]),
            "put": lambda count: store.put(pages[:count]),
        }
        for name, call in calls.items():
            idle.answer = Answer.MISS if name == "put" else Answer.HIT
            assert all(call(IDLE_PAGES)), store.counts()
            subjects = [timed(partial(call, 1)), timed(partial(call, IDLE_PAGES))]
            one, many = interleaved(subjects, plan.effort.file_rounds, calls=CALLS_PER_ROUND)
            by_page = [(most - least) / (IDLE_PAGES - 1) / 1e3 for least, most in zip(one, many, strict=True)]
            note = f"over a store that does nothing, pages of {IDLE_BYTES} bytes"
            for part, taken_us, at_most in (
                ("a call of one page", [ns / 1e3 for ns in one], CALL_US_MAX),
                ("a further page", by_page, PAGE_US_MAX),
            ):
                spread = Spread.of(taken_us)
                against = (Comparison("nothing", 0.0, spread.median, at_most=at_most),)
                yield Figure("guard", f"an engine's {name}, {part}", "us", spread, against, note)


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
