"""Distances in the LRU stack of full attention: for every page asked for, the pages of memory that would have held it.

Least recently used first, leaves before what they stand on, is a stack algorithm: of the pages in the order in which
they would be evicted, a tier of ``n`` pages holds the last ``n``, whatever ``n`` is. A request brings its whole path to
the top, its first page topmost. So what an earlier request touched and no later one has is always the end of its path:

    path of request 3        |--- touched again by 7 ---|--- by 5 ---|--- left to 3 ---|
    position in the stack     below nothing               below 7      below 7, 5, 4 ...

The stack is therefore a list of requests, each with a number of pages, and one Fenwick tree over requests answers how
many pages lie above. R. L. Mattson et al., IBM Systems Journal 9 (1970).
"""

from dataclasses import dataclass

import numpy as np

from unified_cache.sizing.plan.trace_pages import Counts, TracePages


@dataclass(frozen=True, slots=True)
class LruStack:
    """Runs of pages asked for again, and where in the stack they lay; rising with the pages of a prompt."""

    requests_count: int
    request: Counts
    """Request that asks for the run, shape (runs,), rising."""
    asked_before: Counts
    """Request that asked for the run last."""
    start: Counts
    """First page of the run in its prompt."""
    length: Counts
    """Pages of the run."""
    position: Counts
    """Pages more recent than the first page of the run; each page after it lies one lower."""
    left: Counts
    """Pages that the request which asked for the run last has on the stack, from the first page of the run on."""

    @classmethod
    def of(cls, trace: TracePages) -> "LruStack":
        """Find every run's position. O(runs log requests)."""
        pages = trace.pages_counts
        request, before, start, length = _runs_asked_before(trace)
        position = _positions(request, before, length, pages)
        return cls(trace.requests_count, request, before, start, length, position, left=pages[before] - start)

    def hit_pages(self, memory_pages: int) -> int:
        """Return the pages that a tier of this size would have held when they were asked for."""
        return int(np.clip(memory_pages - self.position, 0, self.length).sum())

    def ends(self, memory_pages: int) -> Counts:
        """Return for each request how many pages of its prompt a tier of this size held, shape (requests,)."""
        return self._by_request(np.clip(memory_pages - self.position, 0, self.length))

    def stored_ends(self, store_pages: int, batch_pages: int) -> Counts:
        """Return the same for a store, which is given a prompt's pages in batches, the first page of each topmost.

        So a later batch lies above an earlier one, and of a prompt that is partly gone the beginning goes first.
        """
        batch_end = np.minimum((self.start // batch_pages + 1) * batch_pages, self.start + self.left)
        room = store_pages - self.position
        later = self.start + self.left - batch_end
        first_batch = np.minimum(self.length, batch_end - self.start)
        held = np.where(room >= self.left, self.length, np.clip(room - later, 0, first_batch))
        return self._by_request(held)

    def _by_request(self, held: Counts) -> Counts:
        ends = np.zeros(self.requests_count, np.int64)
        np.add.at(ends, self.request, held)
        return ends


def _runs_asked_before(trace: TracePages) -> tuple[Counts, Counts, Counts, Counts]:
    """Return runs of pages that one request asked for last: ``request``, ``asked_before``, ``start`` and ``length``."""
    request = np.repeat(np.arange(trace.requests_count), trace.pages_counts)
    order = np.argsort(trace.numbers, kind="stable")
    again = np.flatnonzero(trace.numbers[order[1:]] == trace.numbers[order[:-1]])
    before = np.full(len(request), -1, np.int64)
    before[order[again + 1]] = request[order[again]]
    is_first = np.ones(len(request), np.bool_)
    is_first[1:] = (before[1:] != before[:-1]) | (request[1:] != request[:-1])
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(np.append(firsts, len(request)))
    kept = before[firsts] >= 0
    firsts = firsts[kept]
    return request[firsts], before[firsts], firsts - trace.starts[request[firsts]], lengths[kept]


def _positions(request: Counts, before: Counts, length: Counts, pages: Counts) -> Counts:
    """Return the pages above each run when it is asked for: of a request's runs all before the first is moved."""
    position = np.empty(len(length), np.int64)
    above = Fenwick(len(pages))
    run, runs_count = 0, len(length)
    run_request, run_before, run_length = request.tolist(), before.tolist(), length.tolist()
    for number, count in enumerate(pages.tolist()):
        first = run
        while run < runs_count and run_request[run] == number:
            position[run] = above.sum_after(run_before[run])
            run += 1
        for moved in range(first, run):
            above.add(run_before[moved], -run_length[moved])
        if count:
            above.add(number, count)
    return position


class Fenwick:
    """Numbers by place, of which the sum after a place is known in O(log n). P. M. Fenwick, SP&E 24 (1994)."""

    __slots__ = ("_size", "_sums", "total")

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums = [0] * (size + 1)
        self.total = 0
        """Sum of all numbers."""

    def add(self, place: int, number: int) -> None:
        """Add to the number at a place."""
        self.total += number
        sums, size = self._sums, self._size
        at = place + 1
        while at <= size:
            sums[at] += number
            at += at & -at

    def sum_after(self, place: int) -> int:
        """Return the sum of the numbers at higher places."""
        sums = self._sums
        after = self.total
        at = place + 1
        while at:
            after -= sums[at]
            at &= at - 1
        return after
