"""Caches for a live page to look at: one at rest, and one that serves a trace on a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tests.sources import ROOT
from unified_cache import CacheConfig, DevicePool, Full, ModelLayout, PoolSpec, UnifiedCache
from unified_cache.cache.stats import Stats
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import KeysOnlyStorage

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
END_S = 60.0
"""Longest wait for the thread; reached only by a bug."""

PAUSE_S = 0.005
"""Between two requests: an engine computes meanwhile, and a page finds the interpreter free."""


def trace_of(limit: int) -> list[TraceRequest]:
    return read_trace(TRACE, limit)


def plan_of_a_small_replay() -> ReplayPlan:
    """Return tiers so small that every one of them evicts."""
    plan = ReplayPlan.of_pages(device_pages=250, host_pages=600, storage="memory:", storage_bytes=30_000_000)
    return replace(plan, with_bytes=False)


class RunningReplay:
    """Publishes what the replay's cache does."""

    def __init__(self) -> None:
        self.served_count = 0
        self.ready = threading.Event()
        self.stop = threading.Event()
        self._player: Player | None = None

    def published_stats(self) -> Stats:
        """Return what the cache has published last."""
        assert self._player is not None
        return self._player.cache.published_stats()

    def run(self, requests: list[TraceRequest]) -> None:
        """Serve requests until told to stop; owns the cache."""
        plan = plan_of_a_small_replay()
        with Player.open(plan, KeysOnlyStorage(plan.storage_bytes, plan.objects())) as player:
            self._player = player
            self.ready.set()
            while not self.stop.is_set():
                for request in requests:
                    player.serve(request)
                    player.cache.wait_all(END_S)  # publishes figures, which a poll does once a second
                    self.served_count += 1
                    if self.stop.wait(PAUSE_S):
                        break


@contextmanager
def running_replay(requests: int = 200) -> Iterator[RunningReplay]:
    """Yield a replay under way, which ends with the block."""
    replay = RunningReplay()
    thread = threading.Thread(target=replay.run, args=(trace_of(requests),), name="replay")
    thread.start()
    try:
        assert replay.ready.wait(END_S)
        yield replay
    finally:
        replay.stop.set()
        thread.join(END_S)


@contextmanager
def publishing_cache() -> Iterator[UnifiedCache]:
    """Yield a cache of 64 pages on the device and 256 on the host that has published its figures."""
    layout = ModelLayout(16, (Full((PoolSpec("kv", 64),)),))
    tensors = [torch.zeros((65, 64), dtype=torch.uint8)]
    config = CacheConfig((64,), (256,))
    with UnifiedCache.open(layout, config, [DevicePool(layout.pools[0], tensors)], identity="toy") as cache:
        cache.poll()
        yield cache
