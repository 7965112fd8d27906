"""An engine over some stores, as a job describes it. Imported once the engine can be."""

import gc
import logging
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import unified_cache
from tests.engines import stores
from tests.engines.sglang import cpu
from tests.engines.sglang.outcome import EngineJob, JobOutcome
from tests.engines.sglang.recording import Recording
from tests.engines.sglang.session import EngineSession, HiCacheSession
from tests.engines.sglang.stacks import group_of
from tests.support.waiting import wait_until

THREADS_END_S = 10.0
"""Longest wait for threads of ours to end, after the stores were detached and calls that hung were let go."""

VIEW_BYTES_MIN = 1024
"""Views of pages, their headers and bounce buffers have as much."""

PACKAGE = f"{Path(unified_cache.__file__).parent}/"


def run_job(job: EngineJob) -> list[JobOutcome]:
    """Run the engine over every store of a job, by turns.

    Returned is what came of it, and what is left of it once calls that hang were let go.
    """
    views = _views()
    outcomes = _run(job)
    while stores.OPENED:  # a name for one of them would keep its views
        stores.OPENED.pop().release()
    wait_until(lambda: not _threads_of_ours(), THREADS_END_S)
    for outcome in outcomes:
        outcome.threads_left, outcome.views_left = _threads_of_ours(), _views() - views
    return outcomes


def _run(job: EngineJob) -> list[JobOutcome]:
    cpu.serve_as_device(
        job.rank,
        job.stage,
        tp_size=job.size,
        pp_size=job.stages,
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
    runs = [_StoreRun(job, store, group) for store in job.stores]
    for number in range(job.rounds):
        for run in runs:
            run.round(number + 1)
    if job.record:
        recording.save(Path(job.record), job.stack)
    return [run.end() for run in runs]


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


class _StoreRun:
    """An engine over one store of a job."""

    def __init__(self, job: EngineJob, store: dict[str, Any], group: object) -> None:
        self.outcome = JobOutcome(str(store.get("url", "file backend")))
        started_s, opened_count = time.perf_counter(), len(stores.OPENED)
        if job.linked:
            from tests.engines.sglang.linked_session import LinkedSession  # noqa: PLC0415  # no linkers before 0.5.23

            self._session: EngineSession = LinkedSession(job, store, group, self.outcome)
        else:
            self._session = HiCacheSession(job, store, group, self.outcome)
        self.outcome.start_s = time.perf_counter() - started_s
        self._faulty = stores.OPENED[opened_count:]

    def round(self, number: int) -> None:
        try:
            self._session.round(number)
        except Exception as error:  # it is the outcome
            logging.exception("the run failed")
            self.outcome.error = f"{type(error).__name__}: {error}"

    def end(self) -> JobOutcome:
        outcome, alive = self.outcome, weakref.ref(self._session.adapter())
        started_s = time.perf_counter()
        try:
            self._session.close()
        except Exception as error:  # it is the outcome
            logging.exception("the engine does not let go of its store")
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        outcome.close_s = time.perf_counter() - started_s
        outcome.store_calls = sum(store.calls_count for store in self._faulty)
        gc.collect()
        outcome.collected = alive() is None
        return outcome
