"""What an eviction leaves: never a page whose prefix went first, as far as the store was told."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.files import chain
from unified_cache.components import Full, SlidingWindow
from unified_cache.pool import ModelLayout, PoolSpec
from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import MODEL, PAGE_BYTES, blank_page, label, sealed_page


def held(storage: FileStorage, count: int, pool: str = "kv") -> list[int]:
    found = storage.exists([label(number, pool) for number in range(count)])
    return [number for number, is_there in enumerate(found) if is_there]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FileStorage]:
    storage = FileStorage.open(tmp_path / "store", bytes_max=8 * PAGE_BYTES)
    yield storage
    storage.close()


def test_a_page_used_alone_keeps_the_pages_before_it(storage: FileStorage) -> None:
    storage.put(chain(range(4), sealed_page), Level.CACHED)
    storage.put(chain(range(4, 8), sealed_page), Level.CACHED)
    # The head of the first chain was in host memory, so that storage was asked for its tail alone.
    assert storage.get(chain(range(4), blank_page)[2:]) == [Answer.HIT, Answer.HIT]
    storage.put(chain(range(8, 12), sealed_page), Level.CACHED)
    assert held(storage, 12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_chain_goes_from_its_tail_whatever_was_used_last(storage: FileStorage) -> None:
    pages = chain(range(8), sealed_page)
    storage.put(pages, Level.CACHED)
    for page in pages:
        storage.get([page])
    for number in range(8, 12):
        storage.put([sealed_page(label(number))], Level.CACHED)
    assert held(storage, 12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_the_pages_before_a_batch_are_not_evicted_for_it(storage: FileStorage) -> None:
    pages = chain(range(12), sealed_page)
    assert storage.put(pages[:6], Level.CACHED) == [Answer.STORED] * 6
    assert storage.put(pages[6:], Level.CACHED) == [
        Answer.STORED,
        Answer.STORED,
        Answer.DECLINED,
        Answer.DECLINED,
        Answer.DECLINED,
        Answer.DECLINED,
    ]
    assert held(storage, 12) == list(range(8))
    assert storage.counts.declined_count == 4


def test_a_page_declined_holds_nothing_back(storage: FileStorage) -> None:
    pages = chain(range(12), sealed_page)
    storage.put(pages[:8], Level.CACHED)
    assert storage.put(pages[8:], Level.CACHED) == [Answer.DECLINED] * 4
    assert storage.put(chain(range(12, 20), sealed_page), Level.CACHED) == [Answer.STORED] * 8
    assert held(storage, 20) == list(range(12, 20))


def test_a_page_removed_holds_nothing_back(storage: FileStorage) -> None:
    storage.put(chain(range(8), sealed_page), Level.CACHED)
    storage.remove([label(number) for number in range(1, 8)])
    assert storage.put(chain(range(8, 16), sealed_page), Level.CACHED) == [Answer.STORED] * 8
    assert held(storage, 16) == list(range(8, 16))


def test_a_page_that_names_itself_as_the_one_before_it_can_be_evicted(storage: FileStorage) -> None:
    pages = [sealed_page(label(number))._replace(parent=label(number).key) for number in range(16)]
    assert storage.put(pages[:8], Level.CACHED) == [Answer.STORED] * 8
    assert storage.put(pages[8:], Level.CACHED) == [Answer.STORED] * 8


def test_a_windowed_pool_loses_its_old_pages_while_newer_ones_stay(tmp_path: Path) -> None:
    full, window = (PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in ("kv", "window"))
    layout = ModelLayout(64, (Full((full,)), SlidingWindow(64, 64, (window,))))
    manifest = manifest_of(MODEL, layout)
    manifest.identity = label(0).identity
    storage = FileStorage.open(tmp_path / "store", bytes_max=12 * PAGE_BYTES)
    storage.register(manifest, {})
    storage.put(chain(range(6), sealed_page), Level.CACHED)
    storage.put(
        [page._replace(label=label(number, "window")) for number, page in enumerate(chain(range(6), sealed_page))],
        Level.CACHED,
    )
    newest = [page._replace(label=label(5, "window")) for page in chain(range(6), blank_page)[5:]]
    assert storage.get(newest) == [Answer.HIT]
    # What is older than all windows is not read, and everything else is.
    storage.get(chain(range(6), blank_page))
    storage.put([sealed_page(label(number)) for number in range(20, 24)], Level.CACHED)
    assert held(storage, 6) == list(range(6))
    assert 5 in held(storage, 6, "window")
    assert len(held(storage, 6, "window")) == 2
    storage.close()


def test_a_page_in_one_pool_keeps_its_full_page(tmp_path: Path) -> None:
    full, window = (PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in ("kv", "window"))
    manifest = manifest_of(MODEL, ModelLayout(64, (Full((full,)), SlidingWindow(64, 64, (window,)))))
    manifest.identity = label(0).identity
    storage = FileStorage.open(tmp_path / "store", bytes_max=4 * PAGE_BYTES)
    storage.register(manifest, {})
    storage.put([sealed_page(label(1))], Level.CACHED)
    storage.put([sealed_page(label(1, "window"))], Level.CACHED)
    storage.put([sealed_page(label(2)), sealed_page(label(3))], Level.CACHED)
    storage.put([sealed_page(label(4))], Level.CACHED)
    assert held(storage, 5) == [1, 2, 3, 4]
    assert held(storage, 5, "window") == []
    storage.close()


def test_no_history_of_puts_and_gets_leaves_a_page_without_its_prefix(tmp_path: Path) -> None:
    choice = random.Random(5)
    parent_of: dict[int, int | None] = {}
    storage = FileStorage.open(tmp_path / "store", bytes_max=24 * PAGE_BYTES)
    chains: list[list[int]] = []
    for _ in range(300):
        known = choice.choice(chains)[: choice.randrange(1, 9)] if chains and choice.random() < 0.7 else []
        numbers = known + list(range(len(parent_of), len(parent_of) + choice.randrange(0 if known else 1, 5)))
        for before, number in zip([None, *numbers], numbers, strict=False):
            parent_of.setdefault(number, before)
        chains.append(numbers)
        stored = storage.put(chain(numbers, sealed_page), Level.CACHED)
        assert stored == sorted(stored, key=bool, reverse=True)
        start = choice.randrange(len(numbers))
        storage.get(chain(numbers, blank_page)[start:])
        there = set(held(storage, len(parent_of)))
        assert [number for number in there if parent_of[number] not in (None, *there)] == []
        assert storage.bytes_used == len(there) * PAGE_BYTES <= 24 * PAGE_BYTES
    assert storage.counts.evicted_count > 100
    storage.close()
