"""Reuse predictor: hazards and scores from the log, continuations, and the victims that follow from them."""

import random
from itertools import pairwise

import numpy as np
import pytest

from tests.support.components import toy_components
from tests.support.operations import present
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.core.window import SPAN_ALL, needed_pages
from unified_cache.tree import Lock, RadixTree, adaptive_queues, reuse_predictor
from unified_cache.tree.adaptive_queues import AdaptiveQueues, ResumeShares
from unified_cache.tree.node import Node
from unified_cache.tree.reuse_predictor import (
    AGES,
    BINS,
    CLASSES_COUNT,
    COLUMN_TOKENS,
    COLUMNS,
    LAYERS,
    ROW_FACTORS,
    SESSION_CLASSES,
    EvictedRun,
    Floats,
    PredictionScore,
    ReuseLog,
    ReusePredictor,
    hazards_by_class,
    scores,
)

PAGES = 60


class ServedTree:
    """A tree on the device alone, and an engine that computes what it lacks."""

    def __init__(self, policy: EvictionPolicy = EvictionPolicy.ADAPTIVE, pages: int = PAGES) -> None:
        self.pages = pages
        config = EvictionConfig(device=(policy,))
        self.tree = RadixTree(toy_components((SPAN_ALL,)), 1, config, ((pages,), (0,)))
        self.free = list(range(1, pages + 1))

    def begin(self, tokens: list[int]) -> tuple[Prompt, Lock]:
        prompt = Prompt.of(tokens, 1)
        found = self.tree.match(prompt)
        request = self.tree.use(found, found.device_end)
        return prompt, self.tree.lock(found, found.device_end, Tier.DEVICE, request)

    def end(self, prompt: Prompt, lock: Lock) -> None:
        count = prompt.pages_count - lock.end
        if count > len(self.free):
            freed = self.tree.evict(Tier.DEVICE, 0, count - len(self.free))
            self.free += [slot for slots in freed.slots[0] for slot in slots.tolist()]
        if count:
            slots = np.array([self.free.pop() for _ in range(count)], np.int32)
            inserted = self.tree.insert(prompt, lock.end, [slots], Tier.DEVICE, request=lock.request)
            self.free += inserted.duplicates[0].tolist()
        self.tree.unlock(lock)
        self.tree.check()

    def serve(self, tokens: list[int]) -> int:
        """Serve a request; return its hits."""
        prompt, lock = self.begin(tokens)
        hits = lock.end
        self.end(prompt, lock)
        return hits

    def held(self, tokens: list[int]) -> int:
        return self.tree.peek(Prompt.of(tokens, 1)).device_end


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the log often, so that little has to be served before there is a predictor."""
    monkeypatch.setattr(reuse_predictor, "REFRESH_REQUESTS", (16, 16))
    monkeypatch.setattr(reuse_predictor, "COLUMN_TOKENS", 1)


def test_worth_is_the_best_rate_of_reuse_of_all_times_to_keep_a_page_for() -> None:
    rng = np.random.default_rng(3)
    ended = rng.integers(0, 20, (CLASSES_COUNT, BINS)).astype(np.float64)
    spent = rng.integers(1, 4000, (CLASSES_COUNT, BINS)).astype(np.float64)
    found = scores(hazards_by_class(ended, spent))
    widths = [*(after - first for first, after in pairwise(AGES)), AGES[-1]]
    sessions = range(SESSION_CLASSES)
    base = [
        (sum(ended[:SESSION_CLASSES, b]) + 2) / (sum(spent[:SESSION_CLASSES, b]) + 2 * (AGES[b] + 30) / 0.3)
        for b in range(BINS)
    ]
    hazards = [
        [base[b] * (ROW_FACTORS[_place(request_class)[0]] if request_class in sessions else 1) for b in range(BINS)]
        for request_class in range(CLASSES_COUNT)
    ]
    for alike, events in (((0,), 4), ((1,), 4), ((0, 1), 2), ((2,), 4), ((1, 2), 2)):
        before = [row.copy() for row in hazards]
        for request_class in sessions:
            group = [
                other for other in sessions if all(_place(other)[axis] == _place(request_class)[axis] for axis in alike)
            ]
            for b in range(BINS):
                weights = [0.7 ** abs(other - b) for other in range(BINS)]
                seen = sum(float(ended[i] @ weights) for i in group)
                expected = sum(float((spent[i] * before[i]) @ weights) for i in group)
                hazards[request_class][b] *= (seen + events) / (expected + events)
    for request_class in range(SESSION_CLASSES, CLASSES_COUNT):
        for b in range(BINS):
            weights = [0.7 ** abs(other - b) for other in range(BINS)]
            hazards[request_class][b] *= (float(ended[request_class] @ weights) + 2) / (
                float((spent[request_class] * base) @ weights) + 2
            )
    for request_class in (0, 7, SESSION_CLASSES - 1, SESSION_CLASSES, reuse_predictor.UNASKED):
        for first in range(BINS):
            best = reached = uses = kept = 0.0
            reached = 1.0
            for b in range(first, BINS):
                lasting = 1 / (1 + hazards[request_class][b] * widths[b])
                kept += reached * lasting * widths[b]
                uses += reached * (1 - lasting)
                reached *= lasting
                best = max(best, uses / kept)
            assert found[request_class][first] == pytest.approx(best, rel=1e-9)


def _place(request_class: int) -> tuple[int, int, int]:
    """Return row, column and layer of a session's class."""
    return request_class // (COLUMNS * LAYERS), request_class // LAYERS % COLUMNS, request_class % LAYERS


