"""How long a get and a look-up take when a service is busy: at 80 % of the calls that it was measured to answer.

The maximum comes first: ``WORKERS`` callers, each asking again as soon as it is answered. Then calls are due at even
times, and each counts from when it was due, so that waiting for a caller to be free is not forgotten.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import quantiles

from benchmarks.measure import Figure, Spread
from benchmarks.plan import Plan
from benchmarks.remote_pages import MovedPages

__all__ = ["load_figures"]

WORKERS = 4
PAGE_KIB = 256
CALLS = 400
"""Of one figure."""
LOAD_SHARE = 0.8


def load_figures(address: str, plan: Plan) -> Iterator[Figure]:
    """Measure gets of one page and look-ups of all pages of a stream."""
    with ExitStack() as opened:
        moved = MovedPages(address, PAGE_KIB, WORKERS, opened)
        moved.put_all()
        for name, call in ((f"get, {PAGE_KIB} KiB", moved.get_one), ("look-up, 64 pages", moved.look_up)):
            per_s = _calls_per_s(call)
            taken_ms = _at_load(call, per_s * LOAD_SHARE)
            percentiles = quantiles(taken_ms, n=100)
            note = f"p50; p99 {percentiles[98]:.2f} ms; 80 % of {per_s:.0f} calls/s, {WORKERS} callers"
            yield Figure("remote", f"{name}, at 80 % load", "ms", Spread.of(taken_ms), (), note)
        moved.remove_all()


def _calls_per_s(call: Callable[[int], None]) -> float:
    """Return how many calls are answered when every caller asks all the time."""

    def ask(worker: int) -> None:
        for _ in range(CALLS // WORKERS):
            call(worker)

    start_s = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(ask, range(WORKERS)))
    return CALLS / (time.perf_counter() - start_s)


def _at_load(call: Callable[[int], None], per_s: float) -> list[float]:
    """Return how long each call took, in milliseconds, from when it was due."""
    start_s = time.perf_counter()

    def ask(worker: int) -> list[float]:
        taken_ms: list[float] = []
        for number in range(worker, CALLS, WORKERS):
            due_s = start_s + number / per_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            call(worker)
            taken_ms.append((time.perf_counter() - due_s) * 1000)
        return taken_ms

    with ThreadPoolExecutor(WORKERS) as pool:
        return [ms for part in pool.map(ask, range(WORKERS)) for ms in part]
