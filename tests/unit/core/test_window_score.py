"""Windows under the predictor: of the ends that requests leave, which one goes first."""

import numpy as np
import pytest

from tests.support.components import toy_components
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.core.window import SPAN_ALL, needed_pages
from unified_cache.tree import RadixTree, adaptive_queues, reuse_predictor
from unified_cache.tree.adaptive_queues import ResumeShares
from unified_cache.tree.node import Node

DEVICE_WINDOW = 1


class WindowedTree:
    """A tree that holds all of Full, and few windows: at the end of each prompt, and one page before."""

    def __init__(self, windows: int, *, policy: EvictionPolicy = EvictionPolicy.ADAPTIVE, span: int = 1) -> None:
        self.span = span
        config = EvictionConfig(device=(policy,))
        self.tree = RadixTree(toy_components((SPAN_ALL, span)), 1, config, ((100_000, windows), (0, 0)))
        self.free = windows
        self.slots_count = 0

    def serve(self, tokens: list[int], ends: tuple[int, ...] = (-1, 0)) -> int:
        """Serve a request that leaves windows at these ends, counted from its own; return the pages resumed."""
        prompt = Prompt.of(tokens, 1)
        found = self.tree.match(prompt)
        resumed = found.device_end
        branch = found.tree_end
        request = self.tree.use(found, resumed)
        lock = self.tree.lock(found, resumed, Tier.DEVICE, request)
        count = len(tokens) - resumed
        if count:
            kept = needed_pages([branch, *(len(tokens) + end for end in ends)], self.span, resumed, len(tokens))
            short = int(kept.sum()) - self.free
            if short > 0:
                self.free += sum(map(len, self.tree.evict(Tier.DEVICE, DEVICE_WINDOW, short).slots[DEVICE_WINDOW]))
            given = [self._fresh(count), np.where(kept, self._fresh(count), -1).astype(np.int32)]
            inserted = self.tree.insert(prompt, resumed, given, Tier.DEVICE, request=request)
            self.free -= int(kept.sum()) - len(inserted.duplicates[DEVICE_WINDOW])
        self.tree.unlock(lock)
        self.tree.check()
        return resumed

    def _fresh(self, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        self.slots_count += count
        return np.arange(self.slots_count - count + 1, self.slots_count + 1, dtype=np.int32)

    def resumable(self, tokens: list[int]) -> int:
        """Return the pages that a request would resume from, without asking."""
        return self.tree.peek(Prompt.of(tokens, 1)).device_end


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the log often, so that little has to be served before there is a predictor, and believe it.

    What is served then is not what it was learned from: sessions that all wait, which it would take for new habits.
    """
    monkeypatch.setattr(reuse_predictor, "REFRESH_REQUESTS", (16, 16))
    monkeypatch.setattr(reuse_predictor, "RECORD_DEVIATIONS", 100.0)
    monkeypatch.setattr(reuse_predictor, "COLUMN_TOKENS", 1)
    monkeypatch.setattr(adaptive_queues, "SCORE_REQUESTS", 1)


def turns(served: WindowedTree, sessions: int, *, agree: int) -> None:
    """Serve two turns of sessions, one after the other; the second agrees with all but ``agree`` pages."""
    for session in range(sessions):
        first = [10_000 + 100 * session + page for page in range(6)]
        served.serve(first)
        served.serve([*first[: 6 - agree], *(10_050 + 100 * session + page for page in range(4))])


@pytest.mark.parametrize("agree", [0, 1])
def test_of_two_ends_the_one_that_sessions_do_not_go_on_from_goes_first(early: None, agree: int) -> None:
    served = WindowedTree(12)
    turns(served, 60, agree=agree)
    prompts = [[100 * session + page for page in range(6)] for session in range(8)]
    for prompt in prompts:
        served.serve(prompt)
    kept = [served.resumable([*prompt[: 6 - agree], 9_999]) for prompt in prompts]
    assert kept[2:] == [6 - agree] * 6, "with room for twelve, all that sessions go on from fit"
    other = [served.resumable([*prompt[:5], *prompt[5 : 5 + agree], 9_999]) for prompt in prompts]
    assert other.count(5 + agree) <= 5 or agree == 0


def test_an_end_that_its_session_has_gone_on_from_goes_before_those_that_wait(early: None) -> None:
    served = WindowedTree(8)
    turns(served, 60, agree=0)
    waiting = [[100 * session + page for page in range(6)] for session in range(3)]
    for prompt in waiting:
        served.serve(prompt, ends=(0,))
    long = [500 + page for page in range(6)]
    for turn in range(12):
        assert served.serve([*long, *(600 + page for page in range(turn))], ends=(0,)) or not turn
    assert [served.resumable([*prompt, 9_999]) for prompt in waiting] == [6, 6, 6]
    lru = WindowedTree(8, policy=EvictionPolicy.LRU)
    for prompt in waiting:
        lru.serve(prompt, ends=(0,))
    for turn in range(12):
        lru.serve([*long, *(600 + page for page in range(turn))], ends=(0,))
    assert [lru.resumable([*prompt, 9_999]) for prompt in waiting] == [0, 0, 0], "lru keeps them too; nothing is shown"


def node_of(
    *, request_class: int, pages: int, before: int = 0, tombstones_end: int = 0, moved_past: bool = False
) -> Node:
    """Make a node that holds its last page of a windowed component, before the last ``before`` pages of a prompt."""
    node = Node(b"", 0, pages, Node(b"", 0, 0, None, 2), 2)
    node.held_count[DEVICE_WINDOW] = 1
    node.last_tombstone[DEVICE_WINDOW] = tombstones_end
    node.request_class, node.asked_end, node.moved_past = request_class, pages + before, moved_past
    return node


def test_the_end_that_sessions_go_on_from_is_learned() -> None:
    shares = ResumeShares()
    at_end, before_last = node_of(request_class=0, pages=9), node_of(request_class=0, pages=9, before=1)
    assert shares.factor(at_end, DEVICE_WINDOW, 1) > shares.factor(before_last, DEVICE_WINDOW, 1), (
        "expected, before any"
    )
    for _ in range(100):
        shares.count(None, 8, 9)
    assert shares.factor(at_end, DEVICE_WINDOW, 1) * 20 < shares.factor(before_last, DEVICE_WINDOW, 1)
    for _ in range(10_000):
        shares.count(None, 9, 9)
    assert shares.factor(at_end, DEVICE_WINDOW, 1) > 20 * shares.factor(before_last, DEVICE_WINDOW, 1), "habits change"


def test_an_end_moved_past_scores_by_how_often_such_ends_are_asked_for_again() -> None:
    shares = ResumeShares()
    past, shared = (
        node_of(request_class=0, pages=9, moved_past=True),
        node_of(request_class=reuse_predictor.SHARED, pages=9, moved_past=True),
    )
    for _ in range(992):
        shares.moved_past.leave()
    for _ in range(99):
        shares.count(past, 9, None)
    assert shares.factor(past, DEVICE_WINDOW, 1) == pytest.approx(0.1 * 3)
    assert shares.factor(shared, DEVICE_WINDOW, 1) == 3, "what several sessions share is not one session's"


def test_a_window_that_has_lost_a_page_scores_nothing() -> None:
    shares = ResumeShares()
    assert (
        shares.factor(node_of(request_class=reuse_predictor.SHARED, pages=9, tombstones_end=5), DEVICE_WINDOW, 4) == 3
    )
    assert (
        shares.factor(node_of(request_class=reuse_predictor.SHARED, pages=9, tombstones_end=6), DEVICE_WINDOW, 4) == 0
    )
    assert shares.factor(node_of(request_class=reuse_predictor.SHARED, pages=4), DEVICE_WINDOW, 8) == 2, (
        "the rest of it stands above"
    )


def test_what_a_window_saves_counts_by_its_root() -> None:
    shares = ResumeShares()
    short, long = (shares.factor(node_of(request_class=0, pages=pages), DEVICE_WINDOW, 1) for pages in (4, 64))
    assert long == pytest.approx(4 * short)


def test_a_window_that_its_tier_does_not_hold_any_more_scores_nothing() -> None:
    gone = node_of(request_class=reuse_predictor.SHARED, pages=1)
    gone.held_count[DEVICE_WINDOW] = 0
    assert ResumeShares().factor(gone, DEVICE_WINDOW, 1) == 0
