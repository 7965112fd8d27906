"""Random calls on SGLang's own tree, replayed on ours: short prompts over few pages, so that all of them meet.

SGLANG_WHEEL=DIRECTORY python -m tests.engines.sglang.tree_random_calls --seeds 0 1000
"""

import argparse
import importlib
import random
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.sglang import tree_bootstrap
from tests.engines.sglang.tree_recorder import TreeCallRecorder
from tests.support.sglang_tree import replay

__all__ = ["RandomCalls", "main"]

PAGES_MAX = 8
"""Pages of a prompt."""


class RandomCalls:
    """A sequence of random calls, as a scheduler could make them, on a tree of the engine's."""

    def __init__(self, tree: Any, seed: int, types: Any) -> None:
        self.tree, self.types = tree, types
        self.page_size = tree.page_size
        self.allocator = tree.token_to_kv_pool_allocator
        self.random = random.Random(seed)
        self.locks: list[Any] = []

    def take(self, count: int) -> None:
        """Make ``count`` calls, then give all locks back and evict everything."""
        for _ in range(count):
            call = self.random.choices([self.match, self.insert, self.unlock, self.evict, self.touch], [4, 5, 3, 2, 1])[
                0
            ]
            call()
        while self.locks:
            self.unlock()
        self.tree.evict_for_alloc(self.types.EvictParams(num_tokens=self.allocator.size))
        assert self.allocator.available_size() == self.allocator.size, "slots have leaked"

    def key(self) -> Any:
        """Return a key of a random prompt: at each place one of two pages, and maybe a part of one."""
        pages = [self.random.randrange(2) for _ in range(self.random.randint(0, PAGES_MAX))]
        firsts = [(place * 2 + page + 1) * 1000 for place, page in enumerate(pages)]
        tokens = [first + at for first in firsts for at in range(self.page_size)]
        part = list(range(90_000, 90_000 + self.random.randrange(self.page_size)))
        return self.types.RadixKey(array("q", tokens + part), self.random.choice([None, None, None, "adapter"]))

    def match(self) -> None:
        """Match a prompt, and maybe lock what was found."""
        result = self.tree.match_prefix(self.types.MatchPrefixParams(key=self.key()))
        if self.random.random() < 0.3:
            self.locks.append(self.tree.lock(result.last_device_node))

    def touch(self) -> None:
        """Make a prompt recent."""
        self.tree.touch_prefix(self.key())

    def insert(self) -> None:
        """Compute a prompt from what is matched of it, or from an earlier page on, and insert it."""
        key = self.key().page_aligned(self.page_size)
        matched = self.tree.match_prefix(self.types.MatchPrefixParams(key=key))
        lock = self.tree.lock(matched.last_device_node)
        held = self.tree.path_device_indices(matched.last_device_node)
        start = self.random.choice(
            [matched.device_prefix_len, self.random.randint(0, len(held) // self.page_size) * self.page_size]
        )
        missing = len(key) - start
        if missing > self.allocator.available_size():
            self.tree.evict_for_alloc(self.types.EvictParams(num_tokens=missing - self.allocator.available_size()))
        fresh = self.allocator.alloc(missing)
        if fresh is not None:
            value = torch.cat([held[:start], fresh])
            result = self.tree.insert(self.types.InsertParams(key=key, value=value, prev_prefix_len=start))
            if self.random.random() < 0.3:
                self.locks.append(self.tree.lock(result.last_device_node))
        self.tree.unlock(lock)

    def unlock(self) -> None:
        """Give one lock back."""
        if self.locks:
            self.tree.unlock(self.locks.pop(self.random.randrange(len(self.locks))))

    def evict(self) -> None:
        """Evict some pages."""
        pages = self.random.randint(1, 2 * PAGES_MAX)
        self.tree.evict_for_alloc(self.types.EvictParams(num_tokens=pages * self.page_size))


def main() -> None:
    """Compare as many random sequences as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", nargs="+", default=["python", "rust"])
    parser.add_argument("--pages", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 1000])
    parser.add_argument("--calls", type=int, default=60)
    options = parser.parse_args()
    tree_bootstrap.install()
    scheduler = importlib.import_module("tests.engines.sglang.tree_scheduler")
    calls_module = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
    keys_module = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    types = SimpleNamespace(**vars(calls_module), RadixKey=keys_module.RadixKey)
    for core in options.cores:
        for page_size in options.pages:
            calls = 0
            for seed in range(*options.seeds):
                workload = scheduler.TreeWorkload(seed, page_size, capacity_pages=40)
                recorder = TreeCallRecorder(scheduler.tree_named(core, workload), bigrams=False)
                RandomCalls(recorder.tree, seed, types).take(options.calls)
                for number, (theirs, ours) in enumerate(replay(recorder.lines)):
                    if ours != theirs:
                        raise SystemExit(f"seed {seed}, call {number} differs\nours   {ours}\ntheirs {theirs}")
                    calls += 1
            sequences = options.seeds[1] - options.seeds[0]
            sys.stdout.write(
                f"equal to the {core} core, pages of {page_size}: {calls} calls in {sequences} sequences\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
