"""Calls to a store that is there: on a thread of ours by the deadline, or here, and why one did not come to its end.

    started_s      + deadline_s                   + call_timeout_s
    |              a call that hangs is left      no further part of the work is begun
    |              with the span that it has

A span of landing memory comes back with the end of its call; where the call goes on, when the store has returned.
"""

import logging
import time
from collections.abc import Collection
from threading import Condition, Lock, get_ident
from traceback import format_exception
from types import TracebackType

from unified_cache.errors import CacheError, CallInFlight, StorageTimeoutError
from unified_cache.external.away import OpenedStore, Registrations
from unified_cache.external.counts import CallCounts, Unavailable
from unified_cache.external.landing import LandingMemory, Span
from unified_cache.external.settings import ExternalConfig
from unified_cache.external.transfer import Clock
from unified_cache.external.work import LabelledWork
from unified_cache.storage_backends.common.bounded_call import BoundedCall, CallState
from unified_cache.storage_backends.common.call_threads import LOOK_S, CallThreads, run_here

__all__ = ["StoreCalls"]

logger = logging.getLogger(__name__)


class _Callers:
    """Callers that are in a call: ``with callers:``."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition(Lock())

    def wait_for_none(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until no caller is in a call."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout_s)

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()


class StoreCalls:
    """Makes calls and waits for them as long as it may. Any thread may call, several at a time."""

    def __init__(
        self,
        registrations: Registrations,
        landing: LandingMemory,
        counts: CallCounts,
        config: ExternalConfig,
        clock: Clock = time.monotonic,
    ) -> None:
        self._registrations = registrations
        self._landing = landing
        self._counts = counts
        self._call_timeout_s = config.call_timeout_s
        self._clock = clock
        calls_max = config.guard.calls_max
        self._threads = CallThreads("external-store", calls_max, total_max=calls_max, clock=clock)
        self._callers = _Callers()
        self._closed = False

    @property
    def late_now_count(self) -> int:
        """Calls that nobody waits for any more, and that the store has not returned from."""
        return self._threads.lost_count

    def make(
        self,
        opened: OpenedStore,
        identities: Collection[bytes],
        work: LabelledWork,
        started_s: float,
        span: Span | None = None,
    ) -> Unavailable | None:
        """Have work done on a thread of ours and wait for it; return why it did not come to its end.

        The store is told of the identities first. Takes the span back that the work's pages lie in.
        """
        store, clock = opened.guard.breaker, self._clock

        def announce_and_run() -> None:
            self._registrations.announce(store, identities, self._landing.whole)
            work.run(store, started_s + self._call_timeout_s, clock)

        with self._callers:
            call = self._threads.submit(announce_and_run)
            user: CallInFlight = call
            try:
                self._threads.wait(call, max(0.0, started_s + opened.guard.deadline.deadline_s - clock()))
                reason, user = self._reason(call)
            finally:
                work.let_go()
                if span is not None:
                    self._landing.take_back(span, user)
        if reason is Unavailable.FAILED and not self._registrations.are_taken(identities):
            return Unavailable.UNREGISTERED
        return reason

    def make_here(self, opened: OpenedStore, work: LabelledWork, started_s: float) -> Unavailable | None:
        """Have work done on the caller's thread, by a store that returns by itself; no thread and memory of ours."""
        until_s = started_s + self._call_timeout_s
        with self._callers:
            if self._closed:
                return Unavailable.CLOSED
            call = run_here(lambda: work.run(opened.guard.breaker, until_s, self._clock))
            return self._reason(call)[0]

    def wait_for_late(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until the store has returned from every late call; tell whether it has."""
        return self._threads.wait_for_lost(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Make no call any more; let callers finish for ``timeout_s``, then send them away.

        After it no caller waits, but those on their own threads that a store is to return to by itself. Threads of ours
        end when the store returns to them.
        """
        self._closed = True
        self._threads.close(0)
        self._callers.wait_for_none(timeout_s)
        self._threads.leave_all()
        self._callers.wait_for_none(20 * LOOK_S)  # each goes when the copy under way has ended

    def _reason(self, call: BoundedCall[None]) -> tuple[Unavailable | None, CallInFlight]:
        """Return why a settled call did not come to its end, None if it did, and the call that may use its pages.

        Raises:
            KeyboardInterrupt: of the caller, on whose own thread it was.
        """
        error = call.take_error()  # in no frame that it holds itself, and with it the pages
        if error is None:
            return None, call
        if call.state is CallState.WITHDRAWN:
            return Unavailable.CLOSED if self._closed else Unavailable.BUSY, call
        if isinstance(error, StorageTimeoutError):
            if self._closed and error.call is call:
                return Unavailable.CLOSED, call
            self._counts.add_late()
            return Unavailable.LATE, error.call
        if isinstance(error, KeyboardInterrupt) and call.thread_id == get_ident():
            raise KeyboardInterrupt
        self._counts.last_error = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, CacheError):
            # Not the error itself: whoever keeps what was logged would keep its frames, and with them the pages.
            logger.error("a store raised what it should not: %s", "".join(format_exception(error)))
        return Unavailable.FAILED, call
