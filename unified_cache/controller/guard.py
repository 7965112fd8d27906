"""What stands between a cache and its store: a deadline, another try, and rest for a store that keeps failing."""

import random
import time
from collections.abc import Callable

from unified_cache.config import StorageGuard
from unified_cache.storage_backends.common.backoff import Backoff
from unified_cache.storage_backends.common.breaker import CircuitBreaker
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.wrappers import BreakerStorage, DeadlineStorage, RetryStorage

__all__ = ["guarded"]


def guarded(
    backend: StorageBackend, guard: StorageGuard, clock: Callable[[], float] = time.monotonic
) -> StorageBackend:
    """Wrap ``backend``, innermost first: deadline, retry, breaker. The wrapper owns it."""
    in_time = DeadlineStorage(backend, guard.deadline_s, guard.calls_max, clock)
    pauses = Backoff(guard.pause_s, guard.pause_s * 2**guard.rounds_max)
    # Any seed: it only keeps the pauses of several caches from falling together.
    again = RetryStorage(in_time, guard.rounds_max, pauses, random.Random(0))  # noqa: S311
    breaker = CircuitBreaker(guard.failures_max, Backoff(guard.rest_s, guard.rest_s_max), clock)
    return BreakerStorage(again, breaker)
