"""Room for a transfer: the ends of a match that its target has room for, found in one pass and before any pin.

Moving what a resume at ``end`` needs pins its pages on the target, and evicts others there to make room:

    free            allocated first
    evictable       outside the windows before ``end``: evicted for the rest
                    inside of them: pinned, and no room
    protected       no room

So a page in a window before ``end`` takes a slot if it is still to come, and one from what could be evicted if it is
there already.
"""

from collections.abc import Sequence

import numpy as np

from unified_cache.pool import Pages, Tier, all_pages, numbers_of
from unified_cache.tree.match import Match, held_pages
from unified_cache.tree.node import ANYWHERE, ON_DEVICE, Node
from unified_cache.tree.state import TreeState
from unified_cache.window import restorable_ends, window, window_counts

__all__ = ["evictable_mask", "fitting_end"]


def fitting_end(tree: TreeState, found: Match, source: Tier, target: Tier, available_pages: Sequence[int]) -> int:
    """Return the longest end that a match can be resumed at from ``source`` for which ``target`` has room; else 0.

    From the host means from host and device together. ``available_pages[c]`` are free or evictable on the target.
    Linear in pages, unless there is room for all of the windows.
    """
    view, end = (ON_DEVICE, found.device_end) if source is Tier.DEVICE else (ANYWHERE, found.host_end)
    if all(end - window(end, span) <= room for span, room in zip(tree.spans, available_pages, strict=True)):
        return end
    components = tree.components_count
    fits = restorable_ends(tree.spans, _holes(tree, found.path, view, end), 0, end, [0] * components)
    for component, available in enumerate(available_pages):
        lane = int(target) * components + component
        takes = held_pages(found.path, int(source) * components + component, end, end)
        takes &= ~held_pages(found.path, lane, end, end)
        takes &= ~_in_flight(found.path, lane, end)
        takes |= evictable_mask(tree, found.path, lane, end)
        fits &= window_counts(takes, tree.spans[component])[1:] <= available
    ends = numbers_of(fits)
    return int(ends[-1]) + 1 if ends.size else 0


def evictable_mask(tree: TreeState, path: Sequence[Node], lane: int, end: int) -> Pages:
    """Tell of each of the first ``end`` pages of a path whether a lane holds it and eviction could give it back."""
    tree.counts.count_changed()
    evictable = np.zeros(end, np.bool_)
    for node in path:
        held = node.slots[lane]
        if node.start >= end:
            break
        if held is not None and tree.counts.protected_in(node, lane) < node.held_count[lane]:
            # Of Full it is all that the node holds, of the others what lies before the first page that a lock pins.
            first_pinned = min(node.start + node.first_pinned(lane), end)
            evictable[node.start : first_pinned] = held[: first_pinned - node.start] >= 0
    return evictable


def _holes(tree: TreeState, path: Sequence[Node], view: int, end: int) -> list[Pages | None]:
    """Return by component where it lacks pages before ``end`` in a view; Full lacks none before a restorable end."""
    holes: list[Pages | None] = [None]
    for component in range(1, tree.components_count):
        lacks = all_pages(end)
        for node in path:
            if node.start >= end:
                break
            held = node.seen(view, component)
            if held is not None:
                lacks[node.start : node.end] = held[: end - node.start] < 0
        holes.append(lacks)
    return holes


def _in_flight(path: Sequence[Node], lane: int, end: int) -> Pages:
    """Tell of each of the first ``end`` pages of a path whether another transfer is bringing it to a lane."""
    arriving = np.zeros(end, np.bool_)
    for node in path:
        if node.in_flight is not None and lane in node.in_flight and node.start < end:
            arriving[node.start : node.end] = node.in_flight[lane][: end - node.start]
    return arriving
