"""Deadlines of prefetches: a request goes on in time with what has come, whatever the store still does."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine
from tests.support.clock import ManualClock
from tests.support.components import LAYOUTS, every_layout
from tests.support.conversations import ROOM, pages_on, store_turns
from tests.support.operations import Stepped, UnreturnedCall, engine, head_of, over, prompt_of_pages, started
from tests.support.ranks import ThreadRanks, digest_of, in_threads
from tests.support.store_calls import ScriptedStorage, at
from tests.support.tables import check_tables
from unified_cache.controller import OperationState
from unified_cache.controller.jobs import FIRST_CALL_OBJECTS
from unified_cache.controller.ranks.group import LocalRanks, RankGroup
from unified_cache.core.config import Prefetching
from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, ModelLayout, PoolSpec, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.protocol import BATCH_OBJECTS
from unified_cache.storage_backends.wrappers.layer import Method

TURNS = (4, 8, 12, 16)
POLL_S = 1e-4
"""Between two polls of a transfer that somebody waits for."""
every_bound = pytest.mark.parametrize("is_patience", [False, True], ids=["deadline", "patience"])


class Timed:
    """An engine over a store of the conversation, whose jobs run and whose time passes when the test says so."""

    def __init__(
        self,
        layout: ModelLayout,
        turns: tuple[int, ...] = TURNS,
        host: int = ROOM,
        ranks: RankGroup = LocalRanks(),
    ) -> None:
        self.store, self.workers, self.clock = ScriptedStorage(), Stepped(), ManualClock()
        store_turns(layout, self.store, turns, head_of(ranks) if ranks.size > 1 else IDENTITY)
        self.toy = engine(
            self.store,
            layout=layout,
            device=ROOM,
            host=host,
            workers=self.workers,
            ranks=ranks,
            clock=self.clock,
            operation_timeout_s=2.0,
        )
        self.cache = self.toy.cache
        self.prompt = prompt_of_pages(self.cache, 16)

    @property
    def gets_count(self) -> int:
        return self.store.calls.count(Method.GET)

    def during_get(self, number: int, act: Callable[[], object]) -> None:
        """Act in the middle of one get, counted from 0."""
        self.store.before[Method.GET] = at(number, act)

    def run_until_over(self) -> None:
        while self.workers.waiting:
            self.workers.run()
            self.cache.poll()
        self.cache.wait_all(5)


@every_layout
def test_a_request_goes_on_at_its_deadline_while_the_store_is_in_its_call(layout: ModelLayout) -> None:
    timed = Timed(layout)
    cache = timed.cache
    operation = started(cache.prefetch(timed.prompt, deadline_s=1.0))
    timed.workers.run()
    cache.poll()
    timed.clock.now_s = 0.99
    assert cache.poll() == []
    timed.clock.now_s = 1.0
    assert cache.poll() == [operation]
    assert (operation.state, operation.error, operation.pages_count) == (OperationState.PARTIAL, None, 0)
    assert not operation.is_released, "the store may still fill its pages"
    timed.toy.run(timed.prompt)
    timed.run_until_over()
    assert operation.is_released
    assert cache.poll() == [], "it is returned once"
    check_tables(cache, [])
    cache.check()


def make_calls_small(monkeypatch: pytest.MonkeyPatch, layout: ModelLayout) -> None:
    """Have a call take the objects of four pages, so that a prefetch reads in several calls."""
    for name in ("FIRST_CALL_OBJECTS", "BATCH_OBJECTS"):
        monkeypatch.setattr(f"unified_cache.controller.jobs.{name}", 4 * len(layout.pools))


ENDS = ("deadline", "finished early", "cancelled", "too late", "store late", "store fails")


@pytest.mark.parametrize("end", ENDS)
def test_however_a_prefetch_ends_what_has_come_is_kept_at_once(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full-swa"]
    make_calls_small(monkeypatch, layout)
    timed = Timed(layout)
    cache, prompt = timed.cache, timed.prompt
    operation = started(cache.prefetch(prompt, deadline_s=1.0 if end == "deadline" else np.inf))
    late, kept_ends = UnreturnedCall("get"), list[int]()
    kept_pages: set[int] = set()

    def in_call() -> None:
        if end == "store late":
            raise StorageTimeoutError("get hangs", late)
        if end == "store fails":
            raise StorageError("no more", retryable=False)
        if end == "finished early":
            cache.finish_early(operation)
        if end == "cancelled":
            assert cache.cancel(operation)
        timed.clock.now_s = {"deadline": 1.0, "too late": 2.0}.get(end, 0.0)
        look()

    def look() -> None:
        assert cache.poll() == [operation]
        assert operation.is_released is (end == "store fails"), "the store may still fill its pages"
        kept_ends.append(cache.match(prompt).host_end)
        kept_pages.update(pages_on(cache, prompt, Tier.HOST)[0])
        cache.check()

    timed.during_get(1, in_call)
    timed.workers.run()
    cache.poll()
    timed.workers.run()
    if end in ("store late", "store fails"):
        look()
        late.returned = True
    cache.wait_all(5)
    outcome = {
        "cancelled": OperationState.CANCELLED,
        "too late": OperationState.FAILED,
        "store late": OperationState.FAILED,
        "store fails": OperationState.FAILED,
    }
    assert operation.state is outcome.get(end, OperationState.PARTIAL)
    assert kept_ends == [4]
    assert operation.pages_count == (0 if end in outcome else 4), "a failure counts nothing"
    came_later = pages_on(cache, prompt, Tier.HOST)[0] - kept_pages
    assert bool(came_later) is (end not in ("store late", "store fails")), "what was under way is for others"
    assert timed.gets_count == 2, "and none after it was begun"
    check_tables(cache, [])
    cache.check()


def test_what_reached_the_device_through_a_small_host_by_the_deadline_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full"]
    make_calls_small(monkeypatch, layout)
    timed = Timed(layout, host=6)
    operation = started(timed.cache.prefetch(timed.prompt, deadline_s=1.0))

    def at_deadline() -> None:
        timed.clock.now_s = 1.0
        assert timed.cache.poll() == [operation]

    timed.during_get(2, at_deadline)
    timed.run_until_over()
    assert operation.pages_count == 8, "two pieces"
    assert timed.cache.match(timed.prompt).device_end == 12, "the piece that was under way is for others"
    assert timed.gets_count == 3
    check_tables(timed.cache, [])


@every_layout
def test_pages_that_others_have_brought_by_the_deadline_count_as_asked_for(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_calls_small(monkeypatch, layout)
    timed = Timed(layout, (8,))
    operation = started(timed.cache.prefetch(timed.prompt, deadline_s=1.0))

    def in_call() -> None:
        if timed.gets_count == 1:
            timed.toy.run(timed.prompt)
        else:
            timed.clock.now_s = 1.0
            assert timed.cache.poll() == [operation]

    timed.store.before[Method.GET] = in_call
    timed.run_until_over()
    assert (operation.tally.asked, operation.tally.arrived, operation.tally.left_out_count) == (16, 16, 0)
    assert operation.state is OperationState.DONE


@every_bound
def test_a_prefetch_that_waits_for_another_goes_on_at_its_deadline(is_patience: bool) -> None:
    timed = Timed(LAYOUTS["full"])
    cache = timed.cache
    first = started(cache.prefetch(timed.prompt))
    if is_patience:
        cache.config = replace(cache.config, prefetching=Prefetching(patience_s=1.0))
    deadline_s = np.inf if is_patience else 1.0
    second = started(cache.prefetch(prompt_of_pages(cache, 12), deadline_s))
    timed.workers.run(2)
    cache.poll()
    assert second.awaited is first
    timed.clock.now_s = 1.0
    assert cache.poll() == [second]
    assert (first.state, second.pages_count) == (OperationState.RUNNING, 0)
    timed.run_until_over()
    assert (first.state, first.pages_count) == (OperationState.DONE, 16)
    check_tables(cache, [])


def test_a_probe_that_does_not_return_holds_nobody_up() -> None:
    timed = Timed(LAYOUTS["full"])
    operation = started(timed.cache.prefetch(timed.prompt, deadline_s=0.5))
    timed.clock.now_s = 0.6
    assert timed.cache.poll() == [operation]
    assert operation.state is OperationState.DONE
    timed.run_until_over()
    assert timed.cache.match(timed.prompt).host_end == 0
    check_tables(timed.cache, [])


@every_layout
@pytest.mark.parametrize("deadline_s", [0.02, 0.1, 0.5, 5.0])
@pytest.mark.parametrize("byte_s", [0.0, 1e-6, 1e-4])
def test_no_request_is_later_than_its_deadline_and_a_part(
    layout: ModelLayout, deadline_s: float, byte_s: float
) -> None:
    """A simulated store blocks the owner for a part, so by so much a request may be late, and by a poll."""
    store, clock, parts_s = ScriptedStorage(), ManualClock(), [0.0]
    store_turns(layout, store, TURNS)

    def take_time() -> None:
        parts_s.append(byte_s * sum(len(buffer) for page in store.given for buffer in page.buffers))
        clock.sleep(parts_s[-1])

    store.before[Method.GET] = take_time
    toy = engine(store, layout=layout, device=ROOM, clock=clock)
    for pages in (4, 8, 12, 16, 16, 16):
        prompt = prompt_of_pages(toy.cache, pages)
        began_s = clock.now_s
        operation = started(toy.cache.prefetch(prompt, deadline_s))
        while operation.state is OperationState.RUNNING:
            clock.sleep(POLL_S)
            toy.cache.poll()
        assert clock.now_s - began_s <= deadline_s + max(parts_s) + 1e-3
        toy.run(prompt)
        toy.cache.wait_all(60)
        toy.cache.reset()


def test_ranks_are_done_at_the_same_look_and_keep_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full-swa"]
    make_calls_small(monkeypatch, layout)

    def live(group: ThreadRanks) -> tuple[list[int], str, str]:
        timed = Timed(layout, ranks=group)
        cache = timed.cache
        operation = started(cache.prefetch(timed.prompt, deadline_s=1.0))
        counts: list[int] = []
        at_deadline: list[str] = []

        def in_call() -> None:  # this rank has so many calls behind it
            timed.clock.now_s = 1.0 if group.rank == 0 else 0.0  # the other's clock is late
            counts.append(len(cache.poll()))
            at_deadline.append(digest_of(cache))

        timed.during_get(1 + group.rank, in_call)
        timed.workers.run()
        counts.append(len(cache.poll()))
        timed.workers.run()
        counts += [len(cache.poll()), operation.pages_count, timed.gets_count - group.rank]
        return counts, at_deadline[0], digest_of(cache)

    first, second = in_threads(2, live)
    assert first == second
    assert first[0] == [0, 1, 0, 4, 2]
    assert first[1] != first[2], "what came after it is kept, too"


# ---- how much comes by a deadline ----------------------------------------------------------------------------------


PAGES = 256
LAYOUT = ModelLayout(4, (Component("full", SPAN_ALL, (PoolSpec("kv", 64),)),))


@dataclass(frozen=True)
class Speed:
    """Seconds that a store takes for a call, and for each page of it."""

    call_s: float
    page_s: float

    def times(self, factor: float) -> "Speed":
        return Speed(self.call_s * factor, self.page_s * factor)

    def seconds(self, pages: int) -> float:
        """Return the time to read so many pages, in as few calls as that takes."""
        return -(-pages // BATCH_OBJECTS) * self.call_s + pages * self.page_s

    def in_time(self, deadline_s: float) -> int:
        """Return how many pages can come by a deadline, after the call that asks for them."""
        left_s = deadline_s - self.call_s
        return max((pages for pages in range(PAGES + 1) if self.seconds(pages) <= left_s), default=0)


SPEEDS = {
    "20 ms a call": Speed(0.020, 1e-5),
    "5 ms a call": Speed(0.005, 0.0),
    "1 ms a page": Speed(0.0, 1e-3),
    "0.1 ms a page": Speed(0.0, 1e-4),
}

every_speed = pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
every_deadline = pytest.mark.parametrize("deadline_s", [0.05, 0.2])


def prompt_of(toy: ToyEngine) -> Prompt:
    return prompt_of_pages(toy.cache, PAGES)


def came_in_time(speed: Speed, deadline_s: float, *, is_patience: bool = False) -> tuple[int, int]:
    """Prefetch a prompt from a store of a speed; return how many pages had come by the deadline, in how many gets."""
    store, workers, clock = ScriptedStorage(), Stepped(), ManualClock()
    filler = engine(store, layout=LAYOUT, device=PAGES)
    over(filler.cache, filler.cache.backup(filler.run(prompt_of(filler))))
    prefetching = Prefetching(patience_s=deadline_s if is_patience else np.inf)
    toy = engine(store, layout=LAYOUT, device=PAGES, workers=workers, clock=clock, prefetching=prefetching)
    cache, prompt, ends = toy.cache, prompt_of(toy), list[int]()

    def take(seconds: float) -> None:
        """Take so long; on the way, at the deadline, look at the cache."""
        over_s = clock.now_s + seconds
        if clock.now_s <= deadline_s < over_s:
            clock.now_s = deadline_s
            assert cache.poll() == [operation], "it is answered at its deadline, whatever the store does"
            ends.append(cache.match(prompt).host_end)
        clock.now_s = over_s

    store.after[Method.EXISTS] = lambda: take(speed.call_s)
    store.after[Method.GET] = lambda: take(speed.seconds(len(store.given)))
    operation = started(cache.prefetch(prompt) if is_patience else cache.prefetch(prompt, deadline_s))
    while workers.waiting:
        workers.run()
        clock.sleep(POLL_S)
        cache.poll()
    came_whole = operation.pages_count == operation.tally.asked
    assert operation.state is (OperationState.DONE if came_whole else OperationState.PARTIAL)
    assert ends or clock.now_s <= deadline_s + POLL_S
    end = ends[0] if ends else cache.match(prompt).host_end
    assert operation.pages_count == end, "what was told is what had come"
    cache.wait_all(60)
    check_tables(cache, [])
    return end, store.calls.count(Method.GET)


@every_speed
@every_deadline
@every_bound
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_nearly_all_comes_in_time_that_can(speed: Speed, deadline_s: float, is_patience: bool, factor: float) -> None:
    slower = speed.times(factor)
    assert came_in_time(slower, deadline_s, is_patience=is_patience)[0] >= 0.9 * slower.in_time(deadline_s)


@every_speed
def test_a_prefetch_with_time_for_all_makes_few_calls_more_than_one_without_a_deadline(speed: Speed) -> None:
    (all_pages, gets_count), (in_time, more_gets_count) = (came_in_time(speed, end_s) for end_s in (np.inf, 1.0))
    assert (all_pages, in_time) == (PAGES, PAGES)
    assert gets_count == PAGES / BATCH_OBJECTS
    assert more_gets_count <= gets_count + np.log2(BATCH_OBJECTS / FIRST_CALL_OBJECTS)
