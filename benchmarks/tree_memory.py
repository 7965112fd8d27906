"""Memory of the tree by cached token, as the resident set of a process.

python -m benchmarks.tree_memory [PAGES] [RUN_PAGES ...]

Generated prompts of ``RUN_PAGES`` pages of 64 tokens are inserted until ``PAGES`` pages lie in the tree; every other
prompt begins with the first half of the one before, so that half of the nodes hang below another. Each length of a
prompt is measured in a new process. Beside the bytes by token stand those that follow from the tokens and slots alone.
Prompts of fewer than ``LONG_RUN_PAGES`` fill a tenth of the pages: they take 7 to 14 GB of memory otherwise.
"""

import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from unified_cache.components import Full
from unified_cache.core.page import TOKEN_BYTES, Prompt
from unified_cache.core.pool import PoolSpec, Tier
from unified_cache.tree import RadixTree

PAGE_SIZE = 64
PAGES = 10_000_000
RUNS_PAGES = (512, 64, 8, 1)
LONG_RUN_PAGES = 64
VOCABULARY = 128_000
SEED = 7
SLOT_BYTES = 4
"""Slot of one page, int32."""


def resident_bytes() -> int:
    """Return the memory that this process has in RAM."""
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(words["VmRSS"].split()[0]) << 10


def filled(pages: int, run_pages: int) -> tuple[RadixTree, int]:
    """Return a tree that holds at least so many pages on the device, and how many it holds."""
    tree = RadixTree((Full((PoolSpec("kv", 1),)),), PAGE_SIZE)
    rng = np.random.default_rng(SEED)
    shared = np.empty(0, np.int32)
    held = 0
    while held < pages:
        own_pages = run_pages - len(shared) // PAGE_SIZE
        own = rng.integers(0, VOCABULARY, own_pages * PAGE_SIZE, dtype=np.int32)
        tokens = np.concatenate((shared, own))
        # [0, start)            shared with the prompt before: in the tree
        # [start, run_pages)    new
        start = len(shared) // PAGE_SIZE
        slots = np.arange(held + 1, held + 1 + own_pages, dtype=np.int32)
        tree.insert(Prompt.of(tokens, PAGE_SIZE), start, [slots], Tier.DEVICE)
        held += own_pages
        shared = np.empty(0, np.int32) if start else tokens[: run_pages // 2 * PAGE_SIZE]
    return tree, held


def measure(pages: int, run_pages: int) -> tuple[float, int]:
    """Return bytes by token, and nodes; in a process that has done nothing else."""
    filled(1_000, run_pages)  # what is imported and allocated once
    before = resident_bytes()
    tree, held = filled(pages, run_pages)
    return (resident_bytes() - before) / (held * PAGE_SIZE), sum(1 for _ in tree.nodes())


def main(pages: int, runs_pages: Sequence[int]) -> None:
    """Print a line for each length of a prompt."""
    least = TOKEN_BYTES + SLOT_BYTES / PAGE_SIZE
    print(f"pages of {PAGE_SIZE} tokens; tokens and slots alone {least:.2f} bytes a token")
    for run_pages in runs_pages:
        wanted = pages if run_pages >= LONG_RUN_PAGES else pages // 10
        with get_context("spawn").Pool(1) as process:
            token_bytes, nodes = process.apply(measure, (wanted, run_pages))
        node_bytes = (token_bytes - least) * wanted * PAGE_SIZE / nodes
        print(
            f"{wanted:,} pages, prompts of {run_pages}: {token_bytes:.2f} bytes a token, {nodes:,} nodes, "
            f"{node_bytes:,.0f} bytes a node beside tokens and slots",
            flush=True,
        )


if __name__ == "__main__":
    numbers = [int(word.replace("_", "")) for word in sys.argv[1:]]
    main(numbers[0] if numbers else PAGES, numbers[1:] or RUNS_PAGES)
