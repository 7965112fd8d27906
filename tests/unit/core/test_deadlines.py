"""Deadlines of prefetches: a request goes on in time with what has come, whatever the store still does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine
from tests.support.clock import ManualClock
from tests.support.components import LAYOUTS, every_layout
from tests.support.conversations import ROOM, pages_on, store_turns
from tests.support.operations import Stepped, UnreturnedCall, over, prompt_of_pages, started
from tests.support.ranks import ThreadRanks, digest_of, head_of, in_threads
from tests.support.tables import check_tables
from tests.support.timed_engine import POLL_S, PacedStorage, TimedEngine
from unified_cache.controller import InlineWorkers, OperationState
from unified_cache.controller.jobs import FIRST_CALL_OBJECTS
from unified_cache.controller.ranks import LocalRanks, RankGroup
from unified_cache.core.config import CacheConfig, Prefetching, WritePolicy
from unified_cache.core.errors import StorageTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, Tier
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.protocol import BATCH_OBJECTS, Answer, PageIO

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
    """Have a call take the objects of four pages, so that a prefetch reads in several calls."""
    for name in ("FIRST_CALL_OBJECTS", "BATCH_OBJECTS"):
        monkeypatch.setattr(f"unified_cache.controller.jobs.{name}", 4 * len(layout.pools))


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


@pytest.mark.parametrize("end", ["deadline", "finished early", "cancelled", "too late", "store late"])
def test_however_a_prefetch_ends_what_has_come_is_kept_at_once(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full-swa"]
    make_calls_small(monkeypatch, layout)
    engine, workers = stepped(layout)
    cache, prompt = engine.cache, prompt_of_pages(engine.cache, 16)
    cache._controller._timeout_s = 2.0
    operation = started(cache.prefetch(prompt, deadline_s=1.0 if end == "deadline" else np.inf))
    late, kept_ends = UnreturnedCall("get"), list[int]()
    kept_pages: set[int] = set()

    def in_call(number: int) -> None:
        if number == 1:
            if end == "store late":
                raise StorageTimeoutError("get hangs", late)
            if end == "finished early":
                cache.finish_early(operation)
            if end == "cancelled":
                assert cache.cancel(operation)
            engine.clock.now_s = {"deadline": 1.0, "too late": 2.0}.get(end, 0.0)
            look()

    def look() -> None:
        assert cache.poll() == [operation]
        assert not operation.is_released, "the store may still fill its pages"
        kept_ends.append(cache.match(prompt).host_end)
        kept_pages.update(pages_on(cache, prompt, Tier.HOST)[0])
        cache.check()

    engine.store.during_get = in_call
    workers.run()
    cache.poll()
    workers.run()
    if end == "store late":
        look()
        late.returned = True
    cache.wait_all(5)
    outcome = {
        "cancelled": OperationState.CANCELLED,
        "too late": OperationState.FAILED,
        "store late": OperationState.FAILED,
    }
    assert operation.state is outcome.get(end, OperationState.PARTIAL)
    assert kept_ends == [4]
    assert operation.pages_count == (0 if end in outcome else 4), "a failure counts nothing"
    came_later = pages_on(cache, prompt, Tier.HOST)[0] - kept_pages
    assert bool(came_later) is (end != "store late"), "what was under way is for others"
    assert engine.store.gets_count == (1 if end == "store late" else 2)
    check_tables(cache, [])
    cache.check()


def test_what_reached_the_device_through_a_small_host_by_the_deadline_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full"]
    make_calls_small(monkeypatch, layout)
    store, workers = PacedStorage(ManualClock(), 0.0), Stepped()
    store_turns(layout, store, TURNS)
    engine = TimedEngine(layout, replace(config_of(layout), host_pages=(6,)), store, workers=workers)
    prompt = prompt_of_pages(engine.cache, 16)
    operation = started(engine.cache.prefetch(prompt, deadline_s=1.0))

    def at_deadline(number: int) -> None:
        if number == 2:
            engine.clock.now_s = 1.0
            assert engine.cache.poll() == [operation]

    store.during_get = at_deadline
    run_until_over(engine, workers)
    assert operation.pages_count == 8, "two pieces"
    assert engine.cache.match(prompt).device_end == 12, "the piece that was under way is for others"
    assert store.gets_count == 3
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


def test_ranks_are_done_at_the_same_look_and_keep_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["full-swa"]
    make_calls_small(monkeypatch, layout)

    def live(group: ThreadRanks) -> tuple[list[int], str, str]:
        store, workers = PacedStorage(ManualClock(), 0.0), Stepped()
        store_turns(layout, store, TURNS, head_of(group))
        engine = TimedEngine(layout, config_of(layout), store, workers=workers, ranks=group)
        operation = started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16), deadline_s=1.0))
        counts: list[int] = []
        at_deadline: list[str] = []

        def in_call(number: int) -> None:
            if number == 1 + group.rank:  # this rank has so many calls behind it
                engine.clock.now_s = 1.0 if group.rank == 0 else 0.0  # the other's clock is late
                counts.append(len(engine.cache.poll()))
                at_deadline.append(digest_of(engine.cache))

        engine.store.during_get = in_call
        workers.run()
        counts.append(len(engine.cache.poll()))
        workers.run()
        counts += [len(engine.cache.poll()), operation.pages_count, engine.store.gets_count - group.rank]
        return counts, at_deadline[0], digest_of(engine.cache)

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


class MeasuredStorage(PacedStorage):
    """A store of a known speed, during whose calls its owner can look at the cache at a given moment."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), 0.0)
        self.speed = Speed(0.0, 0.0)
        self.look_s = np.inf
        self.look: Callable[[], None] = lambda: None

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return self.taking(self.speed.call_s, super().exists(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        return self.taking(self.speed.seconds(len(pages)), super().get(pages))

    def taking(self, seconds: float, answers: list[Answer]) -> list[Answer]:
        began_s = self.clock.now_s
        if began_s <= self.look_s < began_s + seconds:
            self.clock.now_s = self.look_s
            self.look()
        self.clock.now_s = began_s + seconds
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
    came_whole = operation.pages_count == operation.tally.asked
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
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_nearly_all_comes_in_time_that_can(speed: Speed, deadline_s: float, is_patience: bool, factor: float) -> None:
    engine = engine_of(patience_s=deadline_s if is_patience else np.inf)
    store_of(engine).speed = speed.times(factor)
    can = speed.times(factor).in_time(deadline_s)
    assert pages_in_time(engine, deadline_s) >= 0.9 * can


@every_speed
def test_a_prefetch_with_time_for_all_makes_few_calls_more_than_one_without_a_deadline(speed: Speed) -> None:
    engine = engine_of()
    store_of(engine).speed = speed
    counts = []
    for deadline_s in (np.inf, 1.0):
        before = engine.store.gets_count
        assert pages_in_time(engine, deadline_s) == PAGES
        counts.append(engine.store.gets_count - before)
    assert counts[0] == PAGES / BATCH_OBJECTS
    assert counts[1] <= counts[0] + np.log2(BATCH_OBJECTS / FIRST_CALL_OBJECTS)
