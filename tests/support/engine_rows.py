"""An engine's memory in tests of the engine store: rows of K and V that lie in a mapping of their own, by number."""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from mmap import mmap

from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore, EngineStoreConfig
from unified_cache.storage_backends.protocol import Store

ROW_BYTES = (3000, 700)
"""K and V of a page: one is copied by numpy, the other is small."""

PAGE_BYTES = sum(ROW_BYTES)

LAYOUT = ModelLayout(64, (Full((PoolSpec("kv", PAGE_BYTES),)),))
IDENTITY = Identity("integrations/engine_store/model")


def label_of(number: int, identity: Identity = IDENTITY) -> Label:
    """Name the page of that number."""
    return Label(identity.digest(LAYOUT), hashlib.sha256(b"external %d" % number).digest(), "kv")


def payload_of(number: int) -> bytes:
    """Return the bytes of the page of that number."""
    return random.Random(number).randbytes(PAGE_BYTES)


def opened_store(
    backend: Store, config: EngineStoreConfig | None = None, clock: Callable[[], float] = time.monotonic
) -> EngineStore:
    """Return an engine's store over a backend, which knows the identity."""
    store = EngineStore.opened_by(lambda: backend, config, clock=clock)
    store.register(IDENTITY, LAYOUT)
    return store


class EngineRows:
    """Host memory of an engine: pages side by side, first all K, then all V. ``close`` fails while a view is left."""

    def __init__(self, pages_max: int) -> None:
        self.memory = mmap(-1, pages_max * PAGE_BYTES)
        self._pages_max = pages_max

    @classmethod
    def holding(cls, numbers: Sequence[int]) -> "EngineRows":
        """Return rows that hold these pages."""
        rows = cls(len(numbers))
        for slot, number in enumerate(numbers):
            payload = payload_of(number)
            k, v = rows.rows(slot)
            k[:], v[:] = payload[: ROW_BYTES[0]], payload[ROW_BYTES[0] :]
        return rows

    def rows(self, slot: int) -> tuple[memoryview, ...]:
        """Return the rows of one page."""
        k_bytes, v_bytes = ROW_BYTES
        view = memoryview(self.memory)
        v_start = self._pages_max * k_bytes + slot * v_bytes
        return view[slot * k_bytes : (slot + 1) * k_bytes], view[v_start : v_start + v_bytes]

    def pages(self, numbers: Sequence[int]) -> list[EnginePage]:
        """Return the pages of these numbers, in the first slots."""
        return [EnginePage(label_of(number), self.rows(slot)) for slot, number in enumerate(numbers)]

    def payload(self, slot: int) -> bytes:
        """Return what the rows of one page hold."""
        return b"".join(self.rows(slot))

    def close(self) -> None:
        """Give the memory back, as an engine does; BufferError while anybody has a view of it."""
        self.memory.close()
