"""Time and memory of a plan: alone, beside ``kvcache-simulator`` of PyPI, and of ten million pages.

    python -m benchmarks.planning sweep TRACE
    python -m benchmarks.planning beside TRACE path/to/kvcache-simulator
    python -m benchmarks.planning large

``beside`` asks the peer for LRU and the best there is alone, and has both run as processes of their own, in turns; what
it found is kept. Ratios of the peer are those of the second half of the trace, as it measures; ours are taken of the
same half.
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.report import write_json
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.sizing.plan.costs import PricedSystem
from unified_cache.sizing.plan.hardware import HARDWARE
from unified_cache.sizing.plan.planner import Evaluator
from unified_cache.sizing.plan.sweep import PlannedModel, combinations, parse_sweeps
from unified_cache.sizing.plan.tier_hits import LruHits
from unified_cache.sizing.replay.clairvoyant import FutureUses
from unified_cache.sizing.replay.lru_stack import LruStack
from unified_cache.sizing.replay.plan import ReplayPolicies
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, iterate_trace
from unified_cache.sizing.replay.trace_pages import TracePages

SEED = 17
LARGE_PAGES = 10_000_000
LARGE_SESSIONS = 40_000
NEW_BLOCKS_MAX = 24
KEPT = Path(__file__).parent / "results" / "plan_beside.json"
ROUNDS = 5
PEER_MODEL = "deepseek-v3.2"
PEER_BUDGETS_GIB = (16, 32, 64, 128, 256, 512, 1024, 2048)


def sweep(trace: Path) -> None:
    """Evaluate the 404 combinations of the default sweep, all tiers and components."""
    began_s = time.perf_counter()
    sized = size_preset("deepseek-v4-flash", page_size=256)
    model = PlannedModel("deepseek-v4-flash", sized, Retention(), ReplayPolicies(), devices=8)
    pages = TracePages.of(iterate_trace(trace), sized.layout.page_size, padded=False)
    evaluator = Evaluator(model, LruHits(pages), PricedSystem(model, HARDWARE["h100"]))
    points = [evaluator.point(sizes) for sizes in combinations(parse_sweeps(()))]
    print(f"{len(points)} combinations in {time.perf_counter() - began_s:.1f} s; peak {_peak_mib():.0f} MiB")


def beside(trace: Path, peer: Path) -> None:
    """Ask the peer and us the same question in turns: one tier, eight budgets, LRU and the best there is."""
    budgets = ",".join(map(str, PEER_BUDGETS_GIB))
    options = ["--model", PEER_MODEL, "--budgets-gib", budgets, "--policies", "lru,optimal", "--block-size", "512"]
    theirs_command = [str(peer), "run", "--trace", str(trace), *options, "--format", "json", "--no-progress"]
    first = _run(theirs_command)
    blocks = [point["cacheBlocks"] for point in first.found["points"]]
    ours_command = [sys.executable, "-m", "benchmarks.one_tier", str(trace), ",".join(map(str, blocks))]
    theirs, ours = [], []
    for _ in range(ROUNDS):
        theirs.append(_run(theirs_command))
        ours.append(_run(ours_command))
    off = 0.0
    for count, point, row in zip(blocks, first.found["points"], ours[0].found["ratios"], strict=True):
        told = [point["results"][name]["hitRate"] for name in ("lru", "optimal")]
        print(f"{count:9,} blocks  LRU {row[0]:.4f} {told[0]:.4f}   best {row[1]:.4f} {told[1]:.4f}")
        off = max(off, *(abs(own - other) for own, other in zip(row, told, strict=True)))
    figures = {
        f"{name}_{unit}": statistics.median(getattr(ran, unit) for ran in runs)
        for name, runs in (("ours", ours), ("peer", theirs))
        for unit in ("wall_s", "cpu_s")
    }
    cpu_ratio = statistics.median(own.cpu_s / other.cpu_s for own, other in zip(ours, theirs, strict=True))
    print(f"ratios differ by {off:.6f} at most; ours over the peer's processor time {cpu_ratio:.3f}; {figures}")
    found = {
        "peer": PEER_MODEL,
        "rounds": ROUNDS,
        "blocks": blocks,
        "ratio_difference_max": off,
        "cpu_ratio": cpu_ratio,
    }
    write_json({"machine": asdict(machine()), **found, **figures}, KEPT)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Output and seconds of a process."""

    found: dict[str, Any]
    wall_s: float
    cpu_s: float
    """With its own children."""


def _run(command: Sequence[str]) -> FinishedRun:
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = json.loads(ran.stdout)
    return FinishedRun(found, wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def large() -> None:
    """Number ten million pages, made up with a fixed seed, and find what sizes of memory hit."""
    began_s = time.perf_counter()
    pages = TracePages.of(_conversations(), BLOCK_TOKENS, padded=True)
    stack = LruStack.of(pages)
    future = FutureUses.of(pages)
    ratios = [stack.hit_pages(size) / len(pages.numbers) for size in (10**5, 10**6)]
    bound = int(future.ends(10**5).sum()) / len(pages.numbers)
    print(f"{len(pages.numbers):,} pages, {pages.requests_count:,} requests in {time.perf_counter() - began_s:.0f} s")
    print(f"hits {ratios[0]:.4f} and {ratios[1]:.4f}, at most {bound:.4f}; peak {_peak_mib():.0f} MiB")


def _conversations() -> Iterator[TraceRequest]:
    """Yield sessions in random turn, each prompt its session's last one with some blocks more."""
    rnd = random.Random(SEED)
    sessions: list[list[int]] = [[] for _ in range(LARGE_SESSIONS)]
    asked, next_id, at = 0, 1, 0
    while asked < LARGE_PAGES:
        session = sessions[rnd.randrange(LARGE_SESSIONS)]
        if len(session) > 8 * NEW_BLOCKS_MAX:
            session.clear()
        count = rnd.randint(1, NEW_BLOCKS_MAX)
        session.extend(range(next_id, next_id + count))
        next_id += count
        blocks = (0, *session)
        asked += len(blocks)
        yield TraceRequest(float(at), len(blocks) * BLOCK_TOKENS, 100, blocks)
        at += 1


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["sweep", trace_path]:
            sweep(Path(trace_path))
        case ["beside", trace_path, peer_path]:
            beside(Path(trace_path), Path(peer_path))
        case ["large"]:
            large()
        case _:
            print(__doc__)
