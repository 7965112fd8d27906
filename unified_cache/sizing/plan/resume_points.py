"""Points at which each prompt of a trace could be resumed with windows or states, and what memory that takes.

Full attention lies in an LRU stack (see ``lru_stack``). Windows and states are kept at some ends only, and each
component has a queue of its own, least recently used first. One pass over the trace keeps, for a cache that never
evicts, which windows there are, in which order they would be evicted, and how many pages a component must have had
for a window to have stayed since it was made:

    prompt      |--------- seen before ---------|------- new --------|
    windows           w       w         w                           w
    points            e1      e2        e3        each with the pages and bytes at which it can still be used

A cache of given sizes resumes at the last point that it still has. Not modelled: a small cache resumes earlier, and so
makes other windows than one that never evicts; ``--check`` shows the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.core.config import Retention
from unified_cache.core.window import needed_pages, restorable_ends, window
from unified_cache.sizing.plan.lru_stack import Fenwick, LruStack
from unified_cache.sizing.plan.trace_pages import Counts, Numbers, TracePages

NEVER = 1 << 60
"""More pages or bytes than any tier has."""

POINTS_MAX = 64
"""Points kept of one prompt, the longest first."""


@dataclass(frozen=True, slots=True)
class StoreFootprint:
    """Bytes of one page in a store, by component, and how a store is given pages."""

    page_bytes: tuple[int, ...]
    """Objects of one page in all pools of a component, headers included; Full first."""
    batch_pages: int
    """Pages of Full in one call to a store."""


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """Points of all prompts; each array but the first has shape (points,) or (components - 1, points)."""

    requests_count: int
    request: Counts
    """Request that could resume there, rising."""
    end: Counts
    """Pages that it would have handed back."""
    full: Counts
    """Pages of Full that a tier must have had to hold them."""
    window_pages: Counts
    """Pages that a component must have had to hold its window since it was last used."""
    window_pages_ever: Counts
    """Pages that it must have had to hold it since it was made."""
    full_since: Counts
    """Pages of Full that a tier must have had for the window not to have lost the pages below it, since last used."""
    full_ever: Counts
    """The same, since the windows were made."""
    full_made: Counts
    """Pages of Full that a tier must have had for the windows to be made: where a prompt leaves what was seen before,
    one is made only if memory still knows the place."""
    store_full: Counts
    """Bytes that a store must have had to hold the pages of Full."""
    store_window_bytes: Counts
    """Bytes that it must have had to hold a component's window."""
    store_ever: Counts
    """Bytes that it must have had to hold all windows since they were made."""

    @classmethod
    def of(
        cls, trace: TracePages, stack: LruStack, spans: Sequence[int], retention: Retention, stored: StoreFootprint
    ) -> "ResumePoints":
        """Pass over the trace once. ``spans`` are those of the components after Full."""
        found = PointsPass(trace, stack, spans, retention, stored)
        for request in range(trace.requests_count):
            found.serve(request)
        return found.points()


class ComponentWindows:
    """Windows of one component: which pages are held, in which order they would be evicted."""

    def __init__(self, pages: int, events: int, span: int, page_bytes: int) -> None:
        self.span = span
        self.page_bytes = page_bytes
        self.held = np.zeros(pages, np.bool_)
        self.stamp = np.zeros(pages, np.int32)
        self.need = np.zeros(pages, np.int64)
        self.full_since = np.zeros(pages, np.int64)
        self.full_ever = np.zeros(pages, np.int64)
        self.full_made = np.zeros(pages, np.int64)
        self.stored_at = np.full(pages, -1, np.int32)
        self.store_need = np.zeros(pages, np.int64)
        self.order = Fenwick(events)
        self.at_stamp = np.zeros(events, np.int32)

    def positions(self, pages: Numbers) -> Counts:
        """Return how many of the pages held would be evicted after each of these; those of one use are alike."""
        stamps = self.stamp[pages]
        above: dict[int, int] = {}
        for stamp in stamps.tolist():
            if stamp not in above:
                above[stamp] = self.order.sum_after(stamp) + int(self.at_stamp[stamp]) // 2
        return np.array([above[stamp] for stamp in stamps.tolist()], np.int64)

    def make(self, pages: Numbers, full_need: int) -> None:
        """Hold windows at these pages; new ones are added at the place of their pages in the order."""
        new = pages[~self.held[pages]]
        for stamp in self.stamp[new].tolist():
            self.order.add(stamp, 1)
            self.at_stamp[stamp] += 1
        self.held[new] = True
        self.full_made[new] = NEVER
        self.full_made[pages] = np.minimum(self.full_made[pages], full_need)
        self.need[pages] = 0
        self.full_since[pages] = self.full_ever[pages] = full_need

    def touch(self, pages: Numbers, now: int) -> None:
        """Make pages the most recent ones, held or not."""
        held = pages[self.held[pages]]
        if held.size:
            self.need[held] = np.maximum(self.need[held], self.positions(held))
            self.full_since[held] = 0
            for stamp in self.stamp[held].tolist():
                self.order.add(stamp, -1)
                self.at_stamp[stamp] -= 1
            self.order.add(now, int(held.size))
            self.at_stamp[now] += held.size
        self.stamp[pages] = now


