"""Threads that move chunks between vLLM's host memory and the store: bounded, loads before stores.

    scheduler:  submit ──> loads: urgent       ─┐ cut into pieces                      ┌─> ended ─> scheduler
                submit ──> stores: deferrable  ─┴─> a thread: get or put of the store ─┘

Stores have all threads but some, so a load finds one that no store is on; where loads wait, they go first, between two
pieces too (``CallThreads``). What waits is bounded by the share of vLLM's rows that it holds: a row that waits to be
stored cannot take what is loaded.

The store returns from a call by its deadline and touches no row after it, so every job ends, and with the last one
nobody holds a view of vLLM's memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from unified_cache.core.seal import Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.common.bounded_call import BoundedCall
from unified_cache.storage_backends.common.call_threads import CallThreads
from unified_cache.storage_backends.protocol import BATCH_BYTES, PIECE_BYTES_MAX, Answer, Level

SHARED_BYTES_MIN = 512 << 10
"""A load is shared among the threads that load, so much to each at the least: one reads while another one copies."""

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


class Direction(Enum):
    """Way of a job."""

    LOAD = "load"
    STORE = "store"


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
    direction: Direction
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


@dataclass(slots=True, eq=False)
class _Run:
    """A job under way. Under the lock of moving."""

    job: ChunkJob
    answers: list[Answer]
    submitted_s: float
    left: int
    """Pieces that have not ended."""
    is_given_up: bool = False
    """Whether the store did not answer: the rest of the job is not worth its deadline."""


class _Piece(NamedTuple):
    """Chunks [start, end) of a job: one call of the store."""

    run: _Run
    start: int
    end: int


class Moving:
    """Jobs of one tier. ``submit``, ``ended``, ``drain`` and ``close`` belong to the scheduler's thread."""

    def __init__(
        self, store: EngineStore, rows: HostRows, settings: TierSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start moving between ``store`` and ``rows``; the caller closes it before either of them."""
        self._store = store
        self._rows = rows
        self._level = settings.level
        self._clock = clock
        self._rows_max = {
            Direction.LOAD: rows.rows_count,
            Direction.STORE: max(int(rows.rows_count * settings.store_share), 1),
        }
        """Rows of jobs that have not ended, at most."""
        self._rows_out = dict.fromkeys(Direction, 0)
        """Rows of jobs that have not ended."""
        self._jobs_count = 0
        self._closed = False
        self._changed = threading.Condition()
        self._ended: deque[JobEnd] = deque()
        self._touches_count = 0
        """Calls of touch that have not ended."""
        self._threads_count = settings.load_threads + settings.store_threads
        self._threads = CallThreads(
            "unified-cache-moving", self._threads_count, deferrable_max=settings.store_threads, clock=clock
        )

    def submit(self, job: ChunkJob) -> None:
        """Take a job; where it would be one too many for the rows that may wait it ends at once, with nothing moved.

        One that has more rows than that is taken where no other of its direction waits: else it would never be.
        """
        run = _Run(job, [Answer.UNAVAILABLE] * len(job.chunks), self._clock(), 0)
        with self._changed:
            rows_out = self._rows_out[job.direction] + len(job.chunks)
            is_too_many = rows_out > max(self._rows_max[job.direction], len(job.chunks))
            if self._closed or not job.chunks or is_too_many:
                self._ended.append(JobEnd(job, tuple(run.answers), 0.0))
                return
            self._rows_out[job.direction] = rows_out
            self._jobs_count += 1
            pieces = self._pieces(run)
            run.left = len(pieces)
        for piece in pieces:
            moved = partial(self._moved, piece)
            self._threads.submit(partial(self._move, piece), moved, is_urgent=job.direction is Direction.LOAD)

    def touch(self, labels: Sequence[Label]) -> None:
        """Send the store a recency hint after what waits to be stored."""
        with self._changed:
            if self._closed or self._touches_count >= HINTS_MAX:
                return
            self._touches_count += 1
        self._threads.submit(partial(self._store.touch, tuple(labels)), self._touched, is_urgent=False)

    def ended(self) -> list[JobEnd]:
        """Return the jobs that ended since the last call."""
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
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs_count, timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Wait until every job has ended.

        After ``timeout_s`` what has not begun ends with nothing moved, so this returns after one deadline more.
        """
        if not self.wait(timeout_s):
            self._threads.withdraw_waiting()
            with self._changed:
                self._changed.wait_for(lambda: not self._jobs_count)

    def close(self, timeout_s: float) -> bool:
        """End every job as ``drain`` does, and the threads; return whether all of them have ended.

        False if a call of the store goes on past its deadline: then a thread may still hold a view of a row.
        """
        until_s = self._clock() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs_count, timeout_s)
            self._closed = True
        self._threads.withdraw_waiting()
        return not self._threads.close(max(until_s - self._clock(), 0) + timeout_s)

    def _pieces(self, run: _Run) -> list[_Piece]:
        is_load = run.job.direction is Direction.LOAD
        is_durable = not is_load and self._level is Level.DURABLE
        piece_bytes = BATCH_BYTES if is_durable else PIECE_BYTES_MAX
        if is_load:
            share_bytes = -(-len(run.answers) // self._threads_count) * self._rows.payload_bytes
            piece_bytes = min(piece_bytes, max(share_bytes, SHARED_BYTES_MIN))
        count = max(piece_bytes // self._rows.payload_bytes, 1)
        return [_Piece(run, start, min(start + count, len(run.answers))) for start in range(0, len(run.answers), count)]

    def _move(self, piece: _Piece) -> list[Answer] | None:
        """Move one piece; None if the store was not asked."""
        if piece.run.is_given_up:
            return None
        chunks = piece.run.job.chunks[piece.start : piece.end]
        pages = [EnginePage(chunk.label, (self._rows.row(chunk.row),)) for chunk in chunks]
        try:
            if piece.run.job.direction is Direction.LOAD:
                return self._store.get(pages)
            return self._store.put(pages, self._level)
        finally:
            for page in pages:
                for row in page.rows:
                    row.release()

    def _moved(self, piece: _Piece, call: BoundedCall[list[Answer] | None]) -> None:
        """Record the outcome of a piece; with the last one the job has ended."""
        answers = None if call.take_error() is not None else call.result()
        run = piece.run
        with self._changed:
            if answers is not None:
                run.answers[piece.start : piece.end] = answers
                run.is_given_up = run.is_given_up or Answer.UNAVAILABLE in answers
            run.left -= 1
            if run.left:
                return
            self._rows_out[run.job.direction] -= len(run.answers)
            self._jobs_count -= 1
            self._ended.append(JobEnd(run.job, tuple(run.answers), self._clock() - run.submitted_s))
            self._changed.notify_all()

    def _touched(self, call: BoundedCall[None]) -> None:
        with self._changed:
            self._touches_count -= 1
