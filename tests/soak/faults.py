"""A store with periods of faults, which every process of the machine can compute from the clock it shares:

tests.soak.faults:open_url:PERIOD,BAD:DIR
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.store_calls import ScriptedStorage, SeededFaults, StorageFault
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method

RATES = {
    StorageFault.FAIL: 0.3,
    StorageFault.HANG: 0.02,
    StorageFault.DELAY: 0.1,
    StorageFault.SHORT_READ: 0.1,
    StorageFault.FLIPPED_BIT: 0.1,
    StorageFault.MISDIRECTED_READ: 0.1,
    StorageFault.LOST_WRITE: 0.1,
    StorageFault.TORN_WRITE: 0.1,
}
HANG_S = 1.0
DELAY_S = 0.05

RECOVERY_S = 2.0
"""After a bad time calls may still hang, and the server may still leave the store alone."""


@dataclass(frozen=True, slots=True)
class BadTimes:
    """Periods of faults: the last ``bad_s`` of every ``period_s`` of the monotonic clock that all processes share."""

    period_s: float
    bad_s: float

    def is_bad(self, at_s: float) -> bool:
        """Tell whether the store has faults then."""
        return at_s % self.period_s >= self.period_s - self.bad_s

    def touches(self, start_s: float, end_s: float) -> bool:
        """Tell whether a bad time, or the recovery from one, overlaps [start, end)."""
        since_end_s = start_s % self.period_s
        return since_end_s < RECOVERY_S or since_end_s + (end_s - start_s) >= self.period_s - self.bad_s


class FaultsInBadTimes:
    """A ``FaultPlan`` that gives calls faults in bad times alone."""

    def __init__(self, times: BadTimes, faults: SeededFaults, clock: Callable[[], float] = time.monotonic) -> None:
        self._times = times
        self._faults = faults
        self._clock = clock

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Draw a fault, if it is such a time."""
        return self._faults.fault_of(number, method) if self._times.is_bad(self._clock()) else None


def open_url(rest: str, bytes_max: int | None) -> Store:
    """Open a file store behind such faults."""
    times, _, directory = rest.partition(":")
    period_s, bad_s = map(float, times.split(","))
    rng = random.Random(1)
    plan = FaultsInBadTimes(BadTimes(period_s, bad_s), SeededFaults(RATES, rng))
    store = FileStorage.open(directory, bytes_max=bytes_max)
    return ScriptedStorage(store, plan, rng, delay_s=DELAY_S, hang_s_max=HANG_S)
