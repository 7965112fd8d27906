"""Stores that return by themselves are called on their caller's thread and given the engine's rows themselves."""

import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event, Thread, get_ident

import pytest

from tests.support.engine_rows import IDENTITY, LAYOUT, PAGE_BYTES, EngineRows, label_of, opened_store, payload_of
from tests.support.service import LoopbackServer
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore, EngineStoreConfig, Unavailable
from unified_cache.integrations.engine_store.buffers import BounceMemory
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO
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


class ThreadNotingStore(MemoryStorage):
    """A bounded store that notes on which threads it is called, and hangs or fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.puts_count = 0
        self.hangs, self.may_go_on = Event(), Event()
        self.fails = False

    def capability(self) -> Capability:
        return replace(super().capability(), call_s_max=0.1, exists_costs_io=True)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self.threads.add(get_ident())
        return super().exists(labels)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self.threads.add(get_ident())
        self.puts_count += 1
        return super().put(pages, level)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.threads.add(get_ident())
        if self.fails:
            raise StorageError("told to", retryable=True)
        if self.may_go_on.is_set() or not self.hangs.is_set():
            return super().get(pages)
        self.hangs.clear()
        assert self.may_go_on.wait(PATIENCE_S)
        return super().get(pages)


def test_pages_pass_between_rows_and_a_service_by_no_memory_of_ours(landing: BounceMemory) -> None:
    server = LoopbackServer.start(MemoryStorage())
    with EngineStore.open(f"grpc://{server.address}", CONFIG) as store:
        store.register(IDENTITY, LAYOUT)
        rows = EngineRows.holding(NUMBERS)
        assert store.put(rows.pages(NUMBERS)) == [Answer.STORED] * len(NUMBERS)
        order = [3, 99, 0, 4]
        target = EngineRows(len(order))
        hit = Answer.HIT
        assert store.get(target.pages(order)) == [hit, Answer.MISS, hit, hit]
        assert [target.payload(slot) == payload_of(number) for slot, number in enumerate(order)] == [
            True,
            False,
            True,
            True,
        ]
        assert store.counts().payload_bytes == {Method.PUT: 5 * PAGE_BYTES, Method.GET: 3 * PAGE_BYTES}
        rows.close()
        target.close()
        assert not any(landing.whole)
    server.stop()


def test_a_bounded_store_is_called_on_the_thread_that_asks() -> None:
    backend = ThreadNotingStore()
    with opened_store(backend, CONFIG) as store:
        rows = EngineRows.holding(NUMBERS)
        backend.threads.clear()
        store.put(rows.pages(NUMBERS))
        labels = [label_of(number) for number in NUMBERS]
        assert store.exists(labels) == store.get(rows.pages(NUMBERS)) == [Answer.HIT] * len(NUMBERS)
        assert backend.threads == {get_ident()}


@pytest.mark.parametrize(("piece_bytes", "puts_count"), [(None, 1), (HEADER_BYTES + PAGE_BYTES, len(NUMBERS))])
def test_a_put_of_a_prompt_is_one_call_that_the_store_cuts_itself_unless_told_how_long_a_piece_is(
    piece_bytes: int | None, puts_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.integrations.engine_store.store.PIECE_BYTES_MAX", HEADER_BYTES + PAGE_BYTES)
    backend = ThreadNotingStore()
    with opened_store(backend, replace(CONFIG, piece_bytes=piece_bytes)) as store:
        assert store.put(EngineRows.holding(NUMBERS).pages(NUMBERS)) == [Answer.STORED] * len(NUMBERS)
    assert backend.puts_count == puts_count


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
    backend = ThreadNotingStore()
    store = opened_store(backend, EngineStoreConfig(guard=GuardConfig(retry_rounds_max=2, retry_pause_s=0.001)))
    backend.fails = True
    rows = EngineRows(1)
    assert store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {(Method.GET, Unavailable.FAILED): 1}
    rows.close()  # BufferError, had anybody a view of it
    store.close()


def test_an_interrupt_of_the_caller_in_a_store_is_the_callers() -> None:
    class InterruptedStore(MemoryStorage):
        is_interrupted = True

        def get(self, pages: Sequence[PageIO]) -> list[Answer]:
            if self.is_interrupted:
                raise KeyboardInterrupt  # as the system does, on the thread that it interrupts
            return super().get(pages)

    backend = InterruptedStore()
    store, rows = opened_store(backend, CONFIG), EngineRows(1)
    with pytest.raises(KeyboardInterrupt):
        store.get(rows.pages([1]))
    backend.is_interrupted = False
    assert store.get(rows.pages([1])) == [Answer.MISS]
    store.close()
    rows.close()


def test_close_waits_no_longer_than_it_was_told_for_a_caller_in_a_store() -> None:
    backend = ThreadNotingStore()
    store = opened_store(backend, CONFIG)
    rows = EngineRows.holding([1])
    store.put(rows.pages([1]))
    backend.hangs.set()
    answers: list[Answer] = []
    caller = Thread(target=lambda: answers.extend(store.get(rows.pages([1]))))
    caller.start()
    while backend.hangs.is_set():
        threading.Event().wait(0.001)
    store.close(0.0)
    assert store.get(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert not answers
    backend.may_go_on.set()
    caller.join(PATIENCE_S)
    assert answers == [Answer.HIT]
    rows.close()
