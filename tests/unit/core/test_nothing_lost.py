"""Pages that a write policy means to back up arrive in storage, or are counted under the reason why they do not."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.clock import ManualClock
from tests.support.operations import FULL, HYBRID, PAGE, Stepped, engine, needed_labels, over, started
from tests.support.ranks import ThreadRanks, digest_of, in_threads
from tests.support.store_calls import ScriptedStorage
from unified_cache.components.deepseek_v4 import DeepSeekV4
from unified_cache.controller import LeftOut, OperationState, TransferKind
from unified_cache.controller.backup_scheduler import RETRY_PAUSE_S
from unified_cache.core.config import WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import Method

LAYOUTS: dict[str, Callable[[], ModelLayout]] = {
    "full": lambda: FULL,
    "full and a window": lambda: HYBRID,
    "full and a state": lambda: toy_layout((SPAN_ALL, 1), PAGE),
    "deepseek-v4": lambda: DeepSeekV4((4, 128)).layout(128),
}
PROMPT_PAGES = 24


def prompt_of(toy: ToyEngine, number: int, pages: int = PROMPT_PAGES, *, whole: bool = True) -> Prompt:
    size = toy.page_size
    start = number * (PROMPT_PAGES + 1) * size
    return toy.cache.prompt(np.arange(start, start + pages * size, dtype=np.int32), whole=whole)


def stored(layout: ModelLayout) -> tuple[ScriptedStorage, Prompt]:
    store = ScriptedStorage()
    toy = engine(store, layout=layout, write=WritePolicy.THROUGH, device=40, host=40)
    prompt = toy.run(prompt_of(toy, 0))
    toy.cache.wait_all(10)
    return store, prompt


def check_sums(toy: ToyEngine) -> None:
    """Assert that the counts of the cache add up to what was asked."""
    stats = toy.cache.stats()
    backups = stats.backups
    accounted = backups.arrived_pages + backups.already_pages + backups.waiting_pages + backups.lost_pages_count
    assert backups.asked_pages == accounted, backups
    for counts in stats.operations.values():
        pages = counts.pages
        assert pages.asked == pages.arrived + pages.already + pages.left_out_count, pages


layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
writes = pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.SELECTIVE, WritePolicy.BACK])


@layouts
def test_prompts_that_come_faster_than_the_host_has_room_all_reach_storage(
    layout: Callable[[], ModelLayout],
) -> None:
    store = ScriptedStorage()
    toy = engine(store, layout=layout(), write=WritePolicy.THROUGH, device=800, host=80)
    prompts = [toy.run(prompt_of(toy, number)) for number in range(30)]
    toy.cache.wait_all(10)
    assert [set(needed_labels(toy.cache, prompt)) <= store.known for prompt in prompts] == [True] * 30
    check_sums(toy)
    assert not toy.cache.stats().backups.waiting_pages
    toy.cache.check()


@layouts
@writes
def test_a_prompt_that_the_host_is_too_small_for_reaches_storage(
    layout: Callable[[], ModelLayout], write: WritePolicy
) -> None:
    store = ScriptedStorage()
    toy = engine(store, layout=layout(), device=40, host=8, write=write, dirty_share=0.1)
    prompt = prompt_of(toy, 0)
    for _ in range(2):
        toy.run(prompt)
        toy.cache.wait_all(10)
    assert set(needed_labels(toy.cache, prompt)) <= store.known
    check_sums(toy)
    toy.cache.check()


@layouts
def test_a_backup_by_call_that_the_host_is_too_small_for_reaches_storage_and_says_so(
    layout: Callable[[], ModelLayout],
) -> None:
    store = ScriptedStorage()
    toy = engine(store, layout=layout(), device=40, host=8)
    prompt = toy.run(prompt_of(toy, 0))
    operation = over(toy.cache, toy.cache.backup(prompt))
    assert operation.state is OperationState.DONE
    assert operation.tally.arrived == operation.tally.asked >= PROMPT_PAGES
    assert set(needed_labels(toy.cache, prompt)) <= store.known


def test_without_storage_a_backup_says_how_many_pages_the_host_is_too_small_for() -> None:
    toy = engine(layout=FULL, device=40, host=8)
    operation = over(toy.cache, toy.cache.backup(toy.run(prompt_of(toy, 0))))
    assert operation.state is OperationState.PARTIAL
    assert (operation.tally.arrived, operation.tally.left_out) == (8, {LeftOut.HOST_TOO_SMALL: 16})


@layouts
@pytest.mark.parametrize("host", [40, 8])
def test_of_a_prompt_larger_than_the_stores_cap_the_beginning_stays_there(
    layout: Callable[[], ModelLayout], host: int
) -> None:
    model = layout()
    pages = [min(2 * component.span, 12) for component in model.components]
    store = MemoryStorage(model.prompt_bytes(pages, sealed=True))
    toy = engine(store, layout=model, write=WritePolicy.THROUGH, device=60, host=host)
    prompt = prompt_of(toy, 0)
    for end in (8, 24):
        toy.run(prompt.head(end))
        toy.cache.wait_all(10)
    check_sums(toy)
    counts = toy.cache.stats().backups
    assert (counts.lost_prompts, set(counts.lost_pages)) == (1, {LeftOut.STORE_TOO_SMALL})
    toy.cache.reset()
    assert 8 <= over(toy.cache, toy.cache.prefetch(prompt)).pages_count <= 12, counts


def test_a_prompt_shorter_than_a_window_is_stored_whole_under_a_cap_that_no_whole_window_fits() -> None:
    model = toy_layout((SPAN_ALL, 64), PAGE)
    store = MemoryStorage(model.prompt_bytes([12, 12], sealed=True))
    toy = engine(store, layout=model, write=WritePolicy.THROUGH, device=60, host=40)
    prompt = toy.run(prompt_of(toy, 0, 8))
    toy.cache.wait_all(10)
    assert not toy.cache.stats().backups.lost_pages
    toy.cache.reset()
    assert over(toy.cache, toy.cache.prefetch(prompt)).pages_count == 8


@layouts
@pytest.mark.parametrize("failure", [None, Answer.DECLINED, Answer.UNAVAILABLE])
def test_storage_that_was_away_gets_what_it_missed_once_it_answers_again(
    layout: Callable[[], ModelLayout], failure: Answer | None
) -> None:
    store = ScriptedStorage()
    toy = engine(store, layout=layout(), write=WritePolicy.THROUGH, device=400, host=40)
    store.answers = {Method.PUT: failure} if failure else {}
    store.failing = set() if failure else {Method.PUT}
    prompts = [toy.run(prompt_of(toy, number)) for number in range(5)]
    toy.cache.wait_all(10)
    check_sums(toy)
    assert (len(store.known), toy.cache.stats().backups.waiting_prompts) == (0, 5)
    offered_count = len(store.offered)
    toy.cache.wait_all(10)
    assert len(store.offered) == offered_count, "not before something shows that it works again"
    store.answers, store.failing = {}, set()
    prompts.append(toy.run(prompt_of(toy, 6)))
    toy.cache.wait_all(10)
    assert [set(needed_labels(toy.cache, prompt)) <= store.known for prompt in prompts] == [True] * 6
    check_sums(toy)


@layouts
def test_a_failed_store_is_tried_again_after_a_pause_though_nothing_else_is_stored(
    layout: Callable[[], ModelLayout],
) -> None:
    store, clock = ScriptedStorage(), ManualClock()
    toy = engine(store, layout=layout(), write=WritePolicy.THROUGH, device=200, host=40, clock=clock)
    store.failing = {Method.PUT}
    prompts = [toy.run(prompt_of(toy, number)) for number in range(3)]
    toy.cache.wait_all(10)
    store.failing = set()
    toy.cache.poll()
    toy.cache.wait_all(10)
    assert not store.known, "a store that has just failed is paused for a while"
    clock.sleep(RETRY_PAUSE_S)
    toy.cache.poll()
    toy.cache.wait_all(10)
    assert [set(needed_labels(toy.cache, prompt)) <= store.known for prompt in prompts] == [True] * 3
    check_sums(toy)


@layouts
def test_a_prompt_that_the_store_failed_is_offered_again_when_it_is_used(layout: Callable[[], ModelLayout]) -> None:
    store = ScriptedStorage()
    toy = engine(store, layout=layout(), write=WritePolicy.THROUGH, device=200, host=40)
    store.answers[Method.PUT] = Answer.DECLINED
    prompts = [toy.run(prompt_of(toy, number)) for number in range(2)]
    toy.cache.wait_all(10)
    store.answers.clear()
    toy.cache.release(toy.cache.lock(toy.cache.match(prompts[1])))
    toy.cache.wait_all(10)
    assert set(needed_labels(toy.cache, prompts[1])) <= store.known
    check_sums(toy)


def test_what_is_evicted_before_the_store_answers_again_is_counted() -> None:
    store = ScriptedStorage()
    toy = engine(store, write=WritePolicy.THROUGH, device=24, host=24)
    store.failing = {Method.PUT}
    for number in range(2):
        toy.run(prompt_of(toy, number))
        toy.cache.wait_all(10)
    store.failing = set()
    toy.run(prompt_of(toy, 3))
    toy.cache.wait_all(10)
    backups = toy.cache.stats().backups
    assert (set(backups.lost_pages), backups.waiting_pages) == ({LeftOut.EVICTED}, 0)
    check_sums(toy)


def test_a_prompt_that_was_put_in_pieces_is_not_put_again_with_its_continuation() -> None:
    store = ScriptedStorage()
    toy = engine(store, layout=FULL, write=WritePolicy.THROUGH, device=40, host=8)
    toy.run(prompt_of(toy, 0))
    toy.cache.wait_all(10)
    offered_count = len(store.offered)
    longer = toy.cache.prompt(np.arange(28 * PAGE, dtype=np.int32))
    toy.run(longer)
    toy.cache.wait_all(10)
    assert set(needed_labels(toy.cache, longer)) <= store.known
    assert len(store.offered) == offered_count + 4
    assert toy.cache.stats().backups.already_pages == PROMPT_PAGES


def test_closing_counts_the_prompts_and_pages_that_no_backup_came_to(caplog: pytest.LogCaptureFixture) -> None:
    store, workers = ScriptedStorage(), Stepped()
    write = WritePolicy.THROUGH
    toy = engine(store, layout=FULL, device=300, workers=workers, write=write, operations_max=4, close_timeout_s=0.01)
    for number in range(10):
        toy.run(prompt_of(toy, number))
    toy.cache.close()
    stats = toy.cache.published_stats()
    assert stats.operations[TransferKind.BACKUP].failed == 4
    assert stats.backups.lost_pages == {LeftOut.CLOSED: 10 * PROMPT_PAGES}
    assert (stats.backups.lost_prompts, stats.backups.waiting_pages) == (10, 0)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert str(10 * PROMPT_PAGES) in warnings[0].getMessage()


def test_a_backup_that_is_cancelled_counts_its_pages_as_cancelled() -> None:
    store = ScriptedStorage()
    toy = engine(store, device=40, host=40)
    operation = started(toy.cache.backup(toy.run(prompt_of(toy, 0))))
    assert toy.cache.cancel(operation)
    toy.cache.wait_all(1)
    assert operation.state is OperationState.CANCELLED
    assert operation.tally.left_out == {LeftOut.CANCELLED: operation.tally.asked}


def test_a_load_that_the_device_has_no_room_for_says_so() -> None:
    toy = engine(layout=FULL, device=24, host=48)
    prompt = toy.run(prompt_of(toy, 0))
    over(toy.cache, toy.cache.backup(prompt))
    held = toy.serve(prompt_of(toy, 1, 20))
    operation = over(toy.cache, toy.cache.load(prompt))
    assert operation.state is OperationState.PARTIAL
    assert (operation.tally.arrived, operation.tally.left_out) == (0, {LeftOut.DEVICE_FULL: 20})
    assert held is not None
    toy.cache.release(held)


# ---- from storage to the device, through a host that is too small ------------------------------------------------


@layouts
def test_a_prefetch_that_the_host_is_too_small_for_goes_on_to_the_device(layout: Callable[[], ModelLayout]) -> None:
    store, prompt = stored(layout())
    toy = engine(store, layout=layout(), write=WritePolicy.THROUGH, device=40, host=8)
    for _ in range(2):
        operation = over(toy.cache, toy.cache.prefetch(prompt))
        found = toy.cache.match(prompt)
        assert (found.device_end, found.host_end) == (PROMPT_PAGES, PROMPT_PAGES)
        assert toy.read_back(prompt) == PROMPT_PAGES
        check_sums(toy)
        toy.cache.check()
        if operation and operation.pages_count:
            assert operation.state is OperationState.DONE
            assert (operation.pages_count, operation.tally.arrived) == (PROMPT_PAGES, PROMPT_PAGES)
    assert sum(occupancy.out for occupancy in toy.cache.stats().occupancy) == 0


@layouts
@pytest.mark.parametrize("kept", [6, 12, 23])
def test_a_prefetch_through_the_host_goes_on_from_what_memory_holds(
    layout: Callable[[], ModelLayout], kept: int
) -> None:
    store, prompt = stored(layout())
    toy = engine(store, layout=layout(), device=32, host=8)
    toy.run(prompt.head(kept))
    over(toy.cache, toy.cache.backup(prompt.head(min(kept, 8))))
    operation = over(toy.cache, toy.cache.prefetch(prompt))
    assert (operation.state, operation.pages_count) == (OperationState.DONE, PROMPT_PAGES - kept)
    assert toy.read_back(prompt) == PROMPT_PAGES


@layouts
def test_a_prefetch_that_neither_tier_has_room_for_says_so(layout: Callable[[], ModelLayout]) -> None:
    store, prompt = stored(layout())
    toy = engine(store, layout=layout(), write=WritePolicy.THROUGH, device=20, host=8)
    operation = over(toy.cache, toy.cache.prefetch(prompt))
    assert operation.state is OperationState.PARTIAL
    assert set(operation.tally.left_out) == {LeftOut.HOST_FULL}
    check_sums(toy)
    toy.cache.check()


def test_pages_that_another_backup_is_storing_are_stored_by_the_next_one_where_that_fails() -> None:
    store, workers = ScriptedStorage(), Stepped()
    toy = engine(store, device=80, host=80, workers=workers, write=WritePolicy.SELECTIVE)
    prompt = toy.run(prompt_of(toy, 0, whole=False))
    by_call = started(toy.cache.backup(prompt))
    workers.run()
    toy.cache.poll()
    toy.run(prompt)  # a second use: the policy backs it up, too
    for _ in range(2):  # its copy, and its put of what nobody else is storing
        workers.run_last()
        toy.cache.poll()
    store.failing = {Method.PUT}
    workers.run()
    store.failing = set()
    while workers.waiting or toy.cache._controller.live_count:
        workers.run(len(workers.waiting))
        toy.cache.poll()
    assert by_call.state is OperationState.FAILED
    assert set(needed_labels(toy.cache, prompt)) <= store.known
    check_sums(toy)


def test_a_backup_that_is_stopped_between_its_copy_and_its_put_puts_nothing() -> None:
    store, workers = ScriptedStorage(), Stepped()
    toy = engine(store, device=80, host=80, workers=workers)
    stopped = started(toy.cache.backup(toy.run(prompt_of(toy, 0))))
    toy.cache.finish_early(stopped)
    while workers.waiting or toy.cache._controller.live_count:
        workers.run(len(workers.waiting))
        toy.cache.poll()
    assert stopped.state is OperationState.PARTIAL
    assert not store.known
    check_sums(toy)


# ---- ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [(SPAN_ALL,), (SPAN_ALL, 2), (SPAN_ALL, 1)], ids=["full", "swa", "mamba"])
def test_ranks_put_and_prefetch_through_a_host_that_is_too_small(spans: tuple[int, ...]) -> None:
    def live(ranks: ThreadRanks) -> list[str]:
        store, digests = ScriptedStorage(), []
        for writes in (True, False):
            write = WritePolicy.THROUGH if writes else WritePolicy.ON_CALL
            toy = engine(store, layout=toy_layout(spans, PAGE), device=40, host=8, ranks=ranks, write=write)
            cache = toy.cache
            prompt = prompt_of(toy, 0)
            if writes:
                toy.run(prompt)
            else:
                cache.prefetch(prompt)
            cache.wait_all(10)
            assert toy.read_back(prompt) == PROMPT_PAGES
            digests.append(digest_of(cache))
        return digests

    one, other = in_threads(2, live)
    assert one == other
