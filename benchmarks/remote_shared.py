"""Pages passed to a service on this machine through shared memory, against the same copies and checks in one process.

The same: each page is written into a file in /dev/shm and read out of it; a put is verified from the copy that is
kept, in memory that is new for each page, and a get from the copy in the caller's buffers. Ratios are reference / ours,
so more is better. With two processes the copies of the two ends overlap, which pays for the calls between them.
"""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

from benchmarks.measure import Comparison, Figure, interleaved
from benchmarks.plan import Plan
from benchmarks.remote_pages import MovedPages
from unified_cache.seal import verify_buffers
from unified_cache.service.pages import blank
from unified_cache.storage_backends.protocol import PageIO
from unified_cache.wire.sharing import NAME_PREFIX, PROOF_BYTES, SHARED_DIRECTORY, Region

__all__ = ["shared_figures"]

RATIO_MIN = 0.8
WINDOW_BYTES = 16 << 20
"""Of the file, what one stream goes through again and again."""


def shared_figures(address: str, page_kib: int, streams: int, plan: Plan) -> Iterator[Figure]:
    """Measure puts, then gets of what was put."""
    with ExitStack() as opened:
        yield from _Shared(address, page_kib, streams, opened).figures(plan)


class _Shared:
    """One page size and one number of streams."""

    def __init__(self, address: str, page_kib: int, streams: int, opened: ExitStack) -> None:
        self._moved = MovedPages(address, page_kib, streams, opened)
        name = NAME_PREFIX + secrets.token_hex(16)
        self._region = Region.create(SHARED_DIRECTORY, name, streams * WINDOW_BYTES, bytes(PROOF_BYTES))
        (SHARED_DIRECTORY / name).unlink()

    def figures(self, plan: Plan) -> Iterator[Figure]:
        """Measure."""
        moved = self._moved
        rounds = plan.effort.file_rounds // 4 + 1
        put, alone = interleaved([moved.put, moved.each(self._put)], rounds)
        yield self._figure("shared put", put, alone)
        moved.put_all()
        got, alone, verified, checked = interleaved(
            [
                moved.each(moved.get),
                moved.each(lambda stream: self._get(stream, verified=False)),
                moved.each(moved.get_verified),
                moved.each(lambda stream: self._get(stream, verified=True)),
            ],
            rounds,
        )
        yield self._figure("shared get", got, alone)
        yield self._figure("shared get, verified", verified, checked)
        moved.remove_all()

    def _put(self, stream: int) -> None:
        kept: list[memoryview] = []
        for page, start in self._places(stream):
            self._region.write(page.buffers, start)
            copy = blank(len(page.buffers[0]))
            self._region.read_into((copy,), start)
            assert verify_buffers((copy,), page.label) is None
            kept.append(copy)

    def _get(self, stream: int, *, verified: bool) -> None:
        for page, start in self._places(stream):
            self._region.write(page.buffers, start)
            self._region.read_into(page.buffers, start)
            assert not verified or verify_buffers(page.buffers, page.label) is None

    def _places(self, stream: int) -> Iterator[tuple[PageIO, int]]:
        start = 0
        for page in self._moved.pages[stream]:
            page_bytes = len(page.buffers[0])
            start = start if start + page_bytes <= WINDOW_BYTES else 0
            yield page, stream * WINDOW_BYTES + start
            start += page_bytes

    def _figure(self, name: str, ours: list[int], alone: list[int]) -> Figure:
        total_bytes = self._moved.total_bytes
        ratio = median(theirs / own for theirs, own in zip(alone, ours, strict=True))
        compared = Comparison("one process", median(total_bytes / ns for ns in alone), ratio, at_least=RATIO_MIN)
        where = "same machine, server's memory"
        return Figure("remote", f"{name}, {self._moved.name}", "GB/s", self._moved.rate(ours), (compared,), where)
