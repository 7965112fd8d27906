"""Outlooks of a tree's lanes under adaptive eviction, as they stand when somebody asks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.tree.cell_words import cell_text
from unified_cache.tree.match import peek
from unified_cache.tree.node import Node
from unified_cache.tree.outlook import ForecastFigures, ForecastRun, LaneGuide, LaneOutlook, NextVictim
from unified_cache.tree.readable_queues import ReadableQueues
from unified_cache.tree.state import TreeState

__all__ = ["forecast_figures", "lane_outlooks"]


def lane_outlooks(tree: TreeState, prompt: Prompt) -> list[LaneOutlook]:
    """Return what is expected of a prompt's pages, by lane under adaptive eviction; empty where there is none."""
    queues = None if tree.adaptive is None else tree.adaptive.queues
    if queues is None:
        return []
    found = peek(tree, prompt)
    outlooks: list[LaneOutlook] = []
    for lane in queues.adaptive_lanes():
        tier, component = divmod(lane, tree.components_count)
        runs = [run for node in found.path for run in _runs(tree, queues, node, lane, found.tree_end)]
        victim = queues.peek_victim(lane)
        following = None
        if victim is not None:
            node, reason = victim
            held = list(_runs(tree, queues, node, lane, node.end))
            pages = replace(held[0], end=held[-1].end)
            following = NextVictim(pages, node in found.path, reason)
        outlooks.append(LaneOutlook(Tier(tier), component, queues.guide(lane), tuple(_joined(runs)), following))
    return outlooks


def forecast_figures(tree: TreeState) -> ForecastFigures | None:
    """Return the forecast as a whole; None where no lane is adaptive."""
    queues = None if tree.adaptive is None else tree.adaptive.queues
    if queues is None:
        return None
    guides = [(divmod(lane, tree.components_count), queues.guide(lane)) for lane in queues.adaptive_lanes()]
    lanes = tuple(LaneGuide(Tier(tier), component, guide) for (tier, component), guide in guides)
    forecast = queues.forecast
    return ForecastFigures(forecast.requests_count, lanes, forecast.column_pages * tree.page_size, forecast.look)


def _runs(tree: TreeState, queues: ReadableQueues, node: Node, lane: int, end: int) -> Iterator[ForecastRun]:
    """Yield the runs of pages before ``end`` that a lane holds of a node."""
    slots = node.slots[lane]
    if slots is None:
        return
    cell, age, worth = queues.expected(node, lane)
    text = cell_text(cell, queues.forecast.column_pages * tree.page_size)
    held = slots[: end - node.start] >= 0
    bounds = np.flatnonzero(np.diff(held, prepend=False, append=False)) + node.start
    for start, after in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True):
        yield ForecastRun(start, after, text, age, worth)


def _joined(runs: list[ForecastRun]) -> Iterator[ForecastRun]:
    """Yield runs, those that follow each other and are expected alike as one."""
    start = 0
    for number, (run, after) in enumerate(pairwise([*runs, None])):
        assert run is not None
        if after is None or (run.end, run.cell, run.age, run.index) != (
            after.start,
            after.cell,
            after.age,
            after.index,
        ):
            yield replace(run, start=runs[start].start)
            start = number + 1
