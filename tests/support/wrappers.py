"""Support of the wrappers' tests: guards of which one part does something, faults by script, and pages by number."""

import random
import time
from collections.abc import Callable, Mapping, Sequence

from tests.support.clock import ManualClock
from tests.support.store_calls import ScriptedFaults, ScriptedStorage, StorageFault
from unified_cache.core.config import GuardConfig
from unified_cache.storage_backends.protocol import Capability, PageIO, Store
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.testing.storage_contract import blank_page, label, sealed_page

PATIENCE_S = 60.0
"""Longest wait for what must happen; reached only by a bug."""


def scripted(script: Mapping[int, StorageFault], backend: Store | None = None, seed: int = 0) -> ScriptedStorage:
    """Put these faults, by call number, before a backend, or an empty one in memory."""
    return ScriptedStorage(backend, ScriptedFaults(script), random.Random(seed))


def sealed(numbers: Sequence[int]) -> list[PageIO]:
    """Make the sealed pages of these numbers."""
    return [sealed_page(label(number)) for number in numbers]


def blank(numbers: Sequence[int]) -> list[PageIO]:
    """Make buffers for the pages of these numbers."""
    return [blank_page(label(number)) for number in numbers]


NEVER = 1 << 30
"""Failures that no test comes to."""

OF_ANY_SPEED = Capability("any", durable=False, bytes_max=None)
"""Capability of a store that says nothing about how long its calls take."""


def bounded(
    backend: Store,
    deadline_s: float = PATIENCE_S,
    calls_max: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> StorageGuard:
    """Guard a store by a deadline: every call is made once, and no failure keeps it from the next."""
    config = GuardConfig(deadline_s=deadline_s, calls_max=calls_max, retry_rounds_max=1, breaker_failures_max=NEVER)
    return StorageGuard(backend, OF_ANY_SPEED, config, clock)


def retrying(backend: Store, rounds_max: int, clock: ManualClock | None = None, seed: int = 0) -> StorageGuard:
    """Guard a store by retries after 1, 2, 4 ... seconds: no call is late, and no failure keeps it from the next."""
    clock = clock or ManualClock()
    config = GuardConfig(
        deadline_s=PATIENCE_S, retry_rounds_max=rounds_max, retry_pause_s=1.0, breaker_failures_max=NEVER
    )
    return StorageGuard(backend, OF_ANY_SPEED, config, clock, clock.sleep, random.Random(seed))


def breaking(
    backend: Store, failures_max: int, clock: Callable[[], float], deadline_s: float = PATIENCE_S
) -> StorageGuard:
    """Guard a store by a breaker that rests for 10, 20, 35 seconds: every call is made once."""
    config = GuardConfig(
        deadline_s=deadline_s,
        retry_rounds_max=1,
        breaker_failures_max=failures_max,
        breaker_pause_s=10.0,
        breaker_pause_s_max=35.0,
    )
    return StorageGuard(backend, OF_ANY_SPEED, config, clock)
