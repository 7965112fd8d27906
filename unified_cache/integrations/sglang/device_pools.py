"""SGLang's device pools as the linker moves them: layer by layer, in the order in which their pages are stored.

SGLang groups the pools of DeepSeek-V4, DSA, MLA with states, and windows with states; where it refuses, the pools of
plain models are grouped here in the same form, from their public buffers. A page is stored as HiCache's host pools of
the layout ``layer_first`` store it, so that both find each other's pages, but for states, which have no such layout::

    a page of keys and values    K of layer 0 | V of layer 0 | K of layer 1 | ...
    of latents, or of rows       layer 0 | layer 1 | ...
    of states                    temporal of layer 0, of layer 1, ... | convolutions of layer 0, ...
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from unified_cache.core.errors import ConfigError, InputError
from unified_cache.core.pool import PoolSpec, Slots
from unified_cache.integrations.engine_store.pools import check_slots
from unified_cache.integrations.sglang.naming import PoolFacts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

HOST_LAYOUT = "layer_first"
"""Layout of HiCache's host pools whose pages have the same bytes."""


@dataclass(frozen=True, slots=True)
class LinkedPool:
    """One device pool."""

    spec: PoolSpec
    component: str
    """Name of the pool that its pages share keys and places with; its own where it leads."""
    rows: tuple[torch.Tensor, ...]
    """Its buffers in the order of a page's bytes, a row for each page."""
    by_layer: Mapping[int, tuple[int, ...]]
    """By layer of the model that a load waits for: numbers of its buffers in ``rows``."""
    facts: PoolFacts
    entry: DevicePoolEntry

    def slots(self, indices: torch.Tensor, pages_count: int) -> Slots:
        """Return the rows of so many pages, whose indices the component's allocator gave.

        Raises:
            ValueError: not the indices of whole pages of the pool, as SGLang sees it.
            InputError: not of so many, or of pages that the pool does not have.
        """
        span, places = self.entry.page_size, self.entry.translate_indices(indices)
        starts = np.array(self.entry.prepare_locations(places), np.int64)
        slots = (starts // (1 if _rows_are_pages(self.entry) else span)).tolist()
        if len(slots) != pages_count:
            raise InputError(f"expected indices of {pages_count} pages of {self.spec.name}, found {len(slots)}")
        check_slots(slots, min(map(len, self.rows)))
        return np.array(slots, np.int32)


def group_pools(params: "CacheInitParams", components: "set[ComponentType]") -> DevicePoolGroup:
    """Return the device pools as SGLang groups them, or in the same form where it does not.

    Raises:
        ConfigError: pools that nobody can group.
    """
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    try:
        return resolve_hybrid_device_pool_group(
            kvcache=pool, page_size=params.page_size, params=params, components=components
        )
    except (AssertionError, ValueError) as error:
        entries = list(_own_entries(pool, params))
        if not entries or params.mtp_draft_device_pools:
            raise ConfigError(f"the pools of {type(pool).__name__} cannot be linked: {error}") from error
    page = params.page_size
    for draft in params.sidecar_draft_device_pools:
        layers = {layer: layer for layer in range(draft.layer_num)}
        entries.append(_heads(PoolName.DRAFT, draft, layers, page, PoolName.KV))
    layers_count = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, layers_count, page)


def linked_pools(group: DevicePoolGroup, pool: KVCache) -> list[LinkedPool]:
    """Return the pools of a group; ``pool`` is the one that SGLang's allocator hands out slots of."""
    return [_linked(entry, _facts(entry, pool)) for entry in group.entries]


def _linked(entry: DevicePoolEntry, facts: PoolFacts) -> LinkedPool:
    page = 1 if _rows_are_pages(entry) else entry.page_size
    places, by_layer = _places(entry)
    rows = tuple(_page_rows(entry.components[part][number], page) for part, number in places)
    spec = PoolSpec(str(entry.name), sum(row[0].nbytes for row in rows))
    return LinkedPool(spec, str(entry.indices_from_pool), rows, by_layer, facts, entry)


def _places(entry: DevicePoolEntry) -> tuple[list[tuple[int, int]], dict[int, tuple[int, ...]]]:
    """Return the buffers of a page in order, as (part, number in it), and by layer their numbers in this order."""
    order: list[tuple[int, int]] = []
    by_layer: dict[int, tuple[int, ...]] = {}
    for part in range(len(entry.components)):
        for layer in sorted(entry.layer_mapping):
            for number in _numbers(entry.layer_mapping[layer]):
                by_layer[layer] = (*by_layer.get(layer, ()), len(order))
                order.append((part, number))
    expected = [(part, number) for part, buffers in enumerate(entry.components) for number in range(len(buffers))]
    if sorted(order) != expected:
        raise ConfigError(f"each buffer of pool {entry.name} must be of one layer, found {entry.layer_mapping}")
    return order, by_layer


