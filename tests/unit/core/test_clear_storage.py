"""A cache that clears its store: its own objects alone, and nothing that was on its way there is left or counted."""

from pathlib import Path
from threading import Event

import pytest

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from tests.support.operations import PAGE, SPANS, Stepped, engine, filled, over, serve, started, tokens
from tests.support.store_calls import ScriptedStorage, at, raising
from tests.support.waiting import wait_until
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import LeftOut, NotStarted, Operation, OperationState, ThreadWorkers, TransferKind
from unified_cache.controller.storage_tier import StoreEpoch
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity
from unified_cache.core.seal import Label
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.wrappers.layer import Method

OURS = IDENTITY.digest(toy_layout(SPANS, PAGE))
OTHERS = Identity("another").digest(toy_layout(SPANS, PAGE))


GUARD = GuardConfig(
    deadline_s=0.5, retry_rounds_max=1, breaker_failures_max=1, breaker_pause_s=0.001, breaker_pause_s_max=0.001
)
OVER_S = 30.0
"""For what must come; reached only by a bug."""


def outcome(cache: UnifiedCache, operation: Operation | NotStarted) -> OperationState:
    """Return how an operation ended, though another one may wait for a store that does not return."""
    operation = started(operation)
    assert wait_until(lambda: bool(cache.poll()) or operation.state is not OperationState.RUNNING, OVER_S)
    return operation.state


def clears(cache: UnifiedCache) -> bool:
    """Clear; the breaker that a late put has opened refuses the first tries."""
    return wait_until(lambda: outcome(cache, cache.clear_storage()) is OperationState.DONE, OVER_S)


def objects(store: Store, owner: bytes) -> list[Label]:
    """List all objects of one identity."""
    found, cursor = [], ""
    while True:
        scan = store.scan(owner, cursor)
        found += [stored.label for stored in scan.objects]
        cursor = scan.cursor
        if not cursor:
            return found


def put_for_others(store: Store) -> None:
    page = PageIO(Label(OTHERS, b"k" * 32, "kv"), (memoryview(bytes(200)),))
    assert store.put([page], Level.CACHED) == [Answer.STORED]


