"""Time and memory of a plan: alone, beside ``kvcache-simulator`` of PyPI, and of ten million pages.

    python -m benchmarks.planning sweep TRACE
    python -m benchmarks.planning beside TRACE path/to/kvcache-simulator
    python -m benchmarks.planning large

Ratios of the peer are those of the second half of the trace, as it measures; ours are taken of the same half.
"""

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unified_cache.components.layouts import size_preset
from unified_cache.config import Retention
from unified_cache.plan.clairvoyant import FutureUses
from unified_cache.plan.costs import PricedSystem
from unified_cache.plan.evaluate import Evaluator
from unified_cache.plan.hardware import HARDWARE
from unified_cache.plan.lru_stack import LruStack
from unified_cache.plan.sweep import PlannedModel, combinations, parse_sweeps
from unified_cache.plan.tier_hits import LruHits
from unified_cache.plan.trace_pages import Counts, TracePages
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.replay.trace import BLOCK_TOKENS, TraceRequest, iterate_trace

SEED = 17
LARGE_PAGES = 10_000_000
LARGE_SESSIONS = 40_000
NEW_BLOCKS_MAX = 24
PEER_MODEL = "deepseek-v3.2"
PEER_BUDGETS_GIB = (16, 32, 64, 128, 256, 512, 1024, 2048)


def sweep(trace: Path) -> None:
    """Evaluate the 404 combinations of the default sweep, all tiers and components."""
    began_s = time.perf_counter()
    sized = size_preset("deepseek-v4-flash", page_size=256)
    model = PlannedModel("deepseek-v4-flash", sized, Retention(), ReplayPolicies(), devices=8)
    pages = TracePages.of(iterate_trace(trace), sized.layout.page_size, padded=False)
    evaluator = Evaluator(model, LruHits(pages), PricedSystem.of(model, HARDWARE["h100"]))
    points = [evaluator.point(sizes) for sizes in combinations(parse_sweeps(()))]
    print(f"{len(points)} combinations in {time.perf_counter() - began_s:.1f} s; peak {_peak_mib():.0f} MiB")


def beside(trace: Path, peer: Path) -> None:
    """Ask the peer and us the same question: one tier, eight budgets, LRU and the best there is."""
    began_s = time.perf_counter()
    options = [
        "--model",
        PEER_MODEL,
        "--budgets-gib",
        ",".join(map(str, PEER_BUDGETS_GIB)),
        "--format",
        "json",
        "--block-size",
        "512",
    ]
    ran = subprocess.run(
        [str(peer), "run", "--trace", str(trace), *options, "--no-progress"], check=True, capture_output=True, text=True
    )
    peer_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    pages = TracePages.of(iterate_trace(trace), BLOCK_TOKENS, padded=True)
    stack, future = LruStack.of(pages), FutureUses.of(pages)
    measured = pages.requests_count // 2
    found: object = json.loads(ran.stdout)
    assert isinstance(found, dict)
    rows = []
    for point in found["points"]:
        blocks = point["cacheBlocks"]
        ours = [_token_ratio(pages, ends, measured) for ends in (stack.ends(blocks), future.ends(blocks))]
        rows.append((blocks, ours, [point["results"][name]["hitRate"] for name in ("lru", "optimal")]))
    ours_s = time.perf_counter() - began_s
    for blocks, ours, theirs in rows:
        print(f"{blocks:9,} blocks  LRU {ours[0]:.4f} {theirs[0]:.4f}   best {ours[1]:.4f} {theirs[1]:.4f}")
    print(f"ours {ours_s:.2f} s, {peer.name} {peer_s:.2f} s")


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


def _token_ratio(pages: TracePages, ends: Counts, measured: int) -> float:
    """Return the share of the tokens of the requests from ``measured`` on that was hit."""
    tokens = np.minimum(ends * pages.page_size, pages.input_tokens)[measured:]
    return float(tokens.sum()) / int(pages.input_tokens[measured:].sum())


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