class PointsPass:
    """One pass over a trace."""

    def __init__(
        self, trace: TracePages, stack: LruStack, spans: Sequence[int], retention: Retention, stored: StoreFootprint
    ) -> None:
        self._trace = trace
        self._stack = stack
        self._retention = retention
        self._stored = stored
        self._spans = tuple(spans)
        events = 2 * trace.requests_count + 2
        sizes = zip(spans, stored.page_bytes[1:], strict=True)
        self._windows = [ComponentWindows(trace.distinct_count, events, span, page_bytes) for span, page_bytes in sizes]
        self._ends_node = np.zeros(trace.distinct_count, np.bool_)
        """Whether a node of the tree ends with the page."""
        self._store = Fenwick(trace.requests_count)
        """Bytes in the store by the request that touched them last."""
        self._run = 0
        self._found: list[tuple[int, ...]] = []

    def points(self) -> ResumePoints:
        """Return what was found."""
        windowed = len(self._windows)
        table = np.array(self._found, np.int64).reshape(-1, 8 + 3 * windowed).T
        return ResumePoints(
            self._trace.requests_count,
            *(table[0], table[1], table[2]),
            table[8 : 8 + windowed],
            table[8 + windowed : 8 + 2 * windowed],
            *(table[3], table[4], table[5], table[6]),
            table[8 + 2 * windowed :],
            table[7],
        )

    def serve(self, request: int) -> None:
        """Look where a request could resume, then use and make windows as it does."""
        trace, stack = self._trace, self._stack
        path = trace.numbers[trace.starts[request] : trace.starts[request + 1]]
        first = self._run
        while self._run < len(stack.request) and stack.request[self._run] == request:
            self._run += 1
        runs = slice(first, self._run)
        lengths = stack.length[runs]
        seen = int(lengths.sum())
        full = np.repeat(stack.position[runs] - stack.start[runs], lengths) + np.arange(seen)
        resumed = self._look(request, path, seen, full, runs) if seen else 0
        self._use(request, path, seen, resumed, int(full[-1]) if seen else 0)
        self._put(request, path, seen, runs)

    def _look(self, request: int, path: Numbers, seen: int, full: Counts, runs: slice) -> int:
        """Record the points of a request; return the last one, 0 if there is none."""
        known = path[:seen]
        tombstones: list[npt.NDArray[np.bool_] | None] = []
        for windows in self._windows:
            held = windows.held[known]
            tombstones.append(~held)
            here = known[held]
            windows.full_since[here] = np.maximum(windows.full_since[here], full[held])
            windows.full_ever[here] = np.maximum(windows.full_ever[here], full[held])
        ok = restorable_ends(self._spans, tombstones, seen)
        ends = np.flatnonzero(ok)[::-1][:POINTS_MAX] + 1
        if not ends.size:
            return 0
        store_full = self._store_full(runs, seen)
        points = [self._point(request, end, known, full, store_full) for end in ends.tolist()]
        self._found += _undominated(points)[::-1]
        return int(ends[0])

    def _point(self, request: int, end: int, known: Numbers, full: Counts, store_full: Counts) -> tuple[int, ...]:
        since, ever, stored = [], [], []
        full_since = full_ever = full_made = store_ever = 0
        for windows in self._windows:
            pages = known[window(end, windows.span) : end]
            since.append(int(windows.positions(pages).max()))
            ever.append(max(int(windows.need[pages].max()), 0))
            full_since = max(full_since, int(windows.full_since[pages].max()))
            full_ever = max(full_ever, int(windows.full_ever[pages].max()))
            full_made = max(full_made, int(windows.full_made[pages].max()))
            store_ever = max(store_ever, int(windows.store_need[pages].max()))
            stored_at = int(windows.stored_at[pages].min())
            stored.append(NEVER if stored_at < 0 else self._store.sum_after(stored_at))
        fixed = (request, end, int(full[end - 1]), full_since, full_ever, full_made)
        return (*fixed, int(store_full[end - 1]), store_ever, *since, *ever, *stored)

    def _store_full(self, runs: slice, seen: int) -> Counts:
        """Return for each page of a prompt the bytes that a store needs to have it and all before it."""
        stack, batch = self._stack, self._stored.batch_pages
        needs = np.zeros(seen, np.int64)
        for run in range(runs.start, runs.stop):
            start, length, left = (int(part[run]) for part in (stack.start, stack.length, stack.left))
            batch_end = min((start // batch + 1) * batch, start + left)
            deepest = np.minimum(np.arange(start, start + length), batch_end - 1)
            within = start + left - batch_end + deepest - start + 1
            above = self._store.sum_after(int(stack.asked_before[run]))
            needs[start : start + length] = above + within * self._stored.page_bytes[0]
        return np.maximum.accumulate(needs)

    def _use(self, request: int, path: Numbers, seen: int, resumed: int, full_need: int) -> None:
        count = len(path)
        if resumed:
            self._touch(path, resumed, 2 * request)
            self._ends_node[path[resumed - 1]] = True
        if not count:
            return
        ends = [end for end in self._retention.ends(count, seen, self._trace.page_size) if end > resumed]
        for windows in self._windows:
            made = np.flatnonzero(needed_pages(ends, windows.span, 0, count))
            # What was there and is resumed from stays what it is; what lies at the end of what was seen is there
            # whether it was kept or is made again.
            again = made[(made < seen) & (made >= resumed)]
            windows.make(path[again], full_need)
            fresh = made[made >= seen]
            windows.stamp[path[fresh]] = 2 * request
            windows.make(path[fresh], 0)
            if seen and resumed == seen and self._retention.branches:
                there = path[window(seen, windows.span) : seen]
                windows.need[there] = 0
                windows.full_made[there] = np.minimum(windows.full_made[there], full_need)
            start = window(count, windows.span)
            if start > seen:
                self._ends_node[path[start - 1]] = True
        if seen:
            self._ends_node[path[seen - 1]] = True
        self._ends_node[path[-1]] = True
        self._touch(path, count, 2 * request + 1)

    def _touch(self, path: Numbers, end: int, now: int) -> None:
        """Make the windows before an end recent, with the nodes that they begin in."""
        ends_node = np.flatnonzero(self._ends_node[path[:end]])
        for windows in self._windows:
            first = max(end - windows.span - 1, 0)
            before = int(np.searchsorted(ends_node, first))
            start = int(ends_node[before - 1]) + 1 if before else 0
            windows.touch(path[start:end], now)

    def _put(self, request: int, path: Numbers, seen: int, runs: slice) -> None:
        """Store what the request leaves: all of Full again, the windows of its end, and others once."""
        stack, store = self._stack, self._store
        page_bytes = self._stored.page_bytes[0]
        for run in range(runs.start, runs.stop):
            store.add(int(stack.asked_before[run]), -int(stack.length[run]) * page_bytes)
        put_bytes = len(path) * page_bytes
        for windows in self._windows:
            held = path[windows.held[path]]
            again = held[(windows.stored_at[held] < 0) | (windows.stamp[held] >= 2 * request)]
            was_stored = again[windows.stored_at[again] >= 0]
            for page in was_stored.tolist():
                at = int(windows.stored_at[page])
                windows.store_need[page] = max(int(windows.store_need[page]), store.sum_after(at))
                store.add(at, -windows.page_bytes)
            windows.stored_at[again] = request
            put_bytes += len(again) * windows.page_bytes
        if put_bytes:
            store.add(request, put_bytes)


def _undominated(points: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return of the points of one prompt, the longest first, those that no longer one makes needless."""
    kept: list[tuple[int, ...]] = []
    for point in points:
        if not any(all(a <= b for a, b in zip(other[2:], point[2:], strict=True)) for other in kept):
            kept.append(point)
    return kept
