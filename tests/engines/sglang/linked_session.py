"""Prompts offloaded by SGLang's own tree through a linker, forgotten, loaded back, and compared byte by byte.

No stand-ins: torch has streams and events for host memory, and the linker copies there without kernels.
"""

import hashlib
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_server_args

from tests.engines.sglang.session import known_bytes
from tests.engines.sglang.stacks import KINDS, Geometry, Parts, allocated, draft_pool, step_until, tree_params
from tests.support.waiting import wait_until

DEVICE_JUNK = 0xA5

STORED_S = 60.0

LATE_S = 0.4
"""Of a look-up: it takes a millisecond, and the deadline of a call to a store that misbehaves is 0.5 s."""

DYNAMIC = {"linker": "UnifiedCacheExternalLinker", "linker_module_path": "unified_cache.integrations.sglang"}


class LinkerRequest:
    """Stand-in for a request of the scheduler, as far as the tree asks it; everything else of it is None."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.kv = ReqKvInfo(kv_allocated_len=0)
        self.priority = 0
        self.last_node: object = None
        self.swa_host_hit_length = self.mamba_host_hit_length = 0

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass
class LoadedPages:
    """Pages that one request got, and how many of their rows were wrong."""

    device_pages: int
    host_pages: int
    failed: bool
    rows_checked: int = 0
    rows_wrong: int = 0
    wrong: list[str] = field(default_factory=list)
    indices: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Full indices of the pages from the host, which the request has and the tree does not know yet."""
    state: torch.Tensor | None = None
    """Slot of the state that was loaded with them."""
    evicted: dict[ComponentType, int] = field(default_factory=dict)
    """By component, up to where the request has nothing."""


