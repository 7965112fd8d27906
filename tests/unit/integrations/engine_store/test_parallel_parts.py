"""A large call that is made in parts has the engine's rows in none of them once it is over, however it ends."""

import threading
from collections.abc import Sequence

import pytest

from tests.support.store_calls import ScriptedStorage
from tests.support.wrappers import PATIENCE_S
from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore, EngineStoreConfig
from unified_cache.integrations.engine_store.calls import PART_BYTES_MIN, PARTS_MAX, STARTED_PARTS_MAX
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

LAYOUT = ModelLayout(16, (Full((PoolSpec("kv", PART_BYTES_MIN),)),))
IDENTITY = Identity("model")


class PausedParts(ScriptedStorage):
    """A store that returns to a thread of the engine store's when the test says so, and interrupts other callers."""

    def __init__(self, *, is_bounded: bool) -> None:
        super().__init__()
        self.claims["bounded"] = is_bounded
        self.before[Method.GET] = self._pause
        self.begun = threading.Semaphore(0)
        self.goes_on = threading.Event()

    def _pause(self) -> None:
        if threading.current_thread().name.startswith("engine-store"):
            self.begun.release()
            assert self.goes_on.wait(PATIENCE_S)
        else:
            raise KeyboardInterrupt


def pages_of(rows: Sequence[bytearray]) -> list[EnginePage]:
    digest = IDENTITY.digest(LAYOUT)
    return [
        EnginePage(Label(digest, bytes([number]) * 32, "kv"), (memoryview(row),)) for number, row in enumerate(rows)
    ]


def opened(backend: PausedParts, rows: Sequence[bytearray], config: EngineStoreConfig | None = None) -> EngineStore:
    """Return a store that holds the rows."""
    store = EngineStore.opened_by(lambda: backend, config)
    store.register(IDENTITY, LAYOUT)
    assert store.put(pages_of(rows)) == [Answer.STORED] * len(rows)
    return store


def test_a_large_call_to_a_store_that_returns_by_itself_is_on_no_thread_but_its_callers() -> None:
    rows = [bytearray(PART_BYTES_MIN) for _ in range(2)]
    backend = PausedParts(is_bounded=True)
    with opened(backend, rows) as store:
        with pytest.raises(KeyboardInterrupt):
            store.get(pages_of(rows))
        assert not backend.begun.acquire(blocking=False)


def test_a_put_of_a_mib_to_a_service_is_one_call_and_of_a_larger_one_only_what_it_lacks_is_sent() -> None:
    rows = [bytearray(PART_BYTES_MIN) for _ in range(2)]
    backend = PausedParts(is_bounded=True)
    backend.claims["exists_costs_io"] = True
    with opened(backend, rows[:1]) as store:
        assert backend.calls[-1:] == [Method.PUT]
        assert Method.EXISTS not in backend.calls
        assert store.put(pages_of(rows)) == [Answer.STORED] * 2
    assert backend.calls[-3:-1] == [Method.EXISTS, Method.PUT]
    assert backend.offered == [page.label for page in pages_of(rows)]


@pytest.mark.parametrize("is_started", [False, True], ids=["waited for", "started"])
def test_a_large_call_has_as_many_parts_in_the_store_at_a_time_as_it_may(*, is_started: bool) -> None:
    rows = [bytearray(b"%d" % number) * PART_BYTES_MIN for number in range(4)]
    backend, target = PausedParts(is_bounded=False), [bytearray(PART_BYTES_MIN) for _ in rows]
    answers: list[Answer] = []
    with opened(backend, rows) as store:
        if is_started:
            store.start(Method.GET, pages_of(target), answers.extend)
        else:
            caller = threading.Thread(target=lambda: answers.extend(store.get(pages_of(target))))
            caller.start()
        for _ in range(STARTED_PARTS_MAX if is_started else PARTS_MAX):
            assert backend.begun.acquire(timeout=PATIENCE_S)
        assert not backend.begun.acquire(blocking=False)
        backend.goes_on.set()
        assert store.wait_until(lambda: bool(answers), PATIENCE_S)
    assert answers == [Answer.HIT] * 4
    assert target == rows


def test_parts_whose_buffers_have_no_room_side_by_side_follow_each_other() -> None:
    rows = [bytearray(b"%d" % number) * PART_BYTES_MIN for number in range(2)]
    backend, target = PausedParts(is_bounded=False), [bytearray(PART_BYTES_MIN) for _ in rows]
    backend.goes_on.set()
    with opened(backend, rows, EngineStoreConfig(bounce_bytes=PART_BYTES_MIN + 8192)) as store:
        assert store.get(pages_of(target)) == [Answer.HIT] * 2
    assert target == rows


def test_no_part_of_a_call_that_hangs_has_rows_once_it_is_over() -> None:
    rows = [bytearray(PART_BYTES_MIN) for _ in range(2)]
    backend = PausedParts(is_bounded=False)
    store = opened(backend, rows)
    pages = pages_of(rows)
    answers: list[Answer] = []
    caller = threading.Thread(target=lambda: answers.extend(store.get(pages)))
    caller.start()
    for _ in range(2):
        assert backend.begun.acquire(timeout=PATIENCE_S)
    store.close(0.0)
    caller.join(PATIENCE_S)
    assert answers == [Answer.UNAVAILABLE] * 2
    for page in pages:
        page.rows[0].release()
    for row in rows:
        row.clear()  # BufferError, had the store's threads a view of it
    backend.goes_on.set()
