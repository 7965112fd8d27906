"""Measures what storage is worth: a bundled trace on eight H200, alone, restarted, and behind a load balancer.

    python -m benchmarks.worth [--limit N]

Hits come from a replay without bytes, through the cache itself; waits and money from the queues of ``unified-cache
plan``. A restart comes in the middle of the trace, and its rows, like the one that they stand beside, are of the half
after it. Four engines take the requests in turn, as from a balancer that does not know their caches.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from unified_cache.components.layouts import size_preset
from unified_cache.controller import TransferKind
from unified_cache.core.config import Retention
from unified_cache.core.pool import Hits
from unified_cache.sizing.plan.costs import Costs, PricedSystem
from unified_cache.sizing.plan.hardware import hardware_named
from unified_cache.sizing.plan.sweep import PlannedModel, TierBytes
from unified_cache.sizing.plan.tier_hits import Moved, TierEnds
from unified_cache.sizing.plan.trace_pages import Counts, TracePages
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import KeysOnlyStorage

TRACE = Path(__file__).parents[1] / "traces" / "mooncake_conversation.jsonl.gz"
LIMIT = 2_000
"""Requests, of 12,031: ten minutes of the trace, and less than a minute here."""

GIB = 1 << 30
DEVICES = 8
MODELS = {"deepseek-v4-flash": 13e9, "deepseek-v3": 37e9}
"""Parameters that a token passes through: one model of windows and states, and one of full attention alone."""

DEVICE = TierBytes(16 * GIB, 0, 0)
HOST = replace(DEVICE, host=256 * GIB)
STORAGE = replace(HOST, storage=4096 * GIB)


@dataclass(frozen=True, slots=True)
class Scene:
    """One row: a model on engines with tiers of these sizes."""

    model: str
    name: str
    sizes: TierBytes
    engines: int = 1
    half: bool = False
    """Whether the second half of the requests counts alone."""
    restarts: bool = False
    """Whether the engine loses device and host memory before it."""


SCENES = (
    ("one engine: device alone", DEVICE, 1, False, False),
    ("and host memory", HOST, 1, False, False),
    ("and storage", STORAGE, 1, False, False),
    ("before a restart", HOST, 1, True, False),
    ("restarted", HOST, 1, True, True),
    ("restarted, with storage", STORAGE, 1, True, True),
    ("four engines, each for itself", HOST, 4, False, False),
    ("four over one store", STORAGE, 4, False, False),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Hits and costs of a scene."""

    hits: Hits
    """Tokens."""
    tokens: int
    costs: Costs


def run_scene(scene: Scene, requests: Sequence[TraceRequest]) -> Row:
    """Replay a scene and price it."""
    sized = size_preset(scene.model)
    model = PlannedModel(scene.model, sized, Retention(), DEVICES, scene.engines)
    plan = model.plan(scene.sizes)
    start = len(requests) // 2 if scene.half else 0
    hits, written_pages = _serve(plan, requests, start, restarts=scene.restarts)
    counted = requests[start:]
    page_size = sized.layout.page_size
    tokens = [each.tokens(page_size, request.input_length) for each, request in zip(hits, counted, strict=True)]
    pages = TracePages.of(counted, page_size, padded=False)
    costs = PricedSystem(model, hardware_named("h200", MODELS[scene.model])).costs(
        pages, _ends(plan, hits, written_pages), scene.sizes
    )
    return Row(sum(tokens, Hits()), int(pages.input_tokens.sum()), costs)


def _serve(
    plan: ReplayPlan, requests: Sequence[TraceRequest], start: int, *, restarts: bool
) -> tuple[list[Hits], list[int]]:
    """Serve all requests; return the hits in pages of those from ``start`` on, and by component the pages stored."""
    store = None if plan.storage is None else KeysOnlyStorage(plan.storage_bytes, plan.objects())
    players = [Player.open(plan, store) for _ in range(plan.engines)]
    hits: list[Hits] = []
    before = [0] * len(plan.layout.components)
    for number, request in enumerate(requests):
        if number == start:
            before = _stored(players)
            if restarts:
                players[number % len(players) - 1].wait_all()  # and then killed: nothing is closed
                players, before = [Player.open(plan, store) for _ in players], [0] * len(before)
        players[number % len(players) - 1].wait_all()
        hits.append(players[number % len(players)].serve(request))
    for player in players:
        player.wait_all()
    written = [after - then for after, then in zip(_stored(players), before, strict=True)]
    return hits[start:], written


def _stored(players: Sequence[Player]) -> list[int]:
    moved = [player.cache.traffic()[TransferKind.BACKUP].component_pages for player in players]
    return [sum(each) for each in zip(*moved, strict=True)]


def _ends(plan: ReplayPlan, hits: Sequence[Hits], written_pages: Sequence[int]) -> TierEnds:
    """Return hits in pages as the queues take them; a window is moved whole from the tier that a resume needs."""
    device, host, storage = (np.cumsum([list(each.by_tier().values()) for each in hits], axis=1).T).astype(np.int64)
    of_page = [each.page_bytes for each in plan.true_layout.components]
    spans = [each.span for each in plan.true_layout.components[1:]]

    def moved(end: Counts, held: Counts) -> Counts:
        windows = sum((np.minimum(end, span) * size for span, size in zip(spans, of_page[1:], strict=True)), 0)
        return np.where(end > held, (end - held) * of_page[0] + windows, 0)

    nothing = np.zeros_like(device)
    written = sum(pages * size for pages, size in zip(written_pages, of_page, strict=True)) if plan.storage else 0
    return TierEnds(
        device,
        host,
        storage,
        Moved(moved(host, device), moved(storage, device), moved(storage, host), nothing, written, 0),
    )


def main(limit: Annotated[int, typer.Option(min=2, help="Requests of the trace.")] = LIMIT) -> None:
    """Print tokens found, of them those that came from storage, the median wait and the price of prompts, by scene."""
    requests = read_trace(TRACE, limit)
    scenes = [Scene(model, *scene) for model in MODELS for scene in SCENES]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(run_scene, scenes, [requests] * len(scenes)))
    console = Console()
    for model in MODELS:
        table = Table(title=model, box=None)
        for heading in ("", "found", "storage", "first token", "$/M tokens"):
            table.add_column(heading, no_wrap=True, justify="right" if heading else "left")
        for scene, row in zip(scenes, rows, strict=True):
            if scene.model == model:
                table.add_row(
                    scene.name,
                    f"{row.hits.total / row.tokens:.1%}",
                    f"{row.hits.storage / row.tokens:.1%}" if scene.sizes.storage else "",
                    f"{row.costs.ttft_p50_s * 1e3:,.0f} ms",
                    f"{row.costs.cost_per_million_tokens:.4f}",
                )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
