"""A store that is away: opened later, then given the registrations, tried again after growing pauses.

The calls that come try again; no thread waits for a pause to be over. A failure is logged once. One that passes by
itself has a pause that grows; one that lasts until somebody mends its cause, such as another format, has a long pause.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from threading import Lock

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import CacheError, InputError, StorageError, StorageFullError
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.bounded_call import BoundedCall
from unified_cache.storage_backends.common.breaker import Backoff
from unified_cache.storage_backends.common.call_threads import CallThreads
from unified_cache.storage_backends.manifest import described_by, manifest_of
from unified_cache.storage_backends.memory_reads import MemoryReader, memory_reader_in
from unified_cache.storage_backends.protocol import Capability, StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.storage_backends.wrappers import CheckedStorage, StorageGuard

__all__ = ["OpenedStore", "Registrations", "Retries", "StoreOpening"]

logger = logging.getLogger(__name__)

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
    def around(cls, backend: StorageBackend, name: str, config: GuardConfig, clock: Clock) -> "OpenedStore":
        """Take a store over; asks it what it can do, without a bound on the time. The log calls it ``name``, if any."""
        checked = CheckedStorage(backend)
        capability = checked.capability()
        verified = VerifiedStorage(checked)
        named = replace(capability, name=name or capability.name)
        guard = StorageGuard(verified, named, config, clock)
        return cls(verified, guard, capability, memory_reader_in(backend))


class StoreOpening:
    """Opens a store on a thread of its own, again after a pause where that failed, until it is there.

    Nobody waits longer than they say; an attempt that hangs goes on, and there is one at a time. A store that is opened
    after this was closed is closed at once. Thread-safe.
    """

    __slots__ = ("_closed", "_error", "_guard", "_is_trying", "_open", "_retries", "_store", "_threads")

    def __init__(self, opened: Callable[[], OpenedStore], pauses: Backoff, clock: Clock) -> None:
        self._open = opened
        self._retries = Retries("opening a store", pauses, clock)
        self._store: OpenedStore | None = None
        self._error: BaseException | None = None
        self._is_trying = False
        self._closed = False
        self._threads = CallThreads("engine-store-opening", 1)
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

        A caller that finds another's attempt under way gets None at once.
        """
        with self._guard:
            if self._store is not None or self._closed or self._is_trying or not self._retries.is_due:
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
            store.guard.close()


class _Registration:
    """One identity, and whether the store has taken it."""

    __slots__ = ("is_taken", "manifest", "pools", "retries")

    def __init__(self, manifest: Manifest, pools: tuple[str, ...], retries: Retries) -> None:
        self.manifest = manifest
        self.pools = pools
        self.retries = retries
        self.is_taken = False


class Registrations:
    """Manifests by identity. A call announces what its pages need; what fails is announced again after a pause."""

    __slots__ = ("_by_identity", "_clock", "_guard", "_pauses")

    def __init__(self, pauses: Backoff, clock: Clock) -> None:
        self._by_identity: dict[bytes, _Registration] = {}
        self._pauses = pauses
        self._clock = clock
        self._guard = Lock()

    @property
    def taken_count(self) -> int:
        """Identities that the store has taken."""
        return sum(each.is_taken for each in list(self._by_identity.values()))

    @property
    def count(self) -> int:
        """Identities in all."""
        return len(self._by_identity)

    def remember(self, identity: Identity, layout: ModelLayout) -> list[bytes]:
        """Remember an identity; return the digests that its pools are stored under.

        Raises:
            LayoutError: the layout's pools cannot be those of the identity's shard.
        """
        parts = identity.parts(layout)
        manifests = [manifest_of(part.identity, part.layout) for part in parts]
        with self._guard:
            for manifest, part in zip(manifests, parts, strict=True):
                if manifest.identity not in self._by_identity:
                    retries = Retries(f"registering {identity.model} with the store", self._pauses, self._clock)
                    self._by_identity[manifest.identity] = _Registration(manifest, part.names, retries)
        return [manifest.identity for manifest in manifests]

    def identities(self) -> dict[bytes, Identity]:
        """Return what was remembered, by digest."""
        return {digest: described_by(each.manifest).identity for digest, each in list(self._by_identity.items())}

    def may_ask(self, identities: Collection[bytes]) -> bool:
        """Return whether the store has taken these identities, or may be asked to now.

        Not one that nobody has remembered, nor one that it refused a moment ago.
        """
        for identity in identities:
            found = self._by_identity.get(identity)
            if found is None or not (found.is_taken or found.retries.is_due):
                return False
        return True

    def are_taken(self, identities: Collection[bytes]) -> bool:
        """Return whether the store has taken all of these identities."""
        return all(found is not None and found.is_taken for found in map(self._by_identity.get, identities))

    def announce(self, store: StorageBackend, identities: Collection[bytes], memory: memoryview) -> None:
        """Announce those of these identities that the store has not taken, with the memory that pages lie in.

        Raises:
            CacheError: the store does not take one, or does not answer.
        """
        for identity in identities:
            found = self._by_identity[identity]
            if found.is_taken:
                continue
            slabs: Mapping[str, memoryview] = dict.fromkeys(found.pools, memory)
            try:
                store.register(found.manifest, slabs)
            except CacheError as error:
                with self._guard:
                    found.retries.record_failure(error)
                raise
            with self._guard:
                found.is_taken = True
                found.retries.record_success()
