"""Jobs that move chunks between vLLM's host memory and the store: bounded in number, loads before stores.

    scheduler:  submit ──> load: a get of the store, urgent   ─┐                            ┌─> ended ─> scheduler
                submit ──> store: a put of it, which waits    ─┴─> threads of EngineStore ──┘

What waits is bounded by the share of vLLM's rows that it holds: a row that waits to be stored cannot take what is
loaded. The store touches no row of a job that has ended, so with the last one nobody holds a view of vLLM's memory.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

from unified_cache.core.seal import Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

HINTS_MAX = 64
"""Calls of touch that wait; more are dropped: recency is worth no request's time."""


class HostRows:
    """Rows of vLLM's host memory, one for each chunk, as views of their payload."""

    def __init__(self, view: memoryview, stride_bytes: int, payload_bytes: int) -> None:
        self._flat = view.cast("B")
        self._stride_bytes = stride_bytes
        self.payload_bytes = payload_bytes
        self.rows_count = len(self._flat) // stride_bytes

    def row(self, number: int) -> memoryview:
        """Return the payload of one row; the caller releases it before ``release``."""
        start = number * self._stride_bytes
        return self._flat[start : start + self.payload_bytes]

    def release(self) -> None:
        """Release vLLM's memory."""
        self._flat.release()


class MovedChunk(NamedTuple):
    """One chunk of a job."""

    key: bytes
    """Offload key."""
    label: Label
    row: int


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A transfer that vLLM submitted."""

    number: int
    is_load: bool
    """Whether its rows are filled, and not stored."""
    chunks: tuple[MovedChunk, ...]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Outcome of a job. Its rows are vLLM's again."""

    job: ChunkJob
    answers: tuple[Answer, ...]
    """In the order of its chunks; UNAVAILABLE for one that the store was not asked for."""
    seconds: float
    """From the submit to the end."""

    @property
    def moved(self) -> tuple[bytes, ...]:
        """Offload keys of the chunks that were moved."""
        return tuple(chunk.key for chunk, answer in zip(self.job.chunks, self.answers, strict=True) if answer)

    @property
    def failed(self) -> tuple[bytes, ...]:
        """Offload keys of the others."""
        return tuple(chunk.key for chunk, answer in zip(self.job.chunks, self.answers, strict=True) if not answer)


class Moving:
    """Jobs of one tier. All methods belong to the scheduler's thread."""

    def __init__(
        self, store: EngineStore, rows: HostRows, settings: TierSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Move between ``store`` and ``rows``; the caller closes it before either of them."""
        self._store = store
        self._rows = rows
        self._level = settings.level
        self._clock = clock
        self._stores_rows_max = max(int(rows.rows_count * settings.store_share), 1)
        self._guard = Lock()
        self._rows_out = {True: 0, False: 0}
        """Rows of loads, and of stores, that have not ended."""
        self._jobs_count = 0
        self._closed = False
        self._ended: deque[JobEnd] = deque()
        self._touches_count = 0
        """Calls of touch that have not ended."""

    def submit(self, job: ChunkJob) -> None:
        """Begin a job; where more rows would wait with it than may, it ends at once, and nothing is moved.

        A job of more rows than that is begun where no other of its kind waits: else it would never be.
        """
        count = len(job.chunks)
        rows_max = max(self._rows.rows_count if job.is_load else self._stores_rows_max, count)
        with self._guard:
            is_taken = bool(count) and not self._closed and self._rows_out[job.is_load] + count <= rows_max
            if is_taken:
                self._rows_out[job.is_load] += count
                self._jobs_count += 1
        if not is_taken:
            self._ended.append(JobEnd(job, (Answer.UNAVAILABLE,) * count, 0.0))
            return
        pages = [EnginePage(chunk.label, (self._rows.row(chunk.row),)) for chunk in job.chunks]
        end = partial(self._end, job, self._clock())
        if job.is_load:
            self._store.start(Method.GET, pages, end)
        else:
            self._store.start(Method.PUT, pages, end, self._level)

    def touch(self, labels: Sequence[Label]) -> None:
        """Send the store a recency hint after what waits to be stored."""
        with self._guard:
            if self._closed or self._touches_count >= HINTS_MAX:
                return
            self._touches_count += 1
        self._store.start_asking(Method.TOUCH, tuple(labels), self._touched)

    def ended(self) -> list[JobEnd]:
        """Return the jobs that ended since the last call, those that the store is late with among them."""
        self._store.give_up_late()
        ended: list[JobEnd] = []
        with suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        return ended

    @property
    def jobs_count(self) -> int:
        """Jobs that have not ended."""
        return self._jobs_count

    def wait(self, timeout_s: float) -> bool:
        """Wait until every job has ended; False after ``timeout_s``."""
        return self._store.wait_until(lambda: not self._jobs_count, timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Wait until every job has ended.

        After ``timeout_s`` what has not begun ends with nothing moved, so this returns after one deadline more.
        """
        if not self.wait(timeout_s):
            self._store.drop_waiting()
            self.wait(math.inf)

    def close(self, timeout_s: float) -> bool:
        """End every job as ``drain`` does; return whether all of them have ended.

        False if a call of the store goes on past its deadline: then a thread may still hold a view of a row.
        """
        self.wait(timeout_s)
        self._closed = True
        self._store.drop_waiting()
        return self.wait(timeout_s)

    def _end(self, job: ChunkJob, submitted_s: float, answers: list[Answer]) -> None:
        with self._guard:
            self._rows_out[job.is_load] -= len(answers)
            self._ended.append(JobEnd(job, tuple(answers), self._clock() - submitted_s))
            self._jobs_count -= 1

    def _touched(self, answers: list[Answer]) -> None:
        with self._guard:
            self._touches_count -= 1
