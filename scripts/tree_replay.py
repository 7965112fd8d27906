"""Replay a trace over the tree alone and print, as JSON, whether it is compiled and a digest of all that it answered.

It imports the package that is installed where it runs, and nothing that an extra installs: so a compiled wheel and the
plain one can be held against each other in a clean environment, under any Python.
"""

import gzip
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from unified_cache.components import Full, SlidingWindow
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import PoolSpec, Slots, Tier
from unified_cache.tree import RadixTree, compiled

__all__ = ["answered", "read_requests"]

PAGE_SIZE = 16
WINDOW_TOKENS = 4 * PAGE_SIZE
PAGES_MAX = 2_000
"""Held by the tree; then it evicts."""
EVICTED_PAGES = 64
"""Taken at a time."""
PRIORITIES = 3
HELD_LOCKS = 8
"""Requests under way at any time."""


def answered(requests: Iterable[list[int]], policy: EvictionPolicy) -> str:
    """Return a digest of what a tree answers to requests, given as numbers of blocks; a block is a page here."""
    components = (Full((PoolSpec("kv", 0),)), SlidingWindow(WINDOW_TOKENS, PAGE_SIZE, (PoolSpec("swa", 0),)))
    capacity = ((PAGES_MAX, PAGES_MAX), (0, 0))
    tree = RadixTree(components, PAGE_SIZE, EvictionConfig(device=(policy, policy)), capacity, clock=lambda: 0.0)
    seen = hashlib.sha256()
    locks = []
    next_slot, held_pages = 1, 0
    for blocks in requests:
        prompt = Prompt.of(np.repeat(np.array(blocks, np.int64), PAGE_SIZE), PAGE_SIZE)
        priority = len(blocks) % PRIORITIES
        found = tree.match(prompt, priority)
        end = found.device_end
        seen.update(f"{end} {found.tree_end}\n".encode())
        seen.update(tree.slots(found, Tier.DEVICE, 0, 0, end).tobytes())
        request = tree.use(found, end)
        locks.append(tree.lock(found, end, Tier.DEVICE, request))
        pages = prompt.pages_count - end
        fresh = np.arange(next_slot, next_slot + pages, dtype=np.int32)
        next_slot += pages
        inserted = tree.insert(prompt, end, (fresh, fresh), Tier.DEVICE, priority, request)
        held_pages += pages - _digested(seen, inserted.duplicates[:1])
        if len(locks) > HELD_LOCKS:
            tree.unlock(locks.pop(0))
        while held_pages > PAGES_MAX and (taken := tree.evict(Tier.DEVICE, 0, EVICTED_PAGES).slots):
            _digested(seen, taken[1])
            if not (count := _digested(seen, taken[0])):
                break
            held_pages -= count
    for held in locks:
        tree.unlock(held)
    tree.check()
    return seen.hexdigest()


def read_requests(trace: Path) -> list[list[int]]:
    """Return the blocks of each request of a trace in Mooncake's format."""
    with gzip.open(trace, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def _digested(seen: "hashlib._Hash", slots: Iterable[Slots]) -> int:
    """Add slots to a digest; return how many they are."""
    count = 0
    for given in slots:
        seen.update(given.tobytes())
        count += len(given)
    return count


def main(trace: Path) -> None:
    """Replay a trace by every policy."""
    requests = read_requests(trace)
    answers = {policy.value: answered(requests, policy) for policy in EvictionPolicy}
    sys.stdout.write(json.dumps({"compiled": compiled, "answers": answers}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
