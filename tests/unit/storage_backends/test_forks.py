"""Stores, and what holds one, in a process that was forked from theirs: refused, and closed without a wait."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StateError, StorageError
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store.store import EngineStore
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.testing.storage_contract import blank_page, label, open_for_contract, sealed_page

SERVICE = "grpc://127.0.0.1:9"
"""Nobody is there, and nobody is asked."""

URLS = ("memory:", "keys_only:", "file:{}/store", "packed:{}/store", "packed:{}/store#compress=lossless", SERVICE)
LABELS = [label(1)]


def status_of_child(work: Callable[[], None]) -> int:
    """Return the exit status of a forked child that does some work: -SIGALRM where it hangs, 1 where it raises."""
    child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE_S))
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_refused(*calls: Callable[[], object]) -> None:
    """Make calls, in a forked child, that name the process which they belong to."""
    for call in calls:
        with pytest.raises(StateError, match=rf"process {os.getppid()}\b.*\b{os.getpid()}\b"):
            call()


class WaitingLabels(list[Label]):
    """Labels that a store gets no further with than the first of them, until it may."""

    def __init__(self) -> None:
        super().__init__(LABELS)
        self.is_asked, self.may_go_on = Event(), Event()

    def __iter__(self) -> Iterator[Label]:
        self.is_asked.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return super().__iter__()


@contextmanager
def in_a_call(store: Store) -> Iterator[None]:
    """Have a thread in a call of the store."""
    labels = WaitingLabels()
    caller = Thread(target=store.exists, args=(labels,))
    caller.start()
    try:
        assert labels.is_asked.wait(PATIENCE_S)
        yield
    finally:
        labels.may_go_on.set()
        caller.join(PATIENCE_S)


@pytest.mark.parametrize("url", URLS)
def test_a_forked_child_is_refused_its_parent_s_store_and_closes_it_while_the_parent_is_in_a_call(
    url: str, tmp_path: Path
) -> None:
    def work() -> None:
        check_refused(
            store.capability,
            lambda: store.exists(LABELS),
            lambda: store.get([blank_page(label(1))]),
            lambda: store.put([sealed_page(label(1))], Level.CACHED),
            lambda: store.touch(LABELS),
            lambda: store.remove(LABELS),
            lambda: store.clear(label(1).identity),
            lambda: store.scan(label(1).identity),
        )
        store.close()

    with closing(open_storage(url.format(tmp_path))) as store:
        with in_a_call(store):
            assert status_of_child(work) == 0
        if url is not SERVICE:
            open_for_contract(store)
            assert store.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
            assert store.get([blank_page(label(1))]) == [Answer.HIT]


def test_a_packed_store_stays_its_process_s_alone_when_a_forked_child_closes_it(tmp_path: Path) -> None:
    with closing(open_storage(f"packed:{tmp_path}")) as store:
        assert status_of_child(store.close) == 0
        with pytest.raises(StorageError, match="open once at a time"):
            open_storage(f"packed:{tmp_path}")


def test_a_forked_child_opens_a_store_of_its_own(tmp_path: Path) -> None:
    def work() -> None:
        with closing(open_storage(f"file:{tmp_path}")) as own:
            open_for_contract(own)
            assert own.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]

    with closing(open_storage(f"file:{tmp_path}")) as store:
        assert status_of_child(work) == 0
        assert store.exists(LABELS) == [Answer.HIT]


def test_a_forked_child_is_refused_what_calls_a_store_on_threads_and_closes_it_at_once() -> None:
    with ExitStack() as opened:
        memory = MemoryStorage()
        guard = StorageGuard(memory, memory.capability(), GuardConfig())
        opened.callback(guard.close)
        engine = opened.enter_context(EngineStore.opened_by(MemoryStorage))
        cache = opened.enter_context(ToyEngine(toy_layout((SPAN_ALL,), 4), (4,), (4,), None, None).cache)

        def work() -> None:
            check_refused(guard.capability, lambda: guard.exists(LABELS), cache.stats, cache.poll)
            check_refused(lambda: engine.exists(LABELS), lambda: engine.run(int, engine.give_up_late), engine.due_s)
            guard.close()
            engine.close()
            assert cache.close() == []

        with guard._changed, engine._changed:
            assert status_of_child(work) == 0
        assert guard.exists(LABELS) == [Answer.MISS]
