"""Index of a packed store, against a dict in order of use; and the tables that it is read from."""

import gc
import os
import random
import shutil
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tests.support.files import hits, put
from tests.unit.storage_backends.packed.conftest import TAKEN_BYTES, opened, slots
from unified_cache.core.seal import Label
from unified_cache.storage_backends.common.lru import ScansUnderWay, StoreLru
from unified_cache.storage_backends.directory.records import key_hashes
from unified_cache.storage_backends.packed.segment import SegmentKey, taken_bytes
from unified_cache.storage_backends.protocol import NAMES_MAX, Answer, Level, PageIO
from unified_cache.testing.storage_contract import PAGE_BYTES, label, listing, sealed_page

PAGES_MAX = 150
LENGTHS = (PAGE_BYTES, 3 * PAGE_BYTES)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything that grows, is sorted by parts or is bounded do so among a few hundred pages."""
    monkeypatch.setattr("unified_cache.storage_backends.packed.segment.SLOTS_MAX", 16)
    for name, value in {"RECORDS_MIN": 512, "HEADS_MIN": 16, "QUEUE_MIN": 8, "RECENT_MAX": 20, "VECTOR_MIN": 6}.items():
        monkeypatch.setattr(f"unified_cache.storage_backends.directory.records.{name}", value)
    monkeypatch.setattr("unified_cache.storage_backends.directory.records._SAMPLE", 100)


def test_hashes_of_many_keys_are_those_of_xxhash() -> None:
    count = 5000
    keys = np.frombuffer(os.urandom(32 * count), np.uint64).reshape(-1, 4)
    seeds = np.frombuffer(os.urandom(8 * count), np.uint64)
    expected = [xxh3_64_intdigest(key.tobytes(), seed=int(seed)) for key, seed in zip(keys, seeds, strict=True)]
    assert key_hashes(keys, seeds).tolist() == expected


@pytest.mark.parametrize("vector_min", [1, 6])
def test_a_page_is_not_that_of_another_pool_with_its_key_and_its_hash(
    vector_min: int, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    for name, value in {"HEADS_MIN": 1, "VECTOR_MIN": vector_min}.items():
        monkeypatch.setattr(f"unified_cache.storage_backends.directory.records.{name}", value)
    with closing(opened(root)) as storage:
        storage.put([sealed_page(label(1, "state"))], Level.CACHED)
        storage.remove([label(1, "state")])
        put(storage, [0])
        assert storage._index._records._mask == 0
        assert storage.exists([label(0, "state"), label(0)]) == [Answer.MISS, Answer.HIT]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_is_what_a_dict_in_order_of_use_holds(seed: int, root: Path) -> None:
    choice = random.Random(seed)
    model = StoreLru(PAGES_MAX * TAKEN_BYTES, taken_bytes)
    labels = [label(number, pool) for number in range(PAGES_MAX) for pool in ("kv", "state")]
    length_of = {each: choice.choice(LENGTHS) for each in labels}

    def page_of(each: Label) -> PageIO:
        return PageIO(each, (memoryview(bytearray(length_of[each])),))

    storage = opened(root, pages_max=PAGES_MAX)
    for _ in range(200):
        batch = choice.sample(labels, choice.choice((1, 3, 20, 60)))
        match choice.choice(("put", "put", "get", "touch", "remove", "length", "open")):
            case "put":
                expected, _ = model.store(batch, [length_of[each] for each in batch])
                assert list(map(bool, storage.put([page_of(each) for each in batch], Level.CACHED))) == expected
            case "get":
                expected = [each in model for each in batch]
                assert list(map(bool, storage.get([page_of(each) for each in batch]))) == expected
                model.touch(each for each in reversed(batch) if each in model)
            case "touch":
                storage.touch(batch)
                model.touch(each for each in reversed(batch) if each in model)
            case "remove":
                assert storage.remove(batch[:3]) == sum(model.forget(each) > 0 for each in batch[:3])
            case "length":
                length_of[batch[0]] = choice.choice(LENGTHS)
                if model.size_of(batch[0]) not in (None, length_of[batch[0]]):
                    model.forget(batch[0])
                    assert storage.get([page_of(batch[0])]) == [Answer.FLAWED]
            case _:
                storage.close()
                storage = opened(root, pages_max=PAGES_MAX)
        assert list(map(bool, storage.exists(labels))) == [each in model for each in labels]
        assert storage.bytes_used == model.bytes_used
    assert {each.label for each in listing(storage, label(0).identity)} == {each for each in labels if each in model}
    storage.close()


@pytest.mark.usefixtures("small_parts")
def test_of_many_copies_of_a_page_the_one_used_last_counts_and_the_others_are_free(root: Path) -> None:
    with closing(opened(root)) as storage:
        put(storage, range(40))
    files = sorted(root.glob("*/*.pack"))
    for number, path in enumerate(files):
        for copy in (1, 2):
            shutil.copy(path, path.with_name(f"kv.{PAGE_BYTES}.{20 * copy + number}.pack"))
    # In one file too: the first line once more, in the place of the second, with its check.
    with files[0].open("r+b") as file:
        line = file.read(48)
        file.seek(48)
        file.write(line[:32] + xxh3_64_intdigest(line[:32], seed=1).to_bytes(8, "little") + line[40:])
    with closing(opened(root)) as storage:
        assert storage.bytes_used == 40 * TAKEN_BYTES
        assert hits(storage, range(40)) == [True] * 40
        storage.remove([label(number) for number in range(40)])
    with closing(opened(root)) as storage:
        assert storage.bytes_used == 0


@pytest.mark.parametrize("used_later", [1, 2])
def test_of_two_copies_the_one_used_later_counts_in_whatever_order_they_are_found(used_later: int, root: Path) -> None:
    with closing(opened(root)) as storage:
        put(storage, [0])
    (path,) = root.glob("*/*.pack")
    shutil.copy(path, path.with_name(f"kv.{PAGE_BYTES}.2.pack"))
    with path.with_name(f"kv.{PAGE_BYTES}.{used_later}.pack").open("r+b") as file:
        file.seek(40)
        file.write((1 << 61).to_bytes(8, "little"))
    with closing(opened(root)) as storage:
        assert slots(storage, [0]) == [(used_later, 0)]


def write_tables(root: Path, files_count: int) -> int:
    """Enter pages in every slot of so many files; return how many there are."""
    opened(root).close()
    key = SegmentKey(label(0).identity, "kv", PAGE_BYTES)
    (root / key.identity.hex()).mkdir()
    for number in range(1, files_count + 1):
        lines = np.frombuffer(os.urandom(48 * key.slots_count), np.uint64).reshape(-1, 6).copy()
        lines[:, 4] = key_hashes(lines[:, :4], np.arange(len(lines), dtype=np.uint64))
        with (root / key.identity.hex() / key.file_name(number)).open("wb") as file:
            file.write(lines.tobytes())
            file.truncate(len(lines) * (48 + key.slot_bytes))
    return files_count * key.slots_count


def test_the_index_of_an_opened_store_takes_less_than_64_bytes_of_memory_a_page(root: Path) -> None:
    def memory_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    count = write_tables(root, 24)
    storage = opened(root)
    assert storage.bytes_used == count * TAKEN_BYTES
    with_index_bytes = memory_bytes()
    storage.close()
    del storage
    gc.collect()
    assert 40 < (with_index_bytes - memory_bytes()) / count < 64


def test_two_scans_at_once_list_everything_and_begin_once_each() -> None:
    scans, begun = ScansUnderWay(), count()
    labels = [Label(bytes(32), number.to_bytes(32, "big"), "kv") for number in range(3 * NAMES_MAX)]

    def parts() -> list[list[tuple[int, Label]]]:
        next(begun)
        return [list(enumerate(labels))]

    found: list[list[Label]] = [[], []]
    cursors = ["", ""]
    for number in (0, 1) * 3:
        some, cursors[number] = scans.take(bytes(32), cursors[number], parts)
        found[number] += [each for _, each in some]
    assert found == [labels, labels]
    assert next(begun) == 2
