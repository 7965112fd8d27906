"""Deadlines of prefetches: a request goes on in time with what has come, whatever the store still does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine
from tests.support.clock import ManualClock
from tests.support.components import LAYOUTS, every_layout
from tests.support.conversations import ROOM, pages_on, store_turns
from tests.support.operations import Stepped, over, prompt_of_pages, started
from tests.support.ranks import ThreadRanks, digest_of, head_of, in_threads
from tests.support.tables import check_tables
from tests.support.timed_engine import POLL_S, PacedStorage, TimedEngine
from unified_cache.controller import InlineWorkers, Operation, OperationState
from unified_cache.controller.jobs import STORAGE_BATCH_OBJECTS
from unified_cache.controller.ranks import LocalRanks, RankGroup
from unified_cache.core.config import CacheConfig, Prefetching, WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.protocol import Answer, PageIO

TURNS = (4, 8, 12, 16)
every_bound = pytest.mark.parametrize("is_patience", [False, True], ids=["deadline", "patience"])


def config_of(layout: ModelLayout) -> CacheConfig:
    sizes = tuple(ROOM for _ in layout.components)
    return CacheConfig(sizes, sizes, write=WritePolicy.ON_CALL, guard=None)


def stepped(layout: ModelLayout, turns: tuple[int, ...] = TURNS) -> tuple[TimedEngine, Stepped]:
    """Return an engine whose jobs run when the test says so, over a store of the conversation."""
    store, workers = PacedStorage(ManualClock(), 0.0), Stepped()
    store_turns(layout, store, turns)
    return TimedEngine(layout, config_of(layout), store, workers=workers), workers


def run_until_over(engine: TimedEngine, workers: Stepped) -> None:
    while workers.waiting:
        workers.run()
        engine.cache.poll()
    engine.cache.wait_all(5)


@every_layout
def test_a_request_goes_on_at_its_deadline_while_the_store_is_in_its_call(layout: ModelLayout) -> None:
    engine, workers = stepped(layout)
    prompt = prompt_of_pages(engine.cache, 16)
    operation = started(engine.cache.prefetch(prompt, deadline_s=1.0))
    workers.run()
    engine.cache.poll()
    engine.clock.now_s = 0.99
    assert engine.cache.poll() == []
    engine.clock.now_s = 1.0
    assert engine.cache.poll() == [operation]
    assert (operation.state, operation.error, operation.pages_count) == (OperationState.PARTIAL, None, 0)
    assert not operation.is_released, "the store may still fill its pages"
    engine.compute(prompt)
    run_until_over(engine, workers)
    assert operation.is_released
    assert engine.cache.poll() == [], "it is returned once"
    check_tables(engine.cache, [])
    engine.cache.check()


def make_calls_small(monkeypatch: pytest.MonkeyPatch, layout: ModelLayout) -> None:
    """Have a call take the objects of four pages, so that a prefetch reads in several parts."""
    monkeypatch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", 4 * len(layout.pools))


@every_layout
def test_what_came_before_the_deadline_is_used_and_what_comes_after_it_is_for_others(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_calls_small(monkeypatch, layout)
    engine, workers = stepped(layout)
    prompt = prompt_of_pages(engine.cache, 16)
    operation = started(engine.cache.prefetch(prompt, deadline_s=1.0))
    ends: list[int] = []

    def at_deadline(number: int) -> None:
        if number == 1:  # a part has come
            engine.clock.now_s = 1.0
            assert engine.cache.poll() == [operation]
            ends.extend((engine.cache.match(prompt).host_end, operation.pages_count))

    engine.store.during_get = at_deadline
    run_until_over(engine, workers)
    end, told = ends
    assert 0 < end < 16
    assert told == end
    assert operation.pages_count == end, "what was told stays what it was"
    kept = pages_on(engine.cache, prompt, Tier.HOST)[0]
    assert kept == set(range(len(kept)))
    assert end < len(kept) < 16, "the call that was under way is kept, and none after it was begun"
    assert engine.store.gets_count == 2
    check_tables(engine.cache, [])


@every_layout
def test_pages_that_others_have_brought_by_the_deadline_count_as_asked_for(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_calls_small(monkeypatch, layout)
    engine, workers = stepped(layout, (8,))
    prompt = prompt_of_pages(engine.cache, 16)
    operation = started(engine.cache.prefetch(prompt, deadline_s=1.0))

    def in_call(number: int) -> None:
        if number == 0:
            engine.compute(prompt)
        else:
            engine.clock.now_s = 1.0
            assert engine.cache.poll() == [operation]

    engine.store.during_get = in_call
    run_until_over(engine, workers)
    assert (operation.tally.asked, operation.tally.arrived, operation.tally.left_out_count) == (16, 16, 0)
    assert operation.state is OperationState.DONE


@every_bound
def test_a_prefetch_that_waits_for_another_goes_on_at_its_deadline(is_patience: bool) -> None:
    engine, workers = stepped(LAYOUTS["full"])
    first = started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16)))
    if is_patience:
        engine.cache.config = replace(engine.cache.config, prefetching=Prefetching(patience_s=1.0))
    deadline_s = np.inf if is_patience else 1.0
    second = started(engine.cache.prefetch(prompt_of_pages(engine.cache, 12), deadline_s))
    workers.run(2)
    engine.cache.poll()
    assert second.awaited is first
    engine.clock.now_s = 1.0
    assert engine.cache.poll() == [second]
    assert (first.state, second.pages_count) == (OperationState.RUNNING, 0)
    run_until_over(engine, workers)
    assert (first.state, first.pages_count) == (OperationState.DONE, 16)
    check_tables(engine.cache, [])


def test_a_probe_that_does_not_return_holds_nobody_up() -> None:
    engine, workers = stepped(LAYOUTS["full"])
    operation = started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16), deadline_s=0.5))
    engine.clock.now_s = 0.6
    assert engine.cache.poll() == [operation]
    assert operation.state is OperationState.DONE
    run_until_over(engine, workers)
    assert engine.cache.match(prompt_of_pages(engine.cache, 16)).host_end == 0
    check_tables(engine.cache, [])


@every_layout
@pytest.mark.parametrize("deadline_s", [0.02, 0.1, 0.5, 5.0])
@pytest.mark.parametrize("byte_s", [0.0, 1e-6, 1e-4])
def test_no_request_is_later_than_its_deadline_and_a_part(
    layout: ModelLayout, deadline_s: float, byte_s: float
) -> None:
    """A simulated store blocks the owner for a part, so by so much a request may be late, and by a poll."""
    store = PacedStorage(ManualClock(), byte_s)
    store_turns(layout, store, TURNS)
    engine = TimedEngine(layout, config_of(layout), store)
    for pages in (4, 8, 12, 16, 16, 16):
        prompt = prompt_of_pages(engine.cache, pages)
        began_s = store.clock.now_s
        operation = engine.wait(engine.cache.prefetch(prompt, deadline_s))
        assert operation
        assert store.clock.now_s - began_s <= deadline_s + store.slowest_get_s + 1e-3
        engine.compute(prompt)
        engine.forget()


def test_ranks_are_done_at_the_same_look_and_stay_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full-swa"]
    make_calls_small(monkeypatch, layout)

    def live(group: ThreadRanks) -> tuple[list[int], str, int]:
        store, workers = PacedStorage(ManualClock(), 0.0), Stepped()
        store_turns(layout, store, TURNS, head_of(group))
        engine = TimedEngine(layout, config_of(layout), store, workers=workers, ranks=group)
        operation = started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16), deadline_s=1.0))
        returned: list[int] = []

        def look(now_s: float) -> list[Operation]:
            engine.clock.now_s = now_s if group.rank == 0 else 0.0  # the other's clock is late
            over = engine.cache.poll()
            returned.append(len(over))
            return over

        workers.run()
        look(0.1)
        workers.run()
        look(0.2)
        assert look(1.0) == [operation]
        workers.run()
        look(1.1)
        return returned, digest_of(engine.cache), operation.pages_count

    first, second = in_threads(2, live)
    assert first == second


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
        return -(-pages // STORAGE_BATCH_OBJECTS) * self.call_s + pages * self.page_s

    def in_time(self, deadline_s: float) -> int:
        """Return how many pages can come by a deadline."""
        return max(pages for pages in range(PAGES + 1) if self.seconds(pages) <= deadline_s)


SPEEDS = {
    "20 ms a call": Speed(0.020, 1e-5),
    "5 ms a call": Speed(0.005, 0.0),
    "1 ms a page": Speed(0.0, 1e-3),
    "0.1 ms a page": Speed(0.0, 1e-4),
}

every_speed = pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
every_deadline = pytest.mark.parametrize("deadline_s", [0.05, 0.2])


class MeasuredStorage(PacedStorage):
    """A store of a known speed, during whose calls its owner can look at the cache at a given moment."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), 0.0)
        self.speed = Speed(0.0, 0.0)
        self.look_s = np.inf
        self.look: Callable[[], None] = lambda: None

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        began_s = self.clock.now_s
        answers = super().get(pages)
        ended_s = self.clock.now_s = began_s + self.speed.seconds(len(pages))
        if began_s <= self.look_s < ended_s:
            self.clock.now_s = self.look_s
            self.look()
            self.clock.now_s = ended_s
        return answers


