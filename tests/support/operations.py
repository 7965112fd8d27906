"""Caches whose jobs run, and whose time passes, when a test says so."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, NotStarted, Operation, Workers
from unified_cache.controller.controller import Finished, run_job
from unified_cache.controller.memory import TieredMemory
from unified_cache.controller.operation import Job
from unified_cache.controller.ranks.group import LocalRanks, RankGroup
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.seal import Label
from unified_cache.core.shards import Extent, Shard
from unified_cache.core.window import SPAN_ALL, window
from unified_cache.storage_backends.protocol import Store

Value = TypeVar("Value")

PAGE = 16
SPANS = (SPAN_ALL, 2)
FULL = toy_layout((SPAN_ALL,), PAGE)
HYBRID = toy_layout(SPANS, PAGE)

SETTLE_S = 30.0
"""For all transfers to end."""


def tokens(pages: int, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(first, first + pages * PAGE, dtype=np.int32)


def numbered_pages(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return tokens that fill a page for each number, equal for equal numbers."""
    return np.concatenate([np.arange(PAGE, dtype=np.int32) + 1000 * number for number in numbers])


@dataclass
class Stepped:
    """Workers without threads that run a job when the test says so, or a random one whenever they are asked.

    By a seed every interleaving of transfers with the owner's calls is reached, and repeated.
    """

    waiting: deque[tuple[Operation, Job]] = field(default_factory=deque)
    ended: list[Finished] = field(default_factory=list)
    dice: random.Random | None = None
    """Says which job runs at each call of the owner, where it is not the test."""

    def submit(self, operation: Operation, job: Job) -> None:
        self.waiting.append((operation, job))

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            operation, job = self.waiting.popleft()
            error = run_job(job)  # which may poll
            self.ended.append((operation, error))

    def run_last(self) -> None:
        """Run the job that came last."""
        operation, job = self.waiting.pop()
        error = run_job(job)
        self.ended.append((operation, error))

    def finished(self, timeout_s: float) -> list[Finished]:
        if self.dice is not None and self.waiting:
            self.waiting.rotate(-self.dice.randrange(len(self.waiting)))
            self.run()
        ended, self.ended = self.ended, []
        return ended

    def close(self, timeout_s: float) -> list[str]:
        self.waiting.clear()
        return []


@dataclass
class UnreturnedCall:
    """A call that a store does not return from until the test says so."""

    name: str
    started_s: float = 0.0
    returned: bool = False

    def wait(self, timeout_s: float) -> bool:
        return self.returned


def head_of(ranks: RankGroup) -> Identity:
    """Return the identity of a rank of a tensor-parallel group that has a head for each rank."""
    return replace(IDENTITY, shard=Shard.of_rank(ranks.rank, ranks.size, ranks.size, Extent.whole(1)))


def engine(  # noqa: PLR0913  # each is one part of a cache, all but the store by name
    storage: Store | str | None = None,
    *,
    layout: ModelLayout = HYBRID,
    device: int | tuple[int, ...] = (12, 8),
    host: int | tuple[int, ...] | None = None,
    workers: Workers | None = None,
    ranks: RankGroup = LocalRanks(),
    identity: Identity | None = None,
    clock: Callable[[], float] | None = None,
    memory: type[TieredMemory] = TieredMemory,
    **fields: object,
) -> ToyEngine:
    """Return an engine whose jobs run at once, unless it has other ``workers``; ``fields`` are its configuration's.

    A number of pages is that of every component; the host has as many as the device, unless it is told. A rank of
    several holds a head of its own.
    """
    host = device if host is None else host
    device_pages, host_pages = (
        (pages,) * len(layout.components) if isinstance(pages, int) else pages for pages in (device, host)
    )
    return ToyEngine(
        layout,
        device_pages,
        host_pages,
        storage,
        InlineWorkers() if workers is None else workers,
        identity or (IDENTITY if ranks.size == 1 else head_of(ranks)),
        ranks=ranks,
        clock=clock,
        memory=memory,
        fields=fields,
    )


def filled(store: Store, pages: int = 6) -> None:
    """Have another cache store a prompt."""
    toy = engine(store)
    over(toy.cache, toy.cache.backup(serve(toy, pages)))


def prompt_of_pages(cache: UnifiedCache, pages: int, first: int = 0) -> Prompt:
    """Make the prompt of so many pages, whose tokens count from ``first`` on; a shorter one is its beginning."""
    return cache.prompt(np.arange(first, first + pages * cache.layout.page_size, dtype=np.int32))


def serve(toy: ToyEngine, pages: int, first: int = 0) -> Prompt:
    """Serve the prompt of so many pages; return it."""
    return toy.run(prompt_of_pages(toy.cache, pages, first))


def needed_labels(cache: UnifiedCache, prompt: Prompt) -> list[Label]:
    """Return the names of all objects that a resume at the end of a prompt needs, component by component."""
    owners = cache.identity.owners(cache.layout)
    return [
        Label(owners[pool.name], key, pool.name)
        for component in cache.layout.components
        for pool in component.pools
        if pool.page_bytes
        for key in prompt.keys[window(prompt.pages_count, component.span) :]
    ]


def started(operation: Operation | NotStarted) -> Operation:
    assert operation, operation
    return operation


def over(cache: UnifiedCache, operation: Operation | NotStarted) -> Operation:
    """Wait until a transfer is over, and all others."""
    assert operation, operation
    cache.wait_all(SETTLE_S)
    return operation


def present(value: Value | None) -> Value:
    """Return what is not None: slots that there was room for, a lock, a preference."""
    assert value is not None
    return value


def out_pages(cache: UnifiedCache) -> int:
    """Count the pages with requests and transfers."""
    return sum(occupancy.out for occupancy in cache.stats().occupancy)
