"""Index of a file store with a cap, against a dict in order of use; and its memory."""

import os
import random
from pathlib import Path

import pytest

from unified_cache.core.seal import Label
from unified_cache.storage_backends.common.lru import StoreLru
from unified_cache.storage_backends.file.index import FileIndex
from unified_cache.storage_backends.file.page_reader import ListedObject
from unified_cache.storage_backends.protocol import StoredObject
from unified_cache.testing.storage_contract import label

LENGTHS = (100, 200, 300)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_and_goes_first_is_what_a_dict_in_order_of_use_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.file.index.SHELF_OBJECTS", 4)
    for name, value in {"RECORDS_MIN": 512, "HEADS_MIN": 16, "QUEUE_MIN": 8, "RECENT_MAX": 20, "VECTOR_MIN": 6}.items():
        monkeypatch.setattr(f"unified_cache.storage_backends.directory.records.{name}", value)
    choice = random.Random(seed)
    index, model = FileIndex(int), StoreLru(None)
    labels = [label(number, pool) for number in range(60) for pool in ("kv", "state")]
    for _ in range(400):
        batch = choice.sample(labels, choice.choice((1, 3, 20)))
        match choice.choice(("add", "touch", "forget", "evict")):
            case "add":
                index.take_out(index.find_all(batch))
                index.add([StoredObject(each, choice.choice(LENGTHS)) for each in batch])
                for each, found in reversed(list(zip(batch, index.find_all(batch), strict=True))):
                    assert found is not None
                    model.add(each, found.segment.object_bytes)
            case "touch":
                model.touch(reversed(batch))
                index.touch(batch)
            case "forget":
                gone = {each.label: each.object_bytes for each in index.take_out(index.find_all(batch * 2))}
                assert gone == {each: size for each in batch if (size := model.forget(each))}
            case _:
                wanted_bytes, count_min = choice.choice((0, 150, 1000)), choice.choice((0, 2))
                expected, expected_short = model.least_recent(wanted_bytes, set(batch), count_min)
                chosen, short_bytes = index.least_recent(wanted_bytes, index.find_all(batch), count_min)
                assert (index.take_out(chosen), short_bytes) == (expected, expected_short)
                for victim in expected:
                    model.forget(victim.label)
        assert [found is not None for found in index.find_all(labels)] == [each in model for each in labels]
        assert (len(index), index.bytes_used) == (len(model), model.bytes_used)
        assert set(index.labels()) == {each for each in labels if each in model}


def test_an_object_takes_less_than_64_bytes_of_memory() -> None:
    def memory_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    count, identity = 1 << 17, os.urandom(32)
    index = FileIndex(int)
    index.add_listed([ListedObject(Label(identity, os.urandom(32), "kv"), "", 4096, 1)])
    before_bytes = memory_bytes()
    for start in range(0, count, 256):
        index.add_listed([ListedObject(Label(identity, os.urandom(32), "kv"), "", 4096, start) for _ in range(256)])
    assert len(index) == count + 1
    assert 40 < (memory_bytes() - before_bytes) / count < 64
