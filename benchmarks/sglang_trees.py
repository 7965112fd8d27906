"""Our tree and SGLang's, timed in turns in one process: calls of both by turns, on the same tokens and pages of 64.

    SGLANG_WHEEL=DIRECTORY python -m benchmarks.sglang_trees [--core rust] [--rounds 40]

A line of JSON for each figure: microseconds, median and deciles, of the engine's tree and of ours, and their ratio.
What allocators do is left out on both sides: slots are taken before, and what is freed is put aside. A match is counted
with the slots that it leads to.
"""

import argparse
import importlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Spread, Subject, interleaved, timed
from benchmarks.trees import (
    FILL_TOKENS,
    LEAVES_HELD,
    PAGE_SIZE,
    PROMPT_PAGES,
    PROMPT_TOKENS,
    SETTINGS,
    TimedTree,
    Tokens,
    TreeSetting,
    Workload,
)
from tests.engines.sglang import absent
from unified_cache.core.pool import Slots


@dataclass(frozen=True)
class EngineTypes:
    """Classes and modules of the engine, imported once they can be."""

    calls: Any
    keys: Any
    components: Any
    trees: Any
    parameters: Any
    paged: Any
    windowed: Any
    window_pool: Any

    @classmethod
    def imported(cls) -> "EngineTypes":
        """Publish a configuration for the CPU, without which the engine's modules cannot be imported; import them."""
        absent.provide(os.environ["SGLANG_WHEEL"])
        runtime = importlib.import_module("sglang.srt.runtime_context")
        runtime.get_context().override_server_args(device="cpu", attention_backend="torch_native").install()
        runtime.get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dcp_rank=0)
        cache = "sglang.srt.mem_cache"
        return cls(
            importlib.import_module(f"{cache}.base_prefix_cache"),
            importlib.import_module(f"{cache}.radix_cache"),
            importlib.import_module(f"{cache}.unified_cache.component_type").ComponentType,
            importlib.import_module(f"{cache}.unified_radix_cache").UnifiedRadixCache,
            importlib.import_module(f"{cache}.cache_init_params").CacheInitParams,
            importlib.import_module(f"{cache}.allocator.paged").PagedTokenToKVPoolAllocator,
            importlib.import_module(f"{cache}.allocator.swa").SWATokenToKVPoolAllocator,
            importlib.import_module(f"{cache}.base_swa_memory_pool").BaseSWAKVPool,
        )


class EngineTree:
    """A tree of SGLang's as benchmarks call ours: slots are those of pages, and each is a run of the engine's."""

    def __init__(self, engine: EngineTypes, core: str, spans: tuple[int, ...], tokens_max: int) -> None:
        self.engine = engine
        self.allocator, parts = self._allocator(tokens_max, windowed=bool(spans))
        self._aside: list[Any] = []
        for part in parts:
            part.free = part.free_page_ids = self._aside.append
            part.free_segment = lambda freed, start_pos=0: self._aside.append(freed)
        kinds = engine.components
        self.tree = engine.trees(
            engine.parameters(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE_SIZE,
                sliding_window_size=spans[0] * PAGE_SIZE if spans else None,
                tree_components=(kinds.FULL, kinds.SWA) if spans else (kinds.FULL,),
                tree_core_backend=core,
            )
        )
        self._parts = parts

    def _allocator(self, tokens_max: int, *, windowed: bool) -> tuple[Any, list[Any]]:
        engine = self.engine
        if not windowed:
            allocator = engine.paged(tokens_max, PAGE_SIZE, torch.int64, "cpu", None, False)
            return allocator, [allocator]
        pool = _without_bytes(engine.window_pool)
        allocator = engine.windowed(tokens_max, tokens_max, PAGE_SIZE, torch.int64, "cpu", pool, False)
        return allocator, [allocator.full_attn_allocator, allocator.swa_attn_allocator]

    def taken(self, tokens: int) -> torch.Tensor:
        """Take fresh slots of that many tokens, as a finished prefill holds them."""
        slots = [part.alloc(tokens) for part in self._parts]
        if len(slots) == 2:
            self.allocator.set_full_to_swa_mapping(*slots)
        full: torch.Tensor = slots[0]
        return full

    def key(self, tokens: "array[int]") -> Any:
        """Return the engine's form of a prompt."""
        return self.engine.keys.RadixKey(tokens)

    def match(self, tokens: "array[int]") -> torch.Tensor:
        """Match a prompt; return the slots of Full that it leads to."""
        found = self.tree.match_prefix(self.engine.calls.MatchPrefixParams(key=self.key(tokens)))
        slots: torch.Tensor = self.tree.path_device_indices(found.last_device_node)
        return slots

    def inserting(self, tokens: "array[int]", slots: torch.Tensor, start: int) -> Callable[[], object]:
        """Return what inserts a prompt of which the tree holds ``start`` tokens."""
        call = self.engine.calls.InsertParams(key=self.key(tokens), value=slots, prev_prefix_len=start)
        return lambda: self.tree.insert(call)

    def evict(self, tokens: int) -> None:
        """Evict tokens of Full."""
        evicted = self.tree.evict(self.engine.calls.EvictParams(num_tokens=tokens))
        assert evicted.num_tokens_evicted >= tokens
        self._aside.clear()

    def lock_and_unlock(self, tokens: "array[int]") -> Callable[[], object]:
        """Match a prompt once; return what locks all of it and unlocks it again."""
        found = self.tree.match_prefix(self.engine.calls.MatchPrefixParams(key=self.key(tokens)))
        assert found.device_prefix_len == len(tokens)
        return lambda: self.tree.unlock(self.tree.lock(found.last_device_node))


