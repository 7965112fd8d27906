"""Device pools of five kinds of models in host memory, and SGLang's own tree over them.

full    keys and values of heads                      KV
mla     one latent a layer, the same on every rank    KV
swa     every second layer sees a window              KV, SWA
dsv4    DeepSeek-V4: a logical anchor, compressed caches that follow it, a window and states that follow that
mamba   every fourth layer full, the others states    KV, MAMBA
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool, resolve_compress_state_ring_size
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_server_args

from tests.engines.sglang.outcome import EngineJob

DTYPE = torch.bfloat16
REQUESTS = 8

HOST_BYTES_MAX = 4 << 30
"""Room for the host pools of one engine. SGLang would take what the machine has free beyond 10 GiB, and refuses to
start where others hold that."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model's state."""

    page_tokens: int
    tokens: int
    window_tokens: int
    layers: int = 4
    heads: int = 8
    head_dim: int = 128
    draft_layers: int = 0

    @classmethod
    def of(cls, job: EngineJob) -> "Geometry":
        """Make room for every prompt of a job, and some more."""
        page = job.page_tokens
        turns = job.prompts * (job.prompts + 1) // 2 if job.grows else job.prompts
        tokens = (turns * job.pages + 4 * job.prompts + 8) * page
        return cls(page, tokens, job.window_pages * page, job.layers, job.heads, draft_layers=job.draft_layers)


@dataclass
class Parts:
    """Device pools of one model, and what hands out their slots."""

    pool: object
    allocator: object
    components: tuple[ComponentType, ...]
    requests: HybridReqToTokenPool | None = None

    def places(
        self, source: str, indices: torch.Tensor, state: torch.Tensor | None, start: int, page_tokens: int
    ) -> list[tuple[int, int]]:
        """Return (page, device row) of the pages from ``start`` on whose Full indices these are, in pools of a source.

        A state is of the last page; of a window those pages are left out that have none.
        """
        if source == "mamba":
            end = start + len(indices) // page_tokens
            return [] if state is None else [(end - 1, int(state.reshape(-1)[0]))]
        if source == "swa":
            indices = vars(self.allocator)["full_to_swa_index_mapping"][indices]
        firsts = indices[::page_tokens].tolist()
        return [(start + at, first // page_tokens) for at, first in enumerate(firsts) if first >= page_tokens]

    def clear(self) -> None:
        """Take back every slot."""
        self.allocator.clear()  # type: ignore[attr-defined]  # one of two allocators of the engine
        if self.requests is not None:
            self.requests.clear()


def _paged(pool: object, g: Geometry) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(g.tokens, g.page_tokens, torch.int64, "cpu", pool, False)


def _windowed(pool: object, g: Geometry) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(g.tokens, g.tokens, g.page_tokens, torch.int64, "cpu", pool, False)


def _full(g: Geometry) -> Parts:
    pool = MHATokenToKVPool(g.tokens, g.page_tokens, DTYPE, g.heads, g.head_dim, g.layers, "cpu", False)
    return Parts(pool, _paged(pool, g), (ComponentType.FULL,))


def _mla(g: Geometry) -> Parts:
    pool = MLATokenToKVPool(g.tokens, g.page_tokens, DTYPE, 512, 64, g.layers, "cpu", False)
    return Parts(pool, _paged(pool, g), (ComponentType.FULL,))


def _swa(g: Geometry) -> Parts:
    layers = range(g.layers)
    pool = SWAKVPool(
        g.tokens, g.tokens, g.page_tokens, DTYPE, g.heads, g.head_dim, list(layers[1::2]), list(layers[::2]), "cpu"
    )
    return Parts(pool, _windowed(pool, g), (ComponentType.FULL, ComponentType.SWA))


def _dsv4(g: Geometry) -> Parts:
    ratios = [0, *[4, 128] * ((g.layers + 1) // 2)][: g.layers + 1]
    pages = g.tokens // g.page_tokens
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=REQUESTS,
        swa_size=g.tokens,
        full_size=g.tokens,
        c4_size=g.tokens // 4,
        c128_size=g.tokens // 128,
        c4_state_pool_size=pages * resolve_compress_state_ring_size(4),
        c128_state_pool_size=(REQUESTS + 1) * resolve_compress_state_ring_size(128),
        page_size=g.page_tokens,
        swa_page_size=g.page_tokens,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        start_layer=0,
        end_layer=len(ratios),
        compression_ratios=ratios,
        device="cpu",
        enable_memory_saver=False,
    )
    return Parts(pool, _windowed(pool, g), (ComponentType.FULL, ComponentType.SWA))


def _mamba(g: Geometry) -> Parts:
    attention = list(range(g.layers))[3::4] or [g.layers - 1]
    linear = [layer for layer in range(g.layers) if layer not in attention]
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2048, n_groups=8, num_heads=16, head_dim=128, state_size=128, conv_kernel=4
    )
    requests = HybridReqToTokenPool(
        size=REQUESTS,
        mamba_size=8 * REQUESTS,
        mamba_spec_state_size=REQUESTS,
        max_context_len=g.tokens,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape, layers=linear, dtype=Mamba2StateDType(conv=DTYPE, temporal=torch.float32)
        ),
        mamba_layer_ids=linear,
        enable_mamba_extra_buffer=True,
        start_layer=0,
    )
    pool = HybridLinearKVPool(
        size=g.tokens,
        page_size=g.page_tokens,
        dtype=DTYPE,
        head_num=g.heads,
        head_dim=g.head_dim,
        full_attention_layer_ids=attention,
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=requests.mamba_pool,
        start_layer=0,
    )
    return Parts(pool, _paged(pool, g), (ComponentType.FULL, ComponentType.MAMBA), requests)


KINDS: dict[str, Callable[[Geometry], Parts]] = {
    "full": _full,
    "mla": _mla,
    "swa": _swa,
    "dsv4": _dsv4,
    "mamba": _mamba,
}


def draft_pool(g: Geometry) -> MHATokenToKVPool:
    """Make the pool of a draft model of two heads."""
    return MHATokenToKVPool(g.tokens, g.page_tokens, DTYPE, 2, g.head_dim, g.draft_layers, "cpu", False)


def tree_params(
    parts: Parts,
    core: str,
    page_tokens: int,
    window_tokens: int | None,
    group: object = None,
    drafts: Sequence[object] = (),
) -> CacheInitParams:
    """Describe a tree over device pools; ``drafts`` are pools of draft models."""
    return CacheInitParams(
        disable=False,
        req_to_token_pool=parts.requests,
        token_to_kv_pool_allocator=parts.allocator,
        page_size=page_tokens,
        sliding_window_size=window_tokens if ComponentType.SWA in parts.components else None,
        tree_components=parts.components,
        tree_core_backend=core,
        tp_cache_group=group,
        **({"sidecar_draft_device_pools": tuple(drafts)} if drafts else {}),  # there since SGLang 0.5.23
        **({"enable_mamba_extra_buffer": True} if parts.requests is not None else {}),
    )


def build_tree(params: CacheInitParams) -> UnifiedRadixCache:
    """Make SGLang's tree over device pools, with host pools beside them."""
    tree = UnifiedRadixCache(params)
    with host_memory_budget_scope(HOST_BYTES_MAX):
        tree.init_hicache(get_server_args(), params)
    for entry in tree.host_pool_group.entries:
        vars(entry.host_pool)["pin_memory"] = False
    return tree


def group_of(job: EngineJob) -> object:
    """Return the group of a job's ranks, joined; None for one alone."""
    if job.size == 1:
        return None
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.size
    )
    return torch.distributed.group.WORLD


