"""Threads that move chunks between vLLM's host memory and the store: bounded, loads before stores.

    scheduler:  submit ──> loads   ─┐ cut into pieces                      ┌─> ended ─> scheduler
                submit ──> stores  ─┴─> a thread: get or put of the store ─┘

A thread that only loads is never behind a store; the others load first where loads wait, between two pieces too. What
waits is bounded by the share of vLLM's rows that it holds: a row that waits to be stored cannot take what is loaded.

The store returns from a call by its deadline and touches no row after it, so every job ends, and with the last one
nobody holds a view of vLLM's memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from unified_cache.external import ExternalPage
from unified_cache.page import PageKey
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Answer, Level

__all__ = ["ChunkJob", "ChunkStore", "Direction", "HostRows", "JobEnd", "MovedChunk", "Moving", "MovingConfig"]

PIECE_BYTES_MAX = 8 << 20
"""Bytes of one call, so that a store that goes on for long makes room for a load soon."""

DURABLE_BYTES_MAX = 32 << 20
"""Bytes of one durable put: all its pages wait for the disk together, and each call waits as long again."""

SHARED_BYTES_MIN = 512 << 10
"""A load is shared among the threads that load, so much to each at the least: one reads while another one copies."""

TOUCHES_MAX = 64
"""Calls of touch that wait; more are dropped: recency is worth no request's time."""


class ChunkStore(Protocol):
    """The store under the tier: as much of ``ExternalStore`` as moving needs."""

    def get(self, pages: Sequence[ExternalPage]) -> list[Answer]:
        """Fill the rows of pages, verified; never raises, and returns by its deadline."""
        ...

    def put_missing(self, pages: Sequence[ExternalPage], level: Level = ...) -> list[Answer]:
        """Store from their rows the pages that the store does not have; never raises, and returns by its deadline."""
        ...

    def touch(self, labels: Sequence[Label]) -> None:
        """Tell the store that pages are in use."""
        ...


class HostRows:
    """Rows of vLLM's host memory, one for each chunk, as views of their payload."""

    def __init__(self, view: memoryview, stride_bytes: int, payload_bytes: int) -> None:
        self._flat = view.cast("B")
        self._stride_bytes = stride_bytes
        self.payload_bytes = payload_bytes
        self.rows_count = len(self._flat) // stride_bytes

    def row(self, number: int) -> memoryview:
        """Return the payload of one row; whoever asks lets go of it before ``release``."""
        start = number * self._stride_bytes
        return self._flat[start : start + self.payload_bytes]

    def release(self) -> None:
        """Let vLLM's memory go."""
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
    parent: PageKey | None
    """Key of the page before it in its chain; None for a first one, or where it is not known."""
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


@dataclass(frozen=True, slots=True)
class MovingConfig:
    """Bounds of moving."""

    load_threads: int
    store_threads: int
    load_rows_max: int
    """Rows that wait to be loaded, or are."""
    store_rows_max: int
    level: Level


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


@dataclass(slots=True)
class _Waiting:
    """Work that waits, by kind. Under the lock of moving."""

    loads: deque["_Piece"] = field(default_factory=deque)
    stores: deque["_Piece"] = field(default_factory=deque)
    touches: deque[tuple[Label, ...]] = field(default_factory=deque)


class _Piece(NamedTuple):
    """Chunks [start, end) of a job: one call of the store."""

    run: _Run
    start: int
    end: int


