"""Workers on threads: whose turn it is, how long a turn is, and that no end of a job is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Semaphore

import pytest

from tests.support.cache import ToyEngine
from tests.support.operations import engine, filled, serve, started, tokens
from tests.support.service import wait_for
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import Operation, OperationState, ThreadWorkers, TransferKind
from unified_cache.controller.jobs import FetchJob
from unified_cache.storage_backends.wrappers.layer import Method

PATIENCE_S = 30.0
"""Longest wait for what must happen; reached only by a bug."""


class PacedPuts(ScriptedStorage):
    """A store of which a put returns when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.put_bytes: list[list[int]] = []
        """Bytes of each page, by put."""
        self.returns = Semaphore(0)
        self.before[Method.PUT] = lambda: self.put_bytes.append([sum(map(len, page.buffers)) for page in self.given])
        self.after[Method.PUT] = lambda: self.returns.acquire(timeout=PATIENCE_S)


@contextmanager
def cache_over(store: PacedPuts, *, storage_threads: int) -> Iterator[ToyEngine]:
    """Open a cache over a store that holds prompt 0; prompts 1 and 2 are on the device."""
    store.returns.release(100)
    filled(store, 4)
    store.put_bytes.clear()
    store.take()
    store.returns = Semaphore(0)
    toy = engine(store, host=16, workers=ThreadWorkers.start(storage=storage_threads))
    store.take()
    for number in (1, 2):
        serve(toy, 4, first=1000 * number)
    try:
        yield toy
    finally:
        store.returns.release(100)
        toy.cache.wait_all(PATIENCE_S)
        assert toy.cache.close() == []


def backup(cache: UnifiedCache, number: int) -> Operation:
    return started(cache.backup(cache.prompt(tokens(4, 1000 * number))))


def poll_until(cache: UnifiedCache, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        cache.poll()
        return condition()

    wait_for(holds, PATIENCE_S)


def test_a_prefetch_waits_for_no_put_of_a_backup() -> None:
    store = PacedPuts()
    with cache_over(store, storage_threads=2) as toy:
        backups = [backup(toy.cache, number) for number in (1, 2)]
        poll_until(toy.cache, lambda: toy.cache.traffic()[TransferKind.BACKUP].component_pages[0] == 8)
        poll_until(toy.cache, lambda: Method.PUT in store.calls)
        prefetch = started(toy.cache.prefetch(toy.cache.prompt(tokens(4))))
        poll_until(toy.cache, lambda: prefetch.state is not OperationState.RUNNING)
        assert (prefetch.state, prefetch.pages_count) == (OperationState.DONE, 4)
        assert [operation.state for operation in backups] == [OperationState.RUNNING] * 2, "no put has returned"


def test_with_one_thread_a_prefetch_goes_between_two_batches_of_a_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", 1)
    store = PacedPuts()
    with cache_over(store, storage_threads=1) as toy:
        backup(toy.cache, 1)
        poll_until(toy.cache, lambda: Method.PUT in store.calls)
        prefetch = started(toy.cache.prefetch(toy.cache.prompt(tokens(4))))
        store.returns.release()
        poll_until(toy.cache, lambda: isinstance(prefetch.job, FetchJob) and store.calls.count(Method.PUT) == 2)
        store.returns.release()
        poll_until(toy.cache, lambda: prefetch.state is not OperationState.RUNNING)
        assert store.calls[:4] == [Method.PUT, Method.EXISTS, Method.PUT, Method.GET]


def test_backups_take_turns_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", 1)
    store = PacedPuts()
    with cache_over(store, storage_threads=1) as toy:
        for number in (1, 2):
            backup(toy.cache, number)
        poll_until(toy.cache, lambda: toy.cache.traffic()[TransferKind.BACKUP].component_pages[0] == 8)
        poll_until(toy.cache, lambda: len(store.offered) == 1)
        store.returns.release(100)
        toy.cache.wait_all(PATIENCE_S)
        first = set(toy.cache.prompt(tokens(4, 1000)).keys)
        assert [label.key in first for label in store.offered[:4]] == [True, False, True, False]


def test_a_call_to_a_store_has_no_more_bytes_than_its_deadline_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PacedPuts()
    with cache_over(store, storage_threads=2) as toy:
        store.returns.release(100)
        backup(toy.cache, 1)
        toy.cache.wait_all(PATIENCE_S)
        (sizes,) = store.put_bytes
        monkeypatch.setattr("unified_cache.controller.jobs.BATCH_BYTES", 2 * max(sizes))
        backup(toy.cache, 2)
        toy.cache.wait_all(PATIENCE_S)
        assert len(store.put_bytes) > 2
        assert max(map(sum, store.put_bytes[1:])) <= 2 * max(sizes)
        assert [size for batch in store.put_bytes[1:] for size in batch] == sizes, "every page, in the same order"
        monkeypatch.setattr("unified_cache.controller.jobs.BATCH_BYTES", 1)
        store.put_bytes.clear()
        backup(toy.cache, 2)
        toy.cache.wait_all(PATIENCE_S)
        assert {len(batch) for batch in store.put_bytes} == {1}, "a page beyond the bound goes alone"


# ---- ends --------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_the_ends_of_jobs_are_taken_loses_none() -> None:
    workers = ThreadWorkers.start()
    toy = engine(workers=workers)
    operation = started(toy.cache.backup(serve(toy, 4)))
    ends = workers.finished(PATIENCE_S)
    while (end := next(ends, None)) is None:
        ends = workers.finished(PATIENCE_S)
    with pytest.raises(KeyboardInterrupt):
        ends.throw(KeyboardInterrupt)  # as it comes from the owner's keyboard, after an end was yielded
    assert end == (operation, None)
    assert toy.cache.wait_all(PATIENCE_S) == [operation]
    assert operation.state is OperationState.DONE
    assert toy.cache.close() == []