def backed_up(toy: ToyEngine, pages: int = 6) -> Prompt:
    prompt = serve(toy, pages)
    operation = over(toy.cache, toy.cache.backup(prompt))
    assert operation.state is OperationState.DONE
    return prompt


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_clearing_removes_every_object_of_this_identity_and_of_no_other(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStorage() if kind == "memory" else FileStorage.open(tmp_path)
    toy = engine(store)
    cache = toy.cache
    prompt = backed_up(toy)
    put_for_others(store)
    stored = objects(store, OURS)
    assert stored
    operation = started(cache.clear_storage())
    assert cache.wait_all(1) == [operation]
    assert (operation.kind, operation.state, operation.pages_count) == (
        TransferKind.CLEAR,
        OperationState.DONE,
        len(stored),
    )
    assert objects(store, OURS) == []
    assert len(objects(store, OTHERS)) == 1
    assert cache.match(prompt).host_end == 6, "memory keeps its pages"
    over(cache, cache.backup(prompt))
    cache.reset()
    assert started(cache.prefetch(prompt)).error is None
    cache.wait_all(1)
    assert cache.match(prompt).host_end == 6, "what is backed up later is stored"
    cache.check()
    assert cache.close() == []


def test_without_a_store_there_is_nothing_to_clear() -> None:
    assert engine().cache.clear_storage() is NotStarted.NO_STORAGE


def test_a_store_that_fails_to_remove_fails_the_clear_and_the_next_goes_on() -> None:
    store = ScriptedStorage()
    store.failing = {Method.CLEAR}
    toy = engine(store)
    backed_up(toy)
    operation = over(toy.cache, toy.cache.clear_storage())
    assert operation.state is OperationState.FAILED
    store.failing = set()
    over(toy.cache, toy.cache.clear_storage())
    assert objects(store, OURS) == []


# ---- what is on its way ------------------------------------------------------------------------------------------


def test_a_backup_that_comes_to_the_store_while_it_is_cleared_stores_nothing() -> None:
    store, workers = MemoryStorage(), Stepped()
    filled(store)
    toy = engine(store, workers=workers)
    cache = toy.cache
    backup = started(cache.backup(serve(toy, 4, first=1000)))
    workers.run()
    cache.poll()
    clear = started(cache.clear_storage())
    workers.run(2)  # the put, then the clear
    assert cache.poll() == [backup, clear]
    assert (backup.state, clear.state) == (OperationState.PARTIAL, OperationState.DONE)
    assert backup.tally.left_out == {LeftOut.FAILED: backup.tally.asked}
    assert objects(store, OURS) == []
    assert cache.traffic()[TransferKind.STORE].pages == 0
    cache.backup(cache.prompt(tokens(4, 1000)))
    workers.run()
    cache.poll()
    assert cache.traffic()[TransferKind.STORE].pages > 0, "what storage was not known to have counts"
    assert len(objects(store, OURS)) > 0


@pytest.mark.parametrize("put_ends_last", [True, False])
def test_what_was_put_before_and_after_a_clear_began_is_taken_back_whole(
    put_ends_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", 2)

    def clear() -> None:
        cache.clear_storage()
        if put_ends_last:
            workers.run()

    store, workers = ScriptedStorage(), Stepped()
    toy = engine(store, workers=workers)
    cache = toy.cache
    cache.backup(serve(toy, 6))
    workers.run()
    cache.poll()
    store.after[Method.PUT] = at(0, clear)
    workers.run(2 - put_ends_last)
    assert len(cache.poll()) == 2
    assert objects(store, OURS) == []
    assert cache.traffic()[TransferKind.STORE].pages == 0
    cache.check()


def test_what_was_put_is_taken_back_where_the_store_fails_after_a_clear_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", 4)

    def clear() -> None:
        cache.clear_storage()
        workers.run_last()

    store, workers = ScriptedStorage(), Stepped()
    store.before[Method.PUT] = at(1, clear)
    store.after[Method.PUT] = at(1, raising(StorageError("fails after it has taken the pages", retryable=False)))
    toy = engine(store, workers=workers)
    cache = toy.cache
    backup = started(cache.backup(serve(toy, 6)))
    workers.run()
    cache.poll()
    workers.run()
    assert backup in cache.poll()
    assert backup.state is OperationState.FAILED
    assert store.calls.count(Method.PUT) == 2
    assert objects(store, OURS) == []
    cache.check()


@pytest.mark.parametrize("can_remove", [True, False])
def test_what_a_late_put_brings_after_a_clear_is_taken_back_and_never_read(*, can_remove: bool) -> None:
    returns, memory = Event(), MemoryStorage()
    store = ScriptedStorage(memory)
    store.claims["bounded"] = False
    store.before[Method.PUT] = at(0, lambda: returns.wait(OVER_S))
    store.failing = set() if can_remove else {Method.REMOVE}
    brought: list[Label] = []
    store.after[Method.PUT] = at(0, lambda: brought.extend(objects(memory, OURS)))
    toy = engine(store, workers=ThreadWorkers.start(), guard=GUARD)
    cache, prompt = toy.cache, serve(toy, 4)
    assert outcome(cache, cache.backup(prompt)) is OperationState.FAILED
    assert clears(cache), "though the store has not returned from the put"
    returns.set()
    assert wait_until(lambda: Method.REMOVE in store.calls, OVER_S)
    assert brought, "they were there after the clear"
    cache.reset()
    if not can_remove:
        assert over(cache, cache.prefetch(prompt)).pages_count == 0
        assert clears(cache)
    assert wait_until(lambda: objects(memory, OURS) == [], OVER_S)
    assert wait_until(lambda: over(cache, cache.backup(serve(toy, 4))).state is OperationState.DONE, OVER_S)
    cache.reset()
    assert over(cache, cache.prefetch(prompt)).pages_count == 4
    assert cache.close() == []


def test_nothing_is_put_until_what_has_to_be_taken_back_is_gone() -> None:
    epoch = StoreEpoch()
    with epoch.put("early") as early:
        assert early
        with epoch.clear():
            assert epoch.is_superseded("early")
            with epoch.put("meanwhile") as meanwhile:
                assert not meanwhile
        with epoch.put("after") as after:
            assert not after, "it could be taken back with the first one"
        epoch.take_back("early")
    with epoch.put("late") as late:
        assert late
        assert not epoch.is_superseded("late")