class Moving:
    """Jobs of one tier. ``submit``, ``ended``, ``drain`` and ``close`` belong to the scheduler's thread."""

    def __init__(
        self, store: ChunkStore, rows: HostRows, config: MovingConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._rows = rows
        self._config = config
        self._clock = clock
        self._waiting = _Waiting()
        self._rows_out = dict.fromkeys(Direction, 0)
        """Rows of jobs that have not ended."""
        self._jobs_count = 0
        self._closed = False
        self._changed = threading.Condition()
        self._ended: deque[JobEnd] = deque()
        self._threads = [
            threading.Thread(
                target=self._move_all, args=(number >= config.load_threads,), name="unified-cache-moving", daemon=True
            )
            for number in range(config.load_threads + config.store_threads)
        ]

    @classmethod
    def start(
        cls, store: ChunkStore, rows: HostRows, config: MovingConfig, clock: Callable[[], float] = time.monotonic
    ) -> "Moving":
        """Start moving between ``store`` and ``rows``; the caller closes it before either of them."""
        moving = cls(store, rows, config, clock)
        for thread in moving._threads:
            thread.start()
        return moving

    def submit(self, job: ChunkJob) -> None:
        """Take a job; where it would be one too many for the rows that may wait it ends at once, with nothing moved.

        One that has more rows than that is taken where no other of its direction waits: else it would never be.
        """
        run = _Run(job, [Answer.UNAVAILABLE] * len(job.chunks), self._clock(), 0)
        with self._changed:
            rows_out = self._rows_out[job.direction] + len(job.chunks)
            is_too_many = rows_out > max(self._rows_max(job.direction), len(job.chunks))
            is_refused = self._closed or not any(thread.is_alive() for thread in self._threads)
            if is_refused or not job.chunks or is_too_many:
                self._ended.append(JobEnd(job, tuple(run.answers), 0.0))
                return
            self._rows_out[job.direction] = rows_out
            self._jobs_count += 1
            pieces = self._pieces(run)
            run.left = len(pieces)
            (self._waiting.loads if job.direction is Direction.LOAD else self._waiting.stores).extend(pieces)
            self._changed.notify_all()

    def touch(self, labels: Sequence[Label]) -> None:
        """Have the store told, when nothing else waits, that pages are in use."""
        with self._changed:
            if len(self._waiting.touches) < TOUCHES_MAX and not self._closed:
                self._waiting.touches.append(tuple(labels))
                self._changed.notify_all()

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

    def rows_out(self, direction: Direction) -> int:
        """Return how many rows belong to jobs of one direction that have not ended."""
        return self._rows_out[direction]

    def wait(self, timeout_s: float) -> bool:
        """Wait until every job has ended; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs_count, timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Wait until every job has ended.

        After ``timeout_s`` what has not begun ends with nothing moved, so this returns after one deadline more.
        """
        with self._changed:
            if not self.wait(timeout_s):
                self._drop_waiting()
                self._changed.wait_for(lambda: not self._jobs_count)

    def close(self, timeout_s: float) -> bool:
        """End every job as ``drain`` does, and the threads; tell whether all of them have ended.

        False if a call of the store goes on past its deadline: then a thread may still hold a view of a row.
        """
        until_s = self._clock() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs_count, timeout_s)
            self._closed = True
            self._drop_waiting()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(until_s - self._clock(), 0) + timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _rows_max(self, direction: Direction) -> int:
        return self._config.load_rows_max if direction is Direction.LOAD else self._config.store_rows_max

    def _pieces(self, run: _Run) -> list[_Piece]:
        is_load = run.job.direction is Direction.LOAD
        is_durable = not is_load and self._config.level is Level.DURABLE
        piece_bytes = DURABLE_BYTES_MAX if is_durable else PIECE_BYTES_MAX
        if is_load:
            share_bytes = -(-len(run.answers) // len(self._threads)) * self._rows.payload_bytes
            piece_bytes = min(piece_bytes, max(share_bytes, SHARED_BYTES_MIN))
        count = max(piece_bytes // self._rows.payload_bytes, 1)
        return [_Piece(run, start, min(start + count, len(run.answers))) for start in range(0, len(run.answers), count)]

    def _drop_waiting(self) -> None:
        """End what no thread has begun. Under the lock."""
        waiting, self._waiting = self._waiting, _Waiting()
        for piece in (*waiting.loads, *waiting.stores):
            self._end(piece, None)

    def _move_all(self, may_store: bool) -> None:
        while (work := self._next(may_store)) is not None:
            if not isinstance(work, _Piece):
                self._store.touch(work)
                continue
            answers = None
            try:
                answers = self._move(work)
            finally:
                with self._changed:
                    self._end(work, answers)

    def _next(self, may_store: bool) -> _Piece | tuple[Label, ...] | None:
        """Wait for the next piece, or labels to touch; None once closed."""
        with self._changed:
            while True:
                if self._waiting.loads:
                    return self._waiting.loads.popleft()
                if may_store and self._waiting.stores:
                    return self._waiting.stores.popleft()
                if may_store and self._waiting.touches:
                    return self._waiting.touches.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    def _move(self, piece: _Piece) -> list[Answer] | None:
        """Move one piece; None if the store was not asked."""
        if piece.run.is_given_up:
            return None
        chunks = piece.run.job.chunks[piece.start : piece.end]
        pages = [ExternalPage(chunk.label, chunk.parent, (self._rows.row(chunk.row),)) for chunk in chunks]
        try:
            if piece.run.job.direction is Direction.LOAD:
                return self._store.get(pages)
            return self._store.put_missing(pages, self._config.level)
        finally:
            for page in pages:
                for row in page.rows:
                    row.release()

    def _end(self, piece: _Piece, answers: Sequence[Answer] | None) -> None:
        """Note the outcome of a piece; with the last one the job has ended. Under the lock."""
        run = piece.run
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
