"""One line in the log where nothing is restored, with what shows the reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.stores import FaultSwitch, faulty_url
from tests.support.engine_rows import IDENTITY, LAYOUT, EngineRows, label_of
from tests.support.store_calls import StorageFault
from unified_cache.integrations.engine_store import EngineStore, HitWatch
from unified_cache.integrations.engine_store.interface import REQUESTS_MIN

DOCUMENT = "docs/engine.md"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'store'}"


@pytest.fixture
def store(url: str) -> Iterator[EngineStore]:
    with EngineStore.open(url) as store:
        store.register(IDENTITY, LAYOUT)
        yield store


def count_requests(store: EngineStore, url: str, count: int = REQUESTS_MIN) -> None:
    watch = HitWatch(store.counts, url, DOCUMENT)
    for _ in range(count):
        watch.count_request()


def test_the_log_says_once_that_nothing_was_looked_up(
    store: EngineStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(EngineRows.holding([1]).pages([1]))
    count_requests(store, url, 3 * REQUESTS_MIN)
    (said,) = caplog.records
    assert (said.levelname, said.getMessage()) == (
        "WARNING",
        f"nothing was restored from {url} for {REQUESTS_MIN} requests: 0 of 0 pages looked up were found, "
        f"1 of 1 offered were stored. See {DOCUMENT}",
    )


def test_the_log_says_what_a_store_answered_that_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = faulty_url(tmp_path)
    FaultSwitch(tmp_path).set(put=StorageFault.FAIL)
    with EngineStore.open(url) as store:
        store.register(IDENTITY, LAYOUT)
        store.exists([label_of(1)])
        store.put(EngineRows.holding([1]).pages([1]))
        count_requests(store, url)
        last_error = store.counts().last_error
    said = caplog.records[-1]
    assert said.levelname == "WARNING"
    assert f"0 of 1 offered were stored; the store said: {last_error}" in said.getMessage()


def test_prompts_that_are_stored_and_do_not_come_again_are_no_fault(
    store: EngineStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="unified_cache")
    store.exists([label_of(1)])
    store.put(EngineRows.holding([1]).pages([1]))
    count_requests(store, url)
    (said,) = caplog.records
    assert said.levelname == "INFO"


def test_nothing_is_said_where_something_was_restored_or_before_it_is_time(
    store: EngineStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    count_requests(store, url, REQUESTS_MIN - 1)
    store.put(EngineRows.holding([1]).pages([1]))
    store.get(EngineRows(1).pages([1]))
    count_requests(store, url)
    assert not caplog.records
