"""Replays a trace against the caches of engines that serve one request at a time.

Closed loop: before a request, every transfer has settled, so a run is a function of trace and settings. Nothing
is dropped for being late.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from unified_cache.core.byte_sizes import bytes_text
from unified_cache.core.hits import Hits
from unified_cache.core.host_memory import memory_bytes
from unified_cache.core.pool import Tier
from unified_cache.core.tier_sizes import component_bytes
from unified_cache.sizing.replay.missed import MissedTokens
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.references import references_of
from unified_cache.sizing.replay.result import (
    ComponentUse,
    ReplayResult,
    ServedRequests,
    TimeSeriesPoint,
    TokenUse,
)
from unified_cache.sizing.replay.settings import PlannedSettings
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest, no_progress
from unified_cache.storage_backends.memory import KeysOnlyStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import check_storage_url, open_storage

WINDOWS_MAX = 120
"""Points of the time series: as many as a picture can show."""


def replay(
    trace: str, requests: Sequence[TraceRequest], settings: PlannedSettings, on_progress: OnProgress = no_progress
) -> ReplayResult:
    """Serve ``requests`` in their order by engines of these sizes; ``trace`` is what the result calls them.

    Several engines over a store are then compared with as many that have a part of it each; ``on_progress`` counts that
    second run too.

    Raises:
        ConfigError: memory does not suffice, or the storage URL names nothing.
        StorageError: the store cannot be opened, or failed on the way.

    """
    plan = settings.plan
    with _shared_store(plan) as store:
        store_bytes = None if store is None else store.capability().bytes_max
        with _opened(plan, [store] * plan.engines) as players:
            started_s = time.perf_counter()
            served = _serve(players, plan, requests, on_progress)
            seconds = time.perf_counter() - started_s
            if plan.with_bytes:
                for player in players:
                    player.cache.check()
            stats = [player.cache.stats() for player in players]
            components = _components(plan, players)
    total = _summed(served)
    missed: MissedTokens = sum((player.missed for player in players if player.missed), Counter())
    apart = None
    if plan.compares_private_stores:
        # Hits without bytes are the same as with bytes.
        part, objects = None if store_bytes is None else store_bytes // plan.engines, plan.objects()
        if part is not None and part < max(objects.values(), default=0):
            part = 0  # a share that has no room for a page is no store
        stores = [KeysOnlyStorage(part, objects) for _ in range(plan.engines)]
        alone = plan.without_bytes()
        with _opened(alone, stores) as rivals:
            apart = _summed(_serve(rivals, alone, requests, lambda done, note: on_progress(len(requests) + done, note)))
    return ReplayResult(
        trace=trace,
        settings=settings,
        requests=total.requests,
        pages=total.pages,
        seen_pages=total.seen_pages,
        hits=total.hits,
        tokens=total.tokens,
        apart=apart,
        engines=tuple(_summed(served[number :: plan.engines]) for number in range(plan.engines)),
        components=components,
        missed=dict(missed.most_common()) if plan.explains else None,
        references=references_of(requests, plan, store_bytes) if plan.explains else None,
        pages_verified=sum(player.pages_verified for player in players),
        wrong_pages=sum(player.wrong_pages for player in players),
        leaked_slots=sum(occupancy.out for each in stats for occupancy in each.occupancy),
        flawed_pages=sum(each.flawed_pages for each in stats),
        seconds=seconds,
        series=tuple(_series(requests, served)),
        environment=_environment(),
    )


def served_hits(plan: ReplayPlan, requests: Sequence[TraceRequest]) -> list[Hits]:
    """Serve requests by the caches of a plan; return the pages handed back of each."""
    with _shared_store(plan) as store, _opened(plan, [store] * plan.engines) as players:
        return [each.hits for each in _serve(players, plan, requests, no_progress)]


@contextmanager
def _shared_store(plan: ReplayPlan) -> Iterator[Store | None]:
    """Open the store of ``plan``; for a run without bytes check its URL and open a keys-only store of the same cap."""
    if plan.storage is None:
        yield None
        return
    if plan.with_bytes:
        store = open_storage(plan.storage, bytes_max=plan.storage_bytes)
    else:
        check_storage_url(plan.storage)
        store = KeysOnlyStorage(plan.storage_bytes, plan.objects())
    with closing(store):
        yield store


@contextmanager
def _opened(plan: ReplayPlan, stores: Sequence[Store | None]) -> Iterator[list[Player]]:
    """Open an engine over each of these stores."""
    with ExitStack() as players:
        yield [players.enter_context(Player.open(plan, store)) for store in stores]


def _serve(
    players: Sequence[Player], plan: ReplayPlan, requests: Sequence[TraceRequest], on_progress: OnProgress
) -> list[ServedRequests]:
    """Serve requests by engines in turn (round robin), as from a load balancer that does not know their caches.

    Return what each request asked for and was handed back. An engine serves after every transfer of the one before it
    has ended.
    """
    served: list[ServedRequests] = []
    seen: set[int] = set()
    asked = handed = 0
    page_size = plan.layout.page_size
    for number, request in enumerate(requests):
        players[number % len(players) - 1].wait_all()
        hits = players[number % len(players)].serve(request)
        pages, length = plan.pages_of(request), request.input_length
        seen_pages = min(plan.whole_pages(_blocks_seen(request, seen) * request.block_tokens), pages)
        tokens = TokenUse(length, min(seen_pages * page_size, length), hits.tokens(page_size, length))
        served.append(ServedRequests(requests=1, pages=pages, seen_pages=seen_pages, hits=hits, tokens=tokens))
        asked += tokens.asked
        handed += tokens.hits.total
        on_progress(len(served), f"hit ratio {handed / asked if asked else 0.0:.2%}")
    for player in players:
        player.wait_all()
    return served


def _summed(served: Sequence[ServedRequests]) -> ServedRequests:
    return sum(served, ServedRequests())


def _blocks_seen(request: TraceRequest, seen: set[int]) -> int:
    """Return how many blocks of the prompt begin it as another began before; remember all of them."""
    count = next((i for i, block in enumerate(request.hash_ids) if block not in seen), len(request.hash_ids))
    seen.update(request.hash_ids[count:])
    return count


def _components(plan: ReplayPlan, players: Sequence[Player]) -> tuple[ComponentUse, ...]:
    """Sum up what each component held, handed back and moved on all engines."""
    traffic = [player.cache.traffic() for player in players]
    return tuple(
        ComponentUse(
            name=component.name,
            page_bytes=component_bytes(component),
            capacity_pages={
                Tier.DEVICE.name.lower(): plan.device_pages[number] * plan.engines,
                Tier.HOST.name.lower(): plan.host_pages[number] * plan.engines,
            },
            filled_pages={tier.name.lower(): _filled(players, tier, component.name) for tier in Tier},
            hits=sum((player.component_hits[number] for player in players), Hits()),
            moved_pages={
                kind.value: sum(moved[kind].component_pages[number] for moved in traffic) for kind in traffic[0]
            },
        )
        for number, component in enumerate(plan.true_layout.components)
    )


def _filled(players: Sequence[Player], tier: Tier, component: str) -> int | None:
    """Count the pages of a component that all engines hold on a tier; None where one of them has evicted there."""
    held = [
        each
        for player in players
        for each in player.cache.stats().occupancy
        if each.tier is tier and each.component == component
    ]
    return None if any(each.evicted for each in held) else sum(each.capacity - each.free for each in held)


def _series(requests: Sequence[TraceRequest], served: Sequence[ServedRequests]) -> Iterator[TimeSeriesPoint]:
    """Sum up at most ``WINDOWS_MAX`` windows of equally many requests."""
    step = max(1, -(-len(requests) // WINDOWS_MAX))
    for start in range(0, len(requests), step):
        window = _summed(served[start : start + step])
        yield TimeSeriesPoint(
            start=start,
            timestamp_ms=requests[start + window.requests - 1].timestamp,
            requests=window.requests,
            pages=window.pages,
            seen_pages=window.seen_pages,
            hits=window.hits,
            tokens=window.tokens,
        )


def _environment() -> dict[str, str]:
    """Return the versions that ran, and the machine."""
    return {
        "unified_cache": _own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "cpu": f"{os.cpu_count()} x {_cpu_name()}",
        "memory": bytes_text(memory_bytes()),
    }


def _own_version() -> str:
    """Return the version of this package."""
    try:
        return version("unified-cache")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _cpu_name() -> str:
    """Return the model name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
