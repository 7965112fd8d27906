"""Names of SGLang that the adapter's class imports, for tests without the engine: its values, and pools of tensors.

What the engine does with them is tested over the real one, see ``tests.engines.sglang``.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from types import ModuleType

import torch


class PoolNames(StrEnum):
    """Some of PoolName; as there, a member is a text and prints as it."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"
    DEEPSEEK_V4_C4 = "deepseek_v4_c4"
    DEEPSEEK_V4_C4_INDEXER = "deepseek_v4_c4_indexer"
    DEEPSEEK_V4_C128 = "deepseek_v4_c128"
    DEEPSEEK_V4_C4_STATE = "deepseek_v4_c4_state"
    DEEPSEEK_V4_C4_INDEXER_STATE = "deepseek_v4_c4_indexer_state"
    DEEPSEEK_V4_C128_STATE = "deepseek_v4_c128_state"


@dataclass
class SglangConfig:
    """HiCacheStorageConfig."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "example/model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: Mapping[str, object] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class SglangExtraInfo:
    """HiCacheStorageExtraInfo."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, object] | None = None


@dataclass
class SglangTransfer:
    """PoolTransfer."""

    name: str
    host_indices: torch.Tensor | None = None
    keys: Sequence[str] | None = None
    hit_policy: str = "all_pages"
    indices_from_pool: str | None = None


@dataclass
class SglangVerdict:
    """PoolTransferResult."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class SglangMetrics:
    """StorageMetrics."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class SglangStorage:
    """HiCacheStorage: it keeps the pools that it is told of."""

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        self.registered_pools = {host_pool_name: host_pool}


class TensorPool:
    """A host pool of one tensor for each buffer of a page."""

    shared_allocation_domain: object | None = None
    layout = "page_first"
    dtype: torch.dtype = torch.bfloat16

    def __init__(self, slots: int, page_size: int = 4, buffers: Sequence[int] = (64,)) -> None:
        self.page_size = page_size
        self.size = slots * page_size
        self.buffers = [torch.zeros((slots, count), dtype=torch.uint8) for count in buffers]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        assert len(indices) % self.page_size == 0
        slots = (indices[:: self.page_size] // self.page_size).tolist()
        addresses = [buffer.data_ptr() + slot * buffer.shape[1] for slot in slots for buffer in self.buffers]
        return addresses, [buffer.shape[1] for _ in slots for buffer in self.buffers]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([buffer[index // self.page_size] for buffer in self.buffers])

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(sum(buffer.shape[1] for buffer in self.buffers), dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        start = 0
        for buffer in self.buffers:
            buffer[index // self.page_size] = data_page[start : start + buffer.shape[1]]
            start += buffer.shape[1]

    def indices(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the engine's indices of pages."""
        starts = torch.tensor(list(slots), dtype=torch.int64) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size)).reshape(-1)


class FlatPool(TensorPool):
    """A pool that copies its pages and does not tell where they lie, as Mamba's with states beside its slots."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        raise NotImplementedError("no zero-copy")


class UnruledPool(TensorPool):
    """A pool in memory that others share, which is asked at every call where its pages lie."""

    shared_allocation_domain = "domain"


class LogicalPool(TensorPool):
    """A pool of indices without bytes, as DeepSeek-V4's anchor."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        return None

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


class HeadsPool(TensorPool):
    """MHATokenToKVPoolHost."""


class StatesPool(TensorPool):
    """MambaPoolHost."""


@contextmanager
def adapter_class(arguments: Mapping[str, object]) -> Iterator[type]:
    """Import the adapter's class over these names, with these arguments of the server, and forget both afterwards."""
    contents: dict[str, dict[str, object]] = {
        "sglang.srt.arg_groups.overrides": {
            "resolution_result": lambda args, name, default=None: args.get(name, default)
        },
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": SglangStorage,
            "HiCacheStorageConfig": SglangConfig,
            "HiCacheStorageExtraInfo": SglangExtraInfo,
            "PoolName": PoolNames,
            "PoolTransfer": SglangTransfer,
            "PoolTransferResult": SglangVerdict,
        },
        "sglang.srt.mem_cache.pool_host.mamba": {"MambaPoolHost": StatesPool},
        "sglang.srt.mem_cache.pool_host.mha": {"MHATokenToKVPoolHost": HeadsPool},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": SglangMetrics},
        "sglang.srt.runtime_context": {"get_server_args": lambda: arguments},
    }
    before = dict(sys.modules)
    for name, members in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(module).update(members)
    own = [f"unified_cache.integrations.sglang.{name}" for name in ("hicache", "engine_facts")]
    for name in own:
        sys.modules.pop(name, None)
    try:
        yield vars(import_module(own[0]))["UnifiedCacheHiCache"]
    finally:
        for name in {name for name in sys.modules if name.startswith("sglang")} | {*own}:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if name.startswith("sglang")})
