"""Pages passed to a service on this machine through shared memory, against the same copies and checks in one process.

The same: as many streams, each with a thread and a piece of such memory of its own, mapped before; as much at a time as
a service tells of is written into it, then read out of it. A put is verified from the copy that is
kept, in memory that other pages were in before; a get goes from memory that is not the caller's into the caller's
buffers, and is verified there. Ratios are reference / ours, so more is better.

What ours does more: calls, a thread on either side of each, names looked up. What it may do better is to copy at both
ends at a time: that pays for the calls where one stream leaves a core idle, and cannot where streams keep all busy.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from statistics import median

from benchmarks.measure import Comparison, Figure, interleaved
from benchmarks.plan import BenchmarkPlan
from benchmarks.remote_pages import MovedPages
from unified_cache.seal import verify_buffers
from unified_cache.service.store.pages import blank
from unified_cache.storage_backends.protocol import PageIO
from unified_cache.wire.calls import SHARED_PART_BYTES
from unified_cache.wire.sharing import WINDOW_OFFSET, RegionOffer, SharedRegion

__all__ = ["shared_figures"]

RATIO_MIN = 0.8
WINDOW_BYTES = 16 << 20
"""Part of its memory that one stream goes through again and again."""


def shared_figures(address: str, page_kib: int, streams: int, plan: BenchmarkPlan) -> Iterator[Figure]:
    """Measure puts, then gets of what was put."""
    with ExitStack() as opened:
        yield from _Shared(address, page_kib, streams, opened).figures(plan)


class _Shared:
    """One page size and one number of streams."""

    def __init__(self, address: str, page_kib: int, streams: int, opened: ExitStack) -> None:
        self._moved = MovedPages(address, page_kib, streams, opened)
        self._regions = [_own_region() for _ in range(streams)]
        self._held = [[_copied(page) for page in pages] for pages in self._moved.pages]
        """Pages of each stream as a service would hold them."""

    def figures(self, plan: BenchmarkPlan) -> Iterator[Figure]:
        """Measure."""
        moved = self._moved
        rounds = plan.effort.file_rounds // 4 + 1
        put, alone = interleaved([moved.put, moved.each(self._put)], rounds)
        yield self._figure("shared put", put, alone)
        moved.put_all()
        got, alone, verified, checked = interleaved(
            [
                moved.each(moved.get),
                moved.each(partial(self._get, verified=False)),
                moved.each(moved.get_verified),
                moved.each(partial(self._get, verified=True)),
            ],
            rounds,
        )
        yield self._figure("shared get", got, alone)
        yield self._figure("shared get, verified", verified, checked)
        moved.remove_all()

    def _put(self, stream: int) -> None:
        region, pages = self._regions[stream], self._moved.pages[stream]
        kept: list[memoryview] = []
        for part in _parts(pages):
            for number, at in part:
                region.write(pages[number].buffers, at)
            for number, at in part:
                copy = blank(len(pages[number].buffers[0]))
                region.read_into((copy,), at)
                assert verify_buffers((copy,), pages[number].label) is None
                kept.append(copy)

    def _get(self, stream: int, *, verified: bool) -> None:
        region, pages, held = self._regions[stream], self._moved.pages[stream], self._held[stream]
        for part in _parts(pages):
            for number, at in part:
                region.write((held[number],), at)
            for number, at in part:
                region.read_into(pages[number].buffers, at)
                assert not verified or verify_buffers(pages[number].buffers, pages[number].label) is None

    def _figure(self, name: str, ours: list[int], alone: list[int]) -> Figure:
        total_bytes = self._moved.total_bytes
        ratio = median(theirs / own for theirs, own in zip(alone, ours, strict=True))
        compared = Comparison("one process", median(total_bytes / ns for ns in alone), ratio, at_least=RATIO_MIN)
        where = "same machine, server's memory"
        return Figure("remote", f"{name}, {self._moved.name}", "GB/s", self._moved.rate(ours), (compared,), where)


def _own_region() -> SharedRegion:
    with closing(RegionOffer.make(WINDOW_OFFSET + WINDOW_BYTES)) as offer:
        return offer.region


def _copied(page: PageIO) -> memoryview:
    copy = blank(len(page.buffers[0]))
    copy[:] = page.buffers[0]
    return copy


def _parts(pages: list[PageIO]) -> Iterator[list[tuple[int, int]]]:
    """Yield pages by number, each with its place in the region, as many at a time as make a part."""
    part: list[tuple[int, int]] = []
    start = 0
    for number, page in enumerate(pages):
        page_bytes = len(page.buffers[0])
        if start + page_bytes > WINDOW_BYTES:
            start = 0
        part.append((number, WINDOW_OFFSET + start))
        start += page_bytes
        if len(part) * page_bytes >= SHARED_PART_BYTES:
            yield part
            part = []
    if part:
        yield part
