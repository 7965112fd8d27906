"""Calls to a store that is there: on a thread of ours by the deadline, or here, and why one did not come to its end.

    started_s      + deadline_s                   + call_timeout_s
    |              a call that hangs is left      no further part of the work is begun
    |              with the span that it has

A span of landing memory comes back with the end of its call; where the call goes on, when the store has returned.
"""

import time
from collections.abc import Callable, Collection

from unified_cache.external.counts import CallCounts, Unavailable
from unified_cache.external.landing import LandingMemory, Span
from unified_cache.external.opening import OpenedStore
from unified_cache.external.registrations import Registrations
from unified_cache.external.settings import ExternalConfig
from unified_cache.external.threads import CallThreads, WorkEnd, WorkRun
from unified_cache.external.transfer import Clock
from unified_cache.external.work import LabelledWork

__all__ = ["StoreCalls"]

_REASONS = {WorkEnd.LATE: Unavailable.LATE, WorkEnd.BUSY: Unavailable.BUSY, WorkEnd.CLOSED: Unavailable.CLOSED}


class _Errand:
    """Work on a thread of ours, for identities that the store is to know first."""

    __slots__ = ("_announce", "_let_go", "_work", "is_announced")

    def __init__(self, announce: Callable[[], None], work: Callable[[], None], let_go: Callable[[], None]) -> None:
        self._announce = announce
        self._work = work
        self._let_go = let_go
        self.is_announced = False

    def run(self) -> None:
        self._announce()
        self.is_announced = True
        self._work()

    def let_go(self) -> None:
        self._let_go()


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
        self._threads = CallThreads(config.guard.calls_max, clock)

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
        errand = _Errand(
            lambda: self._registrations.announce(store, identities, self._landing.whole),
            lambda: work.run(store, started_s + self._call_timeout_s, clock),
            work.let_go,
        )
        run = WorkRun(errand, opened.guard)
        try:
            self._threads.run(run, max(0.0, started_s + opened.guard.deadline.deadline_s - clock()))
        finally:
            if span is not None:
                self._settle(span, run)
        return self._reason(run, errand)

    def make_here(self, opened: OpenedStore, work: LabelledWork, started_s: float) -> Unavailable | None:
        """Have work done on the caller's thread, by a store that returns by itself; no thread and memory of ours."""
        until_s = started_s + self._call_timeout_s
        errand = _Errand(lambda: None, lambda: work.run(opened.guard.breaker, until_s, self._clock), work.let_go)
        run = WorkRun(errand, opened.guard)
        self._threads.run_here(run)
        return self._reason(run, errand)

    def wait_for_late(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until the store has returned from every late call; tell whether it has."""
        return self._threads.wait_for_lost(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Make no call any more; let callers finish for ``timeout_s``, then send them away."""
        self._threads.close(timeout_s)

    def _reason(self, run: WorkRun, errand: _Errand) -> Unavailable | None:
        """Say why work that nobody waits for any more did not come to its end; None if it did."""
        if run.error:
            self._counts.last_error = run.error
        if run.end is not WorkEnd.DONE:
            if run.end is WorkEnd.LATE:
                self._counts.add_late()
            return _REASONS[run.end]
        if run.call is not None:  # late by the store's own word, or just as its caller looked
            self._counts.add_late()
            return Unavailable.LATE
        if run.error:
            return Unavailable.FAILED if errand.is_announced else Unavailable.UNREGISTERED
        return None

    def _settle(self, span: Span, run: WorkRun) -> None:
        """Take a span back, at once or when the store has returned."""
        if run.call is None or run.call.returned:
            self._landing.give_back(span)
        else:
            self._landing.quarantine(span, run.call)
