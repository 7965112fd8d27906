"""Threads that calls to a store run on, so that whoever asks waits no longer than the store may take.

The caller hands its work over and waits. The calls to the store run in place on the thread of ours and are watched
(``CallWatch``): where one is late, the caller gives the work up and goes, and the thread is lost until the store
returns. There are as many threads as calls at a time, those that hang included, up to a bound.
"""

import logging
import time
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from traceback import format_exception
from typing import Protocol

from unified_cache.errors import CacheError, CallInFlight, StorageTimeoutError
from unified_cache.storage_backends.wrappers import CallWatch, StorageGuard

__all__ = ["CallThreads", "StoreWork", "WorkEnd", "WorkRun"]

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two looks of a caller whether its work is late, or the store was closed."""


class StoreWork(Protocol):
    """Work of one call, on a thread of ours."""

    def run(self) -> None:
        """Call the store, and keep what it answers; raises as the store does."""
        ...

    def let_go(self) -> None:
        """Let go of the caller's memory, now and for good; called by the caller, at any moment of ``run``."""
        ...


class WorkEnd(Enum):
    """Way in which a call ended for its caller."""

    DONE = "done"
    """The work ended, or raised."""
    LATE = "late"
    """A call to the store was late, and the work was given up."""
    BUSY = "busy"
    """No thread was free in time; the work was not begun."""
    CLOSED = "closed"
    """The threads were closed; the work was given up, or not begun."""


class WorkRun:
    """One piece of work and how it ended."""

    __slots__ = (
        "call",
        "end",
        "error",
        "guard",
        "is_begun",
        "is_interrupted",
        "is_withdrawn",
        "returned",
        "watch",
        "work",
    )

    def __init__(self, work: StoreWork, guard: StorageGuard) -> None:
        self.work: StoreWork | None = work
        self.guard = guard
        self.watch: CallWatch = guard.watch()
        self.end = WorkEnd.DONE
        self.error = ""
        """What the work raised; empty if nothing."""
        self.call: CallInFlight | None = None
        """Call that may still read and write the landing memory of the work; None if there is none."""
        self.is_begun = False
        self.is_interrupted = False
        """Whether the thread that did the work was interrupted, which only a caller's own is."""
        self.is_withdrawn = False
        """Whether the caller has gone."""
        self.returned = Lock()
        """Held until the work has ended."""
        self.returned.acquire()

    def run(self) -> None:
        """Do the work, and keep what it raises: a store is other people's code, and its errors hold our frames."""
        work, self.work = self.work, None
        if work is None:
            return
        try:
            with self.watch:
                work.run()
        except StorageTimeoutError as error:
            self.error = str(error)
            self.call = error.call
        except CacheError as error:
            self.error = str(error)
        except KeyboardInterrupt:
            self.error = "interrupted"
            self.is_interrupted = True
        except BaseException as error:  # the edge: a panic of a native library is no Exception
            self.error = f"{type(error).__name__}: {error}"
            # Not the error itself: whoever keeps what was logged would keep its frames, and with them the pages.
            logger.error("a store raised what it should not: %s", "".join(format_exception(error)))


