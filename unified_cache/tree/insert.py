"""Put pages into the tree: what a request computed (device), or what storage brought (host)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unified_cache.errors import InputError, SlotError
from unified_cache.page import Prompt
from unified_cache.pool import Slots, Tier, numbers_of
from unified_cache.slots import MapChange
from unified_cache.tree.forecast import Visit
from unified_cache.tree.match import find
from unified_cache.tree.node import Node
from unified_cache.tree.state import TreeState
from unified_cache.window import window

__all__ = ["Inserted", "insert"]

_NO_SLOTS = np.empty(0, np.int32)


class Inserted(NamedTuple):
    """Result of an insert."""

    node: Node
    """The node that holds the prompt's last page."""
    duplicates: list[Slots]
    """Slots that the tree did not take, by component, because it holds those pages already; the caller frees them."""
    map_changes: list[MapChange]
    """Changes of the page map: Full slots with a new peer, and duplicates, which have none any more."""


def insert(
    tree: TreeState,
    prompt: Prompt,
    start: int,
    slots: Sequence[Slots],
    tier: Tier,
    priority: int,
    visit: Visit | None = None,
) -> Inserted:
    """Put pages [start, prompt.pages_count) on ``tier``; ``slots[c]`` has one entry per page, -1 where not given.

    Pages before ``start`` must be held by component 0 on that tier, and it needs a slot for every page that it does
    not hold there. ``slots`` are copied. A page that the tree holds already is a duplicate; a hole is filled; new
    pages become a new leaf, which is split where the longest window before its end begins, so that locks and queues
    see one window and not the whole run.
    Makes the prompt recent, and nothing else: a node in which it ends is cut there. Where pages go by priority, the
    prompt's get at least ``priority``.

    Raises:
        InputError: the lengths do not fit, or component 0 is not held up to ``start``. Nothing was changed.
        SlotError: component 0 lacks a slot for a page. Nothing was changed.
    """
    total = prompt.pages_count
    root = tree.root(prompt.root)
    path, tree_end = find(root, prompt, tree.page_key_bytes)
    _check_input(tree, (path, tree_end), total, start, slots, tier)
    if path and tree_end < path[-1].end:
        path[-1] = tree.split(path[-1], tree_end - path[-1].start)
    runs: list[list[Slots]] = [[] for _ in range(tree.components_count)]
    map_changes: list[MapChange] = []
    for node in path:
        if node.end > start:
            _merge(tree, node, start, slots, tier, runs, map_changes)
    node = path[-1] if path else root
    if tree_end < total:
        rest = [given[tree_end - start :] for given in slots]
        above = node
        node = _add_leaves(tree, node, prompt, rest, tier, map_changes)
        if tree.adaptive is not None:
            tree.adaptive.take_up(node, above, visit)
    tree.queues.touch(node, priority)
    at: Node | None = node
    while at is not None and at.end > start:
        tree.queues.offer_all(at)
        at = at.parent
    duplicates = [_joined(arrays) for arrays in runs]
    if tree.mapped is not None and tier is Tier.DEVICE and duplicates[0].size:
        # What the tree kept of these pages is reached through its own Full slots.
        map_changes.append(MapChange(duplicates[0], None))
    return Inserted(node, duplicates, map_changes)


def _check_input(
    tree: TreeState, found: tuple[list[Node], int], total: int, start: int, slots: Sequence[Slots], tier: Tier
) -> None:
    """Refuse what would break the tree, before anything is changed."""
    path, tree_end = found
    count = total - start
    if start < 0 or count < 0:
        raise InputError(f"start must be in [0, {total}], found {start}")
    lengths = [len(given) for given in slots]
    if lengths != [count] * tree.components_count:
        raise InputError(f"expected {count} slots for each of {tree.components_count} components, found {lengths}")
    lowest = int(slots[0][slots[0].argmin()]) if count else 1
    if not start and lowest > 0:
        return
    held_end = 0
    for node in reversed(path):
        if live := node.held_count[int(tier) * tree.components_count]:
            held_end = min(node.start + live, tree_end)
            break
    if held_end < start:
        raise InputError(f"pages before {start} are not held on {tier.name}; nothing was inserted")
    if lowest < 1 and (slots[0][held_end - start :] < 1).any():
        raise SlotError(f"the first component needs a slot for every page that it does not hold, found {lowest}")


def _merge(
    tree: TreeState,
    node: Node,
    start: int,
    slots: Sequence[Slots],
    tier: Tier,
    duplicates: list[list[Slots]],
    map_changes: list[MapChange],
) -> None:
    """Fill the holes of an existing node; what it holds already is a duplicate."""
    first = max(start, node.start)
    offset = first - node.start
    for component, given in enumerate(slots):
        lane = int(tier) * tree.components_count + component
        incoming = given[first - start : node.end - start]
        given_offsets = numbers_of(incoming >= 0)
        held = node.slots[lane]
        if held is None:
            holes = given_offsets
        else:
            is_hole = held[offset + given_offsets] < 0
            holes = given_offsets[is_hole]
            duplicate = incoming[given_offsets[~is_hole]]
            if duplicate.size:
                duplicates[component].append(duplicate)
        tree.fill(node, lane, holes + offset, incoming[holes], map_changes)


def _add_leaves(
    tree: TreeState, parent: Node, prompt: Prompt, slots: Sequence[Slots], tier: Tier, map_changes: list[MapChange]
) -> Node:
    """Hang the pages after ``parent`` below it: one leaf, in parts where a component's last window begins."""
    start, total = parent.end, prompt.pages_count
    bounds = {start, total}
    for component in range(1, tree.components_count):
        cut = window(total, tree.spans[component])
        if cut > start:
            above = slots[component][: cut - start]
            if above[above.argmax()] >= 0:
                bounds.add(cut)
    node = parent
    for first, last in pairwise(sorted(bounds)):
        node = tree.add_child(node, prompt.tokens[first * tree.page_key_bytes : last * tree.page_key_bytes], first)
        for component, given in enumerate(slots):
            part = given[first - start : last - start]
            whole = component == 0 or part[part.argmin()] >= 0
            held_count = len(part) if whole else int(np.count_nonzero(part >= 0))
            if held_count:
                tree.adopt(node, int(tier) * tree.components_count + component, part, held_count, map_changes)
    return node


def _joined(arrays: list[Slots]) -> Slots:
    return np.concatenate(arrays) if arrays else _NO_SLOTS
