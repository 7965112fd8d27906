"""Our tree against SGLang's own, under the same scheduler, requests and slots: every step must leave both the same.

SGLANG_WHEEL=DIRECTORY python -m tests.engines.sglang.tree_against_engine --cores python rust --seeds 0 200
"""

import argparse
import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.engines.sglang import tree_bootstrap

__all__ = ["compare", "main"]


CALLS = (
    "match_prefix",
    "touch_prefix",
    "checkpoint",
    "evict",
    "inc_lock_ref",
    "dec_lock_ref",
    "dfs_weight_order",
    "reset",
)
"""Calls of the scheduler on our tree that are counted; evictions by the tokens they free, matches that hit too."""


def count_calls(tree: Any, counts: Counter[str]) -> Any:
    """Have every call on a tree counted; return the tree."""

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            counts[name] += 1
            if name == "evict":
                counts["tokens evicted"] += result.num_tokens_evicted
            if name == "match_prefix":
                counts["matches that hit"] += result.device_prefix_len > 0
            return result

        return count

    for name in CALLS:
        setattr(tree, name, counted(name, getattr(tree, name)))
    return tree


def compare(scheduler: Any, core: str, workload: Any, counts: Counter[str]) -> None:
    """Run a workload over both trees in step, and count.

    Raises:
        SystemExit: they differ; the message names the step and what each shows.
    """
    our_run = scheduler.ModelFreeScheduler(count_calls(scheduler.tree_named("ours", workload), counts), workload)
    their_run = scheduler.ModelFreeScheduler(scheduler.tree_named(core, workload), workload)
    for step, (ours, theirs) in enumerate(itertools.zip_longest(our_run.run(), their_run.run()), 1):
        if ours != theirs:
            raise SystemExit(f"{workload} against {core}: step {step} differs\nours   {ours}\ntheirs {theirs}")
        counts["steps"] += 1
    counts["requests"] += our_run.requests
    counts["retractions"] += our_run.retractions


def run_with_host(scheduler: Any, workload: Any, counts: Counter[str]) -> None:
    """Run a workload over our tree with host memory below; its requests check every byte that they find."""
    tree = count_calls(scheduler.tree_named("ours", workload), counts)
    run = scheduler.ModelFreeScheduler(tree, workload)
    counts["steps"] += sum(1 for _ in run.run())
    counts["requests"] += run.requests
    counts["tokens loaded"] += run.loaded_tokens
    counts["tokens whose KV was there and right"] += run.checked_tokens
    tree.release_host_resources()


def main() -> None:
    """Compare as many random workloads as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cores", nargs="+", default=["python", "rust", "host"], help="host: ours alone, over host memory"
    )
    parser.add_argument("--pages", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 20])
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    tree_bootstrap.install()
    scheduler = importlib.import_module("tests.engines.sglang.tree_scheduler")
    for core, page_size in itertools.product(options.cores, options.pages):
        counts: Counter[str] = Counter()
        for seed in range(*options.seeds):
            scale = 1 if page_size > 1 else 10
            workload = scheduler.TreeWorkload(
                seed,
                page_size,
                capacity_pages=(16, 24, 48, 120)[seed % 4] * scale,
                steps=options.steps,
                turn_pages_max=6 * scale,
                chunk_pages=(4, 8)[seed % 2] * scale,
                output_tokens_max=(24, 200)[seed // 4 % 2],
                new_token_ratio=(1.0, 0.05)[seed // 8 % 2],
                bigrams=seed % 5 == 4,
            )
            if core == "host":
                run_with_host(scheduler, replace(workload, host=True, bigrams=False), counts)
            else:
                compare(scheduler, core, workload, counts)
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        what = "with host memory" if core == "host" else f"equal to the {core} core"
        sys.stdout.write(f"{what}, pages of {page_size}: {shown}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
