"""DURABLE over pages that are there: they are verified, and what a failed sync has missed is written elsewhere."""

import errno
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.budget import LONG
from tests.support.file_power import Photograph, PowerDisk
from tests.support.files import FaultyDisk, chain, path_of, put
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
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


def damage(kind: StoreKind, root: Path, number: int, offset: int) -> None:
    """Change a byte of a page on the disk."""
    if kind is StoreKind.FILE:
        path, start = path_of(root, label(number)), 0
    else:
        (path,) = root.glob("?" * 64 + "/*.pack")
        start = path.read_bytes().index(bytes_of(sealed_page(label(number))))
    with path.open("r+b") as file:
        file.seek(start + offset)
        (byte,) = file.read(1)
        file.seek(start + offset)
        file.write(bytes([byte ^ 1]))


def check_hits(storage: DirectoryStorage, numbers: Sequence[int]) -> None:
    """Check that pages are there, byte by byte."""
    found = [blank_page(label(number)) for number in numbers]
    assert storage.get(found) == [Answer.HIT] * len(found)
    assert [bytes_of(page) for page in found] == [bytes_of(sealed_page(page.label)) for page in found]


@pytest.mark.parametrize("offset", [5, HEADER_BYTES - 1, HEADER_BYTES, PAGE_BYTES - 1])
def test_a_durable_put_of_a_page_whose_bytes_are_not_there_writes_them(
    offset: int, kind: StoreKind, root: Path
) -> None:
    with closing(kind.open(root)) as storage:
        put(storage, PAGES)
        damage(kind, root, 2, offset)
        assert put(storage, PAGES, Level.DURABLE) == [True] * 6
        check_hits(storage, PAGES)
        assert storage.bytes_used == 6 * PAGE_BYTES
    with closing(kind.open(root)) as storage:
        check_hits(storage, PAGES)
        assert storage.bytes_used == 6 * PAGE_BYTES
    kind.check_room(root, 6 * PAGE_BYTES)


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
        open=64,
        utime=64,
        fsync=80,
        close=64,
        rename=64,
    ),
    StoreKind.PACKED: Counter(fstatvfs=1, pwritev=65, fdatasync=2, fstat=2),
}
"""Of a durable put of 64 pages that are not there, into directories that are open: each file written, synced and named,
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


def test_a_page_that_cannot_be_written_anew_is_not_said_to_be_durable_and_stays(kind: StoreKind, root: Path) -> None:
    disk = FaultyDisk(only="fdatasync" if kind is StoreKind.PACKED else "fsync")
    with closing(kind.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        disk.failing = range(len(disk.calls), NEVER)
        for _ in range(3):
            with pytest.raises(StorageError):
                put(storage, PAGES, Level.DURABLE)
            check_hits(storage, PAGES)
        assert storage.bytes_used == 6 * PAGE_BYTES
        disk.failing = range(0)
        assert all(put(storage, PAGES, Level.DURABLE))
        check_hits(storage, PAGES)
    kind.check_room(root, 6 * PAGE_BYTES)


def test_no_loss_of_power_brings_back_a_page_that_was_cleared(kind: StoreKind, tmp_path: Path) -> None:
    top = tmp_path / "before"
    top.mkdir()
    with PowerDisk.over(top, NEVER, set()) as disk, closing(kind.open(top / STORE, disk=disk)) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        others = [sealed_page(label(number, model=OTHER_MODEL)) for number in PAGES]
        storage.put([*chain(PAGES, sealed_page), *others], Level.DURABLE)
        assert storage.clear(label(0).identity) == 6
        photograph = disk.photograph()
    for number, choice in enumerate((Pessimist(), random.Random(1), random.Random(2))):
        photograph.develop(tmp_path / f"{number}", choice)
        with closing(kind.open(tmp_path / f"{number}" / STORE, disk=FaultyDisk())) as storage:
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
    number: int, restarts: bool, kind: StoreKind, tmp_path: Path
) -> None:
    is_over, failing = False, SYNC_ERRORS.index(number)
    while not is_over:
        top = tmp_path / f"before-{failing}"
        top.mkdir()
        with PowerDisk.over(top, NEVER, set()) as disk:
            disk.sync_errno = number
            photograph = play(kind, top, disk, failing, restarts=restarts)
            is_over = disk.syncs_count <= disk.failing_sync
        photograph.develop(tmp_path / f"after-{failing}", Pessimist())
        with closing(kind.open(tmp_path / f"after-{failing}" / STORE, disk=FaultyDisk())) as storage:
            check_hits(storage, range(9))
        failing += 1 if LONG else len(SYNC_ERRORS)
    assert failing > 4