def allocated(allocator: object, tokens: int) -> torch.Tensor:
    """Allocate Full indices, and those of the window where the allocator is one of both."""
    allocators = vars(allocator)
    if not tokens:
        return torch.zeros(0, dtype=torch.int64)
    if "full_attn_allocator" not in allocators:
        return allocator.alloc(tokens)  # type: ignore[attr-defined, no-any-return]  # one of two of the engine
    full, window = (allocators[name].alloc(tokens) for name in ("full_attn_allocator", "swa_attn_allocator"))
    allocator.set_full_to_swa_mapping(full, window)  # type: ignore[attr-defined]  # as above
    return full  # type: ignore[no-any-return]  # SGLang is untyped here


def step_until(tree: UnifiedRadixCache, condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Do what the scheduler does between two steps until a condition holds; return for how many seconds.

    Raises:
        TimeoutError: it does not come to hold.
    """
    started_s = time.perf_counter()
    while not condition():
        tree.check_hicache_events()
        if time.perf_counter() - started_s > timeout_s:
            raise TimeoutError("the engine waited for storage for ever")
        time.sleep(0.0005)
    return time.perf_counter() - started_s


def device_rows(host_pool: object) -> list[torch.Tensor]:
    """Return every device tensor that a host pool mirrors as bytes, shape (rows, bytes of a page)."""
    kind = type(host_pool).__name__
    parts = vars(host_pool)
    tensors: Sequence[torch.Tensor]
    if kind == "LogicalHostPool":
        return []
    if kind == "DeepSeekV4PagedHostPool":
        return [tensor.view(torch.uint8) for tensor in parts["device_buffers"]]
    if kind == "DeepSeekV4StateHostPool":
        return list(parts["device_page_views"])
    if kind == "MambaPoolHost":
        if "temporal_device_layers" in parts:
            temporal, conv = parts["temporal_device_layers"], parts["conv_device_layers"]
        else:  # SGLang 0.5.21
            temporal, conv = parts["device_pool"].mamba_cache.temporal, parts["device_pool"].mamba_cache.conv
        tensors = [*temporal, *(t for layers in conv for t in layers)]
        return [tensor.view(torch.uint8).reshape(tensor.shape[0], -1) for tensor in tensors]
    if parts.keys() & {"device_kv_buffers", "device_k_buffers"}:
        tensors = parts.get("device_kv_buffers") or [*parts["device_k_buffers"], *parts["device_v_buffers"]]
    else:  # SGLang 0.5.21
        device = vars(parts["device_pool"])
        tensors = device.get("kv_buffer") or [*device["k_buffer"], *device["v_buffer"]]
    return [t.view(torch.uint8).reshape(t.shape[0] // parts["page_size"], -1) for t in tensors]
