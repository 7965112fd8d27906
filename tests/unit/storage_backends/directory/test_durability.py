"""DURABLE over pages that are there: they are verified, and what a failed sync has missed is written elsewhere."""

import errno
import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import get_ident
from typing import TypeVar

import pytest

from tests.support.budget import LONG, examples
from tests.support.file_history import StoreHistory, check_service, prepare
from tests.support.file_power import Photograph, PowerDisk
from tests.support.files import DiskFault, FaultyDisk, chain, descriptors, flip, hits, path_of, put, temps
from tests.support.store_kinds import StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.packed.segments import IDLE_BYTES_MAX
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    OTHER_MODEL,
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    sealed_page,
)

PAGES = range(6)
STORE = "store"
SYNC_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
NEVER = 1 << 30
"""Between two photographs."""

_Chosen = TypeVar("_Chosen")


class Pessimist(random.Random):
    """Chooses the first of all: of what a loss of power may leave, what was synced and no more."""

    def choice(self, seq: Sequence[_Chosen]) -> _Chosen:  # type: ignore[override]
        """Return the first one."""
        return seq[0]


@pytest.fixture
def root(memory_path: Path) -> Path:
    return memory_path / "store"


def damage(kind: StoreKind, root: Path, number: int, offset: int) -> None:
    """Change a byte of a page on the disk."""
    if kind is StoreKind.FILE:
        path, start = path_of(root, label(number)), 0
    else:
        (path,) = root.glob("?" * 64 + "/*.pack")
        start = path.read_bytes().index(bytes_of(sealed_page(label(number))))
    flip(path, 8 * (start + offset))


@pytest.mark.parametrize("offset", [5, HEADER_BYTES - 1, HEADER_BYTES, PAGE_BYTES - 1])
def test_a_durable_put_of_a_page_whose_bytes_are_not_there_writes_them(
    offset: int, kind: StoreKind, root: Path
) -> None:
    with closing(kind.open(root)) as storage:
        put(storage, PAGES)
        damage(kind, root, 2, offset)
        assert put(storage, PAGES, Level.DURABLE) == [True] * 6
        assert all(hits(storage, PAGES))
        assert storage.bytes_used == 6 * kind.taken_bytes()
    with closing(kind.open(root)) as storage:
        assert all(hits(storage, PAGES))
        assert storage.bytes_used == 6 * kind.taken_bytes()
    kind.check_room(root, 6 * kind.taken_bytes())


