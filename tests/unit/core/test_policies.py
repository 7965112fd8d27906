"""Policies: the prefetches and backups that a cache starts by itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.operations import PAGE, Stepped, configured, engine, filled, serve, started, tokens
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import NotStarted, OperationState, TransferKind
from unified_cache.core.config import CacheConfig, Prefetching, WritePolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage


def test_of_the_answers_to_a_prefetch_only_an_operation_is_true() -> None:
    toy = engine(MemoryStorage())
    assert toy.cache.prefetch(toy.cache.prompt(tokens(4)))
    assert not any(NotStarted)


def test_a_prefetch_below_the_threshold_is_not_started() -> None:
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    toy.cache.config = replace(toy.cache.config, prefetching=Prefetching(threshold_tokens=4 * PAGE + 1))
    assert toy.cache.prefetch(toy.cache.prompt(tokens(4))) is NotStarted.BELOW_THRESHOLD
    assert toy.cache.prefetch(toy.cache.prompt(tokens(5)))


def test_prefetches_share_a_budget_of_host_pages_which_comes_back() -> None:
    store, workers = MemoryStorage(), Stepped()
    filled(store)
    toy = engine(store, workers=workers)
    cache = toy.cache
    cache._prefetches.host_pages_left = 4
    prompt = cache.prompt(tokens(6))
    for _ in range(2):
        operation = started(cache.prefetch(prompt))
        workers.run()
        cache.poll()
        if operation.state is OperationState.RUNNING:
            assert cache._prefetches.host_pages_left == 4 - 4
            cache.cancel(operation)
            workers.run()
            cache.poll()
        assert cache._prefetches.host_pages_left == 4
    cache.check()


# ---- when prompts are written ------------------------------------------------------------------------------------


def host_end(cache: UnifiedCache, prompt: Prompt) -> int:
    found = cache.match(prompt)
    return cache._ledger.tree.full_end(found, Tier.HOST)


def test_write_through_backs_up_what_is_inserted() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.THROUGH)
    prompt = serve(toy, 4)
    cache.wait_all(1)
    assert host_end(cache, prompt) == 4


def test_selective_write_through_waits_for_the_second_use() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.SELECTIVE)
    prompt = serve(toy, 3)
    cache.wait_all(1)
    assert host_end(cache, prompt) == 0
    longer = serve(toy, 5)
    cache.wait_all(1)
    assert host_end(cache, longer) == 3, "what was used again, and not what is new"


def test_write_back_backs_up_the_oldest_when_too_much_waits() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.BACK, dirty_share=0.5)
    prompts = [serve(toy, 3, first=1000 * number) for number in range(2)]
    cache.wait_all(1)
    assert [host_end(cache, prompt) for prompt in prompts] == [0, 0]
    prompts.append(serve(toy, 1, first=5000))
    cache.wait_all(1)
    assert [host_end(cache, prompt) for prompt in prompts] == [3, 0, 0]


def test_changing_the_policy_backs_up_what_the_old_one_had_put_off() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.BACK)
    prompt = serve(toy, 3)
    cache.set_write_policy(WritePolicy.ON_CALL)
    cache.wait_all(1)
    assert host_end(cache, prompt) == 3
    other = serve(toy, 3, first=1000)
    cache.wait_all(1)
    assert host_end(cache, other) == 0


def test_a_prompt_is_kept_by_default_and_a_cache_that_keeps_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert CacheConfig((1,), (1,)).write is WritePolicy.THROUGH
    for policy in (WritePolicy.THROUGH, WritePolicy.ON_CALL):
        toy = engine()
        cache = configured(toy, write=policy)
        prompt = serve(toy, 3)
        cache.wait_all(1)
        assert host_end(cache, prompt) == (3 if policy is WritePolicy.THROUGH else 0)
        caplog.clear()
        cache.close()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == (policy is WritePolicy.ON_CALL), warnings
        assert all("nothing was kept in host memory or storage" in text for text in warnings)


def test_a_policy_that_writes_needs_a_host() -> None:
    toy = engine(host=0)
    toy.cache.set_write_policy(WritePolicy.THROUGH)
    serve(toy, 3)
    toy.cache.wait_all(1)
    assert toy.cache.stats().operations[TransferKind.BACKUP].done == 0, "through to nothing is nothing to do"
    with pytest.raises(ConfigError, match="the write policy selective needs host pages"):
        toy.cache.set_write_policy(WritePolicy.SELECTIVE)
    with pytest.raises(ConfigError, match="the write policy back needs host pages"):
        toy.cache.set_write_policy(WritePolicy.BACK)


def test_what_too_many_transfers_put_off_is_backed_up_when_there_is_room_again() -> None:
    workers = Stepped()
    toy = engine(workers=workers)
    cache = toy.cache
    cache.config = replace(cache.config, operations_max=1)
    cache._controller._operations_max = 1
    cache.set_write_policy(WritePolicy.THROUGH)
    prompts = [serve(toy, 3, first=1000 * number) for number in range(3)]
    assert len(workers.waiting) == 1, "one at a time"
    while workers.waiting:
        workers.run()
        cache.poll()
    assert [host_end(cache, prompt) for prompt in prompts] == [3, 3, 3]
    assert cache.stats().operations_declined == 0


def test_waiting_for_all_includes_the_backups_that_are_due() -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.THROUGH, operations_max=1)
    prompts = [serve(toy, 4, first=1000 * number) for number in range(3)]
    over = cache.wait_all(5)
    assert [host_end(cache, prompt) for prompt in prompts] == [4, 4, 4]
    assert [operation.kind for operation in over] == [TransferKind.BACKUP] * 3


def test_closing_stores_what_write_back_has_put_off(tmp_path: Path) -> None:
    toy = engine()
    cache = configured(toy, write=WritePolicy.BACK, operations_max=1)
    cache.attach(FileStorage.open(tmp_path))
    prompts = [serve(toy, 2, first=1000 * number) for number in range(2)]
    assert cache.stats().traffic[TransferKind.STORE].pages == 0
    assert cache.close() == []
    other = configured(engine())
    other.attach(FileStorage.open(tmp_path))
    for prompt in prompts:
        other.prefetch(prompt)
        other.wait_all(1)
        assert other.match(prompt).host_end == 2
    assert other.close() == []
