"""Faults of a simulation: stores that fail, lie and decline, copies that fail; until it is switched off."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.support.store_calls import SeededFaults, StorageFault
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, page_bytes
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
SPACE_RATE = 0.05
"""Per batch: others take space from the store, or give it back."""
SPACE_LEFT = (0.0, 0.6, 0.8, 0.9)
"""Share that they leave, one of these."""
COPY_FAIL_RATE = 0.01
"""Per pool copied."""


class Faults:
    """The faults of one simulation, counted, with one switch for all."""

    def __init__(self, rng: random.Random, *, on: bool) -> None:
        self.on = on
        self.fired: Counter[str] = Counter()
        """Declines and failed copies; the store counts its own."""
        self.failed_removals = 0
        self._rng = rng
        self._plan = SeededFaults(RATES, rng)

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Let the store's calls go wrong."""
        fault = self._plan.fault_of(number, method) if self.on else None
        self.failed_removals += method is Method.REMOVE and fault is StorageFault.FAIL
        return fault

    def strikes(self, kind: str, rate: float) -> bool:
        """Tell whether a fault happens here."""
        struck = self.on and self._rng.random() < rate
        self.fired[kind] += struck
        return struck


class DecliningStorage(MemoryStorage):
    """Now and then has no room for the last pages of a batch, and shares its space with others who take it."""

    def __init__(self, bytes_max: int, faults: Faults, rng: random.Random) -> None:
        super().__init__(bytes_max)
        self._space_bytes = bytes_max
        self._faults = faults
        self._rng = rng
        self._others = random.Random(bytes_max)
        """Draws what others do, so that the rest of a seed does not depend on it."""

    def capability(self) -> Capability:
        """Declare its cap, whatever others leave of the space."""
        return replace(super().capability(), bytes_max=self._space_bytes)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self._let_others_act()
        if not self._faults.strikes("decline", DECLINE_RATE):
            return self._put(pages, level)
        taken = self._rng.randrange(len(pages) + 1)
        return self._put(pages[:taken], level) + [Answer.DECLINED] * (len(pages) - taken)

    def _let_others_act(self) -> None:
        """Have the cap shrink below what is stored, or grow back; where there are no faults it is whole."""
        space_bytes = self._space_bytes
        if self._faults.on and self._others.random() >= SPACE_RATE:
            return
        if self._faults.on and self._lru.bytes_max == space_bytes:
            self._faults.fired["space taken"] += 1
            space_bytes = int(space_bytes * self._others.choice(SPACE_LEFT))
        self._lru.bytes_max = space_bytes

    def _put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Put pages; whatever others did, the newest are stored where they fit at all."""
        known = set(self._pages)
        answers = super().put(pages, level)
        sizes = {page.label: page_bytes(page) for page in pages}
        assert self._lru.bytes_max is not None
        assert all(answers) or sum(sizes.values()) > self._lru.bytes_max, "the newest pages fit and are declined"
        is_fresh = any(answer and page.label not in known for page, answer in zip(pages, answers, strict=True))
        assert not is_fresh or self._lru.bytes_used <= self._lru.bytes_max, "a page was stored above the cap"
        return answers
