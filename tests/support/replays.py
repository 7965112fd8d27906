"""Replays of plain pages, sized field by field, and traces that are made up."""

import random
from dataclasses import dataclass, replace

from unified_cache.core.config import EvictionConfig, EvictionPolicy, Prefetching, WritePolicy
from unified_cache.sizing.replay.plan import PAGE_BYTES, ReplayPlan
from unified_cache.sizing.replay.trace import TraceRequest


@dataclass(frozen=True)
class PageSettings:
    """A plan of plain pages, field by field, so that ``dataclasses.replace`` changes any of them."""

    page_size: int = 512
    device_pages: int = 2000
    host_pages: int = 20000
    storage: str | None = None
    storage_bytes: int | None = None
    page_bytes: int = PAGE_BYTES
    with_bytes: bool = True
    engines: int = 1
    explains: bool = False
    evicts: EvictionPolicy = EvictionPolicy.LRU
    write: WritePolicy = WritePolicy.ON_CALL
    prefetch_min_tokens: int = 0

    @property
    def plan(self) -> ReplayPlan:
        """The plan of these fields."""
        sizes = (self.page_size, self.device_pages, self.host_pages, self.storage, self.storage_bytes, self.page_bytes)
        plan = ReplayPlan.of_pages(*sizes)
        config = replace(
            plan.config,
            eviction=EvictionConfig((self.evicts,), (self.evicts,)),
            write=self.write,
            prefetching=Prefetching(self.prefetch_min_tokens),
        )
        return replace(plan, config=config, with_bytes=self.with_bytes, engines=self.engines, explains=self.explains)


def conversations(count: int, seed: int = 7) -> list[TraceRequest]:
    """Make up requests of a few conversations that grow and fork."""
    rng = random.Random(seed)
    running: list[tuple[int, ...]] = [()]
    requests: list[TraceRequest] = []
    fresh = iter(range(10**6))
    for number in range(count):
        base = rng.choice(running[-12:])
        ids = (*base[: rng.randint(0, len(base))], *(next(fresh) for _ in range(rng.randint(1, 6))))
        running.append(ids)
        requests.append(TraceRequest(1000.0 * number, len(ids) * 512 - rng.randrange(512), 1, ids))
    return requests
