"""A scheduler of SGLang 0.5.23 without a model: the engine's own requests, pools, admission and allocation over a tree.

Everything that calls the tree is the engine's: ``Req``, ``PrefillAdder``, ``alloc_for_extend``, ``alloc_for_decode``,
``checkpoint_kv_cache``, ``release_kv_cache``, ``release_req``. Ours is the order of arrivals, and that the next token
is counted up and not computed. After ``tree_bootstrap.install``.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, release_req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode_default, alloc_for_extend
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache, touch_waiting_prefix
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.registry import get_radix_cache_factory
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from unified_cache.integrations.sglang.tree_plugin import BACKEND_NAME, register

__all__ = ["ModelFreeScheduler", "TreeWorkload", "tree_named"]

STREAM_TOKENS = 4096
"""Tokens of a stream; token number i of stream s is ``s * STREAM_TOKENS + i``."""

SAME_PROMPT_SHARE = 0.2
"""Requests that ask what another one has asked, and are answered alike: they compute the same pages at a time."""

BACKUP_POLLS_MAX = 100_000
"""Polls until the last backups must be over."""


@dataclass(frozen=True)
class TreeWorkload:
    """One random run."""

    seed: int
    page_size: int = 64
    capacity_pages: int = 48
    steps: int = 120
    turn_pages_max: int = 6
    chunk_pages: int = 4
    running_max: int = 4
    output_tokens_max: int = 24
    new_token_ratio: float = 1.0
    """Share of their output tokens that requests are taken to need; less than they do makes for retractions."""
    bigrams: bool = False
    host: bool = False
    """Whether there is KV, and host memory below it, of twice the device's pages."""


def tree_named(name: str, workload: TreeWorkload) -> Any:
    """Make a tree over pools of its own: SGLang's with its core in "python" or "rust", or "ours"."""
    size = workload.capacity_pages * workload.page_size
    kv = MHATokenToKVPool(size, workload.page_size, torch.float32, 1, 4, 2, "cpu", False) if workload.host else None
    # need_sort makes what is allocated depend on which slots are free, and not on the order in which they were freed.
    if workload.page_size == 1:
        allocator = TokenToKVPoolAllocator(size, torch.int64, "cpu", kv, True)
    else:
        allocator = PagedTokenToKVPoolAllocator(size, workload.page_size, torch.int64, "cpu", kv, True)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(2 * workload.running_max, size + workload.page_size, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=workload.page_size,
        is_eagle=workload.bigrams,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=name if name != "ours" else None,
    )
    if name != "ours":
        return UnifiedRadixCache(params)
    register()
    return get_radix_cache_factory(BACKEND_NAME)(
        SimpleNamespace(
            params=params, is_hybrid_swa=False, is_hybrid_ssm=False, enable_hierarchical_cache=workload.host
        )
    )


