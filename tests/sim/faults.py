"""Faults of a simulation: stores that fail, lie and decline, copies that fail; until it is switched off."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.support.faulty_storage import SeededFaults, StorageFault
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.wrappers.layer import Method

RATES: Mapping[StorageFault, float] = {
    StorageFault.FAIL: 0.03,
    StorageFault.DELAY: 0.05,
    StorageFault.SHORT_READ: 0.1,
    StorageFault.FLIPPED_BIT: 0.1,
    StorageFault.MISDIRECTED_READ: 0.1,
    StorageFault.LOST_WRITE: 0.04,
    StorageFault.TORN_WRITE: 0.04,
    StorageFault.PARTIAL_WRITE: 0.04,
}
"""Per call to the store."""
DECLINE_RATE = 0.05
"""Per batch: its tail is not stored, as by a store without room."""
COPY_FAIL_RATE = 0.01
"""Per pool copied."""


class Faults:
    """The faults of one simulation, counted, with one switch for all."""

    def __init__(self, rng: random.Random, *, on: bool) -> None:
        self.on = on
        self.fired: Counter[str] = Counter()
        """Declines and failed copies; the store counts its own."""
        self._rng = rng
        self._plan = SeededFaults(RATES, rng)

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Let the store's calls go wrong."""
        return self._plan.fault_of(number, method) if self.on else None

    def strikes(self, kind: str, rate: float) -> bool:
        """Tell whether a fault happens here."""
        struck = self.on and self._rng.random() < rate
        self.fired[kind] += struck
        return struck


class DecliningStorage(MemoryStorage):
    """Now and then has no room for the last pages of a batch."""

    def __init__(self, bytes_max: int, faults: Faults, rng: random.Random) -> None:
        super().__init__(bytes_max)
        self._faults = faults
        self._rng = rng

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        if not self._faults.strikes("decline", DECLINE_RATE):
            return super().put(pages, level)
        taken = self._rng.randrange(len(pages) + 1)
        return super().put(pages[:taken], level) + [Answer.DECLINED] * (len(pages) - taken)
