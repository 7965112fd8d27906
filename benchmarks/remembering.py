"""Time of a replay that remembers what becomes of its pages, for ``explain``, over the time of one that does not.

python -m benchmarks.remembering [ROUNDS]

Two caches serve the same requests without bytes, batch by batch in turns, so that both see the same machine. What is
printed is the median of the ratios of all batches but the first ones, before memory is full, the requests that the
cache without memory serves in a second of the processor, and as a reference the same of two that remember nothing.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import quiet
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers
from unified_cache.controller.memory import NoBytes
from unified_cache.core.pool import Identity
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.settings import ReplaySettings
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import KeysOnlyStorage

TRACE = Path(__file__).parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
REQUESTS = 6_000
ROUNDS = 3
BATCH_REQUESTS = 40
WARM_SHARE = 0.3
"""Part of the batches that is not counted."""
PAGES = 1_000_000
"""Pages remembered."""

SIZES = {
    "device alone": ReplaySettings(device_pages=5_000, host_pages=0, with_bytes=False),
    "device and host": ReplaySettings(device_pages=2_000, host_pages=20_000, with_bytes=False),
    "all tiers": ReplaySettings(
        device_pages=2_000, host_pages=20_000, storage="memory:", storage_bytes=400_000_000, with_bytes=False
    ),
}


def opened(settings: ReplaySettings, pages: int) -> Player:
    """Open a cache that remembers so many pages."""
    plan = settings.plan
    storage = None if plan.storage is None else KeysOnlyStorage(plan.storage_bytes, plan.objects())
    config = replace(plan.config, forgotten_pages_max=pages)
    identity = Identity(plan.subject, dtype="uint8")
    cache = UnifiedCache.assemble(plan.layout, config, NoBytes(), InlineWorkers(), identity, storage)
    return Player(plan, cache, None)


def served_s(player: Player, requests: Sequence[TraceRequest]) -> float:
    """Serve; return the processor's seconds that it took."""
    started_s = time.thread_time()
    for request in requests:
        player.serve(request)
    return time.thread_time() - started_s


class Compared(NamedTuple):
    """Times of two caches that serve the same batches, without the first ones."""

    ratio: float
    """Median of the time with pages remembered over the time with none."""
    requests_rate: float
    """Requests by second of the processor where none are remembered."""


def compared(settings: ReplaySettings, requests: Sequence[TraceRequest], pages: int) -> Compared:
    """Serve with so many pages remembered, and with none, batch by batch."""
    found: list[float] = []
    plain_s: list[float] = []
    with opened(settings, 0) as plain, opened(settings, pages) as remembering, quiet():
        for start in range(0, len(requests), BATCH_REQUESTS):
            batch = requests[start : start + BATCH_REQUESTS]
            order = (plain, remembering) if len(found) % 2 else (remembering, plain)
            times = {player: served_s(player, batch) for player in order}
            found.append(times[remembering] / times[plain])
            plain_s.append(times[plain])
    first = int(len(found) * WARM_SHARE)
    counted = len(requests[first * BATCH_REQUESTS :])
    return Compared(statistics.median(found[first:]), counted / sum(plain_s[first:]))


def main(rounds: int) -> None:
    """Print the ratios of each size, and of two caches that are alike."""
    requests = read_trace(TRACE, REQUESTS)
    for name, settings in SIZES.items():
        for words, pages in (("remembering over not", PAGES), ("not over not", 0)):
            each = [compared(settings, requests, pages) for _ in range(rounds)]
            seen = [one.ratio for one in each]
            rate = statistics.median(one.requests_rate for one in each)
            print(
                f"{name}, {words}: median {statistics.median(seen):.3f}, {min(seen):.3f} to {max(seen):.3f}; "
                f"{rate:,.0f} requests/s",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