class CallThreads:
    """Threads on demand, ``threads_max`` at most. Any thread may call ``run``, several at a time."""

    __slots__ = (
        "_callers_count",
        "_changed",
        "_clock",
        "_closed",
        "_given_up",
        "_in_flight_count",
        "_lost_count",
        "_queue",
        "_threads_count",
        "_threads_max",
    )

    def __init__(self, threads_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads_max = threads_max
        self._clock = clock
        self._queue: SimpleQueue[WorkRun | None] = SimpleQueue()
        self._threads_count = 0
        self._in_flight_count = 0
        """Work that a caller waits for, begun or not."""
        self._lost_count = 0
        """Threads in work that was given up."""
        self._callers_count = 0
        self._closed = False
        self._given_up = False
        """Whether callers are to go, whatever their work does."""
        self._changed = Condition(Lock())

    @property
    def lost_count(self) -> int:
        """Threads in calls that nobody waits for."""
        return self._lost_count

    def run(self, run: WorkRun, timeout_s: float) -> None:
        """Do work and wait until it ends, or one of its calls is late; wait ``timeout_s`` at most for a thread.

        Once this has returned, or was interrupted, the work holds none of the caller's memory.
        """
        work = run.work
        with self._changed:
            if work is None or not self._begin(run):
                return
        try:
            self._wait(run, self._clock() + timeout_s)
        except BaseException:
            self._leave(run, WorkEnd.CLOSED)
            raise
        finally:
            work.let_go()
            with self._changed:
                self._callers_count -= 1
                self._changed.notify_all()

    def run_here(self, run: WorkRun) -> None:
        """Do work on the caller's own thread, where every call of it returns by itself.

        Raises:
            KeyboardInterrupt: of the caller; the work has ended.
        """
        with self._changed:
            if self._closed:
                run.end = WorkEnd.CLOSED
                return
            self._callers_count += 1
        try:
            run.run()
        finally:
            with self._changed:
                self._callers_count -= 1
                self._changed.notify_all()
        if run.is_interrupted:
            raise KeyboardInterrupt

    def wait_for_lost(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until no thread is lost; tell whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lost_count, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Begin nothing any more; let callers finish for ``timeout_s``, then send them away.

        After it no caller waits, but those on their own threads that a store is to return to by itself. Threads of ours
        end when the store returns to them.
        """
        until_s = self._clock() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._callers_count, max(0.0, until_s - self._clock()))
            self._given_up = True
            # A caller goes at its next look, or when the copy under way has ended.
            self._changed.wait_for(lambda: not self._callers_count, 20 * LOOK_S)
            for _ in range(self._threads_count):
                self._queue.put(None)
            self._threads_count = 0

    def _begin(self, run: WorkRun) -> bool:
        if self._closed:
            run.end = WorkEnd.CLOSED
            return False
        free_count = self._threads_count - self._lost_count - self._in_flight_count
        if free_count <= 0 and self._threads_count < self._threads_max:
            free_count += self._start_thread()
        if free_count <= 0 and self._lost_count >= self._threads_count:
            run.end = WorkEnd.BUSY
            return False
        self._in_flight_count += 1
        self._callers_count += 1
        self._queue.put(run)
        return True

    def _start_thread(self) -> int:
        thread = Thread(target=self._work, name=f"external-store-{self._threads_count}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return 0  # the system has no thread left
        self._threads_count += 1
        return 1

    def _wait(self, run: WorkRun, begun_until_s: float) -> None:
        while not run.returned.acquire(timeout=LOOK_S):
            if run.is_begun and run.watch.give_up_if_late() is not None:
                self._leave(run, WorkEnd.LATE)
                return
            if self._given_up:
                self._leave(run, WorkEnd.CLOSED)
                return
            if not run.is_begun and self._clock() >= begun_until_s:
                self._leave(run, WorkEnd.BUSY)
                return

    def _leave(self, run: WorkRun, end: WorkEnd) -> None:
        """Leave work that has not ended, unless it just has."""
        with self._changed:
            if run.returned.acquire(blocking=False):
                return
            run.end = end
            run.is_withdrawn = True
            self._in_flight_count -= 1
            if run.is_begun:
                run.call = run.watch
                self._lost_count += 1
            else:
                run.work = None

    def _work(self) -> None:
        while (run := self._queue.get()) is not None:
            with self._changed:
                if run.is_withdrawn:
                    continue
                run.is_begun = True
            run.run()
            with self._changed:
                if run.is_withdrawn:
                    self._lost_count -= 1
                    self._changed.notify_all()
                else:
                    self._in_flight_count -= 1
                run.returned.release()
            del run  # and with it the landing memory
