"""Answers that no store may give: an error that names the store, the method and the answer."""

import math
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from tests.support import third_party
from tests.support.store_calls import ScriptedStorage
from tests.support.wrappers import OF_ANY_SPEED, blank, sealed
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.integrations.engine_store.interface import Unavailable
from unified_cache.integrations.engine_store.store import EngineStore
from unified_cache.service.store.guarded import GuardedStore
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.wrappers import Method, StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice
from unified_cache.testing.storage_contract import LAYOUT, MODEL, label

LABELS = [label(0), label(1)]
HIT, STORED = Answer.HIT, Answer.STORED


CALLS: dict[str, Callable[[Store], object]] = {
    "exists": lambda store: store.exists(LABELS),
    "get": lambda store: store.get(blank([0, 1])),
    "put": lambda store: store.put(sealed([0, 1]), Level.CACHED),
}
WRONG: list[tuple[str, object]] = [
    ("exists", [HIT, True]),
    ("exists", [HIT]),
    ("exists", [HIT] * 3),
    ("exists", (HIT, HIT)),
    ("exists", None),
    ("exists", [HIT, STORED]),
    ("exists", [HIT, []]),
    ("get", [True, True]),
    ("get", [STORED, HIT]),
    ("get", []),
    ("put", [STORED, HIT]),
    ("put", True),
]


def guarded(backend: Store) -> StorageGuard:
    return StorageGuard(backend, backend.capability(), GuardConfig(breaker_failures_max=3))


def answering(answer: object) -> ScriptedStorage:
    """Make a store that answers every call for pages by one object."""
    store = ScriptedStorage()
    store.answers = dict.fromkeys((Method.EXISTS, Method.GET, Method.PUT), answer)
    return store


@pytest.mark.parametrize(("method", "answer"), WRONG)
def test_an_answer_that_a_method_cannot_give_is_an_error_that_names_store_method_and_answer(
    method: str, answer: object
) -> None:
    backend = answering(answer)
    text = rf"MemoryStorage\.{method} must return a list of 2 answers, .*found {re.escape(repr(answer))}"
    with closing(guarded(backend)) as storage:
        for _ in range(3):
            with pytest.raises(StorageError, match=text) as caught:
                CALLS[method](storage)
            assert not caught.value.retryable
        assert len(backend.take()) == 3, "it is not asked again, and left alone as one that fails"
        assert CALLS[method](storage) == [Answer.UNAVAILABLE] * 2
        assert backend.take() == []


@pytest.mark.parametrize("answer", [answer for method, answer in WRONG if method == "get"])
def test_no_page_is_believed_to_be_read_that_was_not_verified(answer: object) -> None:
    storage = VerifiedStorage(answering(answer))
    with pytest.raises(StorageError, match=r"MemoryStorage\.get must return"):
        storage.get(blank([0, 1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: declared_capability(third_party.Speechless("", None)),
        lambda: CodedStorage(third_party.ShortLengths("", None), None).get(blank([0, 1])),
        lambda: CodedStorage(answering([STORED]), CodingChoice(compress=True)).put(sealed([0, 1]), Level.CACHED),
    ],
)
def test_another_answer_of_the_wrong_kind_is_an_error_that_names_store_and_method(call: Callable[[], object]) -> None:
    with pytest.raises(
        (ConfigError, StorageError), match=r"(Storage|Lengths)\..* must return .*, found|expected .*Speechless, found"
    ):
        call()


@pytest.mark.parametrize(
    "claim",
    [
        {"name": None},
        {"durable": "no"},
        {"bytes_max": "12"},
        {"bytes_max": -1},
        {"call_s_max": math.nan},
        {"call_s_max": 1e300},
        {"call_bytes": 0},
    ],
)
def test_a_capability_that_cannot_be_one_is_refused_where_it_is_made(claim: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"(expected|a store must have) .*, found"):
        replace(OF_ANY_SPEED, **claim)  # type: ignore[arg-type]


def open_bools(_rest: str, _bytes_max: int | None) -> Store:
    return answering([False, True])


BOOLS = f"{__name__}:open_bools"
"""URL of a store that answers as those of other systems do."""
REFUSED = r"MemoryStorage\.exists must return a list of 2 answers"


def test_a_service_checks_what_its_store_answers() -> None:
    settings = ServiceSettings(storage=BOOLS)
    with closing(GuardedStore.open(settings, CollectorRegistry()).guard) as store:
        store.register(manifest_of(MODEL, LAYOUT), {})
        with pytest.raises(StorageError, match=REFUSED):
            store.exists(LABELS)


def test_an_external_store_counts_a_wrong_answer_as_a_failure_of_its_store() -> None:
    with EngineStore.open(BOOLS) as store:
        store.register(MODEL, LAYOUT)
        assert store.exists(LABELS) == [Answer.UNAVAILABLE] * 2
        assert store.counts().unavailable == {(Method.EXISTS, Unavailable.FAILED): 2}
        assert re.search(REFUSED, store.counts().last_error)
