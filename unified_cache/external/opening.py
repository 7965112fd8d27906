"""A store that is named by a URL and opened as soon as it is there, by a thread of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from unified_cache.config import GuardConfig
from unified_cache.errors import InputError
from unified_cache.external.retries import Retries
from unified_cache.storage_backends.common.backoff import Backoff
from unified_cache.storage_backends.common.bounded_call import BoundedCall
from unified_cache.storage_backends.common.call_threads import CallThreads
from unified_cache.storage_backends.memory_reads import MemoryReader, memory_reader_in
from unified_cache.storage_backends.protocol import Capability, StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.storage_backends.wrappers import CheckedStorage, StorageGuard

__all__ = ["OpenedStore", "StoreOpening"]


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, verified and guarded, and what it says of itself.

    Innermost first: the store, the check of its answers, verification, deadline, retries, breaker. So a page is
    verified on the thread that read it, in the same call, while it is in that processor's caches.
    """

    verified: VerifiedStorage
    guard: StorageGuard
    capability: Capability
    memory: MemoryReader | None
    """The store itself, where it reads pages from memory: that waits for nothing, so it needs no guard."""

    @classmethod
    def around(cls, backend: StorageBackend, config: GuardConfig, clock: Callable[[], float]) -> "OpenedStore":
        """Take a store over; asks it what it can do, without a bound on the time."""
        checked = CheckedStorage(backend)
        capability = checked.capability()
        verified = VerifiedStorage(checked)
        guard = StorageGuard.around(verified, capability, config, clock)
        return cls(verified, guard, capability, memory_reader_in(backend))


class StoreOpening:
    """Opens a store on a thread of its own, again after a pause where that failed, until it is there.

    A failure that lasts until somebody mends its cause, such as another format, is logged once and has a long pause.
    Nobody waits longer than they say; an attempt that hangs goes on, and there is one at a time. A store that is opened
    after this was closed is closed at once. Thread-safe.
    """

    __slots__ = (
        "_clock",
        "_closed",
        "_error",
        "_guard",
        "_is_trying",
        "_next_s",
        "_open",
        "_retries",
        "_store",
        "_threads",
    )

    def __init__(self, opened: Callable[[], OpenedStore], pauses: Backoff, clock: Callable[[], float]) -> None:
        self._open = opened
        self._retries = Retries("opening a store", pauses)
        self._clock = clock
        self._store: OpenedStore | None = None
        self._error: BaseException | None = None
        self._next_s = clock()
        self._is_trying = False
        self._closed = False
        self._threads = CallThreads("external-store-opening", 1)
        self._guard = Lock()

    @property
    def store(self) -> OpenedStore | None:
        """The store, once it is there."""
        return self._store

    @property
    def error(self) -> str:
        """Failure of the last attempt; empty if there was none."""
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def reach(self, timeout_s: float) -> OpenedStore | None:
        """Return the store; if it is not there and the pause is over, try to open it and wait for that.

        Whoever finds another's attempt under way gets None at once.
        """
        with self._guard:
            if self._store is not None or self._closed or self._is_trying or self._clock() < self._next_s:
                return self._store
            self._is_trying = True
        self._threads.submit(self._open, self._end).settle(timeout_s)
        return self._store

    def raise_wrong_input(self) -> None:
        """Raise what the last attempt failed with if it speaks against the URL, and not against the store.

        Raises:
            InputError: it does.
        """
        error = self._error
        if isinstance(error, InputError):
            raise error

    def close(self) -> OpenedStore | None:
        """Open nothing any more; return the store if it is there, which is the caller's to close."""
        with self._guard:
            self._closed = True
        self._threads.close(0)
        return self._store

    def _end(self, attempt: BoundedCall[OpenedStore]) -> None:
        """Keep what an attempt brought; close a store that nobody wants any more."""
        error = attempt.take_error()
        store = None if error is not None else attempt.result()
        with self._guard:
            self._is_trying = False
            self._error = error
            if error is not None:
                self._next_s = self._clock() + self._retries.failed(error)
            elif not self._closed:
                self._store, store = store, None
                self._retries.succeeded()
        if store is not None:
            store.guard.breaker.close()
