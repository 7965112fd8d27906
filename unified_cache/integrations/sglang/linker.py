"""The class that SGLang loads by ``--unified-cache-external-linker-backend dynamic``: its caches over our host tier.

    device rows ── offload: copy ──> host tier ── store: seal, put ──> store
    device rows <── load: copy, layer by layer ── host tier <── fetch: get, verify ── store

SGLang looks up on its scheduler's thread, waits for nothing, and ends every request of a batch with an error if a load
fails. So a look-up tells of pages that lie complete in host memory alone, and pins them; what the store has beyond is
fetched meanwhile, for a later look-up. Every rank has a host tier of its own, and SGLang loads what all of them have.

Offloads and loads have a thread each, in the order in which they came. A call answers from what SGLang says alone
where ranks would part otherwise: an offload that finds no room is taken, and fails.
"""

# pyright: reportMissingImports=false

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_memory, get_parallel, get_serving
from sglang.srt.utils import get_device_module

from unified_cache.controller.memory import PAGE_ALIGN_BYTES, DevicePool, TieredMemory
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Slots, Tier
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.integrations.engine_store import EngineStore, HitWatch
from unified_cache.integrations.engine_store.pools import EnginePools, PageRows, Rows
from unified_cache.integrations.sglang.device_pools import LinkedPool, group_pools, linked_pools
from unified_cache.integrations.sglang.engine_facts import NOTHING_RESTORED, engine_facts
from unified_cache.integrations.sglang.linker_tier import ComponentSlots, LinkerHostTier
from unified_cache.integrations.sglang.naming import ANCHOR_POOL, name_bundle, span_of
from unified_cache.integrations.sglang.settings import LinkerSettings
from unified_cache.integrations.sglang.tier_storage import ComponentBundles, TierStorage
from unified_cache.storage_backends.common.bounded_call import BoundedCall, CallThreads

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.server_args import ServerArgs

if "record_offload_ready" not in vars(UnifiedCacheLinker):
    raise ImportError("a linker that tells when pages may be read", name="sglang")

logger = logging.getLogger(__name__)
device_module = get_device_module()

RESET_S_MAX = 60.0
"""Longest wait for copies between host and device when all is forgotten."""

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for pages that wait to be stored when the engine ends."""


@dataclass(slots=True)
class _LinkerCounts:
    """Calls since the linker was made, and their pages, those of the leading component."""

    lookups: int = 0
    """Calls: a queued request is looked up again and again, so hits are the pages loaded."""
    loads: int = 0
    loaded_pages: int = 0
    failed_loads: int = 0
    offloads: int = 0
    offloaded_pages: int = 0
    failed_offloads: int = 0
    """For want of room in the host tier, or since a copy failed."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Pages of one component: the engine's indices of them, and their hashes."""

    component: str
    keys: Sequence[str]
    indices: torch.Tensor


@dataclass(frozen=True, slots=True)
class _QueuedLoad:
    transfers: Sequence[_Transfer]
    slots: ComponentSlots | None
    """Pinned slots of the host tier; None for a load that will fail."""


class _HostRows(PageRows):
    """Pages of one pool in the host tier's memory, for ``EnginePools``."""

    def __init__(self, memory: TieredMemory, pool: LinkedPool) -> None:
        self._memory, self._spec = memory, pool.spec
        self.buffers_bytes = (pool.spec.page_bytes,)

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        return [(page[HEADER_BYTES:],) for (page,) in self._memory.buffers(self._spec, slots)]


class UnifiedCacheExternalLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is not installed here
    """Device pools of one rank over a host tier and a store. SGLang calls it on its scheduler's thread."""

    def __init__(
        self,
        server_args: "ServerArgs",
        params: "CacheInitParams",
        *,
        components: "set[ComponentType]",
        extra_config: Mapping[str, object],
        forward_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Take the pools, allocate the host tier, and open the store; one that is away is used as soon as it is there.

        Raises:
            ConfigError: a setting is missing, unknown or wrong, or the engine is set up in a way that is not supported.
        """
        settings = LinkerSettings.of(extra_config)
        if get_memory().enable_unified_memory or get_parallel().attn_dcp_size > 1:
            raise ConfigError("unified memory and decode context parallelism are not supported by the linker")
        self.forward_stream = forward_stream
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        group = group_pools(params, components)
        self.pools = group.entry_map
        config = _storage_config(params)
        self._linked = {linked.spec.name: linked for linked in linked_pools(group, pool)}
        self._by_component: dict[str, list[LinkedPool]] = {}
        for linked in sorted(self._linked.values(), key=lambda linked: linked.component != ANCHOR_POOL):
            self._by_component.setdefault(linked.component, []).append(linked)
        pages_max = _pages_max(self._by_component, settings.host_bytes)
        self._memory = TieredMemory.allocate(
            [DevicePool(linked.spec, linked.rows) for linked in self._linked.values()],
            {name: pages_max[linked.component] for name, linked in self._linked.items()},
        )
        self._tier = LinkerHostTier(pages_max)
        self._engine_pools, self._store = self._open(config, settings)
        bundles = {name: _bundles(pools, config.tp_rank) for name, pools in self._by_component.items()}
        self._storage = TierStorage(self._tier, self._store, self._engine_pools, bundles, pages_max)
        self._watch = HitWatch(self._store.counts, settings.url, NOTHING_RESTORED)
        self._wait_s = settings.lookup_wait_s
        self._ranks_count = config.tp_size * config.attn_cp_size
        self.layer_done_counter = LayerWiseLoadCounter(group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, _QueuedLoad] = {}
        self._offloaded: deque[bool] = deque()
        self._offloads = CallThreads("unified-cache-linker-offload", 1)
        self._loads = CallThreads("unified-cache-linker-load", 1)
        self._counts = _LinkerCounts()
        self._url = settings.url
        tier = ", ".join(f"{pages} of {name}" for name, pages in pages_max.items())
        stored = ", ".join(f"{name} ({linked.spec.page_bytes} bytes)" for name, linked in self._linked.items())
        logger.info(
            "unified-cache links pages of %d tokens, %s, to %s, by way of host memory for %s pages",
            params.page_size,
            stored,
            self._url,
            tier,
        )

    # ---- look-up and load ------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return every number of pages that a load could restore now; their pages stay until the next look-up."""
        spans = {str(each.name): span_of(each) for each in transfers}
        keys = next(list(each.keys or ()) for each in transfers if each.name == PoolName.KV)
        if not keys or not set(spans) >= set(self._by_component):
            return []
        ends = self._tier.lookup(rid, keys, spans)
        end = ends[-1] if ends else 0
        if end < len(keys):
            fetch = self._storage.fetch(rid, keys, spans, end)
            if fetch is not None:
                self._watch.count_request()
                if self._wait_s and fetch.wait(self._wait_s):
                    ends = self._tier.lookup(rid, keys, spans)
        self._counts.lookups += 1
        return ends

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of pages that a look-up has reported."""
        if rid in self._queued:
            raise RuntimeError(f"a load for {rid} is already queued")
        parts = self._parts(transfers)
        if not parts:
            return False
        slots = self._tier.take(rid, {part.component: part.keys for part in parts})
        if slots is None and self._ranks_count == 1:
            return False
        # Where there are other ranks, they load: a rank that did not would leave them.
        self._queued[rid] = _QueuedLoad(parts, slots)
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin what is queued; return the number that the forward waits for it by, -1 if nothing is."""
        if not self._counts.lookups:  # a batch begins, and SGLang had no whole page to look up
            self._watch.count_request()
        if not self._queued:
            return -1
        queued, self._queued = list(self._queued.values()), {}
        number: int = self.layer_done_counter.update_producer()
        self._counts.loads += len(queued)
        copy = partial(self._load, number, queued, self.record_offload_ready())
        self._loads.submit(copy, partial(self._end_load, number, queued))
        return number

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a load writes no more; return whether all of it is there."""
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a load that has not begun."""
        load = self._queued.pop(rid, None)
        if load is not None and load.slots is not None:
            self._tier.unpin(load.slots)
        return load is not None

    def _load(self, number: int, queued: Sequence[_QueuedLoad], ready: Sequence["torch.cuda.Event"]) -> None:
        """Copy pages to the device, layer by layer; a layer is complete when its copies have ended."""
        for event in ready:
            event.synchronize()
        counter = self.layer_done_counter
        with self._memory.ordered(Tier.DEVICE):
            moves = self._moves(queued)
            copied: list[torch.cuda.Event] = []
            for layer in range(counter.num_layers):
                for linked, sources, targets in moves:
                    for part in linked.by_layer.get(layer, ()):
                        self._memory.load_layer(linked.spec, part, sources, targets)
                copied.append(device_module.Event())
                copied[-1].record()
                if layer:  # the one before has ended while this one was begun
                    copied[layer - 1].synchronize()
                    counter.complete(number, layer - 1)
            copied[-1].synchronize()
            counter.complete(number, counter.num_layers - 1)

    def _end_load(self, number: int, queued: Sequence[_QueuedLoad], call: BoundedCall[None]) -> None:
        error = call.take_error()
        if error is None:
            self._counts.loaded_pages += sum(len(load.transfers[0].keys) for load in queued)
        else:
            self._counts.failed_loads += len(queued)
            logger.error("a load failed, and SGLang ends its requests", exc_info=error)
            self.layer_done_counter.fail(number, error)
        for load in queued:
            if load.slots is not None:
                self._tier.unpin(load.slots)

    def _moves(self, queued: Sequence[_QueuedLoad]) -> list[tuple[LinkedPool, Slots, Slots]]:
        """Return by pool the slots to copy from and to, of all loads together."""
        moves: dict[str, tuple[list[Slots], list[Slots]]] = {}
        for load in queued:
            if load.slots is None:
                raise LookupError("a page that a look-up reported is not in host memory any more")
            for part in load.transfers:
                for linked in self._by_component[part.component]:
                    sources, targets = moves.setdefault(linked.spec.name, ([], []))
                    sources.append(load.slots[part.component])
                    targets.append(linked.slots(part.indices, len(part.keys)))
        return [
            (self._linked[name], np.concatenate(sources), np.concatenate(targets))
            for name, (sources, targets) in moves.items()
        ]

    # ---- offload ---------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue pages to be copied to the host tier, all of the call or none, and stored from there."""
        parts = self._parts(transfers)
        if not parts:
            return False
        self._counts.offloads += 1
        copy = partial(self._offload, parts, self.record_offload_ready())
        self._offloads.submit(copy, partial(self._end_offload, parts))
        return True

    def num_completed_offloads(self) -> int:
        """Return how many offloads have ended that nobody has taken."""
        return len(self._offloaded)

    def pop_completed_offload(self) -> bool:
        """Take the oldest of them; return whether its pages are in the host tier."""
        return self._offloaded.popleft()

    def _end_offload(self, parts: Sequence[_Transfer], call: BoundedCall[bool]) -> None:
        error = call.take_error()
        if error is not None:
            logger.error("an offload failed, and its pages are computed again once they are evicted", exc_info=error)
        is_held = error is None and call.result()
        if is_held:
            self._counts.offloaded_pages += len(parts[0].keys)
        else:
            self._counts.failed_offloads += 1
        self._offloaded.append(is_held)

    def _offload(self, parts: Sequence[_Transfer], ready: Sequence["torch.cuda.Event"]) -> bool:
        """Copy the pages that the host tier lacks; return whether it holds all now."""
        for event in ready:
            event.synchronize()
        clears_count = self._tier.clears_count
        copied = {part.component: self._tier.lacking(part.component, part.keys) for part in parts}
        slots = self._tier.reserve({name: len(keys) for name, keys in copied.items()})
        if slots is None:
            return False
        try:
            with self._memory.ordered(Tier.HOST):
                for part in parts:
                    lacking = set(copied[part.component])
                    is_lacking = np.array([key in lacking for key in part.keys], np.bool_)
                    for linked in self._by_component[part.component]:
                        sources = linked.slots(part.indices, len(part.keys))[is_lacking]
                        self._memory.backup(linked.spec, sources, slots[part.component])
        except BaseException:
            self._tier.free(slots)
            raise
        if not self._tier.publish(copied, slots, clears_count):
            return False
        keys = {part.component: part.keys for part in parts}
        if not self._tier.holds(keys):  # one of them has gone for others' pages
            return False
        self._storage.store(keys)
        return True

    # ---- operation -------------------------------------------------------------------------------------------------

    def storage_backlog(self) -> int:
        """Return how many pages wait to be stored."""
        return self._storage.backlog

    def reset(self) -> None:
        """Wait until copies from and to the device have ended, and forget the host tier; what is stored stays."""
        self._end_copies()
        self._tier.clear()
        self._storage.forget()
        self._offloaded.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """End all copies, store what waits, within ``CLOSE_TIMEOUT_S``, and release memory and store."""
        self._end_copies()
        self._loads.close(RESET_S_MAX)
        self._offloads.close(RESET_S_MAX)
        self._storage.close(CLOSE_TIMEOUT_S)
        counts = self._counts, self._storage.counts(), self._store.counts()
        logger.info("unified-cache unlinks %s: %s, %s, %s", self._url, *counts)
        self._engine_pools.close()
        self._store.close(CLOSE_TIMEOUT_S)
        self._memory.close()

    def _end_copies(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for threads in (self._loads, self._offloads):
            threads.submit(lambda: None).settle(RESET_S_MAX)

    def _parts(self, transfers: Sequence[PoolTransfer]) -> list[_Transfer]:
        """Return the transfers of components that are linked, the leading one first."""
        parts = [
            _Transfer(str(each.name), list(each.keys), each.device_indices)
            for each in transfers
            if each.keys and each.device_indices is not None and str(each.name) in self._by_component
        ]
        return sorted(parts, key=lambda part: part.component != ANCHOR_POOL)

    def _open(self, config: HiCacheStorageConfig, settings: LinkerSettings) -> tuple[EnginePools, EngineStore]:
        facts = engine_facts(config, settings)
        pool_facts = {name: linked.facts for name, linked in self._linked.items()}
        store = EngineStore.open(settings.url, settings.store_config, bytes_max=settings.bytes_max)
        pools = EnginePools(store, lambda names, _: name_bundle(facts, pool_facts, names))
        for name, linked in self._linked.items():
            pools.add(name, _HostRows(self._memory, linked))
        return pools, store


def _pages_max(components: Mapping[str, Sequence[LinkedPool]], host_bytes: int) -> dict[str, int]:
    """Divide host memory among components as the device's is divided."""
    rows = {name: min(len(part) for linked in pools for part in linked.rows) for name, pools in components.items()}
    page_bytes = {
        name: sum(HEADER_BYTES + PAGE_ALIGN_BYTES + linked.spec.page_bytes for linked in pools)
        for name, pools in components.items()
    }
    share = host_bytes / sum(rows[name] * page_bytes[name] for name in components)
    # One slot of each is the padding sink's.
    pages = {name: int(rows[name] * share) - 1 for name in components}
    if min(pages.values()) < 1:
        needed = max(page_bytes.values())
        raise ConfigError(f"host_bytes must hold pages of each pool, of up to {needed} bytes, found {host_bytes}")
    return pages


def _bundles(pools: Sequence[LinkedPool], rank: int) -> ComponentBundles:
    """Return how the pools of a component are stored, as HiCache's calls name them: the anchor by itself."""
    bundles: dict[object, list[LinkedPool]] = {}
    for linked in pools:
        together = ANCHOR_POOL if linked.spec.name == ANCHOR_POOL else linked.facts.bundled_by
        bundles.setdefault(together, []).append(linked)
    names = {tuple(sorted(each.spec.name for each in bundle)): bundle for bundle in bundles.values()}
    written = [each for each, bundle in names.items() if rank == 0 or bundle[0].facts.is_rank_own]
    return ComponentBundles(tuple(names), tuple(written))


def _storage_config(params: "CacheInitParams") -> HiCacheStorageConfig:
    """Return what HiCache would tell its storage of this rank."""
    parallel = get_parallel()
    has_dp = is_dp_attention_enabled()
    return HiCacheStorageConfig(
        tp_rank=parallel.attn_tp_rank if has_dp else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if has_dp else parallel.tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=get_serving().served_model_name,
    )
