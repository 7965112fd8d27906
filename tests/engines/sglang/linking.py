"""Runs of an engine over a linker, as jobs describe them: SGLang's own tree and pools, and no stand-ins.

whole        prompts that are offloaded, evicted, loaded from the host tier; forgotten, fetched from the store, loaded
histories    look-ups over random pages with holes, beside those of SGLang's own file backend
requests     many requests over a store that misbehaves
write, read  prompts that HiCache has stored or will find, or another engine over a linker
once         prompts that are looked up once, and computed where that finds nothing
short        prompts that are shorter than a page, until the log says that nothing was restored
"""

import gc
import logging
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.runtime_context import get_context, get_parallel

from tests.engines import stores
from tests.engines.sglang.linked_session import LinkedEngine, LinkerRequest, LoadedPages
from tests.engines.sglang.outcome import EngineJob, JobOutcome
from tests.engines.sglang.session import EnginePrompts
from tests.engines.sglang.stacks import Geometry, group_of
from tests.support.waiting import wait_until

NOBODYS = 7
"""Token of a page that nobody stores."""

HOST_BYTES = 256 << 20
"""Of the linker's host tier."""

FETCH_S = 30.0
"""Longest wait for pages that a look-up has begun to fetch."""


def run_linked(job: EngineJob) -> list[JobOutcome]:
    """Run the engine over a linker for every store of a job, one after the other."""
    get_context().override_server_args(
        device="cpu",
        tp_size=job.size,
        pp_size=job.stages,
        page_size=job.page_tokens,
        served_model_name="example/model",
        _mamba_cache_chunk_size=job.page_tokens,
    ).install()
    get_parallel().override_permanently(tp_rank=job.rank, pp_rank=job.stage, attn_tp_rank=job.rank, attn_dcp_rank=0)
    group = group_of(job)
    return [_run(job, store, group) for store in job.stores]


def _run(job: EngineJob, store: dict[str, Any], group: Any) -> JobOutcome:
    outcome = JobOutcome(str(store["url"]))
    owner = job.stage if job.stack in {"mla", "dsv4"} else job.rank + job.stage * job.size
    opened_count, started_s = len(stores.OPENED), time.perf_counter()
    engine = LinkedEngine(job.stack, job.core, Geometry.of(job), {"host_bytes": HOST_BYTES, **store}, group, owner)
    outcome.pools = {
        str(name): sum(rows.shape[1] for rows in engine.rows(of)) for name, of in engine.linker.pools.items()
    }
    outcome.start_s = time.perf_counter() - started_s
    try:
        SCENARIOS[job.linked](job, engine, outcome)
    except Exception as error:  # it is the outcome
        logging.exception("the run failed")
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.late_lookups = engine.late_lookups
    outcome.warnings = engine.warnings.lines
    alive, closing_s = weakref.ref(engine.linker), time.perf_counter()
    engine.tree.release_host_resources()
    outcome.close_s = time.perf_counter() - closing_s
    outcome.detached = True
    outcome.store_calls = sum(opened.calls_count for opened in stores.OPENED[opened_count:])
    del engine
    gc.collect()
    outcome.collected = alive() is None
    return outcome


def _prompts(job: EngineJob, number: int = 1) -> list[list[int]]:
    prompts = EnginePrompts(job.prompts, job.pages, number, job.grows)
    return [list(prompts.tokens(each, job.page_tokens)) for each in range(job.prompts)]


def _note(outcome: JobOutcome, loaded: LoadedPages) -> None:
    outcome.rows_checked += loaded.rows_checked
    outcome.rows_wrong += loaded.rows_wrong
    outcome.wrong += loaded.wrong[:5]
    outcome.failed += loaded.failed


def _ask(engine: LinkedEngine, outcome: JobOutcome, tokens: Sequence[int], rid: str, pages: int) -> LoadedPages:
    """Ask for a prompt and a page more until the linker has so many pages of it; load them."""
    asked, request = [*tokens, *[NOBODYS] * engine.page], LinkerRequest(rid)
    until_s = time.perf_counter() + FETCH_S
    while True:
        match = engine.match(asked, request)
        found = (match.device_prefix_len + match.host_hit_length) // engine.page
        if found >= pages or time.perf_counter() > until_s:
            break
        time.sleep(0.002)
    loaded = engine.load(asked, request, match)
    _note(outcome, loaded)
    return loaded