def test_the_log_counts_what_was_continued_and_how_long_the_rest_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_predictor, "LOG_MAX", 32)
    rng = random.Random(5)
    log = ReuseLog()
    entries: dict[int, tuple[int, int | None]] = {}
    for _ in range(500):
        request_class = rng.randrange(3)
        entries[log.open(request_class)] = (request_class, None)
        number = rng.randrange(max(1, log.now - 40), log.now + 1)
        log.close(number)
        if entries[number][1] is None:
            entries[number] = (entries[number][0], log.now - number)
    ended, spent = log.counts()
    step = 1 << log._shift
    assert step > 1, "nothing was forgotten"
    kept = {number: entry for number, entry in entries.items() if number % step == 0}
    for request_class in range(3):
        ages = [(number, age) for number, (of, age) in kept.items() if of == request_class]
        for b, first in enumerate(AGES):
            after = AGES[b + 1] if b + 1 < BINS else 1 << 60
            assert ended[request_class, b] == sum(age is not None and first <= age < after for _, age in ages)
            lasted = [log.now - number if age is None else age for number, age in ages]
            assert spent[request_class, b] == sum(min(age, after) - first for age in lasted if age >= first)


def test_a_request_continues_where_an_earlier_one_ended_or_nearly() -> None:
    served = ServedTree()
    served.serve([1, 2, 3, 4, 5, 6])
    for tokens, is_continued in (
        ([1, 2, 3, 4, 5, 6, 7], True),
        ([1, 2, 3, 4, 5, 6, 7], True),
        ([9, 9], False),
        ([1, 2, 3, 4, 5, 6, 8, 8], True),
        ([1, 2, 8, 8], False),
    ):
        prompt, lock = served.begin(tokens)
        assert lock.request is not None
        assert lock.request.goes_on is is_continued, tokens
        served.end(prompt, lock)


def test_a_session_is_known_again_after_all_of_it_was_evicted() -> None:
    served = ServedTree(pages=8)
    served.serve([1, 2, 3, 4])
    served.serve([5, 6, 7, 8, 9, 10, 11, 12])
    assert not served.held([1, 2, 3, 4])
    prompt, lock = served.begin([1, 2, 3, 4, 20])
    assert lock.request is not None
    assert lock.request.goes_on
    served.end(prompt, lock)


def test_requests_under_way_at_a_time_do_not_take_each_other_for_themselves() -> None:
    served = ServedTree()
    first, second = served.begin([1, 2, 3, 4]), served.begin([5, 6, 7, 8])
    served.end(*first)
    served.end(*second)
    nodes = {node.key[0]: node.request for node in served.tree._state.nodes()}
    assert nodes == {1: 1, 5: 2}


def test_an_answer_that_is_inserted_extends_its_request() -> None:
    served = ServedTree()
    prompt, lock = served.begin([1, 2, 3])
    slots = np.array([served.free.pop() for _ in range(3)], np.int32)
    served.tree.insert(prompt, 0, [slots], Tier.DEVICE, request=lock.request)
    longer = Prompt.of([1, 2, 3, 4, 5], 1)
    renewed = served.tree.lock(served.tree.match(prompt), 3, Tier.DEVICE, lock.request)
    served.tree.unlock(lock)
    served.end(longer, renewed)
    assert [node.request for node in served.tree._state.nodes()] == [1, 1]
    prompt, lock = served.begin([1, 2, 3, 4, 5, 6])
    assert lock.request is not None
    assert lock.request.goes_on
    served.end(prompt, lock)


def test_a_request_that_a_clear_overtakes_is_continued_after_it() -> None:
    served = ServedTree()
    for first in range(10, 20):
        served.serve([first])
    prompt, lock = served.begin([1, 2, 3])
    served.free = [*range(1, PAGES + 1)]
    served.tree.clear()
    served.end(prompt, lock)
    _, lock = served.begin([1, 2, 3, 4])
    assert lock.end == 3
    assert lock.request is not None
    assert lock.request.goes_on


