"""Worth of windows and states: which of the ends that a request leaves is the one its session goes on from.

A page of Full is used by whoever gets that far; a window only by who resumes at its very end. So what the forecast
makes of a session is shared out between the ends that its last request left:

    worth = forecast x P(resumed here | goes on), for each page of the window  x square root of the pages before it

since who does not resume here computes those again; the root keeps few long prompts from driving out many short ones.
An end that its session has gone on from is worth as much less as such ends are asked for again.
"""

from math import sqrt

from unified_cache.tree.forecast import CELLS_COUNT, SESSION_CELLS, in_session
from unified_cache.tree.node import Node
from unified_cache.tree.returns import Returns

__all__ = ["WINDOW_CELLS", "ResumeShares", "window_cell"]

MOVED_PAST = CELLS_COUNT + SESSION_CELLS
"""Cell of ends that sessions have gone on from."""
WINDOW_CELLS = MOVED_PAST + 1
"""Cells of a windowed lane: the forecast's, for windows at a prompt's end; those of sessions once more, before it."""
OFFSETS_MAX = 64
"""Pages before the end of a prompt that are told apart."""
HALVED_AT = 4096
"""Continuations that are counted before counts are halved: habits change."""


def window_cell(node: Node) -> int:
    """Return the cell of a node in a windowed lane."""
    if not in_session(node.cell):
        return node.cell
    if node.moved_past:
        return MOVED_PAST
    return node.cell if node.end == node.asked_end else CELLS_COUNT + node.cell


class ResumeShares:
    """Counts of where sessions resume: how far before the end of their last prompt, and how often before it began."""

    __slots__ = ("_counts", "_total", "moved_past")

    def __init__(self) -> None:
        self._counts = [1.0 / (1 + offset) for offset in range(OFFSETS_MAX)]
        """Continuations by the pages of the prompt that they leave; at first, the nearer the end the likelier."""
        self._total = sum(self._counts)
        self.moved_past = Returns(8, 1)
        """Ends that sessions have gone on from."""

    def count(self, node: Node | None, agreed_end: int, last_end: int | None) -> None:
        """Count a request that agrees with ``node``, and what is above it, up to ``agreed_end``.

        ``last_end`` are the pages of the prompt that it continues; None if it begins a session.
        """
        if node is not None and node.moved_past and node.end == agreed_end:
            self.moved_past.come_back()
        if last_end is None:
            return
        if self._total >= HALVED_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        self._total += 1
        pages_left = max(last_end - agreed_end, 0)
        if pages_left < OFFSETS_MAX:
            self._counts[pages_left] += 1

    def weigh(self, node: Node, lane: int, span: int) -> float:
        """Return what each window page of a node in ``lane`` is worth, of what the forecast says of its request.

        A window is ``span`` pages. One that has lost a page, or that the lane does not hold any more, is worth nothing.
        """
        pages, held_pages = node.end - node.start, node.held_count[lane]
        if not held_pages or pages - node.last_hole[lane] < min(span, pages):
            return 0.0
        resumed = 1.0
        if in_session(node.cell) and node.moved_past:
            resumed = self.moved_past.part
        elif in_session(node.cell):
            first = max(node.asked_end - node.end, 0)
            resumed = sum(self._counts[first : first + held_pages]) / self._total
        return resumed / held_pages * sqrt(node.end)
