"""Prompts computed by SGLang's own tree over pages of known bytes, and what comes back of them, compared byte by byte.

HiCacheSession    writes prompts by way of the host to the store, forgets them, and reads them back

    write    device pages of known bytes are inserted; the engine backs them up to the host and stores them
    forget   tree and allocators are emptied, and every byte on device and host is overwritten
    read     the engine looks up, prefetches, matches and loads; what it says is restored is compared on the device
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context

from tests.engines.sglang.outcome import EngineJob, JobOutcome
from tests.engines.sglang.stacks import (
    KINDS,
    Geometry,
    allocated,
    build_tree,
    device_rows,
    step_until,
    tree_params,
)

DEVICE_JUNK, HOST_JUNK = 0xA5, 0x5A

NOBODYS = 7
"""Token of a page that nobody stores."""

WRONG_MAX = 10
"""Rows that are named of those that are wrong."""

DYNAMIC = {
    "backend_name": "unified_cache",
    "module_path": "unified_cache.integrations.sglang",
    "class_name": "UnifiedCacheHiCache",
    "interface_v1": 1,
}


def prompts_of(job: EngineJob, seed: int) -> "list[array[int]]":
    """Return token ids of prompts of whole pages; turns of one conversation where the job's prompts grow."""
    found = []
    for number in range(job.prompts):
        rng = np.random.default_rng([seed, 0 if job.grows else number])
        pages = job.pages * (number + 1 if job.grows else 1)
        found.append(array("q", rng.integers(1, 100_000, pages * job.page_tokens).tolist()))
    return found


