"""A store that is away: opened later, by those who come meanwhile, tried again after growing pauses.

No thread waits for a pause to be over. A failure is logged once. One that passes by itself has a pause that grows; one
that lasts until somebody mends its cause, such as another format, has a long pause.
"""

import logging
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from unified_cache.core.errors import InputError, StorageError, StorageFullError
from unified_cache.storage_backends.common.bounded_call import BoundedCall
from unified_cache.storage_backends.common.breaker import Backoff
from unified_cache.storage_backends.common.call_threads import CallThreads

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

Clock = Callable[[], float]

MENDED_PAUSE_S = 60.0
"""Pause after a failure that lasts until somebody mends its cause, such as another format or a missing right."""


class Retries:
    """Tries of one thing, one after the other; the caller takes care that no two are made at a time."""

    __slots__ = ("_clock", "_failures_count", "_logged", "_next_s", "_pauses", "_subject")

    def __init__(self, subject: str, pauses: Backoff, clock: Clock) -> None:
        """``subject`` says in the log what is tried, as in "opening the store"."""
        self._subject = subject
        self._pauses = pauses
        self._clock = clock
        self._next_s = clock()
        self._failures_count = 0
        self._logged = ""
        """Failure that the log has."""

    @property
    def is_due(self) -> bool:
        """Whether the pause after the last failure is over."""
        return self._clock() >= self._next_s

    def record_failure(self, error: BaseException) -> float:
        """Begin a pause and return its seconds; log the failure unless it is the one before once more."""
        self._failures_count += 1
        passes = passes_by_itself(error)
        # A full disk is no sign of a store that suffers, and may have room the next moment.
        count = 1 if isinstance(error, StorageFullError) else self._failures_count
        pause_s = self._pauses.pause_s(count) if passes else MENDED_PAUSE_S
        self._next_s = self._clock() + pause_s
        if str(error) != self._logged:
            self._logged = str(error)
            logger.log(
                logging.WARNING if passes else logging.ERROR,
                "%s failed, and pages are misses until %s: %s; it is tried again every %g s",
                self._subject,
                "it succeeds" if passes else "its cause is mended",
                error,
                self._pauses.max_s if passes else MENDED_PAUSE_S,
            )
        return pause_s

    def record_success(self) -> None:
        """Log that failures are over, if there were any."""
        if self._failures_count:
            logger.info("%s succeeded after %d failures", self._subject, self._failures_count)
        self._failures_count, self._logged = 0, ""


def passes_by_itself(error: BaseException) -> bool:
    """Return whether a try that failed so may succeed later without anyone's help."""
    if isinstance(error, StorageError):
        return error.retryable
    return not isinstance(error, InputError | ValueError)


class StoreOpening(Generic[Opened]):
    """Opens a store on a thread of its own, again after a pause where that failed, until it is there.

    Nobody waits longer than they say; an attempt that hangs goes on, and there is one at a time. A store that is opened
    after this was closed is closed at once. Thread-safe.
    """

    __slots__ = ("_close", "_closed", "_error", "_guard", "_is_trying", "_open", "_retries", "_store", "_threads")

    def __init__(
        self, opened: Callable[[], Opened], close: Callable[[Opened], object], pauses: Backoff, clock: Clock
    ) -> None:
        """``close`` is called for a store that nobody wants any more."""
        self._open = opened
        self._close = close
        self._retries = Retries("opening a store", pauses, clock)
        self._store: Opened | None = None
        self._error: BaseException | None = None
        self._is_trying = False
        self._closed = False
        self._threads = CallThreads("store-opening", 1)
        self._guard = Lock()

    @property
    def store(self) -> Opened | None:
        """The store, once it is there."""
        return self._store

    @property
    def error(self) -> str:
        """Failure of the last attempt; empty if there was none."""
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def reach(self, timeout_s: float) -> Opened | None:
        """Return the store; if it is not there and the pause is over, try to open it and wait for that.

        A caller that finds another's attempt under way gets None at once.
        """
        with self._guard:
            if self._store is not None or self._closed or self._is_trying or not self._retries.is_due:
                return self._store
            self._is_trying = True
        self._threads.submit(self._open, self._end).settle(timeout_s)
        return self._store

    @property
    def failure(self) -> BaseException | None:
        """What the last attempt has raised."""
        return self._error

    def close(self) -> Opened | None:
        """Open nothing any more; return the store if it is there, which is the caller's to close."""
        with self._guard:
            self._closed = True
        self._threads.close(0)
        return self._store

    def _end(self, attempt: BoundedCall[Opened]) -> None:
        """Keep the store that an attempt has opened; close one that nobody wants any more."""
        error = attempt.take_error()
        store = None if error is not None else attempt.result()
        with self._guard:
            self._is_trying = False
            self._error = None if error is None else error.with_traceback(None)
            if error is not None:
                self._retries.record_failure(error)
            elif not self._closed:
                self._store, store = store, None
                self._retries.record_success()
                self._threads.close(0)  # this one ends
        if store is not None:
            self._close(store)
