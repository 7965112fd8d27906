"""Match: the path of nodes that a prompt leads to, what stands on it, and where it can be resumed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unified_cache.core.errors import StaleMatchError
from unified_cache.core.page import TOKEN_BYTES, PageMedia, Prompt, media_between, media_mark
from unified_cache.core.pool import Pages, Slots, Tier, all_pages, no_slots
from unified_cache.core.window import last_end, restorable_ends, window, window_counts
from unified_cache.tree.node import ANYWHERE, ON_DEVICE, Node, TreeCounts


@dataclass(slots=True)
class Match:
    """Longest cached prefixes of a prompt. Dead at the tree's next change of structure: a StaleMatchError."""

    prompt: Prompt
    device_end: int
    """Pages that can be resumed from the device alone."""
    host_end: int
    """Pages that can be resumed from device and host together; at least ``device_end``."""
    tree_end: int
    """Pages that stand in the tree at all, restorable or not."""
    path: list[Node]
    """Nodes that hold [0, tree_end), root first, the last one possibly in part."""
    spans: tuple[int, ...]
    counts: TreeCounts
    version: int
    changes_count: int

    @classmethod
    def of(
        cls, prompt: Prompt, path: list[Node], tree_end: int, end: int, spans: tuple[int, ...], counts: TreeCounts
    ) -> "Match":
        """Find the longest prefixes within the first ``end`` pages of a path."""
        device_end = host_end = _restorable_end(path, ON_DEVICE, spans, end) if end else 0
        if device_end < end:
            host_end = _restorable_end(path, ANYWHERE, spans, end)
        return cls(prompt, device_end, host_end, tree_end, path, spans, counts, counts.version, counts.changes_count)

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
        return Match.of(self.prompt, self.path, self.tree_end, end, self.spans, self.counts)

    def is_as_found(self) -> bool:
        """Return whether the tree would find the same now: neither its structure nor what it holds has changed."""
        return self.version == self.counts.version and self.changes_count == self.counts.changes_count

    def check_alive(self) -> None:
        """Raise StaleMatchError if the tree's structure has changed since."""
        if self.version != self.counts.version:
            raise StaleMatchError("the tree has changed since this match; match again")

    def slots(self, tier: Tier, component: int, start: int, end: int) -> Slots:
        """Return the slots of pages [start, end), a new array; -1 for tombstones."""
        self.check_alive()
        return path_slots(self.path, tier * len(self.spans) + component, start, min(end, self.tree_end))

    def held_pages(self, tier: Tier, component: int) -> Pages:
        """Return a mask of the prompt's pages that a component holds on a tier, a new array."""
        self.check_alive()
        tier_component, end = tier * len(self.spans) + component, self.tree_end
        held_mask = np.zeros(self.prompt.pages_count, np.bool_)
        for node in self.path:
            held = node.slots[tier_component]
            if held is not None:
                last = min(node.end, end)
                is_whole = node.held_count[tier_component] == node.pages
                held_mask[node.start : last] = is_whole or held[: last - node.start] >= 0
        return held_mask

    def evictable_pages(self, tier: Tier, component: int) -> Pages:
        """Return a mask of the pages in the tree that ``evict`` could free on a tier now."""
        self.check_alive()
        self.counts.count_changed()
        tier_component, end = tier * len(self.spans) + component, self.tree_end
        evictable = np.zeros(end, np.bool_)
        for node in self.path:
            held = node.slots[tier_component]
            if held is not None and self.counts.protected_in(node, tier_component) < node.held_count[tier_component]:
                # Of Full it is all that the node holds, of the others what lies before the first page that a lock pins.
                first_pinned = min(node.start + node.first_pinned(tier_component), end)
                evictable[node.start : first_pinned] = held[: first_pinned - node.start] >= 0
        return evictable

    def arriving_pages(self, tier: Tier, component: int) -> Pages:
        """Return a mask of the pages of the prompt that a transfer is bringing to ``tier``."""
        self.check_alive()
        tier_component, end = tier * len(self.spans) + component, self.tree_end
        arriving = np.zeros(self.prompt.pages_count, np.bool_)
        for node in self.path:
            if node.in_flight is not None and tier_component in node.in_flight:
                arriving[node.start : min(node.end, end)] = node.in_flight[tier_component][: end - node.start]
        return arriving

    def full_end(self, tier: Tier) -> int:
        """Return the first page that component 0 does not hold on ``tier``."""
        self.check_alive()
        tier_component = tier * len(self.spans)
        for node in reversed(self.path):
            if node.held_count[tier_component]:
                return min(node.start + node.held_count[tier_component], self.tree_end)
        return 0

    def fitting_end(self, source: Tier, target: Tier, available_pages: Sequence[int]) -> int:
        """Return the longest end to be resumed at from ``source`` for which ``target`` has room, or 0.

        From the host means from host and device together. ``available_pages[c]`` are free or evictable on the target.
        Moving what a resume at ``end`` needs pins its pages on the target, and evicts others there to make room: a page
        in a window before ``end`` takes a slot if it is still to come, and one from what could be evicted if it is
        there already; a page outside of the windows that could be evicted is room. Linear in pages, unless there is
        room for all of the windows.
        """
        self.check_alive()
        spans = self.spans
        view, end = (ON_DEVICE, self.device_end) if source is Tier.DEVICE else (ANYWHERE, self.host_end)
        if all(end - window(end, span) <= room for span, room in zip(spans, available_pages, strict=True)):
            return end
        fits = restorable_ends(spans, _tombstones_of(self.path, view, len(spans), 0, end), end)
        for component, available in enumerate(available_pages):
            takes = self.held_pages(source, component)
            takes &= ~(self.held_pages(target, component) | self.arriving_pages(target, component))
            takes[: self.tree_end] |= self.evictable_pages(target, component)
            fits &= window_counts(takes[:end], spans[component])[1:] <= available
        return last_end(fits)

    def node_ends(self) -> list[int]:
        """Return where the nodes end, ascending: where prompts end, were resumed, or leave each other."""
        self.check_alive()
        return [node.end for node in self.path if node.end <= self.host_end]

    def superseded_ends(self, end: int) -> Pages:
        """Return a mask of the ends in [1, end] before one that its prompt alone has gone on from."""
        self.check_alive()
        last = max([node.end for node in self.path if node.is_superseded and len(node.children) == 1], default=0)
        superseded = np.arange(end) < last
        superseded[[node.end - 1 for node in self.path if node.end <= end and len(node.children) > 1]] = False
        return superseded

    def binding_components(self) -> tuple[int, ...]:
        """Return the components that keep a request from reusing more; none where it can reuse all that a request can.

        Full where the match goes as far as Full does, else those whose windows cannot be resumed where Full ends.
        """
        reusable_pages = self.prompt.reusable_pages
        if self.host_end >= reusable_pages:
            return ()
        node, full_end = _full_end_of(self.path, ANYWHERE, min(self.tree_end, reusable_pages))
        if node is None or full_end <= self.host_end:
            return (0,)
        windowed = enumerate(self.spans[1:], 1)
        return tuple(number for number, span in windowed if _gap_end_of(node, ANYWHERE, number, span, full_end))


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


