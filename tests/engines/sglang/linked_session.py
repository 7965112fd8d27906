"""Prompts offloaded by SGLang's own tree through a linker, forgotten, loaded back, and compared byte by byte.

The linker copies in host memory without kernels. What the engine does is the job's ``linked``:

whole        prompts come back from the host tier, and from the store once the host tier has forgotten them
histories    look-ups over random pages with holes, beside those of SGLang's own file backend
requests     many requests over a store that misbehaves
write, read  prompts that HiCache has stored or will find, or another engine over a linker
once         prompts that are looked up once, and computed where that finds nothing
short        prompts that are shorter than a page, until the log says that nothing was restored
misplaced    loads whose indices are those of other pages than their keys, together as many
"""

import logging
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_server_args

from tests.engines.sglang.outcome import EngineJob, JobOutcome
from tests.engines.sglang.session import NOBODYS, EngineSession, LoadedPages, prompts_of
from tests.engines.sglang.stacks import draft_pool, step_until, tree_params
from tests.support.waiting import wait_until

HOST_BYTES = 256 << 20
"""Of the linker's host tier."""

FETCH_S = 30.0
"""Longest wait for pages that a look-up has begun to fetch."""

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


class Warnings(logging.Handler):
    """Puts warnings and errors of the library into an outcome, from now on."""

    def __init__(self, outcome: JobOutcome) -> None:
        super().__init__(logging.WARNING)
        self._outcome = outcome
        logging.getLogger("unified_cache").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._outcome.warnings.append(record.getMessage())


