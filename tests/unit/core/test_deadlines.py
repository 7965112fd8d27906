"""Deadlines of prefetches: a request goes on in time with what has come, whatever the store still does."""

import pytest

from tests.support.clock import ManualClock
from tests.support.components import COMPONENT_SETS
from tests.support.conversations import ROOM, conversation, pages_on, store_turns
from tests.support.operations import Stepped, started
from tests.support.ranks import ThreadRanks, digest_of, head_of, in_threads
from tests.support.tables import check_tables
from tests.support.timed_engine import PacedStorage, PrefillSpeed, TimedEngine
from unified_cache.controller import Operation, OperationState
from unified_cache.core.config import CacheConfig, TransferPolicy, WritePolicy
from unified_cache.core.pool import ModelLayout, Tier

LAYOUTS = {name: layouts[-1] for name, layouts in COMPONENT_SETS.items()}
TURNS = (4, 8, 12, 16)

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def config_of(layout: ModelLayout, transfer: TransferPolicy = TransferPolicy.ALWAYS) -> CacheConfig:
    sizes = tuple(ROOM for _ in layout.components)
    return CacheConfig(sizes, sizes, write=WritePolicy.ON_CALL, guard=None, transfer=transfer)


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
    prompt = conversation(engine.cache, 16)
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
    prompt = conversation(engine.cache, 16)
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
    prompt = conversation(engine.cache, 16)
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


def test_a_prefetch_that_waits_for_another_goes_on_at_its_deadline() -> None:
    engine, workers = stepped(LAYOUTS["full"])
    first = started(engine.cache.prefetch(conversation(engine.cache, 16)))
    second = started(engine.cache.prefetch(conversation(engine.cache, 12), deadline_s=1.0))
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
    operation = started(engine.cache.prefetch(conversation(engine.cache, 16), deadline_s=0.5))
    engine.clock.now_s = 0.6
    assert engine.cache.poll() == [operation]
    assert operation.state is OperationState.DONE
    run_until_over(engine, workers)
    assert engine.cache.match(conversation(engine.cache, 16)).host_end == 0
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
    for transfer in (TransferPolicy.ALWAYS, TransferPolicy.FASTEST):
        engine = TimedEngine(layout, config_of(layout, transfer), store, PrefillSpeed())
        for pages in (4, 8, 12, 16, 16, 16):
            prompt = conversation(engine.cache, pages)
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
        operation = started(engine.cache.prefetch(conversation(engine.cache, 16), deadline_s=1.0))
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