def test_a_durable_put_reads_a_page_that_is_there_once_and_writes_no_byte_of_it(kind: StoreKind, root: Path) -> None:
    disk = FaultyDisk()
    with closing(kind.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        put(storage, PAGES, Level.DURABLE)
        disk.calls.clear()
        pages = chain(PAGES, sealed_page)
        assert all(storage.put(pages, Level.DURABLE))
        assert Counter(disk.calls)["preadv"] == 6
        assert not {"writev", "pwritev", "rename"} & set(disk.calls)


CALLS_OF_NEW_PAGES = {
    StoreKind.FILE: Counter(
        access=64,
        fstatvfs=1,
        pwritev=64,
        open=80,
        fstat=16,
        utime=64,
        fsync=80,
        close=80,
        rename=64,
    ),
    StoreKind.PACKED: Counter(fstatvfs=1, pwritev=65, fdatasync=2, fstat=2),
}
"""Of a durable put of 64 pages that are not there, into directories that are: each file written, synced and named,
sixteen directories synced."""


def test_a_durable_put_of_pages_that_are_not_there_makes_no_call_for_those_that_may_be(
    kind: StoreKind, root: Path
) -> None:
    disk = FaultyDisk()
    with closing(kind.open(root, disk=disk)) as storage:
        put(storage, range(64), Level.DURABLE)
        disk.calls.clear()
        assert all(put(storage, range(64, 128), Level.DURABLE))
        assert not Counter(disk.calls) - CALLS_OF_NEW_PAGES[kind]


def test_a_page_that_cannot_be_written_again_is_not_said_to_be_durable_and_stays(kind: StoreKind, root: Path) -> None:
    disk = FaultyDisk(only="fdatasync" if kind is StoreKind.PACKED else "fsync")
    with closing(kind.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        disk.failing = range(len(disk.calls), NEVER)
        for _ in range(3):
            with pytest.raises(StorageError):
                put(storage, PAGES, Level.DURABLE)
            assert all(hits(storage, PAGES))
        assert storage.bytes_used == 6 * kind.taken_bytes()
        disk.failing = range(0)
        assert all(put(storage, PAGES, Level.DURABLE))
        assert all(hits(storage, PAGES))
    kind.check_room(root, 6 * kind.taken_bytes())


@pytest.mark.parametrize("idle_bytes_max", [IDLE_BYTES_MAX, 0])
def test_no_loss_of_power_brings_back_a_page_that_was_cleared(
    idle_bytes_max: int, kind: StoreKind, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", idle_bytes_max)
    top = memory_path / "before"
    top.mkdir()
    with PowerDisk.over(top, NEVER, set()) as disk, closing(kind.open(top / STORE, disk=disk)) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        others = [sealed_page(label(number, model=OTHER_MODEL)) for number in PAGES]
        storage.put([*chain(PAGES, sealed_page), *others], Level.DURABLE)
        assert storage.clear(label(0).identity) == 6
        photograph = disk.photograph()
    for number, choice in enumerate((Pessimist(), random.Random(1), random.Random(2))):
        photograph.develop(memory_path / f"{number}", choice)
        with closing(kind.open(memory_path / f"{number}" / STORE, disk=FaultyDisk())) as storage:
            assert storage.get([blank_page(label(number)) for number in PAGES]) == [Answer.MISS] * 6
            assert storage.get([blank_page(page.label) for page in others]) == [Answer.HIT] * 6


def play(kind: StoreKind, top: Path, disk: PowerDisk, failing: int, *, restarts: bool) -> Photograph:
    """Make pages durable that were there, until the store says they are; the power goes when it has."""
    storage = kind.open(top / STORE, disk=disk)
    storage.register(manifest_of(MODEL, LAYOUT), {})
    disk.failing_sync = disk.syncs_count + failing
    storage.put(chain(PAGES, sealed_page), Level.CACHED)
    for numbers in (range(8, 9), PAGES, range(9)):
        stored: list[bool] = []
        while not all(stored) or not stored:
            with suppress(StorageError):
                stored = put(storage, numbers, Level.DURABLE)
            if restarts:
                storage.close()
                storage = kind.open(top / STORE, disk=disk)
    photograph = disk.photograph()
    storage.close()
    return photograph


@pytest.mark.parametrize("restarts", [False, True], ids=["open", "reopened"])
@pytest.mark.parametrize("number", SYNC_ERRORS, ids=errno.errorcode.get)
def test_what_a_failed_sync_has_missed_is_written_elsewhere_before_it_is_said_to_be_durable(
    number: int, restarts: bool, kind: StoreKind, memory_path: Path
) -> None:
    is_over, failing = False, SYNC_ERRORS.index(number)
    while not is_over:
        top = memory_path / f"before-{failing}"
        top.mkdir()
        with PowerDisk.over(top, NEVER, set()) as disk:
            disk.sync_errno = number
            photograph = play(kind, top, disk, failing, restarts=restarts)
            is_over = disk.syncs_count <= disk.failing_sync
        photograph.develop(memory_path / f"after-{failing}", Pessimist())
        with closing(kind.open(memory_path / f"after-{failing}" / STORE, disk=FaultyDisk())) as storage:
            assert all(hits(storage, range(9)))
        failing += 1 if LONG else len(SYNC_ERRORS)
    assert failing > 4


# A loss of power at any moment


POWER_PAGES = range(14)
PHOTOGRAPHS_MIN = {StoreKind.FILE: 100, StoreKind.PACKED: 50}
"""A packed store makes half as many calls."""
MADE_STORE = "made/for/a/store"
"""Its name is not there before: what leads to it must survive too."""


def work(kind: StoreKind, top: Path, disk: PowerDisk, acknowledged: set[int], bytes_max: int | None) -> None:
    """Store pages at both levels, more than once, remove some, come back, and keep book of what is promised."""
    for numbers in (range(4), range(4, 9), range(6, 14)):
        disk.is_dead = False
        # A process that dies here has an error at every call from then on.
        with suppress(StorageError), closing(kind.open(top / MADE_STORE, bytes_max=bytes_max, disk=disk)) as storage:
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
    with closing(VerifiedStorage(store := kind.open(top / MADE_STORE, disk=FaultyDisk()))) as storage:
        assert temps(top / MADE_STORE) == []
        found = [blank_page(label(number)) for number in POWER_PAGES]
        hits = storage.get(found)
        assert [number for number in sorted(photograph.acknowledged) if not hits[number]] == []
        for page, hit in zip(found, hits, strict=True):
            assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label))
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert put(store, POWER_PAGES, Level.DURABLE) == [True] * len(POWER_PAGES)
        assert storage.get(found) == [Answer.HIT] * len(POWER_PAGES)
    return hits.count(Answer.HIT)


def photographs_of(kind: StoreKind, top: Path, stride: int, bytes_max: int | None) -> list[Photograph]:
    top.mkdir()
    acknowledged: set[int] = set()
    with PowerDisk.over(top, stride, acknowledged) as disk:
        work(kind, top, disk, acknowledged, bytes_max)
        return disk.photographs


def test_power_lost_before_any_call_loses_no_durable_page_and_leaves_no_wrong_one(
    kind: StoreKind, memory_path: Path
) -> None:
    choice = random.Random(3)
    photographs = photographs_of(kind, memory_path / "before", examples(4, 1), None)
    there_count = 0
    for number, photograph in enumerate(photographs):
        for again in range(examples(2, 20)):
            there_count += check_after(kind, photograph, memory_path / f"{number}-{again}", choice)
    assert len(photographs) >= PHOTOGRAPHS_MIN[kind]
    assert there_count >= len(photographs)
    assert max(len(photograph.acknowledged) for photograph in photographs) >= len(POWER_PAGES) - 4


def test_power_lost_while_pages_are_evicted_leaves_no_wrong_one(kind: StoreKind, memory_path: Path) -> None:
    choice = random.Random(5)
    photographs = photographs_of(kind, memory_path / "before", examples(8, 1), 5 * kind.taken_bytes())
    for number, photograph in enumerate(photographs):
        check_after(kind, photograph, memory_path / f"{number}", choice)


@pytest.mark.parametrize("is_new", [False, True], ids=["known", "new"])
def test_power_lost_after_a_process_died_at_any_call_loses_no_page_that_was_durable_before_or_after(
    is_new: bool, kind: StoreKind, memory_path: Path
) -> None:
    choice = random.Random(9)
    died_count = 0
    is_over = False
    while not is_over and died_count < examples(30, NEVER):
        top = memory_path / f"before-{died_count}"
        top.mkdir()
        acknowledged: set[int] = set()
        with PowerDisk.over(top, NEVER, acknowledged) as disk:
            if not is_new:
                with closing(kind.open(top / MADE_STORE, disk=disk)) as storage:
                    storage.register(manifest_of(MODEL, LAYOUT), {})
            disk.last_call = disk.calls_count + died_count * examples(2, 1) + 1
            work(kind, top, disk, acknowledged, None)
            photograph = disk.photograph()
            is_over = disk.calls_count < disk.last_call
        for again in range(examples(1, 20)):
            check_after(kind, photograph, memory_path / f"{died_count}-{again}", choice)
        died_count += 1
    assert died_count >= 30


# The n-th call on the disk goes wrong, for every n and every way it can go wrong


STRIDE = 1 if LONG else 19
"""Of the calls of a history each one fails in the long mode, and every nineteenth in the short one, others for each
way."""


def calls_of(kind: StoreKind, root: Path, bytes_max: int | None) -> list[str]:
    """Play the history without a fault and return its calls."""
    prepare(kind, root)
    disk = FaultyDisk()
    history = StoreHistory(kind, root, disk, bytes_max)
    history.play()
    assert history.faults == []
    check_service(root, history)
    return disk.calls


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("is_capped", [False, True], ids=["unbounded", "capped"])
@pytest.mark.parametrize("fault", DiskFault)
def test_whichever_call_goes_wrong_no_byte_is_wrong_and_nothing_durable_is_lost_and_service_goes_on(
    fault: DiskFault, is_capped: bool, for_good: bool, kind: StoreKind, memory_path: Path
) -> None:
    bytes_max = 6 * kind.taken_bytes() if is_capped else None
    calls = calls_of(kind, memory_path / "right", bytes_max)
    before = descriptors(memory_path)
    fired_count = raised_count = 0
    first = (list(DiskFault).index(fault) + (5 if for_good else 0) + (3 if bytes_max else 0)) % STRIDE
    for number in range(first, len(calls), STRIDE):
        root = memory_path / str(number)
        prepare(kind, root)
        disk = FaultyDisk(fault, range(number, 1 << 30 if for_good else number + 1))
        history = StoreHistory(kind, root, disk, bytes_max, is_full=fault is DiskFault.ENOSPC)
        history.play()
        fired_count += len(disk.calls) > number
        raised_count += bool(history.faults)
        check_service(root, history)
        assert descriptors(memory_path) == before
    assert fired_count >= len(calls) // STRIDE - 1
    is_mended = fault in (DiskFault.SHORT, DiskFault.ENOSPC)
    assert is_mended or raised_count > fired_count // RAISED_FRACTION[kind]


RAISED_FRACTION = {StoreKind.FILE: 4, StoreKind.PACKED: 8}
"""Of the faults so many are told to the caller at least; of the packed store's calls, more are of its clean-up."""

CALLS = {"open", "close", "flock", "fstat", "fstatvfs", "listdir", "read", "fsync"}
CALLS |= {"unlink", "mkdir", "rmdir", "makedirs"}
CALLS_OF = {
    StoreKind.FILE: CALLS | {"access", "stat", "pread", "preadv", "pwritev", "write", "utime", "rename", "rmtree"},
    StoreKind.PACKED: CALLS | {"preadv", "pwritev", "pwrite", "fdatasync", "has_data"},
}
"""The manifest and the marker were written before the history begins; its pages are too small to leave holes."""


def test_the_history_makes_every_call_that_the_store_can_make(kind: StoreKind, memory_path: Path) -> None:
    assert set(calls_of(kind, memory_path / "capped", 6 * kind.taken_bytes())) >= CALLS_OF[kind]


# Syncs of a batch


BATCH_PAGES = 20


class SyncThreads(Disk):
    """A disk that notes by which threads it was asked to sync."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        self.threads.append(get_ident())
        os.fsync(fd)


def test_files_of_a_durable_batch_are_synced_together_and_a_single_one_by_its_caller(tmp_path: Path) -> None:
    disk = SyncThreads()
    with closing(FileStorage.open(tmp_path / "store", disk=disk)) as storage:
        disk.threads.clear()
        assert all(put(storage, range(BATCH_PAGES), Level.DURABLE))
        assert len(disk.threads) >= BATCH_PAGES
        assert sum(thread != get_ident() for thread in disk.threads) >= BATCH_PAGES // 2
        disk.threads.clear()
        assert all(put(storage, [BATCH_PAGES], Level.DURABLE))
        assert {*disk.threads} == {get_ident()}
