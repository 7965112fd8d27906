"""Stores that return by themselves are called on their caller's thread and given the engine's rows themselves."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, get_ident

import pytest

from tests.support.engine_rows import IDENTITY, LAYOUT, PAGE_BYTES, EngineRows, label_of, opened_store, payload_of
from tests.support.service import LoopbackServer
from tests.support.store_calls import ScriptedStorage, at, raising
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.integrations.engine_store import EnginePage, EngineStore, EngineStoreConfig, Unavailable
from unified_cache.integrations.engine_store.buffers import BounceMemory
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

NUMBERS = range(5)
CONFIG = EngineStoreConfig(bounce_bytes=1 << 20)


@pytest.fixture
def landing(monkeypatch: pytest.MonkeyPatch) -> BounceMemory:
    """Return the bounce buffers of the stores that are opened from now on."""
    memory = BounceMemory.allocate(CONFIG.bounce_bytes)
    monkeypatch.setattr(BounceMemory, "allocate", lambda *given: memory)
    return memory


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Leave cycles of references as they are, so that what is held by one shows."""
    gc.disable()
    yield
    gc.enable()


def bounded() -> ScriptedStorage:
    """Return a store that returns by itself, whose look-ups take time."""
    backend = ScriptedStorage()
    backend.claims = {"bounded": True, "call_s_max": 0.1, "exists_costs_io": True}
    return backend


def test_pages_pass_between_rows_and_a_service_by_no_memory_of_ours(landing: BounceMemory) -> None:
    server = LoopbackServer.start(MemoryStorage())
    with EngineStore.open(f"grpc://{server.address}", CONFIG) as store:
        store.register(IDENTITY, LAYOUT)
        rows, target = EngineRows.holding(NUMBERS), EngineRows(len(NUMBERS))
        assert store.put(rows.pages(NUMBERS)) == [Answer.STORED] * len(NUMBERS)
        assert store.get(target.pages(NUMBERS)) == [Answer.HIT] * len(NUMBERS)
        assert not any(landing.whole)
    server.stop()


def test_a_bounded_store_is_called_on_the_thread_that_asks() -> None:
    backend = bounded()
    with opened_store(backend, CONFIG) as store:
        rows, threads = EngineRows.holding(NUMBERS), set[int]()
        backend.before = dict.fromkeys((Method.EXISTS, Method.GET, Method.PUT), lambda: threads.add(get_ident()))
        store.put(rows.pages(NUMBERS))
        labels = [label_of(number) for number in NUMBERS]
        assert store.exists(labels) == store.get(rows.pages(NUMBERS)) == [Answer.HIT] * len(NUMBERS)
        assert threads == {get_ident()}


@pytest.mark.parametrize(("piece_bytes", "puts_count"), [(None, 1), (HEADER_BYTES + PAGE_BYTES, len(NUMBERS))])
def test_a_put_of_a_prompt_is_one_call_that_the_store_cuts_itself_unless_told_how_long_a_piece_is(
    piece_bytes: int | None, puts_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.integrations.engine_store.calls.PIECE_BYTES_MAX", HEADER_BYTES + PAGE_BYTES)
    backend = bounded()
    with opened_store(backend, replace(CONFIG, piece_bytes=piece_bytes)) as store:
        assert store.put(EngineRows.holding(NUMBERS).pages(NUMBERS)) == [Answer.STORED] * len(NUMBERS)
    assert backend.calls.count(Method.PUT) == puts_count


def test_rows_of_any_format_are_bytes_to_the_store(landing: BounceMemory) -> None:
    payload = payload_of(1)
    rows = memoryview(bytearray(payload)).cast("H")
    with opened_store(MemoryStorage(), CONFIG) as store:
        assert store.put([EnginePage(label_of(1), (rows,))]) == [Answer.STORED]
        target = memoryview(bytearray(PAGE_BYTES)).cast("H")
        assert store.get([EnginePage(label_of(1), (target,))]) == [Answer.HIT]
        assert target.tobytes() == payload
    assert not any(landing.whole)


def test_a_get_that_fails_leaves_no_view_of_the_rows(no_collection: None) -> None:
    backend = bounded()

    def fail() -> None:  # by an error of each call's own, which nobody keeps
        raise StorageError("told to", retryable=True)

    backend.before[Method.GET] = fail
    store = opened_store(backend, EngineStoreConfig(guard=GuardConfig(retry_rounds_max=2, retry_pause_s=0.001)))
    rows = EngineRows(1)
    assert store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {(Method.GET, Unavailable.FAILED): 1}
    rows.close()  # BufferError, had anybody a view of it
    store.close()


def test_an_interrupt_of_the_caller_in_a_store_is_the_callers() -> None:
    backend = bounded()
    backend.before[Method.GET] = at(0, raising(KeyboardInterrupt()))  # as the system does, on the caller's thread
    with opened_store(backend, CONFIG) as store:
        with pytest.raises(KeyboardInterrupt):
            store.get(EngineRows(1).pages([1]))
        assert store.get(EngineRows(1).pages([1])) == [Answer.MISS]


def test_close_waits_no_longer_than_it_was_told_for_a_caller_in_a_store() -> None:
    backend, hangs, may_go_on = bounded(), Event(), Event()
    store = opened_store(backend, CONFIG)
    rows = EngineRows.holding([1])
    store.put(rows.pages([1]))

    def hang() -> None:
        hangs.set()
        assert may_go_on.wait(PATIENCE_S)

    backend.before[Method.GET] = hang
    with ThreadPoolExecutor(1) as caller:
        answers = caller.submit(store.get, rows.pages([1]))
        assert hangs.wait(PATIENCE_S)
        store.close(0.0)
        assert store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
        assert not answers.done()
        may_go_on.set()
        assert answers.result(PATIENCE_S) == [Answer.HIT]
    rows.close()