def _without_bytes(pool: Any) -> Any:
    """Make a pool of the engine's that has the map from Full to window slots, and no KV."""

    def kept(self: Any, mapping: Any) -> None:
        self.full_to_swa_index_mapping = mapping

    def translated(self: Any, slots: Any) -> Any:
        return self.full_to_swa_index_mapping[slots]

    def nothing(*_: Any, **__: Any) -> None:
        return None

    names = dict.fromkeys([*pool.__abstractmethods__, "__init__"], nothing)
    names |= {"register_mapping": kept, "translate_loc_from_full_to_swa": translated}
    return type("PoolWithoutBytes", (pool,), names)()


class BothTrees:
    """A tree of each kind, given the same prompts."""

    def __init__(self, engine: EngineTypes, core: str, spans: tuple[int, ...], tokens_max: int) -> None:
        self.work = Workload(TreeSetting("", spans))
        self.theirs = EngineTree(engine, core, spans, tokens_max)
        self.ours = TimedTree(spans)

    def insert(self, tokens: Tokens, ours: list[Slots], theirs: torch.Tensor, start: int) -> None:
        """Insert a prompt into both, from page ``start`` on."""
        self.ours.insert(tokens, ours, start)
        self.theirs.inserting(array("q", tokens.tolist()), theirs, start * PAGE_SIZE)()

    def grow(self, nodes: int, path: int) -> Tokens:
        """Fill both to about ``nodes`` nodes, among them one prompt on a path of ``path`` nodes; return the prompt."""
        work = self.work
        hot, slots, held = work.tokens(PROMPT_TOKENS), work.slots(PROMPT_PAGES), self.theirs.taken(PROMPT_TOKENS)
        step = PROMPT_PAGES // path
        for end in range(step, PROMPT_PAGES + 1, step):
            self.insert(hot[: end * PAGE_SIZE], [given[:end] for given in slots], held[: end * PAGE_SIZE], end - step)
        for number in range(nodes - path):
            tail, tail_slots = work.tokens(FILL_TOKENS, first=number), work.slots(FILL_TOKENS // PAGE_SIZE)
            depth = step * (1 + work.below(path)) if number % 2 else 0
            tokens = np.concatenate([hot[: depth * PAGE_SIZE], tail])
            ours = [np.concatenate(pair) for pair in zip([s[:depth] for s in slots], tail_slots, strict=True)]
            theirs = torch.cat([held[: depth * PAGE_SIZE], self.theirs.taken(FILL_TOKENS)])
            self.insert(tokens, ours, theirs, depth)
        assert np.array_equal(self.ours.match(hot), slots[0])
        assert torch.equal(self.theirs.match(array("q", hot.tolist())), held)
        return hot

    def add_leaves(self, leaves: int, tokens_each: int) -> None:
        """Hang leaves below the root of both."""
        for number in range(leaves):
            tokens, slots = self.work.tokens(tokens_each, first=number), self.work.slots(tokens_each // PAGE_SIZE)
            self.insert(tokens, slots, self.theirs.taken(tokens_each), 0)

    def inserts(self, rounds: int) -> list[Subject]:
        """Return inserts of prompts that share their first half with what is held, into trees that keep their size."""
        half = PROMPT_PAGES // 2
        shared = self.work.tokens(PROMPT_TOKENS // 2)
        held = self.theirs.taken(PROMPT_TOKENS // 2)
        prompts = []
        for number in range(rounds + 1 + LEAVES_HELD):
            tokens = np.concatenate([shared, self.work.tokens(PROMPT_TOKENS // 2, first=number)])
            prompts.append((tokens, self.work.slots(PROMPT_PAGES), torch.cat([held, self.theirs.taken(len(shared))])))
        for number, (tokens, ours, theirs) in enumerate(prompts[:LEAVES_HELD]):
            self.insert(tokens, ours, theirs, half if number else 0)
        our_prompts, their_prompts = iter(prompts[LEAVES_HELD:]), iter(prompts[LEAVES_HELD:])

        def their_insert() -> int:
            tokens, _, slots = next(their_prompts)
            key = array("q", tokens.tolist())
            self.theirs.evict(half * PAGE_SIZE)
            self.theirs.match(key)
            return timed(self.theirs.inserting(key, slots, half * PAGE_SIZE))()

        def our_insert() -> int:
            tokens, slots, _ = next(our_prompts)
            self.ours.evict(half)
            self.ours.match(tokens)
            return self.ours.insert(tokens, slots, half)

        return [their_insert, our_insert]


def figures(engine: EngineTypes, core: str, rounds: int) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Yield component set, name of the figure, and nanoseconds of the engine's tree and of ours."""
    for setting in SETTINGS:
        name, spans = setting.name, setting.spans
        for path in (1, 16, 64):
            both = BothTrees(engine, core, spans, 2 * PROMPT_TOKENS + 1_000 * FILL_TOKENS)
            hot = both.grow(1_000, path)
            key = array("q", hot.tolist())
            matches = [timed(partial(both.theirs.match, key)), timed(partial(both.ours.match, hot))]
            yield name, f"match 32k tokens, {path} nodes", interleaved(matches, rounds, calls=10, warm=3)
            if path == 16:
                locks = [timed(both.theirs.lock_and_unlock(key)), timed(both.ours.lock_and_unlock(hot))]
                yield name, "lock + unlock, 16 nodes", interleaved(locks, rounds, calls=10, warm=3)
        both = BothTrees(engine, core, spans, (rounds + LEAVES_HELD + 4) * PROMPT_TOKENS)
        yield name, "insert 32k tokens sharing 16k", interleaved(both.inserts(rounds), rounds)
        for told, leaves, tokens_each, tokens in (
            ("evict 8,192 tokens of 2k leaves of 1,024", 2_000, 1_024, 8_192),
            ("evict one page of 10k leaves", 10_000, 2 * PAGE_SIZE, PAGE_SIZE),
        ):
            both = BothTrees(engine, core, spans, leaves * tokens_each + PROMPT_TOKENS)
            both.add_leaves(leaves, tokens_each)
            evictions: list[Subject] = [
                timed(partial(both.theirs.evict, tokens)),
                partial(both.ours.evict, tokens // PAGE_SIZE),
            ]
            yield name, told, interleaved(evictions, rounds)


def main() -> None:
    """Time both and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", choices=("rust", "python"), default="rust")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for components, name, taken in figures(EngineTypes.imported(), options.core, options.rounds):
        theirs, ours = (Spread.of([ns / 1e3 for ns in values]) for values in taken)
        line = {
            "components": components,
            "figure": name,
            "core": options.core,
            "theirs_us": asdict(theirs),
            "ours_us": asdict(ours),
            "ratio": round(ours.median / theirs.median, 3),
        }
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
