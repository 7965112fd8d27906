"""Objects of SGLang that the adapter uses, as protocols; as in SGLang 0.5.23."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

__all__ = ["EngineHostPool", "EngineTransfer", "ExtraInfo", "StorageConfig"]


class EngineHostPool(Protocol):
    """Pool of pages in host memory: what ``HostKVCache`` and ``LogicalHostPool`` have in common."""

    page_size: int
    """Indices that one page takes."""
    size: int
    """Indices in all."""
    layout: str
    dtype: object

    @property
    def shared_allocation_domain(self) -> object | None:
        """Pools that it shares memory with, and that may move its pages; None for memory of its own."""
        ...

    def get_page_buffer_meta(self, indices: torch.Tensor, /) -> tuple[list[int], list[int]] | None:
        """Return addresses and sizes of every buffer of the pages; None for a pool without bytes."""
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return a copy of a page, or a view."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a page of zeros, as ``get_data_page`` would."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy a page into the pool."""
        ...


class EngineTransfer(Protocol):
    """Pages of one pool that a call is about: ``PoolTransfer``."""

    @property
    def name(self) -> str:
        """Name of the pool, a text that is an enum's member as well."""
        ...

    @property
    def host_indices(self) -> torch.Tensor | None:
        """Where the pages lie, ``page_size`` indices each; None where a look-up is meant."""
        ...

    @property
    def keys(self) -> Sequence[str] | None:
        """Hashes of the pages, 64 hex digits; in a look-up any text, as many as the window has pages."""
        ...

    @property
    def hit_policy(self) -> str:
        """One of all_pages, trailing_pages, block_groups."""
        ...

    @property
    def indices_from_pool(self) -> str | None:
        """Name of the pool whose indices and keys it shares; None for its own."""
        ...


class ExtraInfo(Protocol):
    """Context of a call: ``HiCacheStorageExtraInfo``."""

    @property
    def prefix_keys(self) -> Sequence[str] | None:
        """Hashes of the pages before the call's, from the first on; None where they are not told."""
        ...


class StorageConfig(Protocol):
    """Place of a rank among the others, and the extra configuration: ``HiCacheStorageConfig``."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    """Whether all tensor-parallel ranks hold the same KV."""
    enable_storage_metrics: bool
    model_name: str | None
    should_split_heads: bool
    dcp_size: int
    extra_config: Mapping[str, object] | None
