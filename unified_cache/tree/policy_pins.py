"""Pins: prefixes that a caller would rather keep. They bias what goes first, and stop nothing.

A lock keeps pages whatever happens; a pin only sends them to the end of the queue: a pinned page goes when nothing
else is left in its lane. So pins may live long, but what they cover is bounded, and one too many is declined.

A pin covers pages ``[window(end), end)`` per component on one tier, and Full's prefix, by marking their nodes. What
leaves the tree leaves its pin: a page that is computed again is not pinned again, unless the other tier kept its node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unified_cache.pool import Tier
from unified_cache.tree.node import Node
from unified_cache.tree.state import TreeState
from unified_cache.window import window

__all__ = ["Pin", "Pins"]


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Receipt for a pinned prefix."""

    node: Node
    """The node that ended at ``end`` when it was pinned."""
    end: int
    tier: Tier
    starts: tuple[int, ...]
    """By component: pages [that, end) are pinned."""


class Pins:
    """The pins of one tree, and the bound on what they cover."""

    __slots__ = ("_pages", "_pages_max", "_tree", "live")

    def __init__(self, tree: TreeState, pages_max: Sequence[int]) -> None:
        self._tree = tree
        self._pages_max = tuple(pages_max)
        """By lane."""
        self._pages = [0] * len(self._pages_max)
        """By lane: pages that pins cover, held or not, counted once for each pin."""
        self.live: set[Pin] = set()

    def pin(self, node: Node, end: int, tier: Tier) -> Pin | None:
        """Pin ``end`` pages, which end in ``node``; None, with nothing changed, if that were too many.

        Cuts nodes at ``end`` and where a window begins, so that pages of other prompts are not pinned with them.
        """
        tree = self._tree
        windows = [window(end, span) for span in tree.spans]
        # What stands on a page goes with it, so a component is pinned as far back as those that stand on it.
        starts = tuple(accumulate(reversed(windows), min))[::-1]
        lanes = range(int(tier) * tree.components_count, (int(tier) + 1) * tree.components_count)
        if any(
            self._pages[lane] + end - start > self._pages_max[lane] for lane, start in zip(lanes, starts, strict=True)
        ):
            return None
        if end < node.end:
            node = tree.split(node, end - node.start)
        for start in set(starts):
            self._cut(node, start)
        made = Pin(node, end, tier, starts)
        self.live.add(made)
        self._mark(made, 1)
        return made

    def unpin(self, pin: Pin) -> None:
        """Take a pin back. Once more, or after ``clear``, changes nothing."""
        if pin in self.live:
            self.live.remove(pin)
            self._mark(pin, -1)

    def _cut(self, node: Node, page: int) -> None:
        """Make a node of the path to ``node`` begin at ``page``; the nodes of the path keep their lower parts."""
        at = node
        while at.start > page:
            assert at.parent is not None
            at = at.parent
        if at.start < page:
            self._tree.split(at, page - at.start)

    def _mark(self, pin: Pin, count: int) -> None:
        recency = self._tree.recency
        components = self._tree.components_count
        for component, start in enumerate(pin.starts):
            lane = int(pin.tier) * components + component
            self._pages[lane] += count * (pin.end - start)
            for node in nodes_of(pin, start):
                recency.history(node, lane).pins += count
                recency.offer(node, lane)

    def covered(self) -> list[int]:
        """Return by lane the pages that live pins cover; at most the bound."""
        assert all(pages <= most for pages, most in zip(self._pages, self._pages_max, strict=True)), (
            "too much is pinned"
        )
        return list(self._pages)


def nodes_of(pin: Pin, start: int) -> list[Node]:
    """Return the nodes in the tree that hold pages [start, end) of a pin."""
    found: list[Node] = []
    at: Node | None = pin.node
    while at is not None and at.parent is not None and at.start >= start:
        if not at.dead:
            found.append(at)
        at = at.parent
    return found
