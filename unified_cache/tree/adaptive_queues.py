"""Eviction queues that go by the reuse predictor: a queue for each request class, and LRU until there are predictions.

Within a class the oldest node goes first, or the youngest where its score is less: a score rises with age until people
have thought, and falls after. The next victim has the least score of these two over all classes; for windows and states
see ``ResumeShares``. Where requests do not differ, or recent predictions have failed, the oldest over all classes goes:
that is LRU. So ranks never fall, and a node goes earlier only by another queue.

The last page of a prompt, which the next turn fills up, goes before all that, as long as hardly any is asked for again.

``RequestFeatures`` writes the class and the request of a node.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import sqrt

from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.tree.eviction_queues import STALE_MIN, EvictionQueues, Queue
from unified_cache.tree.node import Node
from unified_cache.tree.reuse_predictor import (
    CLASSES_COUNT,
    SESSION_CLASSES,
    UNASKED,
    EvictedRun,
    Returns,
    ReusePredictor,
    TreeRequest,
    first_turn,
    goes_on,
    in_session,
    shared_class,
)

__all__ = ["WINDOW_CLASSES", "AdaptiveQueues", "RequestFeatures", "ResumeShares", "window_class"]

MOVED_PAST = CLASSES_COUNT + SESSION_CLASSES
"""Class of ends that sessions have gone on from."""
WINDOW_CLASSES = MOVED_PAST + 1
"""Classes of windows: the predictor's, at a prompt's end; those of sessions once more, before the end."""
OFFSETS_MAX = 64
"""Pages before the end of a prompt that have a count of their own."""
HALVED_AT = 4096
"""Continuations at which the counts are halved: habits change."""


def window_class(node: Node) -> int:
    """Return the class of a node in the queues of windows."""
    if not in_session(node.request_class):
        return node.request_class
    if node.moved_past:
        return MOVED_PAST
    return node.request_class if node.end == node.asked_end else CLASSES_COUNT + node.request_class


class ResumeShares:
    """Counts of where sessions resume: how far before the end of their last prompt, and how often before it began.

    Every request that reaches a page of Full uses it; only a request that resumes at its very end uses a window. So the
    predicted score of a session is divided between the ends that its last request left:

        score = predicted x P(resumed here | goes on), for each page of the window  x square root of the pages before it

    since a request that does not resume here computes those again; the root keeps few long prompts from driving out
    many short ones. An end that its session has gone on from counts by how often such ends are asked for again.
    """

    __slots__ = ("_counts", "_total", "moved_past")

    def __init__(self) -> None:
        self._counts = [1.0 / (1 + offset) for offset in range(OFFSETS_MAX)]
        """Continuations by the pages of the prompt that they drop; at first, the nearer the end the likelier."""
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

    def factor(self, node: Node, tier_component: int, span: int) -> float:
        """Return the factor from a request's score to that of each window page of a node in ``tier_component``.

        A window is ``span`` pages. The factor is 0 if it has lost a page, or is not held there any more.
        """
        pages, held_pages = node.end - node.start, node.held_count[tier_component]
        if not held_pages or pages - node.last_tombstone[tier_component] < min(span, pages):
            return 0.0
        resumed = 1.0
        if in_session(node.request_class) and node.moved_past:
            resumed = self.moved_past.part
        elif in_session(node.request_class):
            first = max(node.asked_end - node.end, 0)
            resumed = sum(self._counts[first : first + held_pages]) / self._total
        return resumed / held_pages * sqrt(node.end)


SCORE_REQUESTS = 4
"""Requests after which the ends of all classes are scored again; in between only the ends that changed or come up."""
ENDS_MAX = 1024
"""Ends recorded of a component on a tier at which all are scored again."""
START_MAX = 1 << 24
"""More than the pages of a prompt: of windows of equal stamp, in any class, the one that begins first goes first."""
YOUNG_MAX = 16
"""Youngest nodes that are known of each class."""


class AdaptiveQueues(EvictionQueues):
    """Eviction queues that go by the predictor for some components on some tiers."""

    __slots__ = (
        "_by_prediction",
        "_ends",
        "_is_adaptive",
        "_same_queues",
        "_score_at",
        "_tail_nodes",
        "_tail_tiers",
        "_tails_max",
        "_unlearned_pages",
        "_young",
        "predictor",
        "shares",
        "tails",
    )

    def __init__(
        self, spans: Sequence[int], eviction: EvictionConfig, capacity: Sequence[int], predictor: ReusePredictor
    ) -> None:
        super().__init__(spans, eviction, WINDOW_CLASSES)
        tier_components = [(tier, component) for tier in Tier for component in range(len(spans))]
        self.predictor = predictor
        self.shares = ResumeShares()
        """Where sessions resume: factors of window scores."""
        self.tails = Returns()
        """Last pages of prompts."""
        self._is_adaptive = [eviction.policy(*each) is EvictionPolicy.ADAPTIVE for each in tier_components]
        self._unlearned_pages = [(pages + 1) // 2 for pages in capacity]
        """By tier and component: pages yet to be evicted before its pages go by the predictor."""
        self._by_prediction = [False] * len(tier_components)
        """Whether a component on a tier goes by the predictor; else it is LRU."""
        self._ends: list[list[tuple[float, int]]] = [[] for _ in tier_components]
        """Heaps of (lower bound of the score, end of a class): a queue id its oldest node, ~id its youngest."""
        self._score_at = [0] * len(tier_components)
        """By tier and component: number of the request from which on all its ends are scored again."""
        self._tail_nodes: list[deque[Node]] = [deque() for _ in tier_components]
        """Of Full, by tier: nodes that may end with the last page of a prompt, oldest first."""
        self._tail_tiers = [full for full in range(0, len(tier_components), len(spans)) if self._is_adaptive[full]]
        """Full on each tier where it is adaptive."""
        self._tails_max = [STALE_MIN] * len(tier_components)
        """By tier and component: length at which nodes that do not end so any more are dropped."""
        self._young: dict[int, deque[Node]] = {}
        """By queue id: nodes that became evictable last, youngest last, and some that are no longer evictable."""
        self._same_queues: dict[int, int] = {}
        """Values of ``Node.queued``, each once: as numbers of their own they take 48 bytes a node."""

    # ---- predictor or LRU ----------------------------------------------------------------------------------------

    def follow_predictor(self) -> None:
        """Go by the predictor where it is ready and enough was evicted, and by LRU elsewhere."""
        for tier_component, was_followed in enumerate(self._by_prediction):
            if was_followed is not (self.predictor.is_ready and self._unlearned_pages[tier_component] <= 0):
                self._by_prediction[tier_component] = not was_followed
                self._score_at[tier_component] = 0

    def pages_at_once(self, node: Node, tier_component: int, pages: int) -> int:
        """Return how many of ``pages`` the next victim gives before another is looked for; they are evicted now."""
        nodes = self._tail_nodes[tier_component]
        if nodes and nodes[0] is node and self.ends_with_tail(node, tier_component):
            nodes.popleft()
            pages = min(pages, 1)
        if self._unlearned_pages[tier_component] > 0:
            self._unlearned_pages[tier_component] -= min(pages, node.held_count[tier_component])
            self.follow_predictor()
        return pages

    # ---- queues --------------------------------------------------------------------------------------------------

    def queue_id(self, node: Node, tier_component: int) -> int:
        """Return the queue that a node belongs to while it is evictable from ``tier_component``."""
        is_preferred = node.history is not None and self.is_preferred(node, tier_component)
        if is_preferred or not self._is_adaptive[tier_component]:
            return super().queue_id(node, tier_component)
        request_class = window_class(node) if tier_component % self._components_count else node.request_class
        return (len(Queue) + request_class) * self._stride + tier_component

    def offer(self, node: Node, tier_component: int) -> None:
        """Queue ``node`` for ``tier_component`` if it is evictable there and not queued yet."""
        if not self._is_adaptive[tier_component]:
            super().offer(node, tier_component)
            return
        if not self.evictable(node, tier_component):
            return
        queue_id = self.queue_id(node, tier_component)
        queue = self._queues[queue_id]
        if not node.queued >> queue_id & 1:
            self._enter(node, tier_component, queue_id)
            self._sequence += 1
            heappush(queue, (node.stamps[tier_component], self.place_of(node, tier_component), self._sequence, node))
        if queue_id < len(Queue) * self._stride:
            return
        if queue[0][3] is node:
            self._record_end(queue_id, tier_component)
        young = self._young.setdefault(queue_id, deque(maxlen=YOUNG_MAX))
        if young and young[-1] is not node and young[-1].request > node.request:
            return
        if not young or young[-1] is not node:
            young.append(node)
        if self._by_prediction[tier_component]:
            self._record_end(~queue_id, tier_component)

    def _enter(self, node: Node, tier_component: int, queue_id: int) -> None:
        super()._enter(node, tier_component, queue_id)
        node.queued = self._same_queues.setdefault(node.queued, node.queued)

    def _leave(self, node: Node, tier_component: int, queue_id: int) -> None:
        super()._leave(node, tier_component, queue_id)
        node.queued = self._same_queues.setdefault(node.queued, node.queued)

    def offer_all(self, node: Node) -> None:
        """See ``EvictionQueues.offer_all``."""
        for tier_component, live in enumerate(node.held_count):
            if live:
                self.offer(node, tier_component)

    def next_victim(self, tier_component: int) -> Node | None:
        """Return the next victim of ``tier_component``, which stays queued; None if nothing can be evicted."""
        if not self._is_adaptive[tier_component]:
            return super().next_victim(tier_component)
        victim = self._next_tail(tier_component) or self._least(tier_component)
        return victim or self._first(Queue.PREFERRED * self._stride + tier_component, tier_component)

    def pass_over(self, node: Node, tier_component: int) -> None:
        """Take the next victim of ``tier_component`` out of every queue that it heads, until it is offered again."""
        queue_id = self.queue_id(node, tier_component)
        super().pass_over(node, tier_component)
        for last in (self._young.get(queue_id), self._tail_nodes[tier_component]):
            if last and node in last:
                last.remove(node)

    # ---- last pages of prompts -----------------------------------------------------------------------------------

    def record_tail(self, node: Node) -> None:
        """Queue a node that ends with the last page of a prompt; at times, drop nodes that do not end so any more."""
        self.tails.leave()
        for tier_component in self._tail_tiers:
            nodes = self._tail_nodes[tier_component]
            nodes.append(node)
            if len(nodes) > self._tails_max[tier_component]:
                left = deque(node for node in nodes if self.ends_with_tail(node, tier_component))
                self._tail_nodes[tier_component] = left
                self._tails_max[tier_component] = max(STALE_MIN, 2 * len(left))

    def _next_tail(self, tier_component: int) -> Node | None:
        """Return the oldest node that ends with the last page of a prompt, if such pages are not asked for again."""
        nodes = self._tail_nodes[tier_component]
        if not self._by_prediction[tier_component] or not self.tails.are_rare:
            return None
        for _ in range(len(nodes)):
            node = nodes[0]
            if self.ends_with_tail(node, tier_component):
                if self.evictable(node, tier_component) and not self.is_preferred(node, tier_component):
                    return node
                if not node.full_children[tier_component // self._components_count]:
                    nodes.rotate(-1)
                    continue
            nodes.popleft()
        return None

    def ends_with_tail(self, node: Node, tier_component: int) -> bool:
        """Return whether the last page of a node that Full holds on a tier is the last one of a prompt."""
        held_end = node.start + node.held_count[tier_component]
        return not node.dead and held_end == node.asked_end and in_session(node.request_class)

    # ---- ends of classes -----------------------------------------------------------------------------------------

    def _record_end(self, end: int, tier_component: int) -> None:
        """Queue an end of a class to be scored before the next victim is chosen; -1 is below every score."""
        heappush(self._ends[tier_component], (-1.0, end))
        if len(self._ends[tier_component]) > ENDS_MAX:
            self._ends[tier_component].clear()
            self._score_at[tier_component] = 0

    def _least(self, tier_component: int) -> Node | None:
        """Return the node of least score among the oldest and youngest of all classes."""
        ends = self._ends[tier_component]
        if self._score_at[tier_component] <= self.predictor.now:
            self._score_at[tier_component] = self.predictor.now + SCORE_REQUESTS
            ids = range(len(Queue) * self._stride + tier_component, len(self._queues), self._stride)
            held = [queue_id for queue_id in ids if self._queues[queue_id]]
            held += [~queue_id for queue_id in held] if self._by_prediction[tier_component] else []
            nodes = ((end, self._node_at(end, tier_component)) for end in held)
            ends[:] = [(self._score(node, tier_component), end) for end, node in nodes if node is not None]
            heapify(ends)
        while ends:
            recorded, end = ends[0]
            node = self._node_at(end, tier_component)
            if node is None:
                heappop(ends)
                continue
            score = self._score(node, tier_component)
            if score <= recorded:
                return node
            heapreplace(ends, (score, end))
        return None

    def _node_at(self, end: int, tier_component: int) -> Node | None:
        """Return the node at an end of a class: its oldest, or its youngest if that is known."""
        if end >= 0:
            return self._first(end, tier_component)
        young = self._young.get(~end)
        while young:
            node = young[-1]
            if self.evictable(node, tier_component) and self._belongs(node, tier_component, ~end):
                return node
            young.pop()
        return None

    def _score(self, node: Node, tier_component: int) -> float:
        """Return the score of a node in a component on a tier now; by lru without predictions, the later the more."""
        if not self._by_prediction[tier_component]:
            return node.stamps[tier_component] + self.place_of(node, tier_component) / START_MAX
        score = self.predictor.score(node.request_class, node.request)
        component = tier_component % self._components_count
        return score * self.shares.factor(node, tier_component, self._spans[component]) if component else score

    def _belongs(self, node: Node, tier_component: int, queue_id: int) -> bool:
        return not node.dead and queue_id == self.queue_id(node, tier_component)


class RequestFeatures:
    """Features of one tree's nodes: the request that used them last, its class, and its end.

    They are written when a request's pages become a leaf; when a leaf is evicted, its parent takes over the later of
    the two. A node whose features change is offered to the queues, whose order depends on them.
    """

    __slots__ = ("_has_windows", "_page_key_bytes", "_queues", "predictor")

    def __init__(self, queues: AdaptiveQueues, page_key_bytes: int, *, has_windows: bool) -> None:
        self._queues = queues
        self.predictor = queues.predictor
        self._page_key_bytes = page_key_bytes
        self._has_windows = has_windows
        """Whether there is any component but Full: where sessions resume matters to windows and states alone."""

    def arrive(self, prompt: Prompt, path: Sequence[Node], tree_end: int) -> TreeRequest:
        """Record a request for a prompt, of which the tree has ``tree_end`` pages on ``path``."""
        node = path[-1] if path else None
        last = self._recall(prompt, tree_end)
        is_shared = False
        if node is not None and in_session(node.request_class):
            if last is None and goes_on(tree_end, node.start, node.asked_end):
                last = EvictedRun(node.request, node.request_class, node.asked_end, node.end)
            if node.end == node.asked_end == tree_end:
                self._queues.tails.come_back()
        elif node is not None and node.request_class < UNASKED:
            is_shared = last is None and node.end == tree_end
        if self._has_windows:
            self._queues.shares.count(node, tree_end, None if last is None else last.end)
        request = self.predictor.begin(tree_end, prompt.pages_count, last, below_shared=is_shared)
        self._queues.follow_predictor()
        if is_shared and node is not None:
            self.predictor.close(node.request)
            self._share(node)
        return request

    def _recall(self, prompt: Prompt, start: int) -> EvictedRun | None:
        """Return and forget the evicted run of the prompt's session, if the pages from ``start`` on were evicted."""
        at = start
        while at < prompt.pages_count:
            offset = at * self._page_key_bytes
            evicted_run = self.predictor.recall(at, prompt.tokens[offset : offset + self._page_key_bytes])
            if evicted_run is None:
                return None
            if in_session(evicted_run.request_class):
                if evicted_run.end == at + 1:
                    self._queues.tails.come_back()
                return evicted_run
            self.predictor.close(evicted_run.number)
            at = evicted_run.run_end
        return None

    def _share(self, node: Node) -> None:
        """Count one more session that begins below a node."""
        node.asked_end = 2 if in_session(node.request_class) else node.asked_end + 1
        node.request_class = shared_class(node.asked_end)
        node.request = self.predictor.open(node.request_class)
        node.moved_past = False
        self._queues.offer_all(node)

    def take_up(self, node: Node, parent: Node, request: TreeRequest | None) -> None:
        """Record ``node``, with its ancestors below ``parent``, as the last request's pages.

        ``request`` is None for pages that storage brought before anybody asked.
        """
        if request is None:
            first = node
            while first.parent is not None and first.parent is not parent:
                first = first.parent
            evicted_run = self.predictor.recall(first.start, first.key[: self._page_key_bytes])
            if evicted_run is None:
                evicted_run = EvictedRun(self.predictor.open(UNASKED), UNASKED, node.end, node.end)
            number, request_class, asked_end = evicted_run.number, evicted_run.request_class, evicted_run.end
        else:
            number, request_class, asked_end = request.number, request.request_class, node.end
        at = node
        while at is not parent and at.parent is not None:
            at.request, at.request_class, at.asked_end = number, request_class, asked_end
            at = at.parent
        if request is None:
            return
        self._queues.record_tail(node)
        if first_turn(request.request_class) and parent.parent is not None and parent.end == request.start:
            at = parent
            while at.parent is not None and in_session(at.request_class):
                self._share(at)
                at = at.parent
        elif request.goes_on and self._has_windows:
            self._move_past(parent, request)

    def _move_past(self, node: Node, request: TreeRequest) -> None:
        """Record that a session has gone on below a node: its next request resumes from there."""
        at = node
        while at.parent is not None and in_session(at.request_class) and not at.moved_past:
            if at.request != request.number:
                self._queues.shares.moved_past.leave()
                at.moved_past = True
                self._queues.offer_all(at)
            at = at.parent

    def settle(self, node: Node, request: TreeRequest) -> None:
        """Record ``node`` as the end of a request's prompt."""
        if (node.request, node.request_class, node.asked_end) == (request.number, request.request_class, node.end):
            return  # as ``take_up`` left it
        if in_session(node.request_class) or node.request_class == UNASKED:
            node.request, node.request_class, node.asked_end = request.number, request.request_class, node.end
            node.moved_past = False
            self._queues.offer_all(node)

    def child_left(self, parent: Node, child: Node) -> bool:
        """Copy the features of an evicted child to its parent if they are later; return whether they were."""
        if child.request <= parent.request or not (
            in_session(child.request_class) and in_session(parent.request_class)
        ):
            return False
        parent.request, parent.request_class, parent.asked_end = child.request, child.request_class, child.asked_end
        parent.moved_past = False
        return True

    def remember(self, node: Node, end: int) -> None:
        """Remember the last request of a node whose pages from ``end`` on are evicted."""
        offset = (end - node.start) * self._page_key_bytes
        page = node.key[offset : offset + self._page_key_bytes]
        self.predictor.remember(end, page, EvictedRun(node.request, node.request_class, node.asked_end, node.end))
