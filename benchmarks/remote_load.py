"""Latency of a get and of a look-up while a service is busy: at 80 % of the calls that it can sustain.

The maximum comes first: ``WORKERS`` callers, each asking again as soon as it is answered, for long enough to be no
burst. Then calls fall due at even times, whether or not earlier ones have been answered, and whichever caller is free
makes the next one. Each counts from when it was due, so that waiting for a free caller is not forgotten. The two follow
each other at once and are repeated, since a machine has slower seconds. Where calls are answered less often than they
fall due, the maximum was none and the percentiles mean nothing: so both rates are told.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles

from benchmarks.measure import Figure, Spread
from benchmarks.plan import BenchmarkPlan
from benchmarks.remote_pages import MovedPages

__all__ = ["load_figures"]

WORKERS = 4
PAGE_KIB = 256
LOAD_SHARE = 0.8
MAXIMUM_S = 1.5
LOAD_S = 2.0
"""Duration of one round, for each of two kinds of calls."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One measurement: the sustained rate, the rates asked for and answered after it, and the time of each call."""

    maximum_per_s: float
    offered_per_s: float
    achieved_per_s: float
    taken_ms: list[float]


def load_figures(address: str, plan: BenchmarkPlan) -> Iterator[Figure]:
    """Measure gets of one page and look-ups of all pages of a stream."""
    rounds_count = plan.effort.durable_rounds // 2 + 1
    with ExitStack() as opened:
        moved = MovedPages(address, PAGE_KIB, WORKERS, opened)
        pool = opened.enter_context(ThreadPoolExecutor(WORKERS))
        moved.put_all()
        for name, call in ((f"get, {PAGE_KIB} KiB", moved.get_one), ("look-up, 64 pages", moved.look_up)):
            rounds = [_round(call, pool) for _ in range(rounds_count)]
            taken_ms = [ms for each in rounds for ms in each.taken_ms]
            maximum = median(each.maximum_per_s for each in rounds)
            offered = median(each.offered_per_s for each in rounds)
            achieved = median(each.achieved_per_s for each in rounds)
            note = (
                f"p50; p99 {quantiles(taken_ms, n=100)[98]:.2f} ms; offered {offered:.0f}/s, "
                f"achieved {achieved:.0f}/s; {maximum:.0f}/s sustained by {WORKERS} callers"
            )
            yield Figure("remote", f"{name}, at 80 % load", "ms", Spread.of(taken_ms), (), note)
        moved.remove_all()


def _round(call: Callable[[int], None], pool: ThreadPoolExecutor) -> _Round:
    maximum_per_s = _sustained_per_s(call, pool)
    offered_per_s = maximum_per_s * LOAD_SHARE
    due_s = [number / offered_per_s for number in range(round(offered_per_s * LOAD_S))]
    ended_s, taken_ms = _asked_when_due(call, pool, due_s)
    return _Round(maximum_per_s, offered_per_s, len(due_s) / ended_s, taken_ms)


def _sustained_per_s(call: Callable[[int], None], pool: ThreadPoolExecutor) -> float:
    """Return how many calls are answered when every caller asks all the time."""
    start_s = time.perf_counter()

    def ask(worker: int) -> int:
        calls_count = 0
        while time.perf_counter() - start_s < MAXIMUM_S:
            call(worker)
            calls_count += 1
        return calls_count

    calls_count = sum(pool.map(ask, range(WORKERS)))
    return calls_count / (time.perf_counter() - start_s)


def _asked_when_due(
    call: Callable[[int], None], pool: ThreadPoolExecutor, due_s: list[float]
) -> tuple[float, list[float]]:
    """Make calls, due at seconds from now; return when all were answered, and by call after how many milliseconds."""
    numbers = count()
    start_s = time.perf_counter()

    def ask(worker: int) -> list[float]:
        taken_ms: list[float] = []
        while (number := next(numbers)) < len(due_s):
            time.sleep(max(0.0, start_s + due_s[number] - time.perf_counter()))
            call(worker)
            taken_ms.append((time.perf_counter() - start_s - due_s[number]) * 1000)
        return taken_ms

    taken_ms = [ms for part in pool.map(ask, range(WORKERS)) for ms in part]
    return time.perf_counter() - start_s, taken_ms