class Warnings(logging.Handler):
    """Warnings and errors of the library, from now on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("unified_cache").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def of(self, words: str) -> list[str]:
        """Return the lines that have these words."""
        return [line for line in self.lines if words in line]


class LinkedEngine:
    """SGLang's tree over one model's pools, with a linker beside it."""

    def __init__(
        self,
        kind: str,
        core: str,
        geometry: Geometry,
        extra: dict[str, Any],
        group: object = None,
        owner: int = 0,
    ) -> None:
        """``owner`` tells ranks and stages apart whose bytes differ."""
        self.warnings = Warnings()
        self.page, self.owner = geometry.page_tokens, owner
        self.geometry = geometry
        self.parts: Parts = KINDS[kind](geometry)
        drafts = (draft_pool(geometry),) if geometry.draft_layers else ()
        self.params = tree_params(self.parts, core, self.page, geometry.window_tokens, group, drafts)
        self.tree = UnifiedRadixCache(self.params)
        self.linker = create_unified_cache_linker(
            get_server_args(),
            self.params,
            backend="dynamic",
            config={**DYNAMIC, "linker_extra_config": extra},
            components=set(self.tree.components),
        )
        self.late_lookups = 0
        look_up = self.linker.lookup

        def timed(rid: str, transfers: Any) -> Any:
            started_s = time.perf_counter()
            found = look_up(rid, transfers)
            self.late_lookups += time.perf_counter() - started_s > LATE_S
            return found

        self.linker.lookup = timed
        self.tree.init_cache_linker(self.linker)
        self.params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(
            self.linker.layer_done_counter
        )
        self._numbers = 0

    # ---- bytes that are known ------------------------------------------------------------------------------------

    def content(self, pool: str, tensor: int, tokens: Sequence[int], size: int) -> torch.Tensor:
        """Return the bytes of one page in one tensor: a function of all tokens up to its end."""
        return known_bytes(f"{self.owner} {pool} {tensor}", hashlib.sha256(array("q", tokens).tobytes()).digest(), size)

    def rows(self, entry: Any) -> list[torch.Tensor]:
        """Return the tensors of a pool as bytes, a row for each page."""
        found = []
        for buffer in entry.kv_buffer:
            page_bytes = entry.buffer_meta[0][0][2] if len({m[2] for p in entry.buffer_meta for m in p}) == 1 else 0
            flat = (
                buffer.view(torch.uint8).reshape(buffer.shape[0], -1) if buffer.dim() > 2 else buffer.view(torch.uint8)
            )
            per_page = page_bytes // flat.shape[1] if page_bytes else 1
            if per_page > 1:
                flat = flat[: flat.shape[0] // per_page * per_page].view(flat.shape[0] // per_page, -1)
            found.append(flat)
        return found

    def places(
        self, entry: Any, indices: torch.Tensor, state: torch.Tensor | None, start: int
    ) -> list[tuple[int, int]]:
        """Return (page, row) of the pages from ``start`` on whose Full indices these are, in one pool."""
        return self.parts.places(str(entry.indices_from_pool), indices, state, start, self.page)

    # ---- what a scheduler does -----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], request: LinkerRequest) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)), req=request))

    def compute(self, tokens: Sequence[int]) -> None:
        """Insert a prompt of whole pages, what the device lacks of it filled as a forward pass would."""
        self.insert_loaded(tokens, LoadedPages(0, 0, failed=False))

    def insert_loaded(self, tokens: Sequence[int], loaded: LoadedPages) -> None:
        """Insert a prompt of whole pages whose middle was loaded: the rest is filled as a forward pass would."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        held = match.device_prefix_len
        known = self.tree.path_device_indices(match.last_device_node)[:held]
        known = torch.cat([known, loaded.indices])[: len(tokens)]
        start, state = len(known) // self.page, loaded.state
        fresh = allocated(self.parts.allocator, len(tokens) - len(known))
        if self.parts.requests is not None and len(fresh):
            if state is not None:
                self.parts.requests.mamba_allocator.free(state)
            state = self.parts.requests.mamba_allocator.alloc(1)
        for name, entry in self.linker.pools.items():
            for number, rows in enumerate(self.rows(entry)):
                for page, row in self.places(entry, fresh, state, start) if len(fresh) else []:
                    rows[row] = self.content(str(name), number, tokens[: (page + 1) * self.page], rows.shape[1])
        if start * self.page > held or len(fresh):
            inserted = self.tree.insert(
                InsertParams(
                    key=RadixKey(array("q", tokens)),
                    value=torch.cat([known, fresh]),
                    prev_prefix_len=held,
                    mamba_value=state,
                    component_evicted_seqlens=loaded.evicted,
                )
            )
            if state is not None and inserted.mamba_exist:
                self.parts.requests.mamba_allocator.free(state)  # type: ignore[union-attr]  # it has states
        step_until(self.tree, lambda: not self.tree.linker.pending_offloads)

    def offload_pages(self, keys: dict[str, list[str]]) -> None:
        """Have the linker offload pages of these hashes, from wherever on the device, and wait for it."""
        transfers = [
            PoolTransfer(
                PoolName(component),
                keys=of,
                device_indices=torch.arange(self.page, (len(of) + 1) * self.page)
                if component != "mamba"
                else torch.ones(len(of), dtype=torch.int64),
            )
            for component, of in keys.items()
            if of
        ]
        if transfers:
            assert self.linker.offload(transfers)
            step_until(self.tree, lambda: self.linker.num_completed_offloads() > 0)
            assert self.linker.pop_completed_offload()

    def wait_stored(self) -> None:
        """Wait until nothing waits to be stored. Not by steps: ranks take them together, and end this wait apart."""
        assert wait_until(self.is_stored, STORED_S)

    def is_stored(self) -> bool:
        """Return whether nothing waits to be stored."""
        return not self.linker.storage_backlog()

    def load(self, tokens: Sequence[int], request: LinkerRequest, match: Any) -> LoadedPages:
        """Load what a match has found, wait for it, compare it, and insert the rest as computed."""
        page, tree = self.page, self.tree
        request.last_node = match.last_device_node
        request.swa_host_hit_length = match.swa_host_hit_length
        request.mamba_host_hit_length = match.mamba_host_hit_length
        loaded = LoadedPages(match.device_prefix_len // page, match.host_hit_length // page, failed=False)
        if not match.host_hit_length:
            return loaded
        count, _ = tree.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request))
        loaded.host_pages = int(count) // page
        if not count:
            return loaded
        loaded.indices = tree.linker.private_load_indices[request.rid]
        if "mamba" in map(str, self.linker.pools):
            loaded.state = request.kv.mamba_pool_idx.unsqueeze(0)
        loaded.evicted = {part: request.kv.get_evicted_seqlen(part) for part in (ComponentType.SWA,)}
        counter = self.linker.layer_done_counter
        counter.set_consumer(tree.ready_to_load_host_cache())
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
            self.compare(tokens, loaded, layer)
        loaded.failed = bool(tree.finish_external_linker_loads([request]))
        return loaded

    def compare(self, tokens: Sequence[int], loaded: LoadedPages, layer: int) -> None:
        """Compare one layer of what was loaded, of a window its last pages."""
        window = -(-self.geometry.window_tokens // self.page)
        for name, entry in self.linker.pools.items():
            mapped = entry.layer_mapping.get(layer)
            numbers = () if mapped is None else (mapped,) if isinstance(mapped, int) else mapped
            rows, start = self.rows(entry), 0
            wanted = []
            for part in entry.components:
                wanted += [start + number for number in numbers]
                start += len(part)
            places = self.places(entry, loaded.indices, loaded.state, loaded.device_pages)
            for number in wanted:
                for page, row in places[-window:] if str(entry.indices_from_pool) == "swa" else places:
                    loaded.rows_checked += 1
                    size = rows[number].shape[1]
                    expected = self.content(str(name), number, tokens[: (page + 1) * self.page], size)
                    if not torch.equal(rows[number][row], expected):
                        loaded.rows_wrong += 1
                        loaded.wrong.append(f"{name} tensor {number} page {page}")

    def evict_all(self) -> None:
        """Evict everything from the device."""
        tokens = self.geometry.tokens
        extra = {"swa_num_tokens": tokens} if ComponentType.SWA in self.parts.components else {}
        extra |= {"mamba_num": 64} if self.parts.requests is not None else {}
        self.tree.evict(EvictParams(num_tokens=tokens, **extra))

    def forget(self) -> None:
        """Empty tree, allocators and host tier."""
        self.tree.reset()
        self.parts.clear()
        self.overwrite()

    def overwrite(self) -> None:
        """Overwrite every byte on the device."""
        for entry in self.linker.pools.values():
            for buffer in entry.kv_buffer:
                buffer.view(torch.uint8).fill_(DEVICE_JUNK)
