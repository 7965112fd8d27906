"""The reason why nothing is restored: each from a store that shows it, and one line in the log."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.stores import FaultSwitch, faulty_url
from tests.support.engine_rows import IDENTITY, LAYOUT, EngineRows, label_of
from tests.support.faulty_storage import StorageFault
from unified_cache.core.pool import Identity
from unified_cache.integrations.engine_store import EngineHints, EngineStore, HitWatch
from unified_cache.integrations.engine_store.hit_watch import REQUESTS_MIN, WhyNoHit

HINTS = EngineHints("docs/engine.md", lambda: "a block has 64 tokens", lambda: "the seed is 7")
TIMEOUT_S = 30.0


def opened(url: str, identity: Identity = IDENTITY) -> EngineStore:
    store = EngineStore.open(url)
    store.register(identity, LAYOUT)
    return store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'store'}"


@pytest.fixture
def store(url: str) -> Iterator[EngineStore]:
    with opened(url) as store:
        yield store


def watched(store: EngineStore, url: str) -> tuple[WhyNoHit, str] | None:
    return HitWatch(store, url, HINTS).reason()


def test_prompts_of_which_none_is_looked_up_are_too_short(store: EngineStore, url: str) -> None:
    store.put(EngineRows.holding([1]).pages([1]))
    assert watched(store, url) == (WhyNoHit.SHORT, "a block has 64 tokens")


def test_pages_from_before_of_which_none_is_found_have_other_keys(url: str) -> None:
    with opened(url) as before:
        before.put(EngineRows.holding([1]).pages([1]))
    with opened(url) as store:
        watch = HitWatch(store, url, HINTS)
        store.exists([label_of(2)])
        assert watch.reason() == (WhyNoHit.OTHER_KEYS, "the store has pages from before; the seed is 7")


def test_pages_from_after_the_start_are_not_taken_for_those_of_another_engine(url: str) -> None:
    with opened(url) as before:
        before.put(EngineRows.holding([1]).pages([1]))
    with opened(url) as store:
        watch = HitWatch(store, url, HINTS, clock_ns=lambda: 0)
        store.exists([label_of(2)])
        assert watch.reason() == (WhyNoHit.NOTHING_STORED, "the store has taken no page: 0 pages were offered")


def test_pages_of_this_model_under_another_identity_are_named_by_what_differs(url: str) -> None:
    other = replace(IDENTITY, dtype="float8_e4m3", facts=(("hash", "sha256_cbor"),))
    strange = replace(IDENTITY, model="another model")
    for identity in (other, strange):
        with opened(url, identity) as before:
            before.register(identity, LAYOUT)
    with opened(url) as store:
        store.exists([label_of(2)])
        reason, shown = watched(store, url) or (None, "")
        assert reason is WhyNoHit.OTHER_IDENTITY
        assert shown == (
            "the store has pages of this model with another "
            f"dtype (float8_e4m3 there, {IDENTITY.dtype or 'none'} here), hash (sha256_cbor there, none here)"
        )


def test_a_store_that_takes_nothing_says_why(tmp_path: Path) -> None:
    url = faulty_url(tmp_path)
    FaultSwitch(tmp_path).set(put=StorageFault.FAIL)
    with opened(url) as store:
        store.exists([label_of(1)])
        store.put(EngineRows.holding([1]).pages([1]))
        reason, shown = watched(store, url) or (None, "")
        assert (reason, shown) == (WhyNoHit.NOTHING_STORED, f"the store has taken no page: {store.counts().last_error}")
        assert "put, fails" in shown


def test_prompts_that_are_stored_and_do_not_come_again_are_no_fault(
    store: EngineStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="unified_cache")
    watch = HitWatch(store, url, HINTS)
    store.exists([label_of(1)])
    store.put(EngineRows.holding([1]).pages([1]))
    for _ in range(REQUESTS_MIN):
        watch.count_request()
    assert watch.wait(TIMEOUT_S)
    (said,) = caplog.records
    assert (said.levelname, WhyNoHit.NOTHING_AGAIN.value in said.getMessage()) == ("INFO", True)


def test_the_log_has_the_reason_once_and_the_document_that_mends_it(
    store: EngineStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = HitWatch(store, url, HINTS)
    for _ in range(3 * REQUESTS_MIN):
        watch.count_request()
    assert watch.wait(TIMEOUT_S)
    assert caplog.messages == [
        f"nothing was restored from {url} for {REQUESTS_MIN} requests: prompts are too short. "
        "a block has 64 tokens. See docs/engine.md"
    ]


def test_nothing_is_said_where_something_was_restored_or_before_it_is_time(
    store: EngineStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch, early = HitWatch(store, url, HINTS), HitWatch(store, url, HINTS)
    store.put(EngineRows.holding([1]).pages([1]))
    store.get(EngineRows(1).pages([1]))
    for _ in range(REQUESTS_MIN):
        watch.count_request()
    for _ in range(REQUESTS_MIN - 1):
        early.count_request()
    assert watch.wait(TIMEOUT_S)
    assert early.wait(TIMEOUT_S)
    assert not caplog.records
