"""EnginePrompts written through an engine's own path, forgotten, read back, and compared byte by byte.

write    device pages of known bytes are inserted; the engine backs them up to the host and stores them
forget   tree and allocators are emptied, and every byte on device and host is overwritten
read     the engine looks up, prefetches, matches and loads; what it says is restored is compared on the device
"""

import hashlib
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.engines.sglang.stacks import Stack, allocated, device_rows, step_until

DEVICE_JUNK, HOST_JUNK = 0xA5, 0x5A


@dataclass(frozen=True)
class EnginePrompts:
    """EnginePrompts of whole pages; turns of one conversation where it ``grows``, each longer by ``pages``."""

    count: int
    pages: int
    seed: int = 1
    grows: bool = False

    def tokens(self, number: int, page_tokens: int) -> "array[int]":
        """Return the token ids of a prompt."""
        rng = np.random.default_rng([self.seed, 0 if self.grows else number])
        pages = self.pages * (number + 1 if self.grows else 1)
        return array("q", rng.integers(1, 100_000, pages * page_tokens).tolist())

    def pages_of(self, number: int) -> int:
        """Return how many pages a prompt has."""
        return self.pages * (number + 1 if self.grows else 1)


@dataclass
class ReadBack:
    """Pages that came back, and how many of their rows were wrong."""

    restored_pages: list[int] = field(default_factory=list)
    """By prompt."""
    recomputed: bool = True
    """Whether every prompt that did not come back as a whole could be computed again from where it ended."""
    rows_checked: int = 0
    rows_wrong: int = 0
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0


def known_bytes(place: str, chain: bytes, size: int) -> torch.Tensor:
    """Return what one tensor holds of a page: a function of the tensor and of all tokens up to the page's end."""
    seed = int.from_bytes(hashlib.sha256(place.encode() + chain).digest()[:8], "little")
    return torch.from_numpy(np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(size), np.uint8).copy())


