"""Preferences: prefixes that a caller would rather keep. They bias the order of eviction, and forbid none.

A lock keeps pages whatever happens; a preference only sends them to the end of the queue: a preferred page is evicted
when nothing else is left in its lane. So preferences may live long, but what they cover is bounded, and one too many
is declined.

A preference covers pages ``[window(end), end)`` per component on one tier, and Full's prefix, by marking their nodes.
What leaves the tree leaves its preference: a page that is computed again is not preferred again, unless the other tier
kept its node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unified_cache.pool import Tier
from unified_cache.tree.node import Node
from unified_cache.tree.state import TreeState
from unified_cache.window import window

__all__ = ["Preference", "Preferences"]


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """Receipt for a preferred prefix."""

    node: Node
    """The node that ended at ``end`` when it was preferred."""
    end: int
    tier: Tier
    starts: tuple[int, ...]
    """First preferred page of each component; the last one is ``end - 1``."""


class Preferences:
    """The preferences of one tree, and the bound on what they cover."""

    __slots__ = ("_pages", "_pages_max", "_tree", "live")

    def __init__(self, tree: TreeState, pages_max: Sequence[int]) -> None:
        self._tree = tree
        self._pages_max = tuple(pages_max)
        """Most pages that preferences may cover, by lane."""
        self._pages = [0] * len(self._pages_max)
        """Pages that preferences cover, by lane, held or not, counted once for each preference."""
        self.live: set[Preference] = set()

    def prefer(self, node: Node, end: int, tier: Tier) -> Preference | None:
        """Prefer ``end`` pages, which end in ``node``; None, with nothing changed, if that were too many.

        Cuts nodes at ``end`` and where a window begins, so that pages of other prompts are not preferred with them.
        """
        tree = self._tree
        windows = [window(end, span) for span in tree.spans]
        # What stands on a page goes with it, so a component is preferred as far back as those that stand on it.
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
        made = Preference(node, end, tier, starts)
        self.live.add(made)
        self._mark(made, 1)
        return made

    def unprefer(self, preference: Preference) -> None:
        """Take a preference back. Once more, or after ``clear``, changes nothing."""
        if preference in self.live:
            self.live.remove(preference)
            self._mark(preference, -1)

    def _cut(self, node: Node, page: int) -> None:
        """Make a node of the path to ``node`` begin at ``page``; the nodes of the path keep their lower parts."""
        at = node
        while at.start > page:
            assert at.parent is not None
            at = at.parent
        if at.start < page:
            self._tree.split(at, page - at.start)

    def _mark(self, preference: Preference, count: int) -> None:
        queues = self._tree.queues
        components = self._tree.components_count
        for component, start in enumerate(preference.starts):
            lane = int(preference.tier) * components + component
            self._pages[lane] += count * (preference.end - start)
            for node in nodes_of(preference, start):
                queues.history(node, lane).preferences += count
                queues.offer(node, lane)

    def covered(self) -> list[int]:
        """Return by lane the pages that live preferences cover; at most the bound."""
        assert all(pages <= most for pages, most in zip(self._pages, self._pages_max, strict=True)), (
            "too much is preferred"
        )
        return list(self._pages)


def nodes_of(preference: Preference, start: int) -> list[Node]:
    """Return the nodes in the tree that hold pages [start, end) of a preference."""
    found: list[Node] = []
    at: Node | None = preference.node
    while at is not None and at.parent is not None and at.start >= start:
        if not at.dead:
            found.append(at)
        at = at.parent
    return found
