"""Counts of an external store: what it answered, why it had no answer, and what is late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock

from unified_cache.seal import Flaw
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

__all__ = ["CallCounts", "ExternalCounts", "Unavailable"]


class Unavailable(Enum):
    """Reason why a page was UNAVAILABLE."""

    AWAY = "the store could not be opened yet"
    UNREGISTERED = "the store has not taken the page's identity yet"
    LATE = "the store did not return in time"
    FAILED = "the store failed"
    REFUSED = "the store said so, or its circuit breaker was open"
    BUSY = "no thread was free in time"
    NO_LANDING = "no landing memory was free in time, or the page is larger than all of it"
    CALL_OVER = "the time of the whole call was over, or the store was closed meanwhile"
    CLOSED = "the store was closed"


@dataclass(frozen=True, slots=True)
class ExternalCounts:
    """Counts of one external store since it was opened, and its state now."""

    answers: Mapping[tuple[Method, Answer], int]
    """Pages by method and answer; pairs that never came are absent."""
    unavailable: Mapping[tuple[Method, Unavailable], int]
    """Those of them that were UNAVAILABLE, by method and reason."""
    payload_bytes: Mapping[Method, int]
    """Bytes copied into rows by GET, and out of rows by PUT."""
    seconds: Mapping[Method, float]
    """Time spent inside of the calls, by method."""
    flaws: Mapping[Flaw, int]
    """Pages that the store returned and that did not verify."""
    late_calls_count: int
    """Calls that nobody waited for any more."""
    late_now_count: int
    """Those of them that the store has not returned from yet."""
    landing_bytes: int
    quarantined_bytes: int
    """Of the landing memory, what calls that are late may still read or write."""
    breaker: BreakerState | None
    """None while the store is away."""
    store_name: str
    """Name of the store as it says itself; empty while it is away."""
    registered_count: int
    """Identities that the store has taken, of ``announced_count``."""
    announced_count: int
    last_error: str
    """What failed last, for people; empty if nothing has."""

    @property
    def is_registered(self) -> bool:
        """Whether the store is there and has taken every identity that it was told of."""
        return self.breaker is not None and self.registered_count == self.announced_count


class CallCounts:
    """The part of ``ExternalCounts`` that calls add to. Thread-safe."""

    __slots__ = ("_answers", "_bytes", "_guard", "_late_count", "_seconds", "_unavailable", "last_error")

    def __init__(self) -> None:
        self._answers: dict[tuple[Method, Answer], int] = {}
        self._unavailable: dict[tuple[Method, Unavailable], int] = {}
        self._bytes: dict[Method, int] = {}
        self._seconds: dict[Method, float] = {}
        self._late_count = 0
        self.last_error = ""
        self._guard = Lock()

    def add(self, method: Method, answers: Sequence[Answer], seconds: float) -> None:
        """Count one call and its answers."""
        found = [(answer, count) for answer in Answer if (count := answers.count(answer))]
        with self._guard:
            self._seconds[method] = self._seconds.get(method, 0.0) + seconds
            for answer, count in found:
                self._answers[method, answer] = self._answers.get((method, answer), 0) + count

    def add_reason(self, method: Method, reason: Unavailable, pages_count: int) -> None:
        """Count why pages were UNAVAILABLE."""
        if pages_count:
            with self._guard:
                self._unavailable[method, reason] = self._unavailable.get((method, reason), 0) + pages_count

    def add_bytes(self, method: Method, payload_bytes: int) -> None:
        """Count payload that was copied."""
        with self._guard:
            self._bytes[method] = self._bytes.get(method, 0) + payload_bytes

    def add_late(self) -> None:
        """Count a call that nobody waits for any more."""
        with self._guard:
            self._late_count += 1

    def copy(self, state: "StoreState") -> ExternalCounts:
        """Return them together with the state of the store, the caller's own."""
        with self._guard:
            return ExternalCounts(
                dict(self._answers),
                dict(self._unavailable),
                dict(self._bytes),
                dict(self._seconds),
                state.flaws,
                self._late_count,
                state.late_now_count,
                state.landing_bytes,
                state.quarantined_bytes,
                state.breaker,
                state.store_name,
                state.registered_count,
                state.announced_count,
                self.last_error,
            )


@dataclass(frozen=True, slots=True)
class StoreState:
    """The part of ``ExternalCounts`` that is known where the store is."""

    flaws: Mapping[Flaw, int]
    late_now_count: int
    landing_bytes: int
    quarantined_bytes: int
    breaker: BreakerState | None
    store_name: str
    registered_count: int
    announced_count: int
