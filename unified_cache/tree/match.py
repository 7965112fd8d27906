"""Match and insert: walk a prompt down the tree, find its longest restorable prefix, and hang new pages below."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import InputError, SlotError
from unified_cache.core.page import TOKEN_BYTES, PageMedia, Prompt, media_between, media_mark
from unified_cache.core.pool import Pages, Slots, Tier, no_slots, numbers_of
from unified_cache.core.slots import MapChange
from unified_cache.core.window import last_end, restorable_ends, window
from unified_cache.tree.node import ANYWHERE, ON_DEVICE, Node
from unified_cache.tree.state import TreeState

__all__ = [
    "Inserted",
    "Match",
    "binding_components",
    "find",
    "held_pages",
    "insert",
    "make_recent",
    "node_at",
    "path_slots",
    "peek",
    "restorable_end",
]


@dataclass(slots=True)
class Match:
    """Longest cached prefixes of a prompt. Dead at the tree's next change of structure."""

    prompt: Prompt
    device_end: int
    """Pages that can be resumed from the device alone."""
    host_end: int
    """Pages that can be resumed from device and host together; at least ``device_end``."""
    tree_end: int
    """Pages that stand in the tree at all, restorable or not."""
    path: list[Node]
    """Nodes that hold [0, tree_end), root first, the last one possibly in part."""
    tree: TreeState
    version: int
    changes_count: int

    @property
    def used_end(self) -> int:
        """Pages in use by a request that goes on from ``device_end``: the page that it computes again, too."""
        return self.tree_end if self.device_end == self.prompt.reusable_pages else self.device_end

    @property
    def next_end(self) -> int:
        """Pages that later requests resume after: those in use, or all where this is the first to go on from there."""
        is_first = self.tree_end == self.device_end and not (self.path and self.path[-1].children)
        return self.prompt.pages_count if is_first else self.device_end

    def within(self, end: int) -> "Match":
        """Return the longest prefixes of at most ``end`` pages; the rest of the match stays as it is."""
        if self.host_end <= end:
            return self
        ends = _restorable_ends(self.tree, self.path, end)
        return Match(self.prompt, *ends, self.tree_end, self.path, self.tree, self.version, self.changes_count)

    def is_as_found(self) -> bool:
        """Return whether the tree would find the same now: neither its structure nor what it holds has changed."""
        return self.version == self.tree.version and self.changes_count == self.tree.changes_count


