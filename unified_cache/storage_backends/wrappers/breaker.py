"""A wrapper that leaves a failing store alone: for a while it answers as if there were no store."""

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from threading import Lock
from typing import NoReturn, TypeVar

from unified_cache.errors import CacheError, ClosedError, ConfigError, StorageError, StorageFullError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Capability, Level, PageIO, Scan, StorageBackend
from unified_cache.storage_backends.wrappers.backoff import Backoff

__all__ = ["BreakerState", "CircuitBreaker"]

Answer = TypeVar("Answer")


class BreakerState(Enum):
    """What a breaker does with a call."""

    CLOSED = "closed"
    """The store is asked."""
    OPEN = "open"
    """The store is left alone until its pause is over."""
    HALF_OPEN = "half open"
    """One call, the probe, is asking the store; all others are answered without it."""


class CircuitBreaker:
    """Open after ``failures_max`` failures in a row; after a pause let one call through and close if it succeeds.

    While open, every page is a miss, every put is declined and nothing is removed; ``register`` and ``scan``, which
    have no such answer, raise StorageError. A probe that fails opens it again, for the next longer pause. The first
    call after a pause is the probe: there is no thread. A probe that hangs keeps the store absent, so a deadline
    belongs inside. ``capability`` is declared, not probed, and always passes.

    A failure is any exception but those that a working store raises: a store that is full or closed, and wrong input.
    What ends in another state than it began in, a call that was slow to fail for instance, counts for nothing.

    It owns the wrapped backend. Thread-safe where the backend is. ``clock`` gives seconds.
    """

    def __init__(
        self,
        backend: StorageBackend,
        failures_max: int,
        pauses: Backoff,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failures_max < 1:
            raise ConfigError(f"a breaker needs failures_max >= 1, found {failures_max}")
        self._backend = backend
        self._failures_max = failures_max
        self._pauses = pauses
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._changes_count = 0
        self._failures_count = 0
        self._openings_count = 0
        self._probe_at_s = 0.0
        self._refused_count = 0
        self._closed = False
        self._guard = Lock()

    @property
    def state(self) -> BreakerState:
        """State now; it stays OPEN after its pause until a call comes to be the probe."""
        with self._guard:
            return self._state

    @property
    def changes_count(self) -> int:
        """State changes so far."""
        with self._guard:
            return self._changes_count

    @property
    def refused_count(self) -> int:
        """Calls answered without asking the store so far."""
        with self._guard:
            return self._refused_count

    def capability(self) -> Capability:
        """Say what the wrapped backend can do, in any state."""
        return self._backend.capability()

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend.

        Raises:
            StorageError: the breaker is open. Nothing was announced.
        """
        self._ask(lambda: self._backend.register(manifest, slabs), self._refuse)

    def exists(self, labels: Sequence[Label]) -> list[bool]:
        """Ask the wrapped backend; False for every label while open."""
        return self._ask(lambda: self._backend.exists(labels), lambda: [False] * len(labels))

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill each page's buffers; misses while open."""
        return self._ask(lambda: self._backend.get(pages), lambda: [False] * len(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        """Store pages; all declined while open."""
        return self._ask(lambda: self._backend.put(pages, level), lambda: [False] * len(pages))

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; none while open."""
        return self._ask(lambda: self._backend.remove(labels), lambda: 0)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend.

        Raises:
            StorageError: the breaker is open; an empty listing would be a lie.
        """
        return self._ask(lambda: self._backend.scan(identity, cursor), self._refuse)

    def close(self) -> None:
        """Close the wrapped backend, in any state."""
        with self._guard:
            self._closed = True
        self._backend.close()

    def _ask(self, work: Callable[[], Answer], absent: Callable[[], Answer]) -> Answer:
        admitted = self._admit()
        if admitted is None:
            return absent()
        try:
            answer = work()
        except BaseException as error:
            self._settle(admitted, failed=_is_failure(error))
            raise
        self._settle(admitted, failed=False)
        return answer

    def _admit(self) -> int | None:
        """Return the number of the state in which a call may ask the store, None if it must not."""
        with self._guard:
            if self._closed:
                raise ClosedError("this store with a breaker was closed")
            if self._state is BreakerState.OPEN and self._clock() >= self._probe_at_s:
                self._enter(BreakerState.HALF_OPEN)
                return self._changes_count
            if self._state is BreakerState.CLOSED:
                return self._changes_count
            self._refused_count += 1
            return None

    def _settle(self, admitted: int, *, failed: bool) -> None:
        with self._guard:
            if admitted != self._changes_count:
                return
            if not failed:
                self._failures_count = 0
                if self._state is BreakerState.HALF_OPEN:
                    self._openings_count = 0
                    self._enter(BreakerState.CLOSED)
                return
            self._failures_count += 1
            if self._state is BreakerState.HALF_OPEN or self._failures_count >= self._failures_max:
                self._openings_count += 1
                self._probe_at_s = self._clock() + self._pauses.pause_s(self._openings_count)
                self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._changes_count += 1

    def _refuse(self) -> NoReturn:
        message = f"the store is left alone after {self._failures_max} failures in a row"
        raise StorageError(message, retryable=True)


def _is_failure(error: BaseException) -> bool:
    """Tell whether an exception speaks against the store, and not against the call."""
    if isinstance(error, StorageError):
        return not isinstance(error, StorageFullError)
    return not isinstance(error, CacheError)
