"""A wrapper that leaves a failing store alone: for a while it answers as if there were no store."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import NoReturn, TypeVar

from unified_cache.errors import CacheError, ClosedError, StorageError, StorageFullError
from unified_cache.seal import Label
from unified_cache.storage_backends.common.breaker import Admission, BreakerState, CircuitBreaker
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, StorageBackend
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

__all__ = ["BreakerStorage"]

Result = TypeVar("Result")


class BreakerStorage(StorageLayer):
    """Ask a store only while its circuit breaker lets calls through; failures are counted by method.

    While open, every page and every put is UNAVAILABLE, and nothing is touched or removed; ``register``, ``clear`` and
    ``scan``, which have no such answer, raise StorageError. A probe that hangs keeps the store absent, so a deadline
    belongs inside.
    ``capability`` is declared, not probed, and always passes.

    A failure is any exception but those that a working store raises: a store that is full or closed, and wrong input.

    It owns the wrapped backend. Thread-safe where the backend is.
    """

    def __init__(self, backend: StorageBackend, breaker: CircuitBreaker) -> None:
        super().__init__(backend)
        self._breaker = breaker
        self._admitted: dict[int, Admission] = {}
        """By thread: the call that it is in."""
        self._closed = False

    @property
    def state(self) -> BreakerState:
        """State of the breaker."""
        return self._breaker.state

    @property
    def changes_count(self) -> int:
        """State changes so far."""
        return self._breaker.changes_count

    @property
    def refused_count(self) -> int:
        """Calls answered without asking the store so far."""
        return self._breaker.refused_count

    def give_up(self, thread_id: int) -> None:
        """Count the call that a thread is in as a failure now; how it ends, if ever, counts for nothing."""
        admission = self._admitted.get(thread_id)
        if admission is not None:
            self._breaker.record_outcome(admission, failed=True)

    def capability(self) -> Capability:
        """Return what the wrapped backend can do, in any state."""
        return self._backend.capability()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend; UNAVAILABLE for every label while open."""
        return self._ask(
            Method.EXISTS, partial(self._backend.exists, labels), lambda: [Answer.UNAVAILABLE] * len(labels)
        )

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; UNAVAILABLE while open."""
        return self._ask(Method.GET, partial(self._backend.get, pages), lambda: [Answer.UNAVAILABLE] * len(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages; UNAVAILABLE while open."""
        return self._ask(
            Method.PUT, partial(self._backend.put, pages, level), lambda: [Answer.UNAVAILABLE] * len(pages)
        )

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent; none while open."""
        self._ask(Method.TOUCH, partial(self._backend.touch, labels), lambda: None)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; none while open."""
        return self._ask(Method.REMOVE, partial(self._backend.remove, labels), lambda: 0)

    def close(self) -> None:
        """Close the wrapped backend, in any state."""
        self._closed = True
        self._backend.close()

    def _ask(self, method: Method, work: Callable[[], Result], absent: Callable[[], Result]) -> Result:
        if self._closed:
            raise ClosedError("this store with a breaker was closed")
        admission = self._breaker.admit(method)
        if admission is None:
            return absent()
        thread_id = get_ident()
        self._admitted[thread_id] = admission
        try:
            result = work()
        except BaseException as error:
            self._breaker.record_outcome(admission, failed=_is_failure(error))
            raise
        finally:
            del self._admitted[thread_id]
        self._breaker.record_outcome(admission, failed=False)
        return result

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        return self._ask(method, work, self._refuse)

    def _refuse(self) -> NoReturn:
        message = f"the store is left alone after {self._breaker.failures_max} failures"
        raise StorageError(message, retryable=True)


def _is_failure(error: BaseException) -> bool:
    """Tell whether an exception speaks against the store, and not against the call."""
    if isinstance(error, StorageError):
        return not isinstance(error, StorageFullError)
    return not isinstance(error, CacheError)