@pytest.mark.parametrize("seed", range(3))
def test_predictions_are_not_used_from_soon_after_habits_change_until_it_has_learned_them(seed: int) -> None:
    rng = random.Random(seed)
    learned = ReusePredictor(COLUMN_TOKENS)
    waiting: list[EvictedRun] = []
    believed: list[bool] = []
    for number in range(4_000):
        goes_on = len(waiting) > 40 and rng.random() < 0.6
        last = waiting.pop(rng.randrange(len(waiting))) if goes_on else None
        start = 0 if last is None else last.end
        end = start + rng.choice((1, 20))
        request = learned.begin(start, end, last, below_shared=False)
        if rng.random() < (0.8 if (end - start == 1) == (number < 1_000) else 0.2):
            waiting.append(EvictedRun(request.number, request.request_class, end, end))
        believed.append(learned.is_ready)
    assert all(believed[250:1_000])
    assert not any(believed[1_200:2_000])
    assert all(believed[3_000:])


def test_it_is_lru_until_half_as_much_was_evicted_as_is_held(quick: None) -> None:
    adaptive, lru = ServedTree(), ServedTree(EvictionPolicy.LRU)
    rng = random.Random(1)
    requests = [[rng.randrange(12), *range(rng.randrange(1, 8))] for _ in range(400)]
    evicted = 0
    for tokens in requests:
        free, held = len(adaptive.free), adaptive.held(tokens)
        assert adaptive.serve(tokens) == lru.serve(tokens)
        evicted += max(0, len(tokens) - held - free)
        if queues_of(adaptive)._unlearned_pages[0] <= 0:
            assert 2 * evicted >= PAGES
            return
    raise AssertionError("never half as much was evicted as is held")


def queues_of(served: ServedTree) -> AdaptiveQueues:
    queues = served.tree._state.queues
    assert isinstance(queues, AdaptiveQueues)
    return queues


