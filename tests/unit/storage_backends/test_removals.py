"""Removals of a store: a subscriber that is told of them knows what is in it, or knows that it does not know."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.files import FILE_BYTES, put
from tests.support.service import LoopbackServer
from tests.support.store_kinds import StoreKind
from tests.support.wrappers import scripted
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ClosedError, StateError
from unified_cache.core.seal import Label
from unified_cache.storage_backends import removals
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.removals import SUBSCRIBERS_MAX, RemovalBuffer, RemovalFeed, Removals
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics
from unified_cache.testing.storage_contract import MODEL, OTHER_MODEL, PAGE_BYTES, blank_page, label, sealed_page

CAP_BYTES = 6 * PAGE_BYTES
FILES_BYTES = 6 * FILE_BYTES
PACKED_BYTES = 6 * StoreKind.PACKED.taken_bytes()
LABELS = [label(number, model=model) for number in range(8) for model in (MODEL, OTHER_MODEL)]

OPENERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda root: MemoryStorage(CAP_BYTES),
    "keys_only": lambda root: KeysOnlyStorage(CAP_BYTES),
    "file": lambda root: FileStorage.open(root, bytes_max=FILES_BYTES),
    "file without a cap": FileStorage.open,
    "packed": lambda root: PackedStorage.open(root, bytes_max=PACKED_BYTES),
    "packed without a cap": PackedStorage.open,
    "stacked": lambda root: stacked(PackedStorage.open(root, bytes_max=PACKED_BYTES)),
}


def stacked(store: Store) -> Store:
    metered = MeteredStorage(scripted({}, store), StorageMetrics(CollectorRegistry()), "packed")
    return VerifiedStorage(StorageGuard(metered, store.capability(), GuardConfig()))


def subscribed(storage: Store) -> RemovalFeed:
    feed = storage.removals()
    assert feed is not None
    return feed


@pytest.fixture(params=OPENERS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with closing(OPENERS[request.param](tmp_path / "store")) as storage:
        yield storage


class BelievedPages:
    """Pages that a subscriber believes to be in a store: it saw each stored, and was not told that it went."""

    def __init__(self, feed: RemovalFeed) -> None:
        self.labels: set[Label] = set()
        self.told_count = 0
        self._feed = feed

    def stored(self, labels: list[Label], answers: list[Answer]) -> None:
        self.labels |= {named for named, answer in zip(labels, answers, strict=True) if answer}

    def refresh(self) -> None:
        told = self._feed.take()
        assert not told.lost_count
        assert len(set(told.labels)) == len(told.labels)
        self.told_count += len(told.labels)
        self.labels -= set(told.labels)


@pytest.mark.parametrize("seed", range(3))
def test_who_is_told_of_removals_knows_what_is_in_the_store(storage: Store, seed: int) -> None:
    choice = random.Random(seed)
    put(storage, [0, 1])
    picture = BelievedPages(subscribed(storage))
    picture.labels = {label(0), label(1)}
    for _ in range(120):
        some = choice.sample(LABELS, choice.randrange(1, 5))
        action = choice.random()
        if action < 0.55:
            level = Level.DURABLE if choice.random() < 0.1 and storage.capability().durable else Level.CACHED
            picture.stored(some, storage.put([sealed_page(named) for named in some], level))
        elif action < 0.75:
            storage.get([blank_page(named, PAGE_BYTES + (choice.random() < 0.1)) for named in some])
        elif action < 0.85:
            storage.remove(some)
        elif action < 0.95:
            storage.touch(some)
        else:
            storage.clear(some[0].identity)
        if choice.random() < 0.3:
            picture.refresh()
            there = {named for named, answer in zip(LABELS, storage.exists(LABELS), strict=True) if answer}
            assert picture.labels == there
    picture.refresh()
    assert picture.told_count > 5


def test_each_subscriber_of_a_store_is_told_all(storage: Store) -> None:
    first, second = subscribed(storage), subscribed(storage)
    put(storage, [1])
    storage.remove([label(1)])
    assert first.take() == second.take() == Removals(0, (label(1),))
    first.close()
    first.close()
    put(storage, [2, 3])
    storage.remove([label(2)])
    late = subscribed(storage)
    storage.remove([label(3)])
    assert first.take() == Removals(0, ())
    assert second.take() == Removals(0, (label(2), label(3)))
    assert late.take() == Removals(0, (label(3),))
    storage.close()
    with pytest.raises(ClosedError):
        storage.removals()


def test_a_store_refuses_more_subscribers_than_it_can_tell() -> None:
    store = MemoryStorage()
    feeds = [subscribed(store) for _ in range(SUBSCRIBERS_MAX)]
    with pytest.raises(StateError, match="16 subscribers"):
        store.removals()
    feeds[3].close()
    subscribed(store)


def test_labels_that_can_be_walked_once_reach_every_subscriber() -> None:
    buffer = RemovalBuffer()
    feeds = [buffer.subscribe(), buffer.subscribe()]
    buffer.record(iter(LABELS[:3]))
    buffer.restored(iter(LABELS[:1]))
    assert [feed.take().labels for feed in feeds] == [tuple(LABELS[1:3])] * 2


def test_what_came_back_before_anybody_asked_is_not_reported() -> None:
    buffer = RemovalBuffer()
    buffer.record(LABELS[:2])
    feed = buffer.subscribe()
    assert feed.take() == Removals(0, ())
    buffer.record([LABELS[0], LABELS[1], LABELS[2]])
    buffer.restored([LABELS[1], LABELS[9]])
    assert feed.take() == Removals(0, (LABELS[0], LABELS[2]))
    assert feed.take() == Removals(0, ())


def test_what_there_is_no_room_for_is_lost_and_the_next_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "LABELS_WAITING_MAX", 3)
    buffer = RemovalBuffer()
    feed = buffer.subscribe()
    buffer.record(LABELS[:3])
    buffer.record(LABELS[:3])
    assert feed.take() == Removals(0, tuple(LABELS[:3]))
    buffer.record(LABELS[:4])
    buffer.record(LABELS[5:7])
    assert feed.take() == Removals(4, tuple(LABELS[5:7]))
    assert feed.take() == Removals(0, ())
    buffer.lose()
    assert feed.take() == Removals(1, ())


def test_the_service_reports_nothing_to_its_clients() -> None:
    running = LoopbackServer.start(MemoryStorage())
    client = running.client()
    assert client.removals() is None
    assert VerifiedStorage(client).removals() is None
    client.close()
    running.stop()


def test_what_another_process_evicted_is_reported_with_the_next_sweep(tmp_path: Path) -> None:
    with ExitStack() as stack:
        mine = stack.enter_context(closing(FileStorage.open(tmp_path, bytes_max=40 * FILE_BYTES)))
        theirs = stack.enter_context(closing(FileStorage.open(tmp_path, bytes_max=FILES_BYTES)))
        feed = subscribed(mine)
        put(mine, range(4))
        for number in range(4, 10):
            put(theirs, [number])
        put(mine, [10])
        assert set(feed.take().labels) == {label(number) for number in range(4)}
        theirs.remove([label(5)])
        put(mine, range(11, 14))
        put(mine, [14])
        assert feed.take().labels == (label(5),)


@pytest.mark.parametrize("kind", StoreKind)
def test_a_page_found_to_be_another_one_is_reported(kind: StoreKind, tmp_path: Path) -> None:
    with closing(VerifiedStorage(kind.open(tmp_path))) as storage:
        page = sealed_page(label(1))._replace(label=label(2))
        assert storage.put([page], Level.CACHED) == [Answer.STORED]
        feed = subscribed(storage)
        assert storage.get([blank_page(label(2))]) == [Answer.FLAWED]
        assert feed.take().labels == (label(2),)
