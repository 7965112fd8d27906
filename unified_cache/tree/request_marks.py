"""Marks of nodes: which request used them last, written as requests come, insert, settle, and are evicted.

A node knows the last request that ended with its pages: number, cell, and how far the next one must agree to continue
it. That is written when a request's pages become a leaf; when a leaf goes, its parent takes over the later of the two.
Whoever is marked anew is offered to the queues, which stand by these marks.

What is hardly ever asked for again has a cell of its own, worth nothing: what a session has moved past, and what only
a session that is said to have ended has used. How rare that is, is counted; where it is not, they are as others.
"""

from collections.abc import Sequence

from unified_cache.page import Prompt
from unified_cache.tree.adaptive_queues import AdaptiveQueues
from unified_cache.tree.forecast import (
    ENDED,
    PASSED,
    SHARED,
    UNASKED,
    Ghost,
    Visit,
    first_turn,
    goes_on,
    in_session,
    shared_cell,
)
from unified_cache.tree.node import Node
from unified_cache.tree.returns import Returns

__all__ = ["RequestMarks"]


class RequestMarks:
    """Marks of one tree's nodes, and what is learned from requests as they come."""

    __slots__ = ("_ended", "_has_windows", "_page_key_bytes", "_passed", "forecast", "queues", "shadow")

    def __init__(self, queues: AdaptiveQueues, page_key_bytes: int, *, has_windows: bool) -> None:
        self.queues = queues
        self.forecast = queues.forecast
        self.shadow = queues.shadow
        self._page_key_bytes = page_key_bytes
        self._has_windows = has_windows
        """Whether any component but Full is there: where sessions resume matters to windows and states alone."""
        self._passed = Returns()
        """Pages that sessions have moved past."""
        self._ended = Returns()
        """Pages of sessions that are said to have ended."""

    def arrive(self, prompt: Prompt, path: Sequence[Node], tree_end: int) -> Visit:
        """Note that a request takes up a prompt, of which the tree has ``tree_end`` pages on ``path``."""
        forecast = self.forecast
        node = path[-1] if path else None
        last, gone = self._recall(prompt, tree_end)
        is_shared = False
        if node is None:
            pass
        elif in_session(node.cell):
            if last is None and goes_on(tree_end, node.start, node.asked_end):
                last = self._continued(node, tree_end)
            if node.end == node.asked_end == tree_end:
                self.queues.tails.come_back()
        elif node.cell < PASSED:
            is_shared = last is None and node.end == tree_end
        else:
            self._come_back(node.cell)
        if self._has_windows:
            self.queues.shares.note_request(node, tree_end, None if last is None else last.end)
        visit = forecast.begin(tree_end, prompt.pages_count, last, below_shared=is_shared)
        self.shadow.arrive(visit.number, path, tree_end, gone, prompt.pages_count)
        self.queues.trust(forecast=forecast.is_ready and not self.shadow.is_ahead)
        if is_shared and node is not None:
            forecast.close(node.request)
            self._share(node)
        return visit

    def _continued(self, node: Node, tree_end: int) -> Ghost:
        """Return the request of a session that is continued from ``node``; what it alone had below is passed by."""
        if tree_end == node.end:
            for child in node.children.values():
                if child.request == node.request:
                    self.pass_by(child)
        return Ghost(node.request, node.cell, node.asked_end, node.used, node.end)

    def _recall(self, prompt: Prompt, start: int) -> tuple[Ghost | None, list[tuple[int, int]]]:
        """Take back what is remembered of a prompt's pages from ``start`` on, which have left the tree.

        Returns the last request of the session that they belong to, if there is one, and by whom they were used last:
        runs of (request, pages), each after the one before.
        """
        forecast, page_key_bytes, total = self.forecast, self._page_key_bytes, prompt.pages_count
        gone: list[tuple[int, int]] = []
        at = start
        while at < total:
            offset = at * page_key_bytes
            ghost = forecast.recall(at, prompt.tokens[offset : offset + page_key_bytes])
            if ghost is None:
                break
            if in_session(ghost.cell):
                if ghost.end == at + 1:
                    self.queues.tails.come_back()
                gone.append((ghost.used, min(ghost.end - self.queues.tails.are_rare, total) - at))
                return ghost, gone
            forecast.close(ghost.number)
            self._come_back(ghost.cell)
            gone.append((ghost.used, min(ghost.run_end, total) - at))
            at = ghost.run_end
        return None, gone

    def _come_back(self, cell: int) -> None:
        """Note that pages of a cell are asked for; of some that is not expected."""
        if cell == PASSED:
            self._passed.come_back()
        elif cell == ENDED:
            self._ended.come_back()

    def _share(self, node: Node) -> None:
        node.asked_end = node.asked_end + 1 if SHARED <= node.cell < PASSED else 2
        node.cell = shared_cell(node.asked_end)
        node.request = self.forecast.open(node.cell)
        node.moved_past = False
        self.queues.offer_all(node)

    def pass_by(self, node: Node) -> None:
        """Note that a session has gone on without these pages, which one of its requests had.

        They go first, as long as hardly any such pages are asked for again.
        """
        self._passed.leave()
        if self._passed.are_rare:
            node.cell = PASSED
            self.queues.offer_all(node)

    def end_session(self, node: Node) -> None:
        """Note that the session whose last prompt ends with ``node`` does not go on.

        What it alone has used goes first, as long as hardly any of what is said to have ended is asked for again.
        """
        self._ended.leave()
        at = node
        while self._ended.are_rare and at.parent is not None and in_session(at.cell):
            at.cell = ENDED
            self.queues.offer_all(at)
            at = at.parent

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
                ghost = Ghost(self.forecast.open(UNASKED), UNASKED, node.end, 0, node.end)
            at = node
            while at is not parent and at.parent is not None:
                at.request, at.cell, at.asked_end = ghost.number, ghost.cell, ghost.end
                at.used = -ghost.used
                at = at.parent
            return
        at = node
        while at is not parent and at.parent is not None:
            at.request, at.cell, at.asked_end = visit.number, visit.cell, node.end
            at.used = visit.number
            at = at.parent
        if node.end > visit.end:
            self.shadow.extend(self.forecast.now, node.end - max(parent.end, visit.end))
        self.queues.note_tail(node)
        if first_turn(visit.cell) and parent.parent is not None and parent.end == visit.start:
            at = parent
            while at.parent is not None and (in_session(at.cell) or at.cell == ENDED):
                self._share(at)
                at = at.parent
        elif visit.goes_on and self._has_windows:
            self._move_past(parent, visit)

    def _move_past(self, node: Node, visit: Visit) -> None:
        """Note that a session has gone on below: what is kept there is what the next request resumes from."""
        at = node
        while at.parent is not None and in_session(at.cell) and not at.moved_past:
            if at.request != visit.number:
                self.queues.shares.note_moved_past()
                at.moved_past = True
                self.queues.offer_all(at)
            at = at.parent

    def settle(self, node: Node, visit: Visit) -> None:
        """Note that a request has asked for all pages that end with ``node``, and no more."""
        if node.request == visit.number and node.cell == visit.cell and node.asked_end == node.end:
            return  # as ``take_up`` has left it
        if in_session(node.cell) or node.cell >= PASSED:
            node.request, node.cell = visit.number, visit.cell
            node.asked_end = node.end
            node.moved_past = False
            self.queues.offer_all(node)

    def child_left(self, parent: Node, child: Node) -> bool:
        """Have a parent take over from its child, which is evicted, the later request; tell whether that was."""
        if child.request <= parent.request or not in_session(child.cell) or not in_session(parent.cell):
            return False
        parent.request, parent.cell, parent.asked_end = child.request, child.cell, child.asked_end
        parent.moved_past = False
        return True

    def remember(self, node: Node, end: int) -> None:
        """Have the forecast remember whose pages of a node from ``end`` on leave the tree."""
        page_key_bytes = self._page_key_bytes
        offset = (end - node.start) * page_key_bytes
        page = node.key[offset : offset + page_key_bytes]
        self.forecast.remember(end, page, (node.request, node.cell, node.asked_end, abs(node.used), node.end))