def visitors(turns: int, kept_pages: int = 4) -> list[list[int]]:
    """Sessions that come back after eight others, and between them long prompts that never do.

    They come back with so many of their four pages, and others.
    """
    requests: list[list[int]] = []
    for turn in range(turns):
        session = 1000 * (turn // 4) + 100 * (turn % 4)
        requests.append([session + page for page in range(4)])
        requests += [[50_000 + 100 * turn + 10 * other + page for page in range(9)] for other in range(3)]
        if turn >= 4:
            session = 1000 * ((turn - 4) // 4) + 100 * (turn % 4)
            requests.append([session + (page if page < kept_pages else page + 50) for page in range(6)])
    return requests


def test_what_comes_back_is_kept_over_what_never_does_however_recent(quick: None) -> None:
    requests = visitors(200)
    adaptive, lru = ServedTree(), ServedTree(EvictionPolicy.LRU)
    hits = [sum(served.serve(tokens) for tokens in requests) for served in (adaptive, lru)]
    assert hits[1] == 0, "the sessions fit for lru; nothing is shown"
    assert hits[0] > 0.8 * 4 * 196 * 0.75


def test_the_last_page_of_a_prompt_goes_first_while_such_pages_are_not_asked_for_again(quick: None) -> None:
    served = ServedTree()
    for tokens in visitors(200, kept_pages=3):
        served.serve(tokens)
    prompt = [1, 2, 3, 4]
    served.serve(prompt)
    assert served.held(prompt) == 4
    queues = queues_of(served)
    evicted = 0
    while queues._next_tail(0) is not None:
        victim = present(served.tree.next_victim(Tier.DEVICE, 0))
        assert victim.node is queues._next_tail(0)
        assert served.tree.evict_from(victim, 3).slots[0][0].size == 1, "more than the last page went"
        evicted += 1
    assert evicted
    assert served.held(prompt) == 3


def test_the_last_page_goes_first_although_one_in_many_was_asked_for_again(quick: None) -> None:
    served = ServedTree()
    for tokens in visitors(200, kept_pages=3):
        served.serve(tokens)
    prompt = [1, 2, 3, 4]
    served.serve(prompt)
    assert served.serve(prompt) == 4
    assert queues_of(served)._next_tail(0) is not None


def test_last_pages_that_are_asked_for_again_do_not_go_before_others(quick: None) -> None:
    served = ServedTree()
    for turn in range(300):
        served.serve([turn % 4, *range(100 * turn, 100 * turn + 5)])
        served.serve([turn % 4, *range(100 * turn, 100 * turn + 6)])
    queues = queues_of(served)
    assert queues._by_prediction[0]
    assert queues._next_tail(0) is None


# ---- the score -----------------------------------------------------------------------------------------------------


CLASSES, AGES_COUNT = 6, 4
COMMON = np.full((1, AGES_COUNT), 0.05)
HAZARDS = COMMON * np.array([0.2, 0.4, 0.6, 1.4, 1.6, 1.8])[:, None]
"""Hazards of classes that differ, and are the common one in the mean."""
CHECKS = 40


class CountedRequests:
    """Requests that are continued at given hazards, as a log counts them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ended = np.zeros((CLASSES, AGES_COUNT))
        self.spent = np.zeros((CLASSES, AGES_COUNT))

    def go_on(self, hazards: Floats) -> tuple[Floats, Floats]:
        """Have requests spend some more time at every age; return the counts of all time."""
        spent = self.rng.integers(20, 60, (CLASSES, AGES_COUNT)).astype(np.float64)
        self.ended = self.ended + self.rng.poisson(np.broadcast_to(hazards, spent.shape) * spent)
        self.spent = self.spent + spent
        return self.ended, self.spent


def bad_checks(record: PredictionScore, requests: CountedRequests, hazards: Floats) -> list[bool]:
    bad = []
    for _ in range(CHECKS):
        record.check(*requests.go_on(hazards))
        bad.append(record.is_bad)
    return bad


@pytest.mark.parametrize("seed", range(5))
def test_a_score_is_good_while_predictions_come_true_and_bad_soon_after(seed: int) -> None:
    record, requests = PredictionScore(), CountedRequests(seed)
    record.check(*requests.go_on(HAZARDS))
    record.predict(HAZARDS, COMMON)
    assert not any(bad_checks(record, requests, HAZARDS))
    assert all(bad_checks(record, requests, HAZARDS[::-1])[3:])
    assert not any(bad_checks(record, requests, HAZARDS)[4:])


@pytest.mark.parametrize("seed", range(5))
def test_differences_that_are_none_make_a_bad_record(seed: int) -> None:
    record, requests = PredictionScore(), CountedRequests(seed)
    record.predict(HAZARDS, COMMON)
    assert sum(bad_checks(record, requests, COMMON)) > 0.8 * CHECKS


def test_without_predictions_no_score_is_bad() -> None:
    record, requests = PredictionScore(), CountedRequests(1)
    assert not any(bad_checks(record, requests, HAZARDS))
    record.predict(np.broadcast_to(COMMON, HAZARDS.shape), COMMON)
    assert not any(bad_checks(record, requests, HAZARDS))


def test_requests_that_a_log_has_forgotten_are_not_missed() -> None:
    record, requests = PredictionScore(), CountedRequests(2)
    record.predict(HAZARDS, COMMON)
    assert not any(bad_checks(record, requests, HAZARDS))
    requests.ended, requests.spent = requests.ended // 2, requests.spent // 2
    assert not any(bad_checks(record, requests, HAZARDS))


# ---- windows: of the ends that requests leave, which one goes first ------------------------------------------------


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


def factor(shares: ResumeShares, node: Node, span: int = 1) -> float:
    return shares.factor(node, DEVICE_WINDOW, span)


def test_the_end_that_sessions_go_on_from_is_learned() -> None:
    shares = ResumeShares()
    at_end, before_last = node_of(request_class=0, pages=9), node_of(request_class=0, pages=9, before=1)
    assert factor(shares, at_end) > factor(shares, before_last), "expected, before any"
    for _ in range(100):
        shares.count(None, 8, 9)
    assert factor(shares, at_end) * 20 < factor(shares, before_last)
    for _ in range(10_000):
        shares.count(None, 9, 9)
    assert factor(shares, at_end) > 20 * factor(shares, before_last), "habits change"


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
    assert factor(shares, past) == pytest.approx(0.1 * 3)
    assert factor(shares, shared) == 3, "what several sessions share is not one session's"


def test_a_window_that_has_lost_a_page_scores_nothing() -> None:
    shares, shared = ResumeShares(), reuse_predictor.SHARED
    assert factor(shares, node_of(request_class=shared, pages=9, tombstones_end=5), 4) == 3
    assert factor(shares, node_of(request_class=shared, pages=9, tombstones_end=6), 4) == 0
    assert factor(shares, node_of(request_class=shared, pages=4), 8) == 2, "the rest of it stands above"


def test_what_a_window_saves_counts_by_its_root() -> None:
    shares = ResumeShares()
    short, long = (factor(shares, node_of(request_class=0, pages=pages)) for pages in (4, 64))
    assert long == pytest.approx(4 * short)


def test_a_window_that_its_tier_does_not_hold_any_more_scores_nothing() -> None:
    gone = node_of(request_class=reuse_predictor.SHARED, pages=1)
    gone.held_count[DEVICE_WINDOW] = 0
    assert factor(ResumeShares(), gone) == 0
