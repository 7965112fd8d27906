"""Memory of the tree: by cached token, as the resident set of a process, and by node, what adaptive eviction adds.

python -m benchmarks.tree_memory [PAGES] [RUN_PAGES ...]
python -m benchmarks.tree_memory --policies

Generated prompts of ``RUN_PAGES`` pages of 64 tokens are inserted until ``PAGES`` pages lie in the tree; every other
prompt begins with the first half of the one before, so that half of the nodes hang below another. Each length of a
prompt is measured in a new process. Beside the bytes by token stand those that follow from the tokens and slots alone.
Prompts of fewer than ``LONG_RUN_PAGES`` fill a tenth of the pages: they take 7 to 14 GB of memory otherwise.

With ``--policies`` made-up traffic is served under lru and under adaptive eviction, and nothing is evicted, so that
both trees are the same. Then every object that is reached from tree and queues is counted, but for tokens and slots;
what the predictor has learned, which is bounded, stands beside it. The command fails where a node of a tree of
``NODES_MIN`` or more takes too much more; below, the queues of classes, of which there is a fixed number, weigh more.
"""

import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np

from benchmarks.generated_traces import KINDS, generated_trace
from unified_cache.components import Full
from unified_cache.core.config import EvictionConfig, EvictionPolicy
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
REQUESTS = 12_000
"""Requests that are served to compare policies: of most kinds of traffic they leave about as many nodes, or more."""
NODES_MIN = 10_000
ADDED_NODE_BYTES_MAX = 64
"""Bytes that a node may take under adaptive eviction beyond those under lru."""


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
    return (resident_bytes() - before) / (held * PAGE_SIZE), tree.nodes_count()


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Memory of a tree under one policy, tokens and slots left out."""

    nodes: int
    node_bytes: float
    """Bytes of nodes and queues, by node."""
    learned_bytes: int
    """Bytes of the predictor."""


def served(kind: str, requests: int, policy: EvictionPolicy) -> PolicyMemory:
    """Serve made-up traffic on a device that has room for all of it; return what the tree takes then."""
    config = EvictionConfig(device=(policy,), host=(policy,))
    tree = RadixTree((Full((PoolSpec("kv", 1),)),), PAGE_SIZE, config, ((1 << 30,), (1 << 30,)))
    held = 0
    for request in generated_trace(kind, requests, 0):
        prompt = Prompt.of(np.repeat(np.array(request.hash_ids, np.int32), PAGE_SIZE), PAGE_SIZE)
        found = tree.match(prompt)
        used = tree.use(found, found.device_end)
        lock = tree.lock(found, found.device_end, Tier.DEVICE, used)
        slots = np.arange(held + 1, held + 1 + prompt.pages_count - lock.end, dtype=np.int32)
        inserted = tree.insert(prompt, lock.end, [slots], Tier.DEVICE, request=used)
        renewed = tree.lock_inserted(inserted, prompt, Tier.DEVICE, used)
        tree.unlock(lock)
        tree.unlock(renewed)
        held += len(slots)
    state = tree._state
    learned = [] if state.adaptive is None else [state.adaptive.predictor]
    counted = {id(each) for each in learned}
    nodes = tree.nodes_count()
    return PolicyMemory(nodes, reached_bytes([state], counted) / nodes, reached_bytes(learned, set()))


def reached_bytes(objects: Iterable[object], counted: set[int]) -> int:
    """Add up the objects that are reached from some, each once; what code is, tokens and slots are left out."""
    total = 0
    todo = list(objects)
    while todo:
        each = todo.pop()
        if not isinstance(each, (type, ModuleType, FunctionType, bytes, np.ndarray)):
            total += sys.getsizeof(each)
            for other in gc.get_referents(each):
                if id(other) not in counted:
                    counted.add(id(other))
                    todo.append(other)
    return total


def compare_policies(kinds: Iterable[str]) -> bool:
    """Print a line for each kind of traffic; tell whether a node takes little more under adaptive eviction."""
    most = 0.0
    for kind in kinds:
        lru, adaptive = (served(kind, REQUESTS, policy) for policy in (EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE))
        added = adaptive.node_bytes - lru.node_bytes
        if lru.nodes >= NODES_MIN:
            most = max(most, added)
        print(
            f"{kind:12} {lru.nodes:7,} nodes of {lru.node_bytes:6,.0f} bytes, adaptive {added:4.0f} more; "
            f"learned {adaptive.learned_bytes:,}",
            flush=True,
        )
    return most <= ADDED_NODE_BYTES_MAX


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
    if sys.argv[1:] == ["--policies"]:
        sys.exit(not compare_policies(KINDS))
    numbers = [int(word.replace("_", "")) for word in sys.argv[1:]]
    main(numbers[0] if numbers else PAGES, numbers[1:] or RUNS_PAGES)