def _tombstones_of(path: Sequence[Node], view: int, components_count: int, start: int, end: int) -> list[Pages | None]:
    """Return by component which pages of [start, end), ``start`` where a node begins, it lacks; Full lacks none."""
    run = [node for node in path if start <= node.start < end]
    tombstones: list[Pages | None] = [None]
    for component in range(1, components_count):
        lacks = all_pages(end - start)
        for node in run:
            held = node.seen(view, component)
            if held is not None:
                lacks[node.start - start : node.end - start] = held[: end - node.start] < 0
        tombstones.append(lacks)
    return tombstones


def _restorable_end(path: list[Node], view: int, spans: Sequence[int], end: int) -> int:
    """Return the largest restorable end within the first ``end`` pages of ``path``, as ``view`` sees them."""
    node, end = _full_end_of(path, view, end)
    if node is None:
        return 0
    gap_end = _gap_end(node, view, spans, end)
    if not gap_end:
        return end
    # No end from the gap on, either. The last node before it whose end can be resumed at; then, in one vector pass, the
    # pages inside the nodes below. What lies before the one keeps no later end from being another.
    best, end = 0, gap_end - 1
    for node in reversed(path):
        if node.end < gap_end:
            gap_end = _gap_end(node, view, spans, node.end)
            if not gap_end:
                best = node.end
                break
    return best + last_end(restorable_ends(spans, _tombstones_of(path, view, len(spans), best, end), end - best))


def _gap_end(node: Node, view: int, spans: Sequence[int], end: int) -> int:
    """Return where a gap ends in any component's window before ``end``, which lies in ``node``; 0 if there is none."""
    gaps = (_gap_end_of(node, view, number, span, end) for number, span in enumerate(spans[1:], 1))
    return next(filter(None, gaps), 0)


def _full_end_of(path: list[Node], view: int, end: int) -> tuple[Node | None, int]:
    """Return the node of ``path`` in which Full's prefix of at most ``end`` pages ends, and where it ends."""
    for node in reversed(path):
        if node.start < end:
            full_end = node.full_end(view)
            if full_end > node.start:
                return node, min(end, full_end)
    return None, 0


def _gap_end_of(node: Node, view: int, component: int, span: int, end: int) -> int:
    """Return one more than the last page that a component lacks of its window before ``end``; 0 if it lacks none."""
    window_start = window(end, span)
    at: Node | None = node
    upto = end
    while at is not None and at.end > window_start:
        gap_end = at.last_tombstone_before(view, component, upto)
        if gap_end > window_start:
            return gap_end
        upto = at.start
        at = at.parent
    return 0