def find(root: Node, prompt: Prompt, page_key_bytes: int) -> tuple[list[Node], int]:
    """Walk down while pages agree; return the nodes met and the page where agreement ends, maybe inside the last.

    One memcmp per node, and one dict look-up where the way leads past the child that the last walk took. Media are
    compared where the prompt or a node has any.
    """
    tokens = prompt.tokens
    media = prompt.media
    total = len(tokens)
    startswith = tokens.startswith
    path: list[Node] = []
    node = root
    offset = 0
    while offset < total:
        child = node.last_child
        if (
            child is None
            or not startswith(child.key, offset)
            or ((media or child.media) and _media_end(child, media) < child.end)
        ):
            first_page = tokens[offset : offset + page_key_bytes]
            if media:
                first_page += media_mark(media, offset // page_key_bytes, page_key_bytes // TOKEN_BYTES)
            child = node.children.get(first_page)
            if child is None:
                break
            media_end = _media_end(child, media) if media or child.media else child.end
            if media_end < child.end or not startswith(child.key, offset):
                path.append(child)
                end = child.start + _pages_in_common(child.key, tokens, offset, page_key_bytes)
                return path, min(end, media_end)
            node.last_child = child
        path.append(child)
        offset += len(child.key)
        node = child
    return path, offset // page_key_bytes


def _media_end(node: Node, media: PageMedia) -> int:
    """Return the first page of a node in which other media begin than in the prompt's; the node's end if none is."""
    theirs = media_between(media, node.start, node.end)
    differing = (page for page in node.media.keys() | theirs.keys() if node.media.get(page) != theirs.get(page))
    return min(differing, default=node.end)


def _pages_in_common(key: bytes, tokens: bytes, offset: int, page_key_bytes: int) -> int:
    """Bisect how many whole pages of ``key`` stand at ``offset`` of ``tokens``. The first one does."""
    agree = 1
    differ = min(len(key), len(tokens) - offset) // page_key_bytes + 1
    while differ - agree > 1:
        middle = (agree + differ) >> 1
        start, end = agree * page_key_bytes, middle * page_key_bytes
        if key[start:end] == tokens[offset + start : offset + end]:
            agree = middle
        else:
            differ = middle
    return agree


def make_recent(found: Match, priority: int) -> None:
    """Make the longest restorable prefix of a match recent, on device and host; they get at least ``priority``.

    Not a node that the match ends inside of, most of which may have nothing to do with this prompt.
    """
    for node in reversed(found.path):
        if node.end <= found.host_end:
            found.tree.queues.touch(node, priority)
            break


def peek(tree: TreeState, prompt: Prompt) -> Match:
    """Find the longest restorable prefix of ``prompt`` on device, and on device and host; leave recency as it is."""
    root = tree.roots.get(prompt.root)
    if root is None:
        return Match(prompt, 0, 0, 0, [], tree, tree.version, tree.changes_count)
    path, tree_end = find(root, prompt, tree.page_key_bytes)
    ends = _restorable_ends(tree, path, tree_end)
    return Match(prompt, *ends, tree_end, path, tree, tree.version, tree.changes_count)


def _restorable_ends(tree: TreeState, path: list[Node], end: int) -> tuple[int, int]:
    """Return the largest end within the first ``end`` pages on the device, and on device and host together."""
    device_end = restorable_end(tree, ON_DEVICE, path, end)
    return device_end, device_end if device_end == end else restorable_end(tree, ANYWHERE, path, end)


def node_at(path: list[Node], end: int) -> Node:
    """Return the node of ``path`` that holds page ``end - 1``; ``end`` is at least 1."""
    for node in reversed(path):
        if node.start < end:
            return node
    raise AssertionError(f"page {end - 1} is not on the path")


def path_slots(path: list[Node], tier_component: int, start: int, end: int) -> Slots:
    """Return the slots of pages [start, end) of a component on a tier, a new array; -1 for tombstones."""
    runs: list[Slots] = []
    for node in path:
        if node.end <= start:
            continue
        if node.start >= end:
            break
        held = node.slots[tier_component]
        if held is None:
            held = no_slots(node.pages)
        if node.start < start or node.end > end:
            held = held[max(start - node.start, 0) : end - node.start]
        runs.append(held)
    if len(runs) == 1:
        return runs[0].copy()
    # Joining the runs as bytes takes a third of what concatenating them as arrays does; the result is writable.
    return np.frombuffer(bytearray().join(runs), np.int32)  # type: ignore[arg-type]  # arrays are buffers


def held_pages(path: Sequence[Node], tier_component: int, end: int, count: int) -> Pages:
    """Return a mask of the pages, ``count`` with ``end`` of them on a path, that a component holds on a tier."""
    held_mask = np.zeros(count, np.bool_)
    for node in path:
        if node.start >= end:
            break
        held = node.slots[tier_component]
        if held is not None:
            last = min(node.end, end)
            is_whole = node.held_count[tier_component] == node.pages
            held_mask[node.start : last] = is_whole or held[: last - node.start] >= 0
    return held_mask


def restorable_end(tree: TreeState, view: int, path: list[Node], end: int) -> int:
    """Return the largest restorable end within the first ``end`` pages of ``path``, as ``view`` sees them."""
    node, end = _full_end(view, path, end)
    if node is None:
        return 0
    if tree.components_count == 1 or _windows_live(tree, view, node, end):
        return end
    return _search(tree, view, path, end)


def _full_end(view: int, path: list[Node], end: int) -> tuple[Node | None, int]:
    """Return the node of ``path`` in which Full's prefix of at most ``end`` pages ends, and where it ends."""
    for node in reversed(path):
        if node.start < end:
            full_end = node.full_end(view)
            if full_end > node.start:
                return node, min(end, full_end)
    return None, 0


def binding_components(found: Match) -> tuple[int, ...]:
    """Return the components that keep a request from reusing more; none where it can reuse all that a request can.

    That is Full where the match goes as far as Full does, else those whose windows cannot be resumed where Full ends.
    """
    reusable_pages = found.prompt.reusable_pages
    if found.host_end >= reusable_pages:
        return ()
    tree = found.tree
    node, full_end = _full_end(ANYWHERE, found.path, min(found.tree_end, reusable_pages))
    if node is None or full_end <= found.host_end:
        return (0,)
    return tuple(
        component
        for component in range(1, tree.components_count)
        if not _window_is_live(tree, ANYWHERE, node, full_end, component)
    )


def _windows_live(tree: TreeState, view: int, node: Node, end: int) -> bool:
    """Return whether every windowed component holds its window before ``end``, which lies in ``node``."""
    return all(_window_is_live(tree, view, node, end, component) for component in range(1, tree.components_count))


def _window_is_live(tree: TreeState, view: int, node: Node, end: int, component: int) -> bool:
    """Return whether one windowed component holds its window before ``end``, which lies in ``node``."""
    window_start = window(end, tree.spans[component])
    at: Node | None = node
    upto = end
    while at is not None and at.end > window_start:
        if at.last_tombstone_before(view, component, upto) > window_start:
            return False
        upto = at.start
        at = at.parent
    return True


def _search(tree: TreeState, view: int, path: list[Node], end: int) -> int:
    """Look at every node's end, then, in one vector pass, inside the nodes below the best of them."""
    spans = tree.spans
    windowed = range(1, tree.components_count)
    best = 0
    run: list[Node] = []
    tombstones = tombstones_before_run = [0] * tree.components_count
    for node in path:
        if node.start >= end:
            break
        upto = min(node.end, end)
        before = tombstones
        tombstones = before.copy()
        for component in windowed:
            tombstones[component] = node.last_tombstone_before(view, component, upto) or before[component]
        if all(tombstones[component] <= window(upto, spans[component]) for component in windowed):
            best = upto
            run.clear()
        else:
            if not run:
                tombstones_before_run = before
            run.append(node)
    return _search_inside(tree, view, run, end, tombstones_before_run) or best


def _search_inside(tree: TreeState, view: int, run: list[Node], end: int, tombstones_before: list[int]) -> int:
    """Return the largest restorable end within a run of consecutive nodes, none of whose ends is one; or 0."""
    if not run:
        return 0
    start = run[0].start
    count = min(run[-1].end, end) - start
    missing: list[npt.NDArray[np.bool_] | None] = [None]
    for component in range(1, tree.components_count):
        held = [node.seen(view, component) for node in run]
        slots = np.concatenate(
            [no_slots(node.pages) if part is None else part for node, part in zip(run, held, strict=True)]
        )
        missing.append(slots[:count] < 0)
    length = last_end(restorable_ends(tree.spans, missing, start, count, tombstones_before))
    return start + length if length else 0


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
) -> Inserted:
    """Put pages [start, prompt.pages_count) on ``tier``; ``slots[c]`` has one entry per page, -1 where not given.

    Pages before ``start`` must be held by component 0 on that tier, and it needs a slot for every page that it does
    not hold there. ``slots`` are copied. A page that the tree holds already is a duplicate; a tombstone is filled; new
    pages become a new leaf, which is split where the longest window before its end begins. Makes the prompt recent, and
    nothing else; where pages go by priority, they get at least ``priority``.

    Raises:
        InputError: the lengths do not fit, or component 0 is not held up to ``start``. Nothing was changed.
        SlotError: component 0 lacks a slot for a page. Nothing was changed.
    """
    total = prompt.pages_count
    root = tree.root(prompt)
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
        node = _add_leaves(tree, node, prompt, rest, tier, map_changes)
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
    """Fill the tombstones of an existing node; what it holds already is a duplicate."""
    first = max(start, node.start)
    offset = first - node.start
    for component, given in enumerate(slots):
        tier_component = int(tier) * tree.components_count + component
        incoming = given[first - start : node.end - start]
        given_offsets = numbers_of(incoming >= 0)
        held = node.slots[tier_component]
        if held is None:
            tombstones = given_offsets
        else:
            is_tombstone = held[offset + given_offsets] < 0
            tombstones = given_offsets[is_tombstone]
            duplicate = incoming[given_offsets[~is_tombstone]]
            if duplicate.size:
                duplicates[component].append(duplicate)
        tree.fill(node, tier_component, tombstones + offset, incoming[tombstones], map_changes)


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
        tokens = prompt.tokens[first * tree.page_key_bytes : last * tree.page_key_bytes]
        node = tree.add_child(node, tokens, first, media_between(prompt.media, first, last))
        for component, given in enumerate(slots):
            part = given[first - start : last - start]
            whole = component == 0 or part[part.argmin()] >= 0
            held_count = len(part) if whole else int(np.count_nonzero(part >= 0))
            if held_count:
                tree.adopt(node, int(tier) * tree.components_count + component, part, held_count, map_changes)
    return node


def _joined(arrays: list[Slots]) -> Slots:
    return np.concatenate(arrays) if arrays else _NO_SLOTS
