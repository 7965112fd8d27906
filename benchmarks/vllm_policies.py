"""Hits of vLLM's host tier under its own policies and under our adaptive eviction, on the same requests.

Ours stands in this benchmark alone. vLLM's LRU keeps the chunks, their pins and their order; beside it our tree holds
prompts as chains of hashes, a page of eight "tokens" of four bytes each, and what it evicts goes first in that order.

Runs with the interpreter that has vLLM, over its own manager, without an engine and without bytes:

    PYTHONPATH=. $(python -m tests.engines.vllm.installation) -m benchmarks.vllm_policies [--requests N]

Requests come one at a time: looked up, loaded, stored and ended, as vLLM's connector does for a prompt of one step.
"""

# pyright: reportMissingImports=false
import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from benchmarks.generated_traces import KINDS, REQUESTS, generated_trace
from unified_cache.components import Full
from unified_cache.controller.ledger import Ledger
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import TOKEN_BYTES, Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec, Tier
from unified_cache.integrations.vllm.names import GROUP_BYTES, HASH_BYTES, group_of, page_key
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace
from unified_cache.tree.reuse_predictor import TreeRequest

CONVERSATION = Path(__file__).resolve().parents[1] / "traces" / "mooncake_conversation.jsonl.gz"
SIZES = (1_000, 10_000, 100_000)
"""Chunks of host memory for the conversation trace."""
SHARE = 0.1
"""Of the different chunks of a generated trace."""


LAYOUT = ModelLayout(HASH_BYTES // TOKEN_BYTES, (Full((PoolSpec("kv", HASH_BYTES),)),))
EVICTION = EvictionConfig(device=(EvictionPolicy.ADAPTIVE,))


class EvictionAdvice:
    """Chunks that should be evicted, from the requests that come. Belongs to the scheduler's thread."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._ledger = Ledger(LAYOUT, ((self._chunks_max,), (0,)), EVICTION)
        self._hash_at: dict[int, bytes] = {}
        """By slot of the tree."""
        self._requests: dict[str, TreeRequest | None] = {}
        """Requests that are not over."""

    def end(self, request: str) -> None:
        """Forget a request that is over; its chunks stay."""
        self._requests.pop(request, None)

    def victims_of(self, request: str, hashes: Sequence[bytes]) -> list[bytes]:
        """Count a request as one use of a chain of hashes, however often it comes; return what should go to hold it."""
        tree = self._ledger.tree
        chain = hashes[: self._chunks_max]
        prompt = Prompt(b"".join(chain), LAYOUT.page_size, b"")
        found = tree.match(prompt)
        if request not in self._requests:
            self._requests[request] = tree.use(found, found.device_end)
        use = self._requests[request]
        lock = tree.lock(found, found.device_end, Tier.DEVICE, use)
        missing = chain[lock.end :]
        victims: list[bytes] = []
        if missing:
            slots = self._ledger.allocate_all(Tier.DEVICE, [(0, len(missing))])
            assert slots is not None, "nothing but this chain is pinned, and it fits"
            for slot, name in zip(slots[0].tolist(), missing, strict=True):
                if slot in self._hash_at:
                    victims.append(self._hash_at[slot])
                self._hash_at[slot] = name
            self._ledger.insert(prompt, lock.end, slots, Tier.DEVICE, request=use)
            renewed = tree.lock(tree.match(prompt), prompt.pages_count, Tier.DEVICE, use)
            tree.unlock(lock)
            lock = renewed
        tree.unlock(lock)
        return victims


FIRST_GROUP = bytes(GROUP_BYTES)


class UnifiedCachePolicy(LRUCachePolicy):  # type: ignore[misc]  # vLLM's, untyped where it is not installed
    """vLLM's LRU with our advice. It reads the prompt's chain and sets ranks where vLLM 0.32 keeps both."""

    def __init__(self, cache_capacity: int) -> None:
        """Take the number of chunks that host memory holds."""
        super().__init__(cache_capacity)
        self._advice = EvictionAdvice(cache_capacity)
        self._first_rank = 0
        """Before all ranks of vLLM's, which begin with 1."""

    def clear(self) -> None:
        """Forget every chunk."""
        super().clear()
        self._advice.clear()
        self._first_rank = 0

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Follow the advice for a request whose chunks are to be stored, before room is made for them."""
        super().on_store_miss(keys, req_context)
        self._follow(req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Follow the advice for what a request has computed, now that it is over."""
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        self._follow(req_context)
        self._advice.end(req_context.req_id)

    def _follow(self, context: ReqContext) -> None:
        ends = context._offload_key_positions
        chain = [key for key in sorted(ends, key=ends.__getitem__) if not group_of(key)]
        for name in self._advice.victims_of(context.req_id, [page_key(key) for key in chain]):
            key = OffloadKey(name + FIRST_GROUP)
            if key in self.chunks:
                self._first_rank -= 1
                self._ranks[key] = self._first_rank
                if key in self._evictable:
                    self._push_evictable(key)


POLICIES = {
    "lru": ("lru", None),
    "arc": ("arc", None),
    "ours": (UnifiedCachePolicy.__name__, "benchmarks.vllm_policies"),
}


def hits_of(policy: str, chunks: int, requests: Sequence[TraceRequest]) -> tuple[int, int]:
    """Serve a trace by vLLM's manager of host memory; return the chunks that it had, and those asked for."""
    name, module = POLICIES[policy]
    manager = CPUOffloadingManager(chunks, cache_policy=name, cache_policy_module_path=module)
    hits = asked = 0
    for number, request in enumerate(requests):
        whole = request.hash_ids[: min(request.input_length // BLOCK_TOKENS, chunks)]
        keys = [OffloadKey(each.to_bytes(HASH_BYTES, "big") + bytes(4)) for each in whole]
        context = ReqContext(str(number))
        for end, key in enumerate(keys, 1):
            context.set_offload_key_position(key, end * BLOCK_TOKENS)
        manager.on_new_request(context)
        held = 0
        while held < len(keys) and manager.lookup(keys[held], context) is LookupResult.HIT:
            held += 1
        manager.prepare_load(keys[:held], context)
        manager.complete_load(keys[:held], context)
        prepared = manager.prepare_store(keys[held:], context)
        if prepared is not None:
            manager.complete_store(prepared.keys_to_store, context)
        manager.on_request_finished(context)
        hits, asked = hits + held, asked + len(keys)
    return hits, asked


def compare(kind: str, chunks: int, requests: Sequence[TraceRequest]) -> None:
    """Print the hit ratios, and how many more ours are than the better of vLLM's, in percent."""
    found = {policy: hits_of(policy, chunks, requests) for policy in POLICIES}
    best = max(found["lru"][0], found["arc"][0])
    gain = f"{found['ours'][0] / best - 1:+8.1%}" if best else ""
    ratios = " ".join(f"{hits / max(asked, 1):8.4f}" for hits, asked in found.values())
    print(f"{kind:14} {chunks:8,} {ratios} {gain}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a generated trace")
    options = parser.parse_args()
    print(f"{'traffic':14} {'chunks':>8} {'lru':>8} {'arc':>8} {'ours':>8}")
    conversation = read_trace(CONVERSATION)
    for chunks in SIZES:
        compare("conversation", chunks, conversation)
    for kind in KINDS:
        requests = generated_trace(kind, options.requests)
        different = len({each for request in requests for each in request.hash_ids})
        compare(kind, int(different * SHARE), requests)


if __name__ == "__main__":
    main()