class LinkedSession(EngineSession):
    """SGLang's tree over one model's pools, with a linker beside it."""

    def __init__(self, job: EngineJob, store: Mapping[str, Any], group: object, outcome: JobOutcome) -> None:
        super().__init__(job, outcome, job.stage if job.stack in {"mla", "dsv4"} else job.rank + job.stage * job.size)
        Warnings(outcome)
        drafts = (draft_pool(self.geometry),) if job.draft_layers else ()
        params = tree_params(self.parts, job.core, self.page, self.geometry.window_tokens, group, drafts)
        self.tree = UnifiedRadixCache(params)
        self.linker = create_unified_cache_linker(
            get_server_args(),
            params,
            backend="dynamic",
            config={**DYNAMIC, "linker_extra_config": {"host_bytes": HOST_BYTES, **store}},
            components=set(self.tree.components),
        )
        look_up = self.linker.lookup

        def timed(rid: str, transfers: Any) -> Any:
            started_s = time.perf_counter()
            found = look_up(rid, transfers)
            outcome.late_lookups += time.perf_counter() - started_s > LATE_S
            return found

        self.linker.lookup = timed
        self.tree.init_cache_linker(self.linker)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.pools = {str(name): entry for name, entry in self.linker.pools.items()}
        self.sources = {name: str(entry.indices_from_pool) for name, entry in self.pools.items()}
        outcome.pools = {name: sum(rows.shape[1] for rows in self.rows(name)) for name in self.pools}

    def rows(self, pool: str) -> list[torch.Tensor]:
        found, entry = [], self.pools[pool]
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

    def adapter(self) -> object:
        return self.linker

    def round(self, number: int) -> None:
        prompts = [list(tokens) for tokens in prompts_of(self.job, number)]
        self.outcome.expected_pages = [len(tokens) // self.page for tokens in prompts]
        SCENARIOS[self.job.linked](self, prompts)

    def close(self) -> None:
        self.tree.release_host_resources()
        self.outcome.detached = True
        vars(self).clear()

    # ---- what a scheduler does -----------------------------------------------------------------------------------

    def compute(self, tokens: Sequence[int], loaded: LoadedPages | None = None) -> torch.Tensor | None:
        """Insert a prompt, and wait until what is new of it is offloaded."""
        state = super().compute(tokens, loaded)
        step_until(self.tree, lambda: not self.tree.linker.pending_offloads)
        return state

    def offload_pages(self, component: str, keys: list[str]) -> None:
        """Have the linker offload pages of these hashes, from wherever on the device, and wait for it."""
        indices = torch.arange(self.page, (len(keys) + 1) * self.page)
        if component == "mamba":
            indices = torch.ones(len(keys), dtype=torch.int64)
        if keys:
            assert self.linker.offload([PoolTransfer(PoolName(component), keys=keys, device_indices=indices)])
            step_until(self.tree, lambda: self.linker.num_completed_offloads() > 0)
            assert self.linker.pop_completed_offload()

    def wait_stored(self) -> None:
        """Wait until nothing waits to be stored. Not by steps: ranks take them together, and end this wait apart."""
        assert wait_until(lambda: not self.linker.storage_backlog(), STORED_S)

    def ask(self, tokens: Sequence[int], rid: str, pages: int) -> LoadedPages:
        """Ask for a prompt and a page more until the linker has so many pages of it; load them, and compare them."""
        asked, request = [*tokens, *[NOBODYS] * self.page], LinkerRequest(rid)
        until_s = time.perf_counter() + FETCH_S
        while True:
            match = self.match(asked, request)
            found = (match.device_prefix_len + match.host_hit_length) // self.page
            if found >= pages or time.perf_counter() > until_s:
                return self._load(asked, request, match)
            time.sleep(0.002)

    def _load(self, tokens: Sequence[int], request: LinkerRequest, match: Any) -> LoadedPages:
        page, tree = self.page, self.tree
        request.last_node = match.last_device_node
        request.swa_host_hit_length = match.swa_host_hit_length
        request.mamba_host_hit_length = match.mamba_host_hit_length
        loaded = LoadedPages(match.device_prefix_len // page, match.host_hit_length // page)
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
            self._compare_layer(tokens, loaded, layer)
        self.outcome.failed += bool(tree.finish_external_linker_loads([request]))
        return loaded

    def _compare_layer(self, tokens: Sequence[int], loaded: LoadedPages, layer: int) -> None:
        """Compare one layer of what was loaded."""
        for pool, entry in self.pools.items():
            mapped = entry.layer_mapping.get(layer)
            numbers = () if mapped is None else (mapped,) if isinstance(mapped, int) else mapped
            starts = accumulate((len(part) for part in entry.components[:-1]), initial=0)
            tensors = {start + number for start in starts for number in numbers}
            places = self.places(pool, loaded.indices, loaded.state, loaded.device_pages)
            self.compare(pool, tokens, places, tensors)

    def evict_all(self) -> None:
        """Evict everything from the device."""
        tokens = self.geometry.tokens
        extra = {"swa_num_tokens": tokens} if ComponentType.SWA in self.parts.components else {}
        extra |= {"mamba_num": 64} if self.parts.requests is not None else {}
        self.tree.evict(EvictParams(num_tokens=tokens, **extra))


Prompts = Sequence[Sequence[int]]


def _write(session: LinkedSession, prompts: Prompts) -> None:
    for tokens in prompts:
        session.compute(tokens)


def _store(session: LinkedSession, prompts: Prompts) -> None:
    """Write every prompt, and wait until it is stored."""
    _write(session, prompts)
    session.wait_stored()
    session.outcome.restored_pages = session.outcome.expected_pages


def _read(session: LinkedSession, prompts: Prompts) -> None:
    """Load every prompt from wherever it is; with states and windows it is then computed on."""
    session.outcome.restored_pages = []
    for number, tokens in enumerate(prompts):
        _answer(session, tokens, f"read {number}", len(tokens) // session.page)
        session.tree.sanity_check()


def _answer(session: LinkedSession, tokens: Sequence[int], rid: str, pages: int = 0) -> None:
    """Load what the linker has of a prompt, so many pages at least, and compute the rest."""
    loaded = session.ask(tokens, rid, pages)
    if not loaded.host_pages:
        session.tree.ready_to_load_host_cache()
    session.outcome.restored_pages.append(loaded.device_pages + loaded.host_pages)
    session.compute(tokens, loaded)


def _once(session: LinkedSession, prompts: Prompts) -> None:
    """Look up every prompt once, load what is there, and compute the rest, a batch for each."""
    for number, tokens in enumerate(prompts):
        _answer(session, tokens, f"once {number}")
    session.wait_stored()


def _short(session: LinkedSession, prompts: Prompts) -> None:
    """Begin batches of prompts that are shorter than a page."""
    for number in range(len(prompts)):
        session.match([NOBODYS] * (session.page // 2), LinkerRequest(f"short {number}"))
        session.tree.ready_to_load_host_cache()
    wait_until(lambda: any("nothing was restored" in line for line in session.outcome.warnings), FETCH_S)


def _misplaced(session: LinkedSession, prompts: Prompts) -> None:
    """Load two pages into the place of one, and one into that of two; then one into a place beyond the device's."""
    linker, page, outcome = session.linker, session.page, session.outcome
    keys = [f"{number:064x}" for number in range(3)]
    session.offload_pages("kv", keys)
    beyond = session.geometry.tokens + page
    outcome.expected_pages, outcome.restored_pages = [0, 0], []
    for asked in ([(keys[:2], page, 2 * page), (keys[2:], 2 * page, 4 * page)], [(keys[:1], beyond, beyond + page)]):
        for some, start, end in asked:
            linker.lookup(some[0], [PoolTransfer(PoolName.KV, keys=some)])
            indices = torch.arange(start, end)
            assert linker.load(some[0], [PoolTransfer(PoolName.KV, keys=some, device_indices=indices)])
        is_loaded = linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
        outcome.restored_pages.append(sum(len(some) for some, _, _ in asked) * is_loaded)
        outcome.rows_checked += 1


def _whole(session: LinkedSession, prompts: Prompts) -> None:
    """Load everything from the host tier, forget it, and load everything once more from the store."""
    _write(session, prompts)
    session.evict_all()
    session.overwrite()
    _read(session, prompts)
    from_host = session.outcome.restored_pages
    session.wait_stored()
    session.forget()
    _read(session, prompts)
    session.outcome.restored_pages = list(map(min, from_host, session.outcome.restored_pages))


def _histories(session: LinkedSession, prompts: Prompts) -> None:
    """Offload random pages of random components of a chain; compare every look-up with SGLang's file backend."""
    job, outcome = session.job, session.outcome
    outcome.expected_pages = []
    rng = random.Random(f"histories {job.stack} {job.core}")
    components = sorted({*session.sources.values(), "kv"})
    with tempfile.TemporaryDirectory() as directory:
        for number in range(job.requests):
            place = Path(directory, str(number))
            place.mkdir()
            theirs = HiCacheFile(_file_config(place))
            keys = [f"{rng.getrandbits(256):064x}" for _ in range(rng.randint(1, 24))]
            holes = rng.choice((0.0, 0.05, 0.3))
            for component in components:
                held = [key for key in keys if rng.random() >= holes]
                session.offload_pages(component, held)
                for key in held:
                    name = theirs._get_component_key(key, PoolName(component))
                    Path(place, f"{name}.bin").touch()
            span = rng.randint(1, len(keys))
            others = [
                PoolTransfer(
                    PoolName(component),
                    keys=keys[-1:] if component == "mamba" else keys[-span:],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
                for component in components
                if component != "kv"
            ]
            ours = session.linker.lookup(f"history {number}", [PoolTransfer(PoolName.KV, keys=keys), *others])
            expected = theirs.batch_exists_v2(keys, others).restorable_prefix_pages or []
            outcome.rows_checked += 1
            if ours != expected:
                outcome.rows_wrong += 1
                outcome.wrong.append(f"history {number}: {ours}, expected {expected}")
            outcome.expected_pages.append(len(expected))
            outcome.restored_pages.append(len(ours))


def _file_config(place: Path) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config={"file_storage_path": str(place)},
    )


def _requests(session: LinkedSession, prompts: Prompts) -> None:
    """Answer requests of a few prompts, again and again, whatever the store does; nothing may be wrong, nobody fail."""
    job, outcome = session.job, session.outcome
    outcome.expected_pages = []
    rng = random.Random(f"requests {job.stack} {job.core}")
    for number in range(job.requests):
        tokens = prompts[rng.randrange(len(prompts))]
        if rng.random() < 0.3:
            session.evict_all()
            session.overwrite()
        if rng.random() < 0.1:
            session.forget()
        cut = rng.randint(1, len(tokens) // session.page) * session.page
        _answer(session, tokens[:cut], f"request {number}")
        outcome.expected_pages.append(cut // session.page)
    session.tree.sanity_check()


SCENARIOS: dict[str, Callable[[LinkedSession, Prompts], None]] = {
    "whole": _whole,
    "histories": _histories,
    "requests": _requests,
    "write": _store,
    "read": _read,
    "once": _once,
    "short": _short,
    "misplaced": _misplaced,
}
