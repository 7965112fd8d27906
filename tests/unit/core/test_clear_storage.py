"""A cache that clears its store: its own objects alone, and nothing that was on its way there is left or counted."""

from pathlib import Path

import pytest

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from tests.support.operations import PAGE, SPANS, Stepped, engine, filled, over, serve, started, tokens
from tests.support.store_calls import ScriptedStorage, at, raising
from unified_cache.controller import LeftOut, NotStarted, OperationState, TransferKind
from unified_cache.controller.storage_tier import StoreEpoch
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
    with epoch.put("late") as late:
        assert late
        assert not epoch.is_superseded("late")
