"""Settings that a seed draws: policies, bounds and deadlines of the cache that it simulates."""

import math
import random

from tests.sim.cells import Cell
from unified_cache.core.config import CacheConfig, EvictionConfig, EvictionPolicy, Prefetching, WritePolicy

TIMEOUT_S = 0.8
"""Of an operation, where seeds have one: some end too late, most do not."""
PATIENCE_S = 0.3
"""Of a prefetch, where seeds have one."""
THRESHOLD_PAGES = 3
HOST_SHARE = 0.25
"""Of the host's pages, where seeds bound what prefetches may fill."""
SMALL_HOST_PAGES, SMALL_HOST_WINDOW_PAGES = 8, 2
"""Of the host, where seeds have one that is a buffer: fewer pages than most prompts, and than the longest window."""


def config_of(cell: Cell, seed: int) -> CacheConfig:
    """Draw the configuration of a seed; half of all seeds evict by lru alone and back up on call alone."""
    rng = random.Random(f"settings of {seed}")
    components = len(cell.layout.components)

    def policies() -> tuple[EvictionPolicy, ...]:
        return tuple(rng.choice(list(EvictionPolicy)) for _ in range(components))

    plain = rng.random() < 0.5
    host_pages = cell.host_pages
    if (
        seed + seed // 18
    ) % 3 == 0:  # one of each three seeds, and in time every component set, with and without faults
        host_pages = (SMALL_HOST_PAGES, *(SMALL_HOST_WINDOW_PAGES for _ in range(1, components)))
    return CacheConfig(
        cell.device_pages,
        host_pages,
        eviction=EvictionConfig() if plain else EvictionConfig(policies(), policies()),
        write=WritePolicy.ON_CALL if rng.random() < 0.5 else rng.choice(list(WritePolicy)),
        prefetching=Prefetching(
            threshold_tokens=rng.choice((0, 0, THRESHOLD_PAGES * cell.layout.page_size)),
            patience_s=rng.choice((math.inf, PATIENCE_S)),
            host_share=rng.choice((1.0, HOST_SHARE)),
        ),
        operation_timeout_s=rng.choice((60.0, 60.0, TIMEOUT_S)),
        guard=None,
    )
