"""An engine whose store takes simulated time."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.support.cache import IDENTITY, ToyEngine, WholePromptCache
from tests.support.clock import ManualClock
from tests.support.ranks import head_of
from unified_cache.controller import InlineWorkers, NotStarted, Operation, OperationState, Workers
from unified_cache.controller.memory import TieredMemory
from unified_cache.controller.ranks import LocalRanks, RankGroup
from unified_cache.core.config import CacheConfig
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO

Waited = TypeVar("Waited", bound=Operation | NotStarted)

POLL_S = 1e-4
"""Between two polls of a transfer that somebody waits for."""


class PacedStorage(MemoryStorage):
    """A store whose gets take a latency, and time for each byte, by a clock that they move."""

    def __init__(self, clock: ManualClock, byte_s: float, latency_s: float = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.byte_s = byte_s
        self.latency_s = latency_s
        self.gets_count = 0
        self.slowest_get_s = 0.0
        self.during_get: Callable[[int], None] = lambda number: None
        """Called in the middle of each get with its number, from 0."""

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.during_get(self.gets_count)
        self.gets_count += 1
        read_bytes = sum(len(buffer) for page in pages for buffer in page.buffers)
        taken_s = self.latency_s + self.byte_s * read_bytes
        self.clock.now_s += taken_s
        self.slowest_get_s = max(self.slowest_get_s, taken_s)
        return super().get(pages)


class TimedEngine:
    """Serves prompts by one cache, on the clock of its store."""

    def __init__(
        self,
        layout: ModelLayout,
        config: CacheConfig,
        store: PacedStorage,
        *,
        workers: Workers | None = None,
        ranks: RankGroup = LocalRanks(),
    ) -> None:
        self.clock = clock = store.clock
        identity = IDENTITY if ranks.size == 1 else head_of(ranks)
        self.store = store
        self.toy = ToyEngine(layout, config.device_pages, config.host_pages, None, InlineWorkers())
        memory = TieredMemory.fitting(layout, config, list(self.toy.pools.values()))
        ours = InlineWorkers() if workers is None else workers
        self.cache = WholePromptCache(self.toy.layout, config, memory, ours, identity, ranks, clock)
        self.toy.cache = self.cache
        self.cache.attach(store)

    def compute(self, prompt: Prompt) -> None:
        """Compute what the device lacks of a prompt, and keep it there."""
        cache = self.cache
        found = cache.match(prompt)
        lock = cache.lock(found)
        self.toy.verify(prompt, lock)
        fresh = cache.allocate(cache.pages_to_allocate(lock.end, prompt.pages_count, cache.checkpoint_ends(found)))
        assert fresh is not None, "the device is too small for the test"
        for component, slots in enumerate(fresh):
            self.toy.write_pages(component, slots, prompt, lock.end)
        cache.release(cache.insert(prompt, fresh, lock))

    def wait(self, operation: Waited) -> Waited:
        """Poll until an operation is over, as an engine that has nothing else to do."""
        while isinstance(operation, Operation) and operation.state is OperationState.RUNNING:
            self.clock.now_s += POLL_S
            self.cache.poll()
        return operation

    def forget(self) -> None:
        """End what is under way and empty device and host."""
        self.cache.wait_all(60)
        self.cache.reset()
