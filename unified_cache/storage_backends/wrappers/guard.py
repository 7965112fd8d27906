"""The guard between a cache or a service and its store: deadline, retries and circuit breaker, in the one right order.

Innermost first::

    DeadlineStorage   bounds every single try
    RetryStorage      tries again what failed in a way that may pass
    BreakerStorage    counts what is left of failures, and leaves a store alone that keeps failing

The deadline is inside of the retries, so that it bounds a try and not all of them together with their pauses, and so
that a try that hangs is never made again over buffers that are still in use; the same reason as OpenDAL gives for a
TimeoutLayer below its RetryLayer. The breaker is outside of both: a fault that a second try cures is none, and a store
that is left alone is not tried three times.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from unified_cache.config import GuardConfig
from unified_cache.storage_backends.common.bounded_call import call_within
from unified_cache.storage_backends.common.breaker import Backoff, CircuitBreaker
from unified_cache.storage_backends.protocol import Capability, StorageBackend
from unified_cache.storage_backends.wrappers.breaker import BreakerStorage
from unified_cache.storage_backends.wrappers.deadline import DeadlineStorage
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.storage_backends.wrappers.retry import RetryStorage

__all__ = ["StorageGuard", "declared_capability"]

DECLARATION_S = 60.0
"""Longest wait for a store to say what it can do, and with it how long its other calls may take."""


def declared_capability(backend: StorageBackend, clock: Callable[[], float] = time.monotonic) -> Capability:
    """Ask a store what it can do, within bounds, before anything else is asked of it.

    Raises:
        StorageError: the store does not say.
    """
    return call_within(DECLARATION_S, Method.CAPABILITY.value, backend.capability, clock)


@dataclass(frozen=True, slots=True)
class StorageGuard:
    """The wrappers around one store. ``breaker`` is the outermost: calls go to it, and closing it closes all."""

    deadline: DeadlineStorage
    retry: RetryStorage
    breaker: BreakerStorage

    @classmethod
    def around(
        cls,
        backend: StorageBackend,
        capability: Capability,
        config: GuardConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "StorageGuard":
        """Put the guard around a store; a call that may take longer by the store's own word has a longer deadline."""
        deadline_s = max(config.deadline_s, capability.call_s_max)

        def count_late(thread_id: int) -> None:
            breaker.give_up(thread_id)

        deadline = DeadlineStorage(backend, deadline_s, config.calls_max, clock, count_late)
        pauses = Backoff(config.retry_pause_s, config.retry_pause_s * 2**config.retry_rounds_max)
        rng = random.Random()  # noqa: S311  # it only keeps the pauses of several callers from falling together
        retry = RetryStorage(deadline, config.retry_rounds_max, pauses, rng, sleep)
        rests = Backoff(config.breaker_pause_s, config.breaker_pause_s_max)
        breaker = BreakerStorage(retry, CircuitBreaker(config.breaker_failures_max, rests, clock))
        return cls(deadline, retry, breaker)
