"""Backups: what an operation tells of them, what storage is offered, what failures and evictions leave undone."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.operations import (
    PAGE,
    Stepped,
    engine,
    filled,
    out_pages,
    over,
    present,
    serve,
    started,
    tokens,
)
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import LeftOut, NotStarted, OperationState, TransferKind
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.errors import ConfigError, CopyError
from unified_cache.core.page import MediaItem, Prompt
from unified_cache.core.pool import PoolSpec, Slots, Tier
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.wrappers.layer import Method

PROMPT_PAGES = 4 + 2
"""Pages of a prompt of four, of both components."""


# ---- telling -----------------------------------------------------------------------------------------------------


def test_a_backup_tells_how_many_pages_storage_has_at_that_level(tmp_path: Path) -> None:
    toy = engine()
    toy.cache.attach(FileStorage.open(tmp_path))
    for _ in range(2):
        operation = over(toy.cache, toy.cache.backup(serve(toy, 4), Level.DURABLE))
        assert (operation.tally.stored, operation.tally.left_out) == (PROMPT_PAGES, {})


@pytest.mark.parametrize(
    ("answer", "reason"), [(Answer.DECLINED, LeftOut.DECLINED), (Answer.UNAVAILABLE, LeftOut.FAILED)]
)
def test_a_backup_that_stored_nothing_says_so(answer: Answer, reason: LeftOut) -> None:
    store = ScriptedStorage()
    store.answers[Method.PUT] = answer
    toy = engine(store)
    operation = over(toy.cache, toy.cache.backup(serve(toy, 4), Level.DURABLE))
    assert (operation.state, operation.pages_count) == (OperationState.PARTIAL, PROMPT_PAGES)
    assert (operation.tally.stored, operation.tally.left_out) == (0, {reason: PROMPT_PAGES})


# ---- offering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_write_through_offers_a_page_to_storage_once_though_two_backups_have_it_at_a_time(waits: bool) -> None:
    store = ScriptedStorage()
    toy = engine(store, host=16, write=WritePolicy.THROUGH)
    for pages in range(1, 9):
        serve(toy, pages)
        if waits:
            toy.cache.wait_all(1)
    toy.cache.wait_all(1)
    assert len(store.offered) == len(set(store.offered))
    assert len({label.key for label in store.offered}) == 8
    store.take()
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(8))))
    assert store.offered, "a call by the engine offers all of it, which keeps it recent there"


def test_what_memory_resumes_prompts_from_stays_in_a_store_that_evicts() -> None:
    store = MemoryStorage()
    filled(store, 8)
    store = MemoryStorage(2 * store.bytes_used)
    toy = engine(host=24, write=WritePolicy.ON_CALL)
    toy.cache.attach(store)
    document = tokens(4)
    prompts = [toy.cache.prompt(document)]
    prompts += [toy.cache.prompt(np.concatenate([document, tokens(2, first)])) for first in range(1000, 12_000, 1000)]
    for prompt in prompts:
        toy.run(prompt)
        over(toy.cache, toy.cache.backup(prompt))
    assert [resumed_from(store, prompts[place]) for place in (1, 0)] == [4, 4], "the first question has been evicted"


def test_write_through_offers_nothing_that_came_from_storage() -> None:
    store = ScriptedStorage()
    filled(store, 4)
    toy = engine(store, host=16, write=WritePolicy.THROUGH)
    store.take()
    over(toy.cache, toy.cache.prefetch(toy.cache.prompt(tokens(4))))
    over(toy.cache, toy.cache.load(toy.cache.prompt(tokens(4))))
    serve(toy, 6)
    toy.cache.wait_all(1)
    known = set(toy.cache.prompt(tokens(4)).keys)
    assert len({label.key for label in store.offered}) == 2
    assert not any(label.key in known for label in store.offered)


def test_a_backup_leaves_what_another_one_copies_to_that() -> None:
    workers = Stepped()
    toy = engine(workers=workers)
    cache = toy.cache
    prompt = serve(toy, 4)
    first, second = started(cache.backup(prompt)), started(cache.backup(prompt))
    while workers.waiting:
        workers.run()
        cache.poll()
    assert (first.state, second.state) == (OperationState.DONE, OperationState.PARTIAL)
    assert second.tally.left_out == {LeftOut.UNDER_WAY: second.tally.asked}


@pytest.mark.parametrize("how", ["cleared", "other store"])
def test_write_through_offers_again_what_storage_has_no_more(how: str) -> None:
    store = ScriptedStorage()
    toy = engine(store, host=16, write=WritePolicy.THROUGH)
    serve(toy, 4)
    toy.cache.wait_all(1)
    if how == "cleared":
        over(toy.cache, toy.cache.clear_storage())
    else:
        toy.cache.detach()
        store = ScriptedStorage()
        toy.cache.attach(store)
    store.take()
    prompt = serve(toy, 6)
    toy.cache.wait_all(1)
    assert {label.key for label in store.offered} == set(prompt.keys)


def resumed_from(store: MemoryStorage, prompt: Prompt) -> int:
    """Return what another cache can resume of a prompt from that store."""
    other = engine(store, host=16)
    operation = over(other.cache, other.cache.prefetch(prompt))
    return operation.pages_count


def test_prompts_that_wait_for_a_store_are_bounded_by_the_pages_of_memory_and_what_falls_out_is_counted() -> None:
    store = ScriptedStorage()
    store.failing = {Method.PUT}
    toy = engine(store, host=16, write=WritePolicy.THROUGH)
    for number in range(9):
        serve(toy, 4, first=1000 * number)
        toy.cache.wait_all(1)
    backups = toy.cache.stats().backups
    assert (backups.waiting_prompts, backups.waiting_pages) == ((12 + 16) // 4, (12 + 16) // 4 * PROMPT_PAGES)
    assert (backups.lost_prompts, backups.lost_pages) == (2, {LeftOut.FAILED: 2 * PROMPT_PAGES})


# ---- write-back --------------------------------------------------------------------------------------------------


def resumable(toy: ToyEngine, prompt: Prompt) -> int:
    """Load a prompt and compare every byte of what it can be resumed from; return how many pages that is."""
    toy.cache.load(prompt)
    toy.cache.wait_all(1)
    return toy.read_back(prompt)


def test_a_page_written_back_when_it_is_evicted_keeps_its_picture() -> None:
    toy = engine(host=16, write=WritePolicy.BACK, dirty_share=1.0)
    cat, dog = (toy.cache.prompt([7] * (4 * PAGE), media=[MediaItem(PAGE, 1, name)]) for name in ("cat", "dog"))
    toy.run(cat)
    assert toy.cache.stats().traffic[TransferKind.BACKUP].component_pages[0] == 0
    toy.cache.free(present(toy.cache.allocate(toy.cache.pages_to_allocate(0, 12, [12]))))
    assert [toy.cache.match(prompt).host_end for prompt in (cat, dog)] == [4, 0], "no window is kept before the picture"
    over(toy.cache, toy.cache.load(cat))
    assert toy.read_back(cat) == 4


def test_a_page_that_cannot_be_copied_is_lost_and_the_allocation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = engine(host=16, write=WritePolicy.BACK, dirty_share=1.0)
    prompts = [serve(toy, 4, first=1000 * number) for number in range(3)]

    def failing(pool: PoolSpec, source: Slots, target: Slots) -> None:
        raise CopyError("on purpose")

    monkeypatch.setattr(type(toy.cache._memory), "backup", lambda memory, *arguments: failing(*arguments))
    prompts.append(serve(toy, 4, first=3000))
    monkeypatch.undo()
    assert (out_pages(toy.cache), [resumable(toy, prompt) for prompt in prompts]) == (0, [0, 4, 4, 4])
    toy.cache.check()


def test_what_was_evicted_before_its_turn_is_stored_at_the_end(tmp_path: Path) -> None:
    toy = engine(host=16, write=WritePolicy.BACK, dirty_share=1.0)
    toy.cache.attach(FileStorage.open(tmp_path))
    prompts = [serve(toy, 4, first=1000 * number) for number in range(4)]
    assert toy.cache.match(prompts[0]).device_end == 0
    assert toy.cache.close() == []
    other = engine(FileStorage.open(tmp_path), host=16).cache
    for prompt in prompts:
        other.prefetch(prompt)
        other.wait_all(1)
        assert other.match(prompt).host_end == 4
    assert other.close() == []


# ---- the prefetches and backups that a cache starts by itself ------------------------------------------------------


def test_of_the_answers_to_a_prefetch_only_an_operation_is_true() -> None:
    toy = engine(MemoryStorage())
    assert toy.cache.prefetch(toy.cache.prompt(tokens(4)))
    assert not any(NotStarted)


# ---- when prompts are written ------------------------------------------------------------------------------------


def host_end(cache: UnifiedCache, prompt: Prompt) -> int:
    found = cache.match(prompt)
    return found.full_end(Tier.HOST)


def test_selective_write_through_waits_for_the_second_use() -> None:
    toy = engine(write=WritePolicy.SELECTIVE)
    cache = toy.cache
    prompt = serve(toy, 3)
    cache.wait_all(1)
    assert host_end(cache, prompt) == 0
    longer = serve(toy, 5)
    cache.wait_all(1)
    assert host_end(cache, longer) == 3, "what was used again, and not what is new"


def test_write_back_backs_up_the_oldest_when_too_much_waits() -> None:
    toy = engine(write=WritePolicy.BACK, dirty_share=0.5)
    cache = toy.cache
    prompts = [serve(toy, 3, first=1000 * number) for number in range(2)]
    cache.wait_all(1)
    assert [host_end(cache, prompt) for prompt in prompts] == [0, 0]
    prompts.append(serve(toy, 1, first=5000))
    cache.wait_all(1)
    assert [host_end(cache, prompt) for prompt in prompts] == [3, 0, 0]


def test_a_prompt_is_kept_by_default_and_a_cache_that_keeps_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert CacheConfig((1,), (1,)).write is WritePolicy.THROUGH
    for policy in (WritePolicy.THROUGH, WritePolicy.ON_CALL):
        toy = engine(write=policy)
        cache = toy.cache
        prompt = serve(toy, 3)
        cache.wait_all(1)
        assert host_end(cache, prompt) == (3 if policy is WritePolicy.THROUGH else 0)
        caplog.clear()
        cache.close()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == (policy is WritePolicy.ON_CALL), warnings
        assert all("nothing was kept in host memory or storage" in text for text in warnings)


def test_a_policy_that_writes_needs_a_host() -> None:
    toy = engine(host=0, write=WritePolicy.THROUGH)
    serve(toy, 3)
    toy.cache.wait_all(1)
    assert toy.cache.stats().operations[TransferKind.BACKUP].done == 0, "through to nothing is nothing to do"
    for policy in (WritePolicy.SELECTIVE, WritePolicy.BACK):
        with pytest.raises(ConfigError, match=f"the write policy {policy.value} needs host pages"):
            engine(host=0, write=policy)


@pytest.mark.parametrize("waits", [False, True])
def test_what_too_many_transfers_put_off_is_backed_up_when_there_is_room_again_or_all_are_waited_for(
    waits: bool,
) -> None:
    workers = Stepped()
    toy = engine(workers=None if waits else workers, write=WritePolicy.THROUGH, operations_max=1)
    cache = toy.cache
    prompts = [serve(toy, 3, first=1000 * number) for number in range(3)]
    assert len(workers.waiting) == (not waits), "one at a time"
    if waits:
        assert [operation.kind for operation in cache.wait_all(5)] == [TransferKind.BACKUP] * 3
    while workers.waiting:
        workers.run()
        cache.poll()
    assert [host_end(cache, prompt) for prompt in prompts] == [3, 3, 3]
    assert cache.stats().operations_declined == 0