class EngineSession:
    """One engine and what is asked of it."""

    def __init__(self, stack: Stack, prompts: EnginePrompts, owner: int = 0, timeout_s: float = 60.0) -> None:
        """``owner`` tells ranks apart that hold different bytes; 0 where all hold the same."""
        self.stack, self.prompts, self.owner, self.timeout_s = stack, prompts, owner, timeout_s
        self.tree = stack.tree
        self._chains: dict[tuple[int, int], bytes] = {}
        """By prompt and page: digest of all tokens up to its end."""
        self.page = stack.geometry.page_tokens
        self.pools = {str(entry.name): entry.host_pool for entry in self.tree.host_pool_group.entries}
        sources = {str(spec.pool_name): str(spec.indices_from_pool) for spec in self.tree.sidecar_pool_specs}
        self.sources = {name: sources.get(name, name) for name in self.pools}

    # ---- bytes that are known ------------------------------------------------------------------------------------

    def _content(self, pool: str, tensor: int, prompt: int, page: int, size: int) -> torch.Tensor:
        if (prompt, page) not in self._chains:
            tokens = self.prompts.tokens(prompt, self.page)[: (page + 1) * self.page]
            self._chains[prompt, page] = hashlib.sha256(tokens.tobytes()).digest()
        return known_bytes(f"{self.owner} {pool} {tensor}", self._chains[prompt, page], size)

    def _places(self, pool: str, indices: torch.Tensor, state: torch.Tensor | None) -> list[tuple[int, int]]:
        """Return (page, device row) of a prompt's pages in a pool, for Full indices of its pages from the first on."""
        return self.stack.parts.places(self.sources[pool], indices, state, 0, self.page)

    def page_bytes(self, pool: str) -> int:
        """Return the bytes of one page of a pool."""
        page = self.pools[pool].get_data_page(0)
        return int(page.numel() * page.element_size())

    # ---- phases --------------------------------------------------------------------------------------------------

    def write(self) -> float:
        """Insert every prompt and wait until all is stored; return the seconds that storing took."""
        took_s = 0.0
        for number in range(self.prompts.count):
            self._compute(number)
            self.tree.flush_pending_backups()
            if self.prompts.grows:
                took_s += self._until(self._is_stored)
        return took_s + self._until(self._is_stored)

    def _compute(self, number: int) -> torch.Tensor | None:
        """Insert what the device lacks of a prompt, filled as a forward pass would; return its state's slot, if any."""
        tokens = self.prompts.tokens(number, self.page)
        end = self.prompts.pages_of(number)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        start = match.device_prefix_len // self.page
        indices = allocated(self.stack.parts.allocator, (end - start) * self.page)
        if start:
            held = self.tree.path_device_indices(match.last_device_node)[: start * self.page]
            indices = torch.cat([held, indices])
        requests = self.stack.parts.requests
        state = None if requests is None else requests.mamba_allocator.alloc(1)
        for pool, host_pool in self.pools.items():
            for number_of, rows in enumerate(device_rows(host_pool)):
                for page, row in self._places(pool, indices, state):
                    if page >= start:
                        rows[row] = self._content(pool, number_of, number, page, rows.shape[1])
        self.tree.insert(
            InsertParams(key=RadixKey(tokens), value=indices, prev_prefix_len=start * self.page, mamba_value=state)
        )
        return state

    def forget(self) -> None:
        """Empty tree and allocators, and overwrite every byte on device and host."""
        self._until(self._is_stored)
        self.tree.reset()
        self.stack.parts.clear()
        self.overwrite()

    def overwrite(self) -> None:
        """Overwrite every byte on device and host."""
        for host_pool in self.pools.values():
            for rows in device_rows(host_pool):
                rows.fill_(DEVICE_JUNK)
            for name in ("kv_buffer", "temporal_buffer", "conv_buffer"):
                buffers = vars(host_pool).get(name)
                for buffer in buffers if isinstance(buffers, list | tuple) else [buffers]:
                    if isinstance(buffer, torch.Tensor):
                        buffer.view(torch.uint8).fill_(HOST_JUNK)

    def read(self) -> ReadBack:
        """Ask for every prompt, and one token more; load what the engine finds, and compare it."""
        found = ReadBack()
        together = (
            [[number] for number in range(self.prompts.count)]
            if self.prompts.grows
            else [list(range(self.prompts.count))]
        )
        for numbers in together:
            found.took_s += self._prefetch(numbers)
        for number in range(self.prompts.count):
            self._load(number, found)
        return found

    def _prefetch(self, numbers: list[int]) -> float:
        asked = [self._asked(number) for number in numbers]
        started_s = time.perf_counter()
        handles = []
        for number, tokens in zip(numbers, asked, strict=True):
            match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
            held = match.device_prefix_len + match.host_hit_length
            handles.append(CacheRequestHandle(f"request {number}", 0))
            prefix_keys = (
                self.tree.get_prefix_hash_values(match.last_host_node)
                if self.tree.hicache_storage_pass_prefix_keys
                else None
            )
            self.tree.prefetch_from_storage(
                handles[-1],
                match.last_host_node,
                tokens[held:],
                self.tree.get_last_hash_value(match.last_host_node),
                prefix_keys,
                matched_prefix_tokens=list(tokens[:held]),
            )
        self._until(lambda: all(self.tree.check_prefetch_progress(handle) for handle in handles))
        return time.perf_counter() - started_s

    def _load(self, number: int, found: ReadBack) -> None:
        tokens = self._asked(number)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        kv = SimpleNamespace(holds_mamba=False, mamba_pool_idx=None)
        request = SimpleNamespace(
            rid=f"request {number}",
            last_node=match.last_device_node,
            swa_host_hit_length=match.swa_host_hit_length,
            mamba_host_hit_length=match.mamba_host_hit_length,
            kv=kv,
        )
        self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        self.tree.ready_to_load_host_cache()
        self._until(lambda: not self.tree.ongoing_load_back)
        found.restored_pages.append(self._compare(number, kv.mamba_pool_idx, found))
        if found.restored_pages[-1] < self.prompts.pages_of(number):
            state = self._compute(number)
            found.recomputed &= self._compare(number, state, found) == self.prompts.pages_of(number)

    def _compare(self, number: int, state: torch.Tensor | None, found: ReadBack) -> int:
        """Compare what the device holds of a prompt, and of a window its last pages; return how many pages it holds."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(self._asked(number))))
        end = int(match.device_prefix_len) // self.page
        if not end:
            return 0
        indices = self.tree.path_device_indices(match.last_device_node)[: end * self.page]
        window = self.stack.geometry.window_tokens // self.page
        for pool, host_pool in self.pools.items():
            for tensor, rows in enumerate(device_rows(host_pool)):
                places = self._places(pool, indices, state)
                for page, row in places[-window:] if self.sources[pool] == "swa" else places:
                    found.rows_checked += 1
                    if not torch.equal(rows[row], self._content(pool, tensor, number, page, rows.shape[1])):
                        found.rows_wrong += 1
                        found.wrong.append(f"prompt {number} {pool} tensor {tensor} page {page}")
        return end

    # ---- the engine's loop -----------------------------------------------------------------------------------------

    def _asked(self, number: int) -> "array[int]":
        """Return a prompt and a page that nobody stored."""
        return self.prompts.tokens(number, self.page) + array("q", [7] * self.page)

    def _is_stored(self) -> bool:
        tree = self.tree
        return not (tree.ongoing_write_through or tree.ongoing_backup or tree.cache_controller.ack_write_queue)

    def _until(self, condition: Callable[[], bool]) -> float:
        return step_until(self.tree, condition, self.timeout_s)
