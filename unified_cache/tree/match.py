"""Find a prompt in the tree, and the longest prefix of it that every component can resume from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.page import Prompt
from unified_cache.pool import Pages, Slots, no_slots, numbers_of
from unified_cache.tree.node import ANYWHERE, ON_DEVICE, Node
from unified_cache.tree.state import TreeState
from unified_cache.window import restorable_ends, window

__all__ = [
    "Match",
    "binding_components",
    "find",
    "held_pages",
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

    def within(self, end: int) -> "Match":
        """Return the longest prefixes of at most ``end`` pages; the rest of the match stays as it is."""
        if self.host_end <= end:
            return self
        ends = _restorable_ends(self.tree, self.path, end)
        return Match(self.prompt, *ends, self.tree_end, self.path, self.tree, self.version, self.changes_count)

    def is_as_found(self) -> bool:
        """Tell whether the tree would find the same now: neither its structure nor what it holds has changed."""
        return self.version == self.tree.version and self.changes_count == self.tree.changes_count


def find(root: Node, prompt: Prompt, page_key_bytes: int) -> tuple[list[Node], int]:
    """Walk down while tokens agree; return the nodes met and the page where agreement ends, maybe inside the last.

    One memcmp per node, and one dict look-up where the way leads past the child that the last walk took.
    """
    tokens = prompt.tokens
    total = len(tokens)
    startswith = tokens.startswith
    path: list[Node] = []
    node = root
    offset = 0
    while offset < total:
        child = node.last_child
        if child is None or not startswith(child.key, offset):
            child = node.children.get(tokens[offset : offset + page_key_bytes])
            if child is None:
                break
            if not startswith(child.key, offset):
                path.append(child)
                return path, child.start + _pages_in_common(child.key, tokens, offset, page_key_bytes)
            node.last_child = child
        path.append(child)
        offset += len(child.key)
        node = child
    return path, offset // page_key_bytes


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
    """Make the longest restorable prefix of a match recent, on device and host.

    Changes recency, never structure: a match may end inside a node. Such a node is not made recent, because most
    of it may have nothing to do with this prompt; lock and insert cut it where the prompt ends, and insert then
    makes exactly the prompt recent. Where pages go by priority, those made recent get at least ``priority``.
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


def path_slots(path: list[Node], lane: int, start: int, end: int) -> Slots:
    """Return a lane's slots of pages [start, end), a new array; -1 for holes."""
    runs: list[Slots] = []
    for node in path:
        if node.end <= start:
            continue
        if node.start >= end:
            break
        held = node.slots[lane]
        if held is None:
            held = no_slots(node.pages)
        if node.start < start or node.end > end:
            held = held[max(start - node.start, 0) : end - node.start]
        runs.append(held)
    if len(runs) == 1:
        return runs[0].copy()
    # Joining the runs as bytes takes a third of what concatenating them as arrays does; the result is writable.
    return np.frombuffer(bytearray().join(runs), np.int32)  # type: ignore[arg-type]  # arrays are buffers


def held_pages(path: Sequence[Node], lane: int, end: int, count: int) -> Pages:
    """Tell of each of ``count`` pages, the first ``end`` of which stand on a path, whether a lane holds it."""
    held_mask = np.zeros(count, np.bool_)
    for node in path:
        if node.start >= end:
            break
        held = node.slots[lane]
        if held is not None:
            last = min(node.end, end)
            held_mask[node.start : last] = node.held_count[lane] == node.pages or held[: last - node.start] >= 0
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

    That is Full, where the match goes as far as Full does on device and host. Else Full goes farther, and those whose
    windows cannot be resumed where it ends.
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
    """Tell whether every windowed component holds its window before ``end``, which lies in ``node``."""
    return all(_window_is_live(tree, view, node, end, component) for component in range(1, tree.components_count))


def _window_is_live(tree: TreeState, view: int, node: Node, end: int, component: int) -> bool:
    """Tell whether one windowed component holds its window before ``end``, which lies in ``node``."""
    window_start = window(end, tree.spans[component])
    at: Node | None = node
    upto = end
    while at is not None and at.end > window_start:
        if at.last_hole_before(view, component, upto) > window_start:
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
    holes = holes_before_run = [0] * tree.components_count
    for node in path:
        if node.start >= end:
            break
        upto = min(node.end, end)
        before = holes
        holes = before.copy()
        for component in windowed:
            holes[component] = node.last_hole_before(view, component, upto) or before[component]
        if all(holes[component] <= window(upto, spans[component]) for component in windowed):
            best = upto
            run.clear()
        else:
            if not run:
                holes_before_run = before
            run.append(node)
    return _search_inside(tree, view, run, end, holes_before_run) or best


def _search_inside(tree: TreeState, view: int, run: list[Node], end: int, holes_before: list[int]) -> int:
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
    ok = restorable_ends(tree.spans, missing, start, count, holes_before)
    ends = numbers_of(ok)
    return start + int(ends[-1]) + 1 if ends.size else 0
