"""Replays a trace against the caches of engines that serve one request at a time.

Closed loop: before a request, every transfer has settled, so a run is a function of trace and settings. Nothing
is dropped for being late.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version

import torch

from unified_cache.core.pool import Hits, Tier
from unified_cache.core.sizes import bytes_text, memory_bytes
from unified_cache.sizing.replay.missed import MissedTokens
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.result import ComponentUse, ReplayResult, ServedRequests
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest, no_progress
from unified_cache.storage_backends.memory import KeysOnlyStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import check_storage_url, open_storage

WINDOWS_MAX = 40
"""Points of the time series: more would jump with the luck of a few long prompts."""


def replay(
    trace: str, requests: Sequence[TraceRequest], plan: ReplayPlan, on_progress: OnProgress = no_progress
) -> ReplayResult:
    """Serve ``requests`` in their order by the engines of a plan; ``trace`` is what the result calls them.

    Raises:
        ConfigError: memory does not suffice, or the storage URL names nothing.
        StorageError: the store cannot be opened, or failed on the way.

    """
    with _players(plan) as players:
        started_s = time.perf_counter()
        served = _serve(players, plan, requests, on_progress)
        seconds = time.perf_counter() - started_s
        if plan.with_bytes:
            for player in players:
                player.cache.check()
        stats = [player.cache.stats() for player in players]
        components = _components(plan, players)
    missed: MissedTokens = sum((player.missed for player in players if player.missed), Counter())
    step = max(1, -(-len(requests) // WINDOWS_MAX))
    return ReplayResult(
        trace=trace,
        plan=plan,
        served=_summed(served),
        series=tuple(_summed(served[start : start + step]) for start in range(0, len(served), step)),
        components=components,
        missed=dict(missed.most_common()) if plan.explains else None,
        pages_verified=sum(player.pages_verified for player in players),
        wrong_pages=sum(player.wrong_pages for player in players),
        leaked_slots=sum(occupancy.out for each in stats for occupancy in each.occupancy),
        flawed_pages=sum(each.flawed_pages for each in stats),
        seconds=seconds,
        environment=_environment(),
    )


def served_hits(plan: ReplayPlan, requests: Sequence[TraceRequest]) -> list[Hits]:
    """Serve requests by the caches of a plan; return the pages handed back of each."""
    with _players(plan) as players:
        return [each.hits for each in _serve(players, plan, requests, no_progress)]


@contextmanager
def _players(plan: ReplayPlan) -> Iterator[list[Player]]:
    """Open the store of a plan, and its engines over it; a run without bytes has a store of keys of the same cap."""
    plan.check_memory()
    with ExitStack() as opened:
        store: Store | None = None
        if plan.storage is not None and plan.with_bytes:
            store = opened.enter_context(closing(open_storage(plan.storage, bytes_max=plan.storage_bytes)))
        elif plan.storage is not None:
            check_storage_url(plan.storage)
            store = opened.enter_context(closing(KeysOnlyStorage(plan.storage_bytes, plan.objects())))
        yield [opened.enter_context(Player.open(plan, store)) for _ in range(plan.engines)]


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
        pages, tokens = plan.pages_of(request), request.input_length
        seen_pages = min(plan.whole_pages(_blocks_seen(request, seen) * request.block_tokens), pages)
        served.append(
            ServedRequests(
                requests=1,
                timestamp_ms=request.timestamp,
                pages=pages,
                seen_pages=seen_pages,
                hits=hits,
                tokens=tokens,
                seen_tokens=min(seen_pages * page_size, tokens),
                hit_tokens=hits.tokens(page_size, tokens),
            )
        )
        asked += tokens
        handed += served[-1].hit_tokens.total
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
            page_bytes=component.page_bytes,
            capacity_pages={
                Tier.DEVICE.name.lower(): plan.config.device_pages[number] * plan.engines,
                Tier.HOST.name.lower(): plan.config.host_pages[number] * plan.engines,
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


def _environment() -> dict[str, str]:
    """Return the versions that ran, and the machine."""
    return {
        "unified_cache": version("unified-cache"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "cpu": f"{os.cpu_count()} x {platform.machine()}",
        "memory": bytes_text(memory_bytes()),
    }
