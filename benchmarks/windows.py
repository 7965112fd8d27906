"""Hits of a hybrid model whose windows are few and whose full attention is not bounded, by what is evicted first.

    python -m benchmarks.windows [TRACE]

Pages of 512 tokens and windows of one page, kept at a prompt's end, before its last page and where it branches off; a
device alone. So only windows decide how far a prompt can be resumed. Blocks handed back, of all that were asked for.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.report import write_json
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.config import EvictionPolicy, Retention
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.sizing.replay.plan import ReplayPlan, ReplayPolicies
from unified_cache.sizing.replay.runner import served_hits
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, read_trace

TRACE = Path(__file__).resolve().parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
RESULTS = Path(__file__).resolve().parent / "results" / "windows.json"
WINDOWS = (100, 300, 1_000, 3_000, 100_000)
FULL_PAGES = 200_000
"""More than the trace has."""
POLICIES = (EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE)


def plan_of(windows: int, policy: EvictionPolicy) -> ReplayPlan:
    """Return the plan for one number of windows on the device, prompts padded to whole blocks, and a policy."""
    full, swa = PoolSpec("full", 1), PoolSpec("swa", 1)
    layout = ModelLayout(BLOCK_TOKENS, (Full((full,)), SlidingWindow(BLOCK_TOKENS, BLOCK_TOKENS, (swa,))))
    return ReplayPlan(
        subject="benchmarks.windows",
        layout=layout,
        true_layout=layout,
        device_pages=(FULL_PAGES, windows),
        host_pages=(0, 0),
        storage=None,
        storage_bytes=None,
        retention=Retention(tail_tokens=2 * BLOCK_TOKENS),
        padded=True,
        with_bytes=False,
        policies=ReplayPolicies(device=policy),
    )


def main() -> None:
    """Print and keep a row for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=str(__doc__).partition("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE, help="trace to replay; default: the bundled one")
    trace: Path = parser.parse_args().trace
    requests = list(read_trace(trace))
    rows: list[dict[str, object]] = []
    for windows in WINDOWS:
        row: dict[str, object] = {"windows": windows}
        for policy in POLICIES:
            plan = plan_of(windows, policy)
            hit_pages = sum(hits.total for hits in served_hits(plan, requests))
            row[policy.value] = round(hit_pages / sum(map(plan.pages_of, requests)), 4)
        rows.append(row)
        sys.stdout.write("  ".join(f"{name} {value}" for name, value in row.items()) + "\n")
    write_json({"trace": trace.name, "requests": len(requests), "machine": asdict(machine()), "rows": rows}, RESULTS)


if __name__ == "__main__":
    main()
