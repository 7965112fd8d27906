"""Engine stores over real ones: pages come back as they were, every page has an answer, every reason is counted."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tests.support.engine_rows import IDENTITY, LAYOUT, PAGE_BYTES, EngineRows, label_of, opened_store, payload_of
from tests.support.files import FaultyDisk
from tests.support.running_service import running
from tests.support.store_calls import ScriptedStorage
from tests.support.wrappers import PATIENCE_S
from unified_cache.components import Full
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore, EngineStoreConfig, Unavailable
from unified_cache.integrations.engine_store import calls as calls_module
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.removals import Removals
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import Method

SMALL_PIECES = EngineStoreConfig(piece_bytes=10_000, bounce_bytes=1 << 20)
"""Two pages a piece."""


@pytest.fixture(params=["memory:", "file:", "packed:", "grpc:"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    scheme: str = request.param
    if scheme == "grpc:":
        with running() as server:
            yield f"grpc://{server.address}"
    else:
        yield scheme if scheme == "memory:" else f"{scheme}{tmp_path / 'store'}"


@pytest.fixture
def store(url: str) -> Iterator[EngineStore]:
    with EngineStore.open(url, SMALL_PIECES) as store:
        store.register(IDENTITY, LAYOUT)
        yield store


def test_pages_come_back_byte_by_byte_in_the_order_asked_for(store: EngineStore) -> None:
    source = EngineRows.holding(range(7))
    assert store.put(source.pages(range(7))) == [Answer.STORED] * 7
    order = [5, 0, 99, 6, 2]
    target = EngineRows(len(order))
    expected = Answer.of_reads(number != 99 for number in order)
    assert store.exists([label_of(number) for number in order]) == expected
    assert store.get(target.pages(order)) == expected
    for slot, number in enumerate(order):
        assert (target.payload(slot) == payload_of(number)) is (number != 99)


def test_what_a_store_in_a_directory_knows_from_memory_is_reported_on_the_spot_and_not_counted(
    store: EngineStore, url: str
) -> None:
    assert store.put(EngineRows.holding(range(3)).pages(range(3))) == [Answer.STORED] * 3
    counted = store.counts().answers
    known = Answer.HIT if url.startswith(("file:", "packed:")) else Answer.UNAVAILABLE
    assert store.exists_at_once([label_of(2), label_of(99)]) == [known, Answer.UNAVAILABLE]
    assert store.exists_at_once([label_of(2, Identity("another"))]) == [Answer.UNAVAILABLE]
    assert store.counts().answers == counted
    store.close()
    assert store.exists_at_once([label_of(2)]) == [Answer.UNAVAILABLE]


def test_calls_are_counted_by_method_and_answer(store: EngineStore) -> None:
    source = EngineRows.holding([1, 2, 3])
    store.put(source.pages([1, 2, 3]))
    store.exists([label_of(1), label_of(9)])
    store.get(source.pages([1, 2, 9]))
    counts = store.counts()
    assert counts.answers == {
        (Method.PUT, Answer.STORED): 3,
        (Method.EXISTS, Answer.HIT): 1,
        (Method.EXISTS, Answer.MISS): 1,
        (Method.GET, Answer.HIT): 2,
        (Method.GET, Answer.MISS): 1,
    }
    assert counts.payload_bytes == {Method.PUT: 3 * PAGE_BYTES, Method.GET: 2 * PAGE_BYTES}
    assert counts.unavailable == {}
    assert counts.is_registered
    assert counts.last_error == ""
    assert set(counts.seconds) == {Method.PUT, Method.EXISTS, Method.GET}


def test_of_pages_that_a_store_has_some_of_only_the_others_are_copied_and_put(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "UNASKED_BYTES_MAX", 0)
    store.put(EngineRows.holding([1, 4, 5]).pages([1, 4, 5]))
    before = store.counts()
    others = EngineRows(7)  # zeros: what is there already is not read, and stays as it is
    others.rows(2)[0][:] = b"new" * 1000
    assert store.put(others.pages(range(7))) == [Answer.STORED] * 7
    counts = store.counts()
    assert counts.payload_bytes[Method.PUT] == before.payload_bytes[Method.PUT] + 4 * PAGE_BYTES
    assert counts.answers == {(Method.PUT, Answer.STORED): 3 + 7}
    target = EngineRows(7)
    assert store.get(target.pages(range(7))) == [Answer.HIT] * 7
    assert [target.payload(slot) == payload_of(slot) for slot in range(7)] == [slot in {1, 4, 5} for slot in range(7)]
    assert target.payload(2) == others.payload(2)


def test_a_durable_put_asks_the_store_for_pages_too_that_may_be_there_and_not_last(tmp_path: Path) -> None:
    rows, disk = EngineRows.holding(range(4)), FaultyDisk(only="fsync")
    with opened_store(FileStorage.open(tmp_path, disk=disk)) as store:
        disk.calls.clear()
        assert store.put(rows.pages(range(4))) == [Answer.STORED] * 4
        assert disk.calls == []
        assert store.put(rows.pages(range(4)), Level.DURABLE) == [Answer.STORED] * 4
        assert disk.calls


def test_no_pages_are_no_work(store: EngineStore) -> None:
    assert store.get([]) == store.put([]) == store.exists([]) == []


def test_after_close_every_page_is_unavailable_and_no_view_is_left(store: EngineStore) -> None:
    rows = EngineRows.holding([1, 2])
    store.put(rows.pages([1, 2]))
    store.get(rows.pages([1, 2]))
    store.close()
    assert store.get(rows.pages([1])) == store.put(rows.pages([1])) == [Answer.UNAVAILABLE]
    assert store.exists([label_of(1)]) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable[Method.GET, Unavailable.CLOSED] == 1
    rows.close()


def touch(store: EngineStore, labels: Sequence[Label]) -> None:
    ends: list[list[Answer]] = []
    store.start_asking(Method.TOUCH, labels, ends.append)
    assert store.wait_until(lambda: bool(ends), PATIENCE_S)


def test_of_many_pages_that_are_touched_the_first_is_the_most_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "NAMES_MAX", 2)
    rows = EngineRows.holding(range(5))
    with opened_store(open_storage("memory:", bytes_max=5 * (PAGE_BYTES + HEADER_BYTES))) as store:
        store.put(rows.pages(range(5)))
        touch(store, [label_of(number) for number in (3, 1, 4, 0, 2)])
        for gone_count, number in enumerate((10, 11, 12, 13), 1):
            store.put(EngineRows.holding([number]).pages([number]))
            left = store.exists([label_of(number) for number in (3, 1, 4, 0, 2)])
            assert left == [Answer.HIT] * (5 - gone_count) + [Answer.MISS] * gone_count


def test_a_touch_of_a_store_that_is_closed_is_lost_and_counted(store: EngineStore) -> None:
    touch(store, [label_of(1)])
    assert store.counts().unavailable == {}
    store.close()
    touch(store, [label_of(1)])
    assert store.counts().unavailable == {(Method.TOUCH, Unavailable.CLOSED): 1}


def test_a_store_cleared_of_an_identity_misses_its_pages(store: EngineStore) -> None:
    rows = EngineRows.holding([1])
    store.put(rows.pages([1]))
    assert store.clear(IDENTITY.digest(LAYOUT))
    assert store.get(rows.pages([1])) == [Answer.MISS]


def test_pages_of_an_identity_that_nobody_registered_are_unavailable(store: EngineStore) -> None:
    other = EngineRows.holding([1])
    pages = [EnginePage(label_of(1, Identity("another")), other.rows(0))]
    assert store.put(pages) == store.get(pages) == [Answer.UNAVAILABLE]
    assert store.counts().unavailable == {
        (Method.PUT, Unavailable.UNREGISTERED): 1,
        (Method.GET, Unavailable.UNREGISTERED): 1,
    }


def test_a_layout_whose_pages_do_not_fit_is_refused_by_name() -> None:
    layout = ModelLayout(64, (Full((PoolSpec("kv", 8192),)),))
    with (
        EngineStore.open("memory:", EngineStoreConfig(piece_bytes=1, bounce_bytes=8192)) as store,
        pytest.raises(ConfigError, match="a page of kv, 8320 bytes, found 8192"),
    ):
        store.register(IDENTITY, layout)


def test_a_page_larger_than_all_landing_memory_is_unavailable(tmp_path: Path) -> None:
    rows = memoryview(bytearray(9000))
    with opened_store(
        open_storage(f"file:{tmp_path / 'store'}"), EngineStoreConfig(piece_bytes=1, bounce_bytes=8192)
    ) as store:
        page = EnginePage(label_of(1), (rows,))
        assert store.put([page]) == [Answer.UNAVAILABLE]
        assert store.counts().unavailable == {(Method.PUT, Unavailable.NO_BOUNCE_BUFFER): 1}


@pytest.mark.parametrize("url", ["", "no_such:", "no.such.module:make", "memory:rest", "file:"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        EngineStore.open(url)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineStoreConfig(piece_bytes=0),
        lambda: EngineStoreConfig(piece_bytes=9 << 20),
        lambda: EngineStoreConfig(bounce_bytes=1),
        lambda: EngineStoreConfig(call_timeout_s=0.0),
        lambda: EngineStoreConfig(guard=None),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], EngineStoreConfig]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_durable_put_takes_an_eighth_of_the_bounce_buffers_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "PIECE_BYTES_MAX", 1)
    numbers, backend = range(40), ScriptedStorage(FileStorage.open(tmp_path))
    with opened_store(backend, EngineStoreConfig(bounce_bytes=1 << 20)) as store:
        assert all(store.put(EngineRows.holding(numbers).pages(numbers), Level.DURABLE))
    puts = [len(call.labels) for call in backend.noted if call.method is Method.PUT]
    assert puts == [(1 << 17) // (PAGE_BYTES + HEADER_BYTES), 40 - puts[0]]


@pytest.mark.parametrize("scheme", ["file", "packed"])
def test_a_store_tells_which_pages_it_has_dropped(scheme: str, tmp_path: Path) -> None:
    numbers = range(1, 100)
    with opened_store(open_storage(f"{scheme}:{tmp_path}", bytes_max=200_000), SMALL_PIECES) as store:
        assert store.take_removals() == Removals(0, ())
        assert store.put(EngineRows.holding(numbers).pages(numbers)) == [Answer.STORED] * len(numbers)
        removals = store.take_removals()
        assert removals is not None
        gone = set(removals.labels)
        labels = [label_of(number) for number in numbers]
        assert 0 < len(gone) < len(numbers)
        assert [label in gone for label in labels] == [not answer for answer in store.exists(labels)]
    assert store.take_removals() == Removals(0, ())


def test_a_store_that_is_away_or_remote_tells_nothing_of_what_it_lets_go(tmp_path: Path) -> None:
    errors = [StorageError("away", retryable=True)]

    def make() -> Store:
        if errors:
            raise errors.pop()
        return open_storage(f"file:{tmp_path}")

    clock = ManualClock()
    with EngineStore.opened_by(make, clock=clock) as store:
        assert store.take_removals() is None
        clock.now_s += 60.0
        store.register(IDENTITY, LAYOUT)
        assert store.take_removals() == Removals(0, ())
    with running() as server, EngineStore.open(f"grpc://{server.address}") as store:
        assert store.take_removals() is None
