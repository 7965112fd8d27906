"""An engine over some stores, as a job describes it. Imported once the engine can be."""

import gc
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sglang.srt.runtime_context import get_context

import unified_cache
from tests.engines import stores
from tests.engines.sglang import cpu, linking
from tests.engines.sglang.outcome import EngineJob, JobOutcome
from tests.engines.sglang.recording import Recording
from tests.engines.sglang.session import EnginePrompts, EngineSession
from tests.engines.sglang.stacks import Geometry, build_stack, group_of
from tests.support.waiting import wait_until

THREADS_END_S = 10.0
"""Longest wait for threads of ours to end, after the stores were detached and calls that hung were let go."""

VIEW_BYTES_MIN = 1024
"""Views of pages, their headers and bounce buffers have as much."""

DYNAMIC = {
    "backend_name": "unified_cache",
    "module_path": "unified_cache.integrations.sglang",
    "class_name": "UnifiedCacheHiCache",
    "interface_v1": 1,
}

PACKAGE = f"{Path(unified_cache.__file__).parent}/"


def run_job(job: EngineJob) -> list[JobOutcome]:
    """Run the engine over every store of a job, by turns."""
    if job.linked:
        return _ended(lambda: linking.run_linked(job))
    cpu.serve_as_device(
        job.rank,
        job.size,
        page_size=job.page_tokens,
        hicache_ratio=4.0,
        hicache_mem_layout=job.layout,
        hicache_io_backend=job.io_backend,
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        served_model_name="example/model",
        _mamba_cache_chunk_size=job.page_tokens,
    )
    group = group_of(job)
    recording = Recording()
    if job.record:
        recording.listen()

    def run() -> list[JobOutcome]:
        engines = [_Engine(job, store, group) for store in job.stores]
        for number in range(job.rounds):
            for engine in engines:
                engine.round(number + 1)
        if job.record:
            recording.save(Path(job.record), job.stack)
        return [engine.end() for engine in engines]

    return _ended(run)


def _ended(run: Callable[[], list[JobOutcome]]) -> list[JobOutcome]:
    """Return what came of a run, and what is left of it once calls that hang were let go."""
    views = _views()
    outcomes = run()
    for store in stores.OPENED:
        store.release()
    stores.OPENED.clear()
    wait_until(lambda: not _threads_of_ours(), THREADS_END_S)
    for outcome in outcomes:
        outcome.threads_left, outcome.views_left = _threads_of_ours(), _views() - views
    return outcomes


def _threads_of_ours() -> list[str]:
    """Return the names of threads that run code of this library, the caller's own aside."""
    frames = sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return [thread.name for thread in others if _is_ours(frames.get(thread.ident or 0))]


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def _views() -> int:
    """Return how many views of memory there are, constants of modules aside, which are there once one is imported."""
    gc.collect()
    modules = [module for name, module in sys.modules.items() if name.startswith("unified_cache.")]
    constants = {id(each) for module in modules for each in vars(module).values()}
    views = [each for each in gc.get_objects() if type(each) is memoryview and id(each) not in constants]
    return sum(_bytes_of(each) >= VIEW_BYTES_MIN for each in views)


def _bytes_of(view: memoryview) -> int:
    try:
        return view.nbytes
    except ValueError:  # it was released
        return 0


class _Engine:
    def __init__(self, job: EngineJob, store: dict[str, Any], group: Any) -> None:
        self.job = job
        self.outcome = JobOutcome(str(store.get("url", "file backend")))
        page = job.page_tokens
        name, extra = (None, None) if job.attach else _named(store, page)
        get_context().override("the run", hicache_storage_backend=name, hicache_storage_backend_extra_config=extra)
        started_s, opened_count = time.perf_counter(), len(stores.OPENED)
        self.stack = build_stack(job.stack, job.core, Geometry.of(job), group)
        if job.attach:
            done, said = self.stack.tree.attach_storage_backend(
                *_named(store, page), "example/model", "wait_complete", "write_through"
            )
            assert done, said
        self.outcome.start_s = time.perf_counter() - started_s
        self._faulty = stores.OPENED[opened_count:]

    def round(self, number: int) -> None:
        job, outcome = self.job, self.outcome
        prompts = EnginePrompts(job.prompts, job.pages, number, job.grows)
        owner = 0 if job.stack in {"mla", "dsv4"} else job.rank
        session = EngineSession(self.stack, prompts, owner, job.timeout_s)
        outcome.expected_pages = [prompts.pages_of(number) for number in range(job.prompts)]
        outcome.pools = {pool: session.page_bytes(pool) for pool in session.pools}
        outcome.prompt_bytes = sum(size * (1 if pool == "mamba" else job.pages) for pool, size in outcome.pools.items())
        try:
            if "write" in job.phases:
                outcome.write_s.append(session.write())
                session.forget()
            if "read" in job.phases:
                session.overwrite()
                found = session.read()
                outcome.read_s.append(found.took_s)
                outcome.restored_pages = found.restored_pages
                outcome.recomputed &= found.recomputed
                outcome.rows_checked += found.rows_checked
                outcome.rows_wrong += found.rows_wrong
                outcome.wrong += found.wrong[:5]
                self.stack.tree.sanity_check()
                session.forget()
        except Exception as error:  # it is the outcome
            logging.exception("the run failed")
            outcome.error = f"{type(error).__name__}: {error}"

    def end(self) -> JobOutcome:
        outcome = self.outcome
        backend = self.stack.tree.cache_controller.storage_backend
        alive = weakref.ref(backend)
        del backend
        started_s = time.perf_counter()
        try:
            done, said = self.stack.tree.detach_storage_backend()
            outcome.detached = bool(done)
            outcome.error = outcome.error or ("" if done else str(said))
        except Exception as error:  # noqa: BLE001  # it is the outcome
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.close_s = time.perf_counter() - started_s
        outcome.store_calls = sum(store.calls_count for store in self._faulty)
        gc.collect()
        outcome.collected = alive() is None
        return outcome


def _named(store: dict[str, Any], page_tokens: int) -> tuple[str, str]:
    """Return the name and the extra configuration of a store, of SGLang's own file backend or of ours."""
    is_file_backend = "file_storage_path" in store
    extra = {"prefetch_threshold": page_tokens, **({} if is_file_backend else DYNAMIC), **store}
    return "file" if is_file_backend else "dynamic", json.dumps(extra)