class ModelFreeScheduler:
    """Requests of one workload over one tree; ``run`` yields what an observer sees after each step."""

    def __init__(self, tree: Any, workload: TreeWorkload) -> None:
        self.tree = tree
        self.workload = workload
        self.pool = tree.req_to_token_pool
        self.allocator = tree.token_to_kv_pool_allocator
        self.random = random.Random(workload.seed)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.chunked: Any = None
        self.histories: list[array[int]] = [array("q")]
        self.prompts: list[array[int]] = []
        self.streams = 1
        self.requests = 0
        self.retractions = 0
        self.checked_tokens = self.loaded_tokens = 0

    def run(self) -> Iterator[str]:
        """Take every step; yield a line for each."""
        for _ in range(self.workload.steps):
            step = self.random.choices(
                [self.arrive, self.prefill, self.decode, self.abort, self.touch, self.flush], [6, 8, 12, 1, 1, 0.05]
            )[0]
            step()
            yield f"{step.__name__} {self.observed()}"
        while self.waiting or self.running or self.chunked:
            before = self.observed()
            self.prefill()
            self.decode()
            if self.observed() == before:
                self.waiting.pop(0)  # it is too long for what there is
            yield f"drain {self.observed()}"
        for _ in range(BACKUP_POLLS_MAX if self.workload.host else 0):
            self.tree.check_hicache_events()
            if not self.tree.protected_size():
                break
        self.tree.sanity_check()
        free, held = self.allocator.available_size(), self.tree.evictable_size()
        assert free + held == self.allocator.size, f"slots have leaked: {free} free, {held} held"
        assert self.tree.protected_size() == 0, "a lock has leaked"

    def observed(self) -> str:
        """Describe free, evictable and protected tokens, and the slots of every request that has any."""
        tree = self.tree
        sizes = f"{self.allocator.available_size()} free {tree.evictable_size()} {tree.protected_size()}"
        rows = [
            f"{req.rid}:{req.prefix_len}/{req.kv.cache_protected_len}/{req.kv.kv_allocated_len}"
            f"#{hash(bytes(self.pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].numpy())):x}"
            for req in [*self.running, *([self.chunked] if self.chunked else [])]
        ]
        waiting = [f"{req.rid}:{req.prefix_len}" for req in self.waiting]
        return f"{sizes} running={rows} waiting={waiting}"

    # ---- steps -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Let a request arrive, in one of three namespaces: a turn or a branch of a conversation, or something new."""
        history = self.random.choice(self.histories)
        cut = self.random.choice([len(history), len(history), self.random.randint(0, len(history))])
        turn = self.random.randint(1, self.workload.turn_pages_max * self.workload.page_size)
        tokens = history[:cut] + self.stream(turn)
        if len(tokens) > self.workload.capacity_pages * self.workload.page_size // 2:
            tokens = self.stream(turn)
        if self.random.random() < SAME_PROMPT_SHARE and self.prompts:
            tokens = self.random.choice(self.prompts)[:]
        self.prompts = [*self.prompts, tokens][-4:]
        self.requests += 1
        params = SamplingParams(max_new_tokens=self.random.randint(1, self.workload.output_tokens_max))
        extra_key, salt = self.random.choice([(None, None), (None, None), ("adapter", None), (None, "tenant")])
        request = Req(f"r{self.requests}", "", tokens, params, extra_key=extra_key, cache_salt=salt)
        self.waiting.append(request)

    def stream(self, count: int) -> "array[int]":
        """Return tokens that nobody had before."""
        self.streams += 1
        start = self.streams * STREAM_TOKENS
        return array("q", range(start, start + min(count, STREAM_TOKENS)))

    def prefill(self) -> None:
        """Admit what there is room for, as ``_get_new_batch_prefill`` does, and run a prefill."""
        page = self.workload.page_size
        if self.workload.host:
            self.tree.check_hicache_events()
        running = SimpleNamespace(reqs=self.running, batch_size=lambda: len(self.running))
        adder = PrefillAdder(
            page,
            self.tree,
            self.allocator,
            running,
            self.workload.new_token_ratio,
            1 << 20,
            self.workload.chunk_pages * page,
            waiting_queue_len=0,
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for request in list(self.waiting):
            if len(self.running) + len(adder.can_run_list) >= self.workload.running_max:
                break
            request.init_next_round_input(self.tree)
            request.host_loaded_length = 0
            if adder.add_one_req(request, self.chunked is not None, None) != AddReqResult.CONTINUE:
                break
        admitted = adder.can_run_list
        self.loaded_tokens += sum(request.host_loaded_length for request in admitted)
        if not admitted:
            return
        self.waiting = [request for request in self.waiting if request not in admitted]
        self.chunked = adder.new_chunked_req or self.chunked
        alloc_for_extend(self.extend_batch(admitted))
        for request in admitted:
            self.compute(request, request.prefix_len, request.extend_end)
        for request in admitted:
            if request is self.chunked:
                checkpoint_kv_cache(request, self.tree)
            else:
                self.next_token(request, lambda request: checkpoint_kv_cache(request, self.tree))
                if not request.finished():
                    self.running.append(request)

    def decode(self) -> None:
        """Run a decode over all running requests, taking some back first if there is no room for it."""
        while self.running and not self.allocator.check_decode_capacity(
            num_tokens=len(self.running) * self.workload.page_size, tree_cache=self.tree
        ):
            request = self.running.pop()
            self.retract(request)
        if not self.running:
            return
        alloc_for_decode_default(self.decode_batch(), 1)
        for request in self.running:
            self.compute(request, request.kv.kv_allocated_len - 1, request.kv.kv_allocated_len)
        for request in list(self.running):
            self.next_token(request, lambda _: None)
        self.running = [request for request in self.running if not request.finished()]

    def retract(self, request: Any) -> None:
        """Take a request's slots back and let it wait again."""
        release_req(
            req=request,
            remaing_req_count=len(self.running),
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
        )
        self.waiting.append(request)
        self.retractions += 1

    def abort(self) -> None:
        """Abort a running request without inserting what it computed."""
        if self.running:
            request = self.running.pop(self.random.randrange(len(self.running)))
            release_kv_cache(request, self.tree, checkpoint=False)

    def touch(self) -> None:
        """Make the prefixes of waiting requests recent, and sort these by them."""
        for request in self.waiting:
            touch_waiting_prefix(request, self.tree)
        for request in self.waiting:
            request.init_next_round_input(self.tree)
        order = self.tree.dfs_weight_order([request.last_node for request in self.waiting])
        assert sorted(order) == list(range(len(self.waiting)))

    def flush(self) -> None:
        """Forget everything, as ``flush_cache`` does when nothing runs."""
        if not (self.running or self.chunked):
            self.tree.reset()
            self.allocator.clear()

    def compute(self, request: Any, start: int, end: int) -> None:
        """Check the KV that a request has before ``start``, and fill in [start, end) where there is KV at all."""
        if not self.workload.host:
            return
        tokens = torch.tensor(request.origin_input_ids + request.output_ids, dtype=torch.float64)
        names = sum(map(ord, (request.extra_key or "") + (request.cache_salt or "")))
        state = ((tokens * 3 + names).cumsum(0) % 65_521).to(torch.float32)
        kv = self.allocator.get_kvcache()
        slots = self.pool.req_to_token[request.kv.req_pool_idx, :end].to(torch.int64)
        for number, layer in enumerate([*kv.k_buffer, *kv.v_buffer]):
            held = layer[slots[:start]]
            assert (held == (state[:start] + number)[:, None, None]).all(), f"wrong KV for {request.rid}"
            layer[slots[start:]] = (state[start:end] + number)[:, None, None].expand_as(layer[slots[start:]])
        self.checked_tokens += start

    # ---- parts of steps ----------------------------------------------------------------------------------------

    def next_token(self, request: Any, go_on: Callable[[Any], None]) -> None:
        """Append a request's next token; release the request if that was its last, else ``go_on``."""
        said = len(request.output_ids)
        request.output_ids.append(request.output_ids[-1] + 1 if said else request.origin_input_ids[-1] + 1)
        if len(request.output_ids) < request.sampling_params.max_new_tokens:
            go_on(request)
            return
        request.finished_reason = FINISH_LENGTH(len(request.output_ids))
        self.histories.append(request.origin_input_ids + request.output_ids)
        self.histories = self.histories[-12:]
        release_kv_cache(request, self.tree, checkpoint=True)

    def extend_batch(self, requests: list[Any]) -> Any:
        """Make what ``alloc_for_extend`` reads of a batch."""
        lengths = torch.tensor([request.extend_end for request in requests], dtype=torch.int64)
        prefixes = [request.prefix_len for request in requests]
        extends = [request.extend_end - request.prefix_len for request in requests]
        return SimpleNamespace(
            **self.any_batch(requests, lengths),
            prefix_lens=prefixes,
            extend_lens=extends,
            extend_num_tokens=sum(extends),
        )

    def decode_batch(self) -> Any:
        """Make what ``alloc_for_decode_default`` reads of a batch."""
        lengths = torch.tensor([request.kv.kv_allocated_len for request in self.running], dtype=torch.int64)
        rows = torch.tensor([request.kv.req_pool_idx for request in self.running], dtype=torch.int64)
        return SimpleNamespace(
            **self.any_batch(self.running, lengths),
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )

    def any_batch(self, requests: list[Any], lengths: torch.Tensor) -> dict[str, Any]:
        """Return what both kinds of batches have."""
        return {
            "reqs": requests,
            "device": "cpu",
            "tree_cache": self.tree,
            "req_to_token_pool": self.pool,
            "seq_lens": lengths,
            "seq_lens_cpu": lengths,
            "hisparse_coordinator": None,
            "is_dllm": lambda: False,
            "maybe_evict_swa": lambda: None,
        }