@dataclass
class LoadedPages:
    """Pages of a request's prompt that it has, and that the tree does not know yet."""

    device_pages: int = 0
    host_pages: int = 0
    indices: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Full indices of the pages from the host."""
    state: torch.Tensor | None = None
    """Slot of the state that was loaded with them."""
    evicted: Mapping[ComponentType, int] = field(default_factory=dict)
    """By component, up to where the request has nothing."""


def held_indices(tree: UnifiedRadixCache, match: MatchResult) -> torch.Tensor:
    """Return the indices of what the device holds of a prompt; SGLang 0.5.21 says them itself."""
    try:
        found: torch.Tensor = tree.path_device_indices(match.last_device_node)[: match.device_prefix_len]
    except AttributeError:
        found = match.device_indices
    return found


class EngineSession(ABC):
    """One engine over one store, the bytes that its device has to hold, and what came of it."""

    tree: UnifiedRadixCache

    def __init__(self, job: EngineJob, outcome: JobOutcome, owner: int) -> None:
        """``owner`` tells ranks and stages apart that hold different bytes."""
        self.job, self.outcome, self.owner = job, outcome, owner
        self.page = job.page_tokens
        self.geometry = Geometry.of(job)
        self.parts = KINDS[job.stack](self.geometry)
        self.sources: dict[str, str] = {}
        """By pool the pool that its pages share places with."""

    @abstractmethod
    def rows(self, pool: str) -> list[torch.Tensor]:
        """Return the tensors of a pool on the device as bytes, a row for each page."""

    @abstractmethod
    def round(self, number: int) -> None:
        """Do what the job says, for the prompts of a round."""

    @abstractmethod
    def adapter(self) -> object:
        """Return what of ours the engine holds."""

    @abstractmethod
    def close(self) -> None:
        """Have the engine let go of it."""

    def content(self, pool: str, tensor: int, tokens: Sequence[int], size: int) -> torch.Tensor:
        """Return the bytes of one page in one tensor: a function of all tokens up to the page's end."""
        place = f"{self.owner} {pool} {tensor}".encode()
        digest = hashlib.sha256(place + hashlib.sha256(array("q", tokens).tobytes()).digest()).digest()
        bits = np.random.SFC64(int.from_bytes(digest[:8], "little"))
        return torch.from_numpy(np.frombuffer(np.random.Generator(bits).bytes(size), np.uint8).copy())

    def places(
        self, pool: str, indices: torch.Tensor, state: torch.Tensor | None, start: int = 0
    ) -> list[tuple[int, int]]:
        """Return (page, row) of the pages from ``start`` on whose Full indices these are, in one pool."""
        return self.parts.places(self.sources[pool], indices, state, start, self.page)

    def match(self, tokens: Sequence[int], request: object = None) -> Any:
        """Return what the tree has of a prompt."""
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)), req=request))

    def compute(self, tokens: Sequence[int], loaded: LoadedPages | None = None) -> torch.Tensor | None:
        """Insert a prompt of whole pages, what is neither held nor loaded filled as a forward pass would.

        Returned is the slot of its state, if it has one.
        """
        loaded = loaded or LoadedPages()
        match, requests = self.match(tokens), self.parts.requests
        on_device = held_indices(self.tree, match)
        held = len(on_device)
        known = torch.cat([on_device, loaded.indices])
        known = known[: len(tokens)]
        start, state = len(known) // self.page, loaded.state
        fresh = allocated(self.parts.allocator, len(tokens) - len(known))
        if requests is not None and len(fresh):
            if state is not None:
                requests.mamba_allocator.free(state)
            state = requests.mamba_allocator.alloc(1)
        for pool in self.sources if len(fresh) else ():
            for number, rows in enumerate(self.rows(pool)):
                for page, row in self.places(pool, fresh, state, start):
                    rows[row] = self.content(pool, number, tokens[: (page + 1) * self.page], rows.shape[1])
        if len(known) > held or len(fresh):
            value, evicted = torch.cat([known, fresh]), dict(loaded.evicted)
            key = RadixKey(array("q", tokens))
            inserted = self.tree.insert(
                InsertParams(
                    key=key,
                    value=value,
                    prev_prefix_len=held,
                    mamba_value=state,
                    component_evicted_seqlens=evicted,
                )
            )
            if requests is not None and state is not None and inserted.mamba_exist:
                requests.mamba_allocator.free(state)
        return state

    def compare(
        self,
        pool: str,
        tokens: Sequence[int],
        places: Sequence[tuple[int, int]],
        numbers: Collection[int] | None = None,
    ) -> None:
        """Compare what the device has of a prompt in tensors of a pool, of a window its last pages."""
        window = -(-self.geometry.window_tokens // self.page)
        for number, rows in enumerate(self.rows(pool)):
            if numbers is not None and number not in numbers:
                continue
            for page, row in places[-window:] if self.sources[pool] == "swa" else places:
                expected = self.content(pool, number, tokens[: (page + 1) * self.page], rows.shape[1])
                self.outcome.rows_checked += 1
                if not torch.equal(rows[row], expected):
                    self.outcome.rows_wrong += 1
                    self.outcome.wrong += [f"{pool} tensor {number} page {page} of {len(tokens)} tokens"]
                    del self.outcome.wrong[WRONG_MAX:]

    def forget(self) -> None:
        """Empty tree and allocators, and overwrite every byte."""
        self.tree.reset()
        self.parts.clear()
        self.overwrite()

    def overwrite(self) -> None:
        """Overwrite every byte on the device."""
        for pool in self.sources:
            for rows in self.rows(pool):
                rows.fill_(DEVICE_JUNK)


class HiCacheSession(EngineSession):
    """An engine whose HiCache has our storage, or SGLang's own file backend."""

    def __init__(self, job: EngineJob, store: dict[str, Any], group: object, outcome: JobOutcome) -> None:
        super().__init__(job, outcome, 0 if job.stack in {"mla", "dsv4"} else job.rank)
        is_file_backend = "file_storage_path" in store
        extra = {"prefetch_threshold": self.page, **({} if is_file_backend else DYNAMIC), **store}
        named = "file" if is_file_backend else "dynamic", json.dumps(extra)
        name, configuration = (None, None) if job.attach else named
        get_context().override(
            "the run", hicache_storage_backend=name, hicache_storage_backend_extra_config=configuration
        )
        self.tree = build_tree(tree_params(self.parts, job.core, self.page, self.geometry.window_tokens, group))
        if job.attach:
            done, said = self.tree.attach_storage_backend(*named, "example/model", "wait_complete", "write_through")
            assert done, said
        self.pools = {str(entry.name): entry.host_pool for entry in self.tree.host_pool_group.entries}
        sources = {str(spec.pool_name): str(spec.indices_from_pool) for spec in self.tree.sidecar_pool_specs}
        self.sources = {name: sources.get(name, name) for name in self.pools}
        pages = {name: pool.get_data_page(0) for name, pool in self.pools.items()}
        outcome.pools = {name: int(page.numel() * page.element_size()) for name, page in pages.items()}
        outcome.prompt_bytes = sum(size * (1 if pool == "mamba" else job.pages) for pool, size in outcome.pools.items())

    def rows(self, pool: str) -> list[torch.Tensor]:
        return device_rows(self.pools[pool])

    def adapter(self) -> object:
        return self.tree.cache_controller.storage_backend

    def close(self) -> None:
        done, said = self.tree.detach_storage_backend()
        self.outcome.detached = bool(done)
        if not done:
            raise RuntimeError(said)

    def round(self, number: int) -> None:
        prompts = prompts_of(self.job, number)
        self.outcome.expected_pages = [len(tokens) // self.page for tokens in prompts]
        if "write" in self.job.phases:
            self.outcome.write_s.append(self.write(prompts))
            self.forget()
        if "read" in self.job.phases:
            self.overwrite()
            self.outcome.read_s.append(self.read(prompts))
            self.tree.sanity_check()
            self.forget()

    def write(self, prompts: "Sequence[array[int]]") -> float:
        """Insert every prompt and wait until all is stored; return the seconds that storing took."""
        took_s = 0.0
        for tokens in prompts:
            self.compute(tokens)
            self.tree.flush_pending_backups()
            if self.job.grows:
                took_s += self._until(self._is_stored)
        return took_s + self._until(self._is_stored)

    def read(self, prompts: "Sequence[array[int]]") -> float:
        """Ask for every prompt, and a page more; load what the engine finds, and compare it.

        Return the seconds that the prefetch took.
        """
        asked = [tokens + array("q", [NOBODYS] * self.page) for tokens in prompts]
        groups = [[each] for each in asked] if self.job.grows else [asked]
        took_s = sum(self._prefetch(group) for group in groups)
        self.outcome.restored_pages = []
        for each, tokens in zip(asked, prompts, strict=True):
            pages = self._compare(each, self._load(each))
            self.outcome.restored_pages.append(pages)
            if pages * self.page < len(tokens):
                self.outcome.recomputed &= self._compare(each, self.compute(tokens)) * self.page == len(tokens)
        return took_s

    def forget(self) -> None:
        """Empty tree and allocators once all is stored, and overwrite every byte on device and host."""
        self._until(self._is_stored)
        super().forget()

    def overwrite(self) -> None:
        """Overwrite every byte on device and host."""
        super().overwrite()
        for host_pool in self.pools.values():
            for name in ("kv_buffer", "temporal_buffer", "conv_buffer"):
                buffers = vars(host_pool).get(name)
                for buffer in buffers if isinstance(buffers, list | tuple) else [buffers]:
                    if isinstance(buffer, torch.Tensor):
                        buffer.view(torch.uint8).fill_(HOST_JUNK)

    def _prefetch(self, asked: "Sequence[array[int]]") -> float:
        """Fetch prompts from the store to the host, all at once; return the seconds that it took."""
        tree, started_s = self.tree, time.perf_counter()
        handles: list[CacheRequestHandle] = []
        for tokens in asked:
            match = self.match(tokens)
            held = len(held_indices(tree, match)) + match.host_hit_length
            handles.append(CacheRequestHandle(f"request {len(handles)}", 0))
            has_prefix_keys = tree.hicache_storage_pass_prefix_keys
            tree.prefetch_from_storage(
                handles[-1],
                match.last_host_node,
                tokens[held:],
                tree.get_last_hash_value(match.last_host_node),
                tree.get_prefix_hash_values(match.last_host_node) if has_prefix_keys else None,
                matched_prefix_tokens=list(tokens[:held]),
            )
        self._until(lambda: all(tree.check_prefetch_progress(handle) for handle in handles))
        return time.perf_counter() - started_s

    def _load(self, asked: "array[int]") -> torch.Tensor | None:
        """Load what the host has of a prompt; return the slot of its state, if it has one."""
        match = self.match(asked)
        kv = SimpleNamespace(holds_mamba=False, mamba_pool_idx=None)
        request = SimpleNamespace(
            rid="loaded",
            last_node=match.last_device_node,
            swa_host_hit_length=match.swa_host_hit_length,
            mamba_host_hit_length=match.mamba_host_hit_length,
            kv=kv,
        )
        self.tree.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request))
        self.tree.ready_to_load_host_cache()
        self._until(lambda: not self.tree.ongoing_load_back)
        state: torch.Tensor | None = kv.mamba_pool_idx
        return state

    def _compare(self, asked: "array[int]", state: torch.Tensor | None) -> int:
        """Compare what the device holds of a prompt; return how many pages that are."""
        match = self.match(asked)
        indices = held_indices(self.tree, match)
        end = len(indices)
        for pool in self.pools if end else ():
            self.compare(pool, asked, self.places(pool, indices, state))
        return end // self.page

    def _is_stored(self) -> bool:
        tree = self.tree
        return not (tree.ongoing_write_through or tree.ongoing_backup or tree.cache_controller.ack_write_queue)

    def _until(self, condition: Callable[[], bool]) -> float:
        return step_until(self.tree, condition)
