"""The check of answers: what a store cannot answer is an error that names the store, the method and the answer."""

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from tests.support.wrappers import blank, sealed
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.integrations.engine_store.interface import Unavailable
from unified_cache.integrations.engine_store.store import EngineStore
from unified_cache.service.store.guarded import GuardedStore
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.offline.stores import open_existing, open_to_read
from unified_cache.storage_backends.protocol import (
    Answer,
    Level,
    PageIO,
    Scan,
    Store,
    StoredObject,
)
from unified_cache.storage_backends.wrappers import CheckedStorage, Method, StorageGuard, declared_capability
from unified_cache.testing.storage_contract import LAYOUT, MODEL, label

MANIFEST = manifest_of(MODEL, LAYOUT)
IDENTITY = label(0).identity
LABELS = [label(0), label(1)]


class Answering:
    """A store with a catalog that answers every call by one object, whatever that is."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def capability(self, *_asked: object) -> object:
        return self._answer

    register = exists = get = put = touch = remove = clear = scan = manifests = used_between = close = capability


CALLS: dict[str, Callable[[Store], object]] = {
    "capability": lambda store: store.capability(),
    "register": lambda store: store.register(MANIFEST, {}),
    "exists": lambda store: store.exists(LABELS),
    "get": lambda store: store.get(blank([0, 1])),
    "put": lambda store: store.put(sealed([0, 1]), Level.CACHED),
    "touch": lambda store: store.touch(LABELS),
    "remove": lambda store: store.remove(LABELS),
    "clear": lambda store: store.clear(IDENTITY),
    "scan": lambda store: store.scan(IDENTITY),
    "manifests": lambda store: store.manifests(),
    "used_between": lambda store: store.used_between(IDENTITY),
}
HIT, STORED = Answer.HIT, Answer.STORED
OTHER = label(0)._replace(identity=b"\0" * 32)
SHORT = label(0)._replace(key=b"\0" * 31)
WRONG: dict[str, list[tuple[object, str]]] = {
    "capability": [(None, "a Capability, found None"), ("memory", "found 'memory' of type str")],
    "register": [(True, "None, found True")],
    "exists": [
        ([HIT, True], "a list of 2 answers, each of FLAWED, HIT, MISS, UNAVAILABLE, found True at index 1"),
        ([HIT], "found a list of 1"),
        ([HIT] * 3, "found a list of 3"),
        ((HIT, HIT), "of type tuple"),
        (None, "of type NoneType"),
        (2, "found 2 of type int"),
        ([HIT, STORED], "found <Answer.STORED: 'stored'> at index 1"),
        ([HIT, []], r"found \[\] at index 1"),
    ],
    "get": [
        ([STORED, HIT], "found <Answer.STORED: 'stored'> at index 0"),
        ([1, 0], "found 1 at index 0"),
        ([], "of 0"),
    ],
    "put": [
        ([STORED, HIT], "a list of 2 answers, each of DECLINED, STORED, UNAVAILABLE, found <Answer.HIT"),
        ([0, 0], "found 0 at index 0"),
        (True, "found True of type bool"),
    ],
    "touch": [(2, "None, found 2")],
    "remove": [(True, "an int, found True"), (None, "found None"), (-1, "found -1")],
    "clear": [("2", "an int, found '2'"), (2.0, "found 2.0 of type float")],
    "scan": [
        (([], ""), "a Scan of a list of StoredObject"),
        (Scan((), ""), "a Scan of a list"),  # type: ignore[arg-type]
        (Scan([], None), "a cursor that is text"),  # type: ignore[arg-type]
        (Scan([StoredObject(OTHER, 9)], ""), f"objects of identity {IDENTITY.hex()}"),
        (Scan([StoredObject(SHORT, 9)], ""), "a key of 32 bytes"),
        (Scan([StoredObject(label(0), None)], ""), "its length in bytes"),  # type: ignore[arg-type]
        (Scan([label(0)], ""), "found Label"),  # type: ignore[list-item]
    ],
    "manifests": [
        ([IDENTITY], "a dict of Manifest"),
        ({b"ab": None}, "by digest, 32 bytes"),
        ({IDENTITY: {}}, "found"),
    ],
    "used_between": [((1, 2), "UsedBetween of two ints, or None, found"), (0, "found 0 of type int")],
}


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [(method, answer, message) for method, answers in WRONG.items() for answer, message in answers],
)
def test_an_answer_that_a_method_cannot_give_is_an_error_that_names_store_method_and_answer(
    method: str, answer: object, message: str
) -> None:
    backend = cast("Store", Answering(answer))
    with pytest.raises(StorageError, match=rf"test_checked\.Answering\.{method} must return .*{message}") as caught:
        CALLS[method](CheckedStorage(backend))
    assert not caught.value.retryable


def test_every_method_of_a_store_and_of_its_catalog_has_wrong_answers_here() -> None:
    assert WRONG.keys() == CALLS.keys()


class Bools(MemoryStorage):
    """A store that says True for a page that it has, as those of other systems do, and counts how often it is asked."""

    calls_count = 0

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self.calls_count += 1
        return [answer is HIT for answer in super().exists(labels)]  # type: ignore[misc]

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.calls_count += 1
        return [bool(answer) for answer in super().get(pages)] * 2  # type: ignore[return-value]


def test_a_store_that_answers_wrongly_is_not_asked_again_and_is_left_alone_as_one_that_fails() -> None:
    backend = Bools()
    checked = CheckedStorage(backend)
    config = GuardConfig(breaker_failures_max=3)
    guarded = StorageGuard(checked, declared_capability(checked), config)
    for _ in range(3):
        with pytest.raises(StorageError, match=r"Bools\.exists must return"):
            guarded.exists(LABELS)
    assert backend.calls_count == 3
    assert guarded.get(blank([0, 1])) == [Answer.UNAVAILABLE] * 2
    assert backend.calls_count == 3
    guarded.close()


def open_bools(_rest: str, _bytes_max: int | None) -> Store:
    return Bools()


BOOLS = f"{__name__}:open_bools"
"""URL of such a store."""
REFUSED = r"Bools\.exists must return a list of 2 answers"


def test_a_service_checks_what_its_store_answers() -> None:
    settings = ServiceSettings(storage=BOOLS)
    with closing(GuardedStore.open(settings, CollectorRegistry()).guard) as store:
        store.register(MANIFEST, {})
        with pytest.raises(StorageError, match=REFUSED):
            store.exists(LABELS)


def test_an_external_store_counts_a_wrong_answer_as_a_failure_of_its_store() -> None:
    with EngineStore.open(BOOLS) as store:
        store.register(MODEL, LAYOUT)
        assert store.exists(LABELS) == [Answer.UNAVAILABLE] * 2
        assert store.counts().unavailable == {(Method.EXISTS, Unavailable.FAILED): 2}
        assert re.search(REFUSED, store.counts().last_error)


@pytest.mark.parametrize("opened", [open_to_read, open_existing])
def test_a_tool_checks_what_a_store_answers(opened: Callable[[str], Store]) -> None:
    with closing(opened(BOOLS)) as store, pytest.raises(StorageError, match=REFUSED):
        store.exists(LABELS)


def test_what_a_store_offers_beside_its_pages_is_offered_by_the_check(tmp_path: Path) -> None:
    backend = FileStorage.open(tmp_path)
    checked = CheckedStorage(backend)
    checked.register(MANIFEST, {})
    assert checked.removals() is not None
    assert checked.manifests() == backend.manifests()
    checked.close()