def prompt_of(engine: ToyEngine | TimedEngine) -> Prompt:
    return engine.cache.prompt(np.arange(PAGES * LAYOUT.page_size, dtype=np.int32))


def engine_of(
    *,
    patience_s: float = np.inf,
    ranks: RankGroup = LocalRanks(),
    identity: Identity = IDENTITY,
) -> TimedEngine:
    """Return an engine over a store that has the prompt; its jobs run when the test says so."""
    store = MeasuredStorage()
    filler = ToyEngine(LAYOUT, (PAGES,), (PAGES,), store, InlineWorkers(), identity)
    over(filler.cache, filler.cache.backup(filler.run(prompt_of(filler))))
    config = CacheConfig(
        (PAGES,),
        (PAGES,),
        write=WritePolicy.ON_CALL,
        guard=None,
        prefetching=Prefetching(patience_s=patience_s),
    )
    return TimedEngine(LAYOUT, config, store, workers=Stepped(), ranks=ranks)


def store_of(engine: TimedEngine) -> MeasuredStorage:
    assert isinstance(engine.store, MeasuredStorage)
    return engine.store


def workers_of(engine: TimedEngine) -> Stepped:
    workers = engine.cache._controller._workers
    assert isinstance(workers, Stepped)
    return workers


def pages_in_time(engine: TimedEngine, deadline_s: float) -> int:
    """Prefetch the prompt, then forget it; return how many pages had come by the deadline."""
    store, workers = store_of(engine), workers_of(engine)
    began_s = engine.clock.now_s
    is_patience = engine.cache.config.prefetching.patience_s == deadline_s
    prompt = prompt_of(engine)
    operation = started(engine.cache.prefetch(prompt) if is_patience else engine.cache.prefetch(prompt, deadline_s))
    ends: list[int] = []

    def look() -> None:
        assert engine.cache.poll() == [operation], "it is answered at its deadline, whatever the store does"
        ends.append(engine.cache.match(prompt).host_end)

    store.look_s, store.look = began_s + deadline_s, look
    while workers.waiting:
        workers.run()
        engine.clock.now_s += POLL_S
        engine.cache.poll()
    came_whole = operation.pages_count == prompt.pages_count
    assert operation.state is (OperationState.DONE if came_whole else OperationState.PARTIAL)
    end = ends[0] if ends else engine.cache.match(prompt).host_end
    assert ends or engine.clock.now_s <= began_s + deadline_s + POLL_S
    assert operation.pages_count == end, "what was told is what had come"
    engine.forget()
    check_tables(engine.cache, [])
    return end


