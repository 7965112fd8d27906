"""One form of the core, which takes turns with others: ``benchmarks.side_by_side`` runs a process of each.

It reads from standard input what to measure, line by line: the name of a set of tiers, for a batch of requests, or
``tree``, for the figures of ``benchmarks.trees``. It prints what that took, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from benchmarks.machine import calibrate
from benchmarks.measure import Figure
from benchmarks.plan import QUICK, BenchmarkPlan
from benchmarks.remembering import BATCH_REQUESTS, REQUESTS, SIZES, TRACE, opened, served_s
from benchmarks.trees import evict_figures, insert_figures, lock_figures, match_figures
from unified_cache.sizing.replay.trace import TraceRequest, read_trace

__all__ = ["TREE", "Taken"]

TREE = "tree"
TREE_SECTIONS: tuple[Callable[[BenchmarkPlan], Iterator[Figure]], ...] = (
    match_figures,
    insert_figures,
    evict_figures,
    lock_figures,
)

Taken = dict[str, float]
"""What each figure took in one turn."""


def take_turns() -> None:
    """Measure what is asked for, until nothing is."""
    requests = read_trace(TRACE, REQUESTS)
    plan = BenchmarkPlan(QUICK, calibrate(), None)
    with ExitStack() as caches:
        batches: dict[str, Iterator[float]] = {}
        for line in sys.stdin:
            name = line.strip()
            if name == TREE:
                figures = (figure for section in TREE_SECTIONS for figure in section(plan))
                taken = {f"{each.section}, {each.name}": each.spread.median for each in figures}
            else:
                if name not in batches:
                    batches[name] = served(caches, name, requests)
                taken = {name: next(batches[name])}
            print(json.dumps(taken), flush=True)


def served(caches: ExitStack, name: str, requests: Sequence[TraceRequest]) -> Iterator[float]:
    """Serve requests by a cache of those sizes; yield the processor's seconds of each batch."""
    player = caches.enter_context(opened(SIZES[name], 0))
    for start in range(0, len(requests), BATCH_REQUESTS):
        yield served_s(player, requests[start : start + BATCH_REQUESTS])


if __name__ == "__main__":
    take_turns()