def _facts(entry: DevicePoolEntry, pool: KVCache) -> PoolFacts:
    """Return the facts of HiCache's host pool whose pages have the same bytes; of others, our own."""
    buffers_count = {len(_numbers(mapped)) for mapped in entry.layer_mapping.values()}
    dtype = str(entry.kv_buffer[0].dtype).removeprefix("torch.")
    kind, is_rank_own = f"linked {type(entry.device_pool).__name__}", True
    if isinstance(pool, DeepSeekV4TokenToKVPool):
        is_rank_own = False
        if buffers_count == {1}:  # no draft's layers among them
            kind, dtype = "DeepSeekV4PagedHostPool", "uint8"
            kind = "DeepSeekV4StateHostPool" if str(entry.name).endswith("_state") else kind
    elif isinstance(entry.device_pool, MLATokenToKVPool):
        is_rank_own = False
        if type(entry.device_pool) is MLATokenToKVPool and buffers_count == {1}:
            kind = "MLATokenToKVPoolHost"
    elif type(entry.device_pool) is MHATokenToKVPool and buffers_count == {2}:
        kind = "MHATokenToKVPoolHost"
    sizes = [meta[2] for meta in (entry.buffer_meta[part][number] for part, number in _places(entry)[0])]
    return PoolFacts(kind, HOST_LAYOUT, dtype, entry.page_size, tuple(sizes), is_rank_own)


def _numbers(mapped: "int | Sequence[int]") -> Sequence[int]:
    return [mapped] if isinstance(mapped, int) else mapped


def _rows_are_pages(entry: DevicePoolEntry) -> bool:
    buffer, (_, _, page_bytes) = entry.kv_buffer[0], entry.buffer_meta[0][0]
    return bool(page_bytes == buffer.nbytes // buffer.shape[0])


def _page_rows(buffer: torch.Tensor, page: int) -> torch.Tensor:
    """Return a buffer with a row for each page, of which it has ``page`` rows."""
    return buffer if page == 1 else buffer[: buffer.shape[0] // page * page].view(buffer.shape[0] // page, -1)


def _own_entries(pool: KVCache, params: "CacheInitParams") -> Iterator[DevicePoolEntry]:
    """Yield the pools of plain models; nothing for others."""
    page = params.page_size
    if type(pool) is MHATokenToKVPool or type(pool) is MLATokenToKVPool:
        layers = {layer: layer for layer in range(pool.layer_num)}
        yield _anchor(pool, layers, page)
    elif type(pool) is SWAKVPool:
        places = {layer - pool.start_layer: place for layer, place in pool.layers_mapping.items()}
        full, window = (
            {layer: number for layer, (number, in_window) in places.items() if in_window is wanted}
            for wanted in (False, True)
        )
        yield _heads(PoolName.KV, pool.full_kv_pool, full, page)
        yield _heads(PoolName.SWA, pool.swa_kv_pool, window, page)
    elif type(pool) is HybridLinearKVPool:
        mapping = pool.full_attention_layer_id_mapping
        yield _anchor(pool.full_kv_pool, {layer - pool.start_layer: number for layer, number in mapping.items()}, page)
        yield _states(params.req_to_token_pool, pool.start_layer)


def _anchor(pool: KVCache, layers: Mapping[int, int], page: int) -> DevicePoolEntry:
    if isinstance(pool, MHATokenToKVPool):
        return _heads(PoolName.KV, pool, layers, page)
    if type(pool) is not MLATokenToKVPool:
        raise ConfigError(f"a pool of {type(pool).__name__} cannot be linked")
    return _entry(PoolName.KV, PoolName.KV, pool, [pool.kv_buffer], dict(layers), page)


def _heads(
    name: PoolName, pool: MHATokenToKVPool, layers: Mapping[int, int], page: int, source: PoolName | None = None
) -> DevicePoolEntry:
    """Return a pool of keys and values of heads."""
    if type(pool) is not MHATokenToKVPool or pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise ConfigError(f"a pool of {type(pool).__name__} with buffers of its own kind or of scales cannot be linked")
    count = len(pool.k_buffer)
    mapping = {layer: (number, count + number) for layer, number in layers.items()}
    return _entry(name, source or name, pool, [[*pool.k_buffer, *pool.v_buffer]], mapping, page)


def _states(requests: HybridReqToTokenPool, start_layer: int) -> DevicePoolEntry:
    """Return the pool of recurrent states, a row for each."""
    if requests.mamba_ckpt_pool is not None or requests.short_conv_pool.enabled or requests.ngram_pool.enabled:
        raise ConfigError("states beside their slots, or in checkpoints of int8, cannot be linked")
    states, layers = requests.mamba_pool.mamba_cache, range(requests.mamba_pool.num_mamba_layers)
    parts = [[part[layer] for layer in layers] for part in (states.temporal, *states.conv) if part.numel()]
    mapping = {layer - start_layer: number for layer, number in requests.mamba_map.items()}
    return _entry(PoolName.MAMBA, PoolName.MAMBA, requests.mamba_pool, parts, mapping, 1)


def _entry(
    name: PoolName,
    source: PoolName,
    pool: KVCache,
    parts: Sequence[Sequence[torch.Tensor]],
    layers: Mapping[int, int | Sequence[int]],
    page: int,
) -> DevicePoolEntry:
    return DevicePoolEntry(
        name=name,
        indices_from_pool=source,
        device_pool=pool,
        components=parts,
        layer_mapping=dict(layers),
        page_size=page,
        rows_are_pages=page == 1,
    )
