"""The file store after a loss of power, on a disk that keeps only what was synced and any part of the rest."""

import random
from contextlib import closing
from pathlib import Path

from tests.budget import examples
from tests.file_fixture import FaultyDisk, chain, put, temps
from tests.file_power import Photograph, PowerDisk
from unified_cache.storage_backends.file import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    sealed_page,
)

PAGES = range(14)
STORE = "made/for/a/store"
"""Its name is not there before: what leads to it must survive too."""


def play(top: Path, disk: PowerDisk, acknowledged: set[int], bytes_max: int | None) -> None:
    """Store pages at both levels, more than once, remove some, come back, and keep book of what is promised."""
    for numbers in (range(4), range(4, 9), range(6, 14)):
        with closing(FileStorage.open(top / STORE, bytes_max=bytes_max, disk=disk)) as storage:
            if numbers.start:  # What is put before must not need it to survive.
                storage.register(manifest_of(MODEL, LAYOUT), {})
            for level in (Level.CACHED, Level.DURABLE):
                # Half of what becomes durable was there before, at the lower level.
                part = numbers[: len(numbers) // 2] if level is Level.CACHED else numbers
                stored = storage.put(chain(part, sealed_page), level)
                if level is Level.DURABLE and bytes_max is None:
                    acknowledged.update(number for number, is_there in zip(part, stored, strict=True) if is_there)
            acknowledged.discard(numbers[1])
            storage.remove([label(numbers[1])])
            storage.get([blank_page(label(number)) for number in numbers])


def check_after(photograph: Photograph, top: Path, choice: random.Random) -> int:
    """Lose power at a moment and start again. Returns how many pages were there."""
    photograph.develop(top, choice)
    with closing(VerifiedStorage(store := FileStorage.open(top / STORE, disk=FaultyDisk()))) as storage:
        assert temps(top / STORE) == []
        found = [blank_page(label(number)) for number in PAGES]
        hits = storage.get(found)
        assert [number for number in sorted(photograph.acknowledged) if not hits[number]] == []
        for page, hit in zip(found, hits, strict=True):
            assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label))
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert put(store, PAGES, Level.DURABLE) == [True] * len(PAGES)
        assert storage.get(found) == [True] * len(PAGES)
    return sum(hits)


def photographs_of(top: Path, stride: int, bytes_max: int | None) -> list[Photograph]:
    top.mkdir()
    acknowledged: set[int] = set()
    with PowerDisk.over(top, stride, acknowledged) as disk:
        play(top, disk, acknowledged, bytes_max)
        return disk.photographs


def test_power_lost_before_any_call_loses_no_durable_page_and_leaves_no_wrong_one(tmp_path: Path) -> None:
    choice = random.Random(3)
    photographs = photographs_of(tmp_path / "before", examples(4, 1), None)
    there_count = 0
    for number, photograph in enumerate(photographs):
        for again in range(examples(2, 20)):
            there_count += check_after(photograph, tmp_path / f"{number}-{again}", choice)
    assert len(photographs) >= 100
    assert there_count >= len(photographs)
    assert max(len(photograph.acknowledged) for photograph in photographs) >= len(PAGES) - 4


def test_power_lost_while_pages_are_evicted_leaves_no_wrong_one(tmp_path: Path) -> None:
    choice = random.Random(5)
    photographs = photographs_of(tmp_path / "before", examples(8, 1), 5 * PAGE_BYTES)
    for number, photograph in enumerate(photographs):
        check_after(photograph, tmp_path / f"{number}", choice)
