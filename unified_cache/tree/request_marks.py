"""Marks of nodes: which request used them last, written as requests come, insert, settle, and are evicted.

A node knows the last request that ended with its pages: number, cell, and how far the next one must agree to continue
it. That is written when a request's pages become a leaf; when a leaf goes, its parent takes over the later of the two.
A node that is marked anew is offered to the queues, which stand by these marks.
"""

from collections.abc import Sequence

from unified_cache.page import Prompt
from unified_cache.tree.adaptive_queues import AdaptiveQueues
from unified_cache.tree.forecast import UNASKED, Ghost, Visit, first_turn, goes_on, in_session, shared_cell
from unified_cache.tree.node import Node

__all__ = ["RequestMarks"]


class RequestMarks:
    """Marks of one tree's nodes, and what is learned from requests as they come."""

    __slots__ = ("_has_windows", "_page_key_bytes", "_queues", "forecast")

    def __init__(self, queues: AdaptiveQueues, page_key_bytes: int, *, has_windows: bool) -> None:
        self._queues = queues
        self.forecast = queues.forecast
        self._page_key_bytes = page_key_bytes
        self._has_windows = has_windows
        """Whether any component but Full is there: where sessions resume matters to windows and states alone."""

    def arrive(self, prompt: Prompt, path: Sequence[Node], tree_end: int) -> Visit:
        """Note that a request takes up a prompt, of which the tree has ``tree_end`` pages on ``path``."""
        node = path[-1] if path else None
        last = self._recall(prompt, tree_end)
        is_shared = False
        if node is not None and in_session(node.cell):
            if last is None and goes_on(tree_end, node.start, node.asked_end):
                last = Ghost(node.request, node.cell, node.asked_end, node.end)
            if node.end == node.asked_end == tree_end:
                self._queues.tails.come_back()
        elif node is not None and node.cell < UNASKED:
            is_shared = last is None and node.end == tree_end
        if self._has_windows:
            self._queues.shares.count(node, tree_end, None if last is None else last.end)
        visit = self.forecast.begin(tree_end, prompt.pages_count, last, below_shared=is_shared)
        self._queues.follow_forecast()
        if is_shared and node is not None:
            self.forecast.close(node.request)
            self._share(node)
        return visit

    def _recall(self, prompt: Prompt, start: int) -> Ghost | None:
        """Take back what is remembered of a prompt's pages from ``start`` on, which have left the tree.

        Returns the last request of the session that they belong to, if there is one.
        """
        at = start
        while at < prompt.pages_count:
            offset = at * self._page_key_bytes
            ghost = self.forecast.recall(at, prompt.tokens[offset : offset + self._page_key_bytes])
            if ghost is None:
                return None
            if in_session(ghost.cell):
                if ghost.end == at + 1:
                    self._queues.tails.come_back()
                return ghost
            self.forecast.close(ghost.number)
            at = ghost.run_end
        return None

    def _share(self, node: Node) -> None:
        """Note that one more session has begun below a node."""
        node.asked_end = 2 if in_session(node.cell) else node.asked_end + 1
        node.cell = shared_cell(node.asked_end)
        node.request = self.forecast.open(node.cell)
        node.moved_past = False
        self._queues.offer_all(node)

    def take_up(self, node: Node, parent: Node, visit: Visit | None) -> None:
        """Note that the pages of ``node``, after ``parent``, are those that a request has asked for last.

        None for pages that storage brought before anybody asked.
        """
        if visit is None:
            first = node
            while first.parent is not None and first.parent is not parent:
                first = first.parent
            ghost = self.forecast.recall(first.start, first.key[: self._page_key_bytes])
            if ghost is None:
                ghost = Ghost(self.forecast.open(UNASKED), UNASKED, node.end, node.end)
            number, cell, asked_end = ghost.number, ghost.cell, ghost.end
        else:
            number, cell, asked_end = visit.number, visit.cell, node.end
        at = node
        while at is not parent and at.parent is not None:
            at.request, at.cell, at.asked_end = number, cell, asked_end
            at = at.parent
        if visit is None:
            return
        self._queues.note_tail(node)
        if first_turn(visit.cell) and parent.parent is not None and parent.end == visit.start:
            at = parent
            while at.parent is not None and in_session(at.cell):
                self._share(at)
                at = at.parent
        elif visit.goes_on and self._has_windows:
            self._move_past(parent, visit)

    def _move_past(self, node: Node, visit: Visit) -> None:
        """Note that a session has gone on below: what is kept there is what the next request resumes from."""
        at = node
        while at.parent is not None and in_session(at.cell) and not at.moved_past:
            if at.request != visit.number:
                self._queues.shares.moved_past.leave()
                at.moved_past = True
                self._queues.offer_all(at)
            at = at.parent

    def settle(self, node: Node, visit: Visit) -> None:
        """Note that a request has asked for all pages that end with ``node``, and no more."""
        if node.request == visit.number and node.cell == visit.cell and node.asked_end == node.end:
            return  # as ``take_up`` has left it
        if in_session(node.cell) or node.cell == UNASKED:
            node.request, node.cell, node.asked_end = visit.number, visit.cell, node.end
            node.moved_past = False
            self._queues.offer_all(node)

    def child_left(self, parent: Node, child: Node) -> bool:
        """Have a parent take over from its child, which is evicted, the later request; return whether that was."""
        if child.request <= parent.request or not in_session(child.cell) or not in_session(parent.cell):
            return False
        parent.request, parent.cell, parent.asked_end = child.request, child.cell, child.asked_end
        parent.moved_past = False
        return True

    def remember(self, node: Node, end: int) -> None:
        """Have the forecast remember whose pages of a node from ``end`` on leave the tree."""
        offset = (end - node.start) * self._page_key_bytes
        page = node.key[offset : offset + self._page_key_bytes]
        self.forecast.remember(end, page, Ghost(node.request, node.cell, node.asked_end, node.end))