@every_speed
@every_deadline
@every_bound
def test_from_the_second_prefetch_on_nearly_all_comes_in_time_that_can(
    speed: Speed, deadline_s: float, is_patience: bool
) -> None:
    engine = engine_of(patience_s=deadline_s if is_patience else np.inf)
    store_of(engine).speed = speed
    first, *later = (pages_in_time(engine, deadline_s) for _ in range(5))
    can = speed.in_time(deadline_s)
    if speed.seconds(STORAGE_BATCH_OBJECTS) < deadline_s:
        assert first >= 0.5 * can
    assert min(later) >= 0.9 * can


@every_speed
@every_deadline
@pytest.mark.parametrize("factors", [(1, 4), (1, 0.25), (1, 4, 1), (1, 0.25, 1)], ids=str)
def test_a_store_that_has_become_slower_or_faster_is_found_out_by_one_prefetch(
    speed: Speed, deadline_s: float, factors: tuple[float, ...]
) -> None:
    engine = engine_of()
    for factor in factors:
        store_of(engine).speed = speed.times(factor)
        can = speed.times(factor).in_time(deadline_s)
        _, *later = (pages_in_time(engine, deadline_s) for _ in range(4))
        assert min(later) >= 0.9 * can


def test_reads_without_a_deadline_are_measured_for_those_that_have_one() -> None:
    engine, speed = engine_of(), SPEEDS["1 ms a page"]
    store_of(engine).speed = speed
    pages_in_time(engine, np.inf)
    assert pages_in_time(engine, 0.05) >= 0.9 * speed.in_time(0.05)


@every_speed
def test_a_prefetch_with_time_for_all_reads_in_as_few_calls_as_one_without_a_deadline(speed: Speed) -> None:
    engine = engine_of()
    store_of(engine).speed = speed
    counts = []
    for deadline_s in (np.inf, 1.0, 1.0):
        before = engine.store.gets_count
        assert pages_in_time(engine, deadline_s) == PAGES
        counts.append(engine.store.gets_count - before)
    assert counts == [PAGES / STORAGE_BATCH_OBJECTS] * 3


def test_ranks_read_the_same_parts_by_the_slowest_of_them() -> None:
    def live(group: ThreadRanks) -> tuple[list[int], list[int], str]:
        engine = engine_of(ranks=group, identity=head_of(group))
        store_of(engine).speed = Speed(0.0, 1e-3 if group.rank == 0 else 1e-4)
        prompt, counts, parts = prompt_of(engine), [], [engine.store.gets_count]
        for _ in range(3):
            operation = started(engine.cache.prefetch(prompt, 0.2))
            while operation.state is OperationState.RUNNING:
                run_all(engine)
                engine.clock.now_s += POLL_S
                engine.cache.poll()
            counts.append(operation.pages_count)
            run_all(engine)
            engine.cache.wait_all(5)
            parts.append(engine.store.gets_count)
            engine.forget()
        return counts, [after - before for before, after in pairwise(parts)], digest_of(engine.cache)

    def run_all(engine: TimedEngine) -> None:
        workers_of(engine).run(len(workers_of(engine).waiting))

    first, second = in_threads(2, live)
    assert first == second
    assert min(first[0]) >= 0.5 * 200
