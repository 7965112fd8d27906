"""Stores in a directory after a loss of power, on a disk that keeps only what was synced and any part of the rest."""

import random
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.budget import examples
from tests.support.file_power import Photograph, PowerDisk
from tests.support.files import FaultyDisk, chain, put, temps
from tests.support.store_kinds import StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
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
PHOTOGRAPHS_MIN = {StoreKind.FILE: 100, StoreKind.PACKED: 50}
"""A packed store makes half as many calls."""
NEVER = 1 << 30
"""Between two photographs."""
STORE = "made/for/a/store"
"""Its name is not there before: what leads to it must survive too."""


def play(kind: StoreKind, top: Path, disk: PowerDisk, acknowledged: set[int], bytes_max: int | None) -> None:
    """Store pages at both levels, more than once, remove some, come back, and keep book of what is promised."""
    for numbers in (range(4), range(4, 9), range(6, 14)):
        disk.is_dead = False
        # A process that dies here has an error at every call from then on.
        with suppress(StorageError), closing(kind.open(top / STORE, bytes_max=bytes_max, disk=disk)) as storage:
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


def check_after(kind: StoreKind, photograph: Photograph, top: Path, choice: random.Random) -> int:
    """Lose power at a moment and start again. Returns how many pages were there."""
    photograph.develop(top, choice)
    with closing(VerifiedStorage(store := kind.open(top / STORE, disk=FaultyDisk()))) as storage:
        assert temps(top / STORE) == []
        found = [blank_page(label(number)) for number in PAGES]
        hits = storage.get(found)
        assert [number for number in sorted(photograph.acknowledged) if not hits[number]] == []
        for page, hit in zip(found, hits, strict=True):
            assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label))
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert put(store, PAGES, Level.DURABLE) == [True] * len(PAGES)
        assert storage.get(found) == [Answer.HIT] * len(PAGES)
    return hits.count(Answer.HIT)


def photographs_of(kind: StoreKind, top: Path, stride: int, bytes_max: int | None) -> list[Photograph]:
    top.mkdir()
    acknowledged: set[int] = set()
    with PowerDisk.over(top, stride, acknowledged) as disk:
        play(kind, top, disk, acknowledged, bytes_max)
        return disk.photographs


@pytest.mark.parametrize("kind", StoreKind)
def test_power_lost_before_any_call_loses_no_durable_page_and_leaves_no_wrong_one(
    kind: StoreKind, tmp_path: Path
) -> None:
    choice = random.Random(3)
    photographs = photographs_of(kind, tmp_path / "before", examples(4, 1), None)
    there_count = 0
    for number, photograph in enumerate(photographs):
        for again in range(examples(2, 20)):
            there_count += check_after(kind, photograph, tmp_path / f"{number}-{again}", choice)
    assert len(photographs) >= PHOTOGRAPHS_MIN[kind]
    assert there_count >= len(photographs)
    assert max(len(photograph.acknowledged) for photograph in photographs) >= len(PAGES) - 4


@pytest.mark.parametrize("kind", StoreKind)
def test_power_lost_while_pages_are_evicted_leaves_no_wrong_one(kind: StoreKind, tmp_path: Path) -> None:
    choice = random.Random(5)
    photographs = photographs_of(kind, tmp_path / "before", examples(8, 1), 5 * PAGE_BYTES)
    for number, photograph in enumerate(photographs):
        check_after(kind, photograph, tmp_path / f"{number}", choice)


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("is_new", [False, True], ids=["known", "new"])
def test_power_lost_after_a_process_died_at_any_call_loses_no_page_that_was_durable_before_or_after(
    is_new: bool, kind: StoreKind, tmp_path: Path
) -> None:
    choice = random.Random(9)
    died_count = 0
    is_over = False
    while not is_over and died_count < examples(30, NEVER):
        top = tmp_path / f"before-{died_count}"
        top.mkdir()
        acknowledged: set[int] = set()
        with PowerDisk.over(top, NEVER, acknowledged) as disk:
            if not is_new:
                with closing(kind.open(top / STORE, disk=disk)) as storage:
                    storage.register(manifest_of(MODEL, LAYOUT), {})
            disk.last_call = disk.calls_count + died_count * examples(2, 1) + 1
            play(kind, top, disk, acknowledged, None)
            photograph = disk.photograph()
            is_over = disk.calls_count < disk.last_call
        for again in range(examples(1, 20)):
            check_after(kind, photograph, tmp_path / f"{died_count}-{again}", choice)
        died_count += 1
    assert died_count >= 30
