"""Pauses calls to what keeps failing: a breaker before a store, and a store that is away and is opened later.

No thread waits for a pause to be over: who comes after it tries.
"""

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from types import TracebackType
from typing import Generic, TypeVar

from unified_cache.core.errors import (
    CacheError,
    ConfigError,
    InputError,
    NotOfferedError,
    StorageError,
    StorageFullError,
)
from unified_cache.storage_backends.common.bounded_call import BoundedCall, CallThreads, Clock

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

_DOUBLINGS_MAX = 60
"""A second doubled so often outlasts every machine; more would overflow a float."""

MENDED_PAUSE_S = 60.0
"""Pause after a failure that lasts until somebody mends its cause, such as another format or a missing right."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, in seconds."""

    first_s: float
    max_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.max_s:
            raise ConfigError(f"a backoff needs 0 <= first_s <= max_s, found {self.first_s} and {self.max_s}")

    def pause_s(self, failures_count: int) -> float:
        """Return the pause after so many failures in a row; the first failure is 1."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures_count - 1, _DOUBLINGS_MAX))


class BreakerState(Enum):
    """State of a breaker, and so what becomes of a call."""

    CLOSED = "closed"
    """Calls are made."""
    OPEN = "open"
    """Calls are refused until the pause is over; the first one after it is the probe."""
    HALF_OPEN = "half open"
    """One call, the probe, is under way; all others are refused."""


class Admission:
    """One call that a breaker has let through; its outcome counts once, and only while the state is the same.

    ``with admission:`` around the call records how it ends.
    """

    __slots__ = ("_breaker", "changes_count", "is_recorded", "kind")

    def __init__(self, breaker: "CircuitBreaker", kind: Hashable, changes_count: int) -> None:
        self._breaker = breaker
        self.kind = kind
        self.changes_count = changes_count
        self.is_recorded = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._breaker.record_outcome(self, failed=error is not None and _is_failure(error))


class CircuitBreaker:
    """Open after ``failures_max`` failures; after a pause let one call through, and close when it succeeds.

    Failures are counted by kind of call, and a success takes back those of its own kind alone: look-ups that succeed do
    not keep a breaker closed while every read fails. Failures of all kinds add up, so that a store that is gone is left
    alone soon. While open, probes follow each other without a pause until every kind that had failed has succeeded, or
    ``failures_max`` probes of any kind. A probe that fails opens the breaker again, for the next longer pause.

    A gate calls ``admit`` before each call and ``record_outcome`` after it. A client that prefers one of several nodes
    asks ``is_resting``, calls whom it likes, and says ``record_failure`` or ``record_success``.

    Thread-safe. There is no thread: time passes by ``clock``, in seconds.
    """

    def __init__(
        self, failures_max: int, pauses: Backoff, clock: Clock = time.monotonic, name: str = "a store"
    ) -> None:
        """``name`` says in the log what is paused."""
        if failures_max < 1:
            raise ConfigError(f"a breaker needs failures_max >= 1, found {failures_max}")
        self.failures_max = failures_max
        self._pauses = pauses
        self._clock = clock
        self._name = name
        self.state = BreakerState.CLOSED
        """State now; it stays OPEN after its pause until a call comes to be the probe."""
        self.changes_count = 0
        self._failures_count: dict[Hashable, int] = {}
        """By kind, since its last success."""
        self._successes_count = 0
        """Of probes since it opened."""
        self._openings_count = 0
        """Since it was closed last."""
        self.rests_until_s = 0.0
        self.refused_count = 0
        self._guard = Lock()

    @property
    def has_failures(self) -> bool:
        """Whether a kind of call has failed since it succeeded last."""
        return bool(self._failures_count)

    @property
    def is_resting(self) -> bool:
        """Whether it is open and its pause is not over."""
        return self.state is BreakerState.OPEN and self._clock() < self.rests_until_s

    def admit(self, kind: Hashable = None) -> Admission | None:
        """Admit a call, or return None; an admitted caller must call ``record_outcome``."""
        changes_count = self.changes_count  # read first: of a state that ends meanwhile no outcome counts
        if self.state is BreakerState.CLOSED:
            return Admission(self, kind, changes_count)
        with self._guard:
            if self.state is BreakerState.OPEN and self._clock() >= self.rests_until_s:
                self._enter(BreakerState.HALF_OPEN)
                return Admission(self, kind, self.changes_count)
            self.refused_count += 1
            return None

    def record_outcome(self, admission: Admission, *, failed: bool) -> None:
        """Count how an admitted call ended; a second time, or in another state than it began in, change nothing."""
        if not failed and self.state is BreakerState.CLOSED and admission.kind not in self._failures_count:
            admission.is_recorded = True
            return
        with self._guard:
            if admission.is_recorded or admission.changes_count != self.changes_count:
                return
            admission.is_recorded = True
            if failed:
                self._fail(admission.kind)
            else:
                self._succeed(admission.kind)

    def record_failure(self) -> None:
        """Count a call that failed; during a pause it is one that began before, and changes nothing."""
        with self._guard:
            if not self.is_resting:
                self._fail(None)

    def record_success(self) -> None:
        """Close, whatever failed before."""
        if self._failures_count:
            with self._guard:
                self._failures_count.clear()
                self._succeed(None)

    def _fail(self, kind: Hashable) -> None:
        self._failures_count[kind] = self._failures_count.get(kind, 0) + 1
        if self.state is not BreakerState.CLOSED or sum(self._failures_count.values()) >= self.failures_max:
            was_closed = self.state is BreakerState.CLOSED
            self._openings_count += 1
            self._successes_count = 0
            pause_s = self._pauses.pause_s(self._openings_count)
            self.rests_until_s = self._clock() + pause_s
            if was_closed:
                failures = ", ".join(f"{each or 'calls'} {count}" for each, count in self._failures_count.items())
                logger.warning("a breaker opens: %s is paused for %g s, failures: %s", self._name, pause_s, failures)
            self._enter(BreakerState.OPEN)

    def _succeed(self, kind: Hashable) -> None:
        self._failures_count.pop(kind, None)
        if self.state is BreakerState.CLOSED:
            return
        self._successes_count += 1
        if self._failures_count and self._successes_count < self.failures_max:
            self.rests_until_s = self._clock()
            self._enter(BreakerState.OPEN)
        else:
            self._failures_count.clear()
            self._openings_count = 0
            logger.info("a breaker closes: %s is asked again", self._name)
            self._enter(BreakerState.CLOSED)

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        self.changes_count += 1


def _is_failure(error: BaseException) -> bool:
    """Return whether an exception speaks against the store, and not against the call."""
    if isinstance(error, StorageError):
        return not isinstance(error, StorageFullError | NotOfferedError)
    return not isinstance(error, CacheError)


class Retries:
    """Tries of one thing, one after the other; the caller takes care that no two are made at a time.

    A failure is logged once. One that passes by itself has a pause that grows; one that lasts until somebody mends its
    cause, such as another format, has a long pause.
    """

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

    __slots__ = ("_close", "_closed", "_guard", "_is_trying", "_open", "_retries", "_threads", "failure", "store")

    def __init__(
        self, opened: Callable[[], Opened], close: Callable[[Opened], object], pauses: Backoff, clock: Clock
    ) -> None:
        """``close`` is called for a store that nobody wants any more."""
        self._open = opened
        self._close = close
        self._retries = Retries("opening a store", pauses, clock)
        self.store: Opened | None = None
        """The store, once it is there."""
        self.failure: BaseException | None = None
        """What the last attempt has raised."""
        self._is_trying = False
        self._closed = False
        self._threads = CallThreads("store-opening", 1)
        self._guard = Lock()

    @property
    def error(self) -> str:
        """Failure of the last attempt; empty if there was none."""
        return "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def reach(self, timeout_s: float) -> Opened | None:
        """Return the store; if it is not there and the pause is over, try to open it and wait for that.

        A caller that finds another's attempt under way gets None at once.
        """
        with self._guard:
            if self.store is not None or self._closed or self._is_trying or not self._retries.is_due:
                return self.store
            self._is_trying = True
        self._threads.submit(self._open, self._end).settle(timeout_s)
        return self.store

    def close(self) -> Opened | None:
        """Open nothing any more; return the store if it is there, which is the caller's to close."""
        with self._guard:
            self._closed = True
        self._threads.close(0)
        return self.store

    def _end(self, attempt: BoundedCall[Opened]) -> None:
        """Keep the store that an attempt has opened; close one that nobody wants any more."""
        error = attempt.take_error()
        store = None if error is not None else attempt.result()
        with self._guard:
            self._is_trying = False
            self.failure = None if error is None else error.with_traceback(None)
            if error is not None:
                self._retries.record_failure(error)
            elif not self._closed:
                self.store, store = store, None
                self._retries.record_success()
                self._threads.close(0)  # this one ends
        if store is not None:
            self._close(store)