def _write(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    prompts = _prompts(job)
    outcome.expected_pages = [len(tokens) // engine.page for tokens in prompts]
    for tokens in prompts:
        engine.compute(tokens)


def _store(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Write every prompt, and wait until it is stored."""
    _write(job, engine, outcome)
    engine.wait_stored()
    outcome.restored_pages = outcome.expected_pages


def _read(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Load every prompt from wherever it is; with states and windows it is then computed on."""
    prompts = _prompts(job)
    outcome.expected_pages = [len(tokens) // engine.page for tokens in prompts]
    restored = []
    for number, tokens in enumerate(prompts):
        loaded = _ask(engine, outcome, tokens, f"read {number}", outcome.expected_pages[number])
        restored.append(loaded.device_pages + loaded.host_pages)
        engine.insert_loaded(tokens, loaded)
        engine.tree.sanity_check()
    outcome.restored_pages = restored


def _once(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Look up every prompt once, load what is there, and compute the rest, a batch for each."""
    prompts = _prompts(job)
    outcome.expected_pages = [len(tokens) // engine.page for tokens in prompts]
    for number, tokens in enumerate(prompts):
        loaded = _ask(engine, outcome, tokens, f"once {number}", 0)
        if not loaded.host_pages:
            engine.tree.ready_to_load_host_cache()
        outcome.restored_pages.append(loaded.device_pages + loaded.host_pages)
        engine.insert_loaded(tokens, loaded)
    engine.wait_stored()


def _short(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Begin batches of prompts that are shorter than a page."""
    for number in range(job.prompts):
        engine.match([NOBODYS] * (engine.page // 2), LinkerRequest(f"short {number}"))
        engine.tree.ready_to_load_host_cache()
    wait_until(lambda: bool(engine.warnings.of("nothing was restored")), FETCH_S)


def _whole(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Load everything from the host tier, forget it, and load everything once more from the store."""
    _write(job, engine, outcome)
    engine.evict_all()
    engine.overwrite()
    _read(job, engine, outcome)
    from_host = outcome.restored_pages
    engine.wait_stored()
    engine.forget()
    _read(job, engine, outcome)
    outcome.restored_pages = list(map(min, from_host, outcome.restored_pages))


def _histories(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Offload random pages of random components of a chain; compare every look-up with SGLang's file backend."""
    rng = random.Random(f"histories {job.stack} {job.core}")
    components = sorted({str(entry.indices_from_pool) for entry in engine.linker.pools.values()} | {"kv"})
    with tempfile.TemporaryDirectory() as directory:
        for number in range(job.requests):
            place = Path(directory, str(number))
            place.mkdir()
            theirs = HiCacheFile(_file_config(place))
            keys = [f"{rng.getrandbits(256):064x}" for _ in range(rng.randint(1, 24))]
            holes = rng.choice((0.0, 0.05, 0.3))
            for component in components:
                held = [key for key in keys if rng.random() >= holes]
                engine.offload_pages({"kv": held} if component == "kv" else {component: held})
                for key in held:
                    name = theirs._get_component_key(key, PoolName.KV if component == "kv" else PoolName(component))
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
            ours = engine.linker.lookup(f"history {number}", [PoolTransfer(PoolName.KV, keys=keys), *others])
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


def _requests(job: EngineJob, engine: LinkedEngine, outcome: JobOutcome) -> None:
    """Answer requests of a few prompts, again and again, whatever the store does; nothing may be wrong, nobody fail."""
    rng = random.Random(f"requests {job.stack} {job.core}")
    prompts = _prompts(job)
    for number in range(job.requests):
        tokens = prompts[rng.randrange(len(prompts))]
        if rng.random() < 0.3:
            engine.evict_all()
            engine.overwrite()
        if rng.random() < 0.1:
            engine.forget()
        cut = rng.randint(1, len(tokens) // engine.page) * engine.page
        loaded = _ask(engine, outcome, tokens[:cut], f"request {number}", 0)
        engine.insert_loaded(tokens[:cut], loaded)
        outcome.expected_pages.append(cut // engine.page)
        outcome.restored_pages.append(loaded.device_pages + loaded.host_pages)
    engine.tree.sanity_check()


SCENARIOS: dict[str, Callable[[EngineJob, LinkedEngine, JobOutcome], None]] = {
    "whole": _whole,
    "histories": _histories,
    "requests": _requests,
    "write": _store,
    "read": _read,
    "once": _once,
    "short": _short,
}
