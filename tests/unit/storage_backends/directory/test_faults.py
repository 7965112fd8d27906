"""Stores in a directory on a disk on which the n-th call goes wrong, for every n and every way it can go wrong."""

from pathlib import Path

import pytest

from tests.support.budget import LONG
from tests.support.file_history import StoreHistory, check_service, prepare
from tests.support.files import DiskFault, FaultyDisk, descriptors
from tests.support.store_kinds import StoreKind
from unified_cache.testing.storage_contract import PAGE_BYTES

STRIDE = 1 if LONG else 23
"""Of the calls of a history each one fails in the long mode, and every twenty-third in the short one, others for each
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


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("bytes_max", [None, 6 * PAGE_BYTES], ids=["unbounded", "capped"])
@pytest.mark.parametrize("fault", DiskFault)
def test_whichever_call_goes_wrong_no_byte_is_wrong_and_nothing_durable_is_lost_and_service_goes_on(
    fault: DiskFault, bytes_max: int | None, for_good: bool, kind: StoreKind, tmp_path: Path
) -> None:
    calls = calls_of(kind, tmp_path / "right", bytes_max)
    before = descriptors(tmp_path)
    fired_count = raised_count = 0
    first = (list(DiskFault).index(fault) + (5 if for_good else 0) + (3 if bytes_max else 0)) % STRIDE
    for number in range(first, len(calls), STRIDE):
        root = tmp_path / str(number)
        prepare(kind, root)
        disk = FaultyDisk(fault, range(number, 1 << 30 if for_good else number + 1))
        history = StoreHistory(kind, root, disk, bytes_max)
        history.play()
        fired_count += len(disk.calls) > number
        raised_count += bool(history.faults)
        check_service(root, history)
        assert descriptors(tmp_path) == before
    assert fired_count >= len(calls) // STRIDE - 1
    assert fault is DiskFault.SHORT or raised_count > fired_count // RAISED_FRACTION[kind]


RAISED_FRACTION = {StoreKind.FILE: 4, StoreKind.PACKED: 8}
"""Of the faults so many are told to the caller at least; of the packed store's calls, more are of its clean-up."""

CALLS = {"open", "close", "flock", "fstat", "fstatvfs", "listdir", "read", "fsync"}
CALLS |= {"unlink", "mkdir", "rmdir", "makedirs"}
CALLS_OF = {
    StoreKind.FILE: CALLS | {"access", "stat", "pread", "preadv", "pwritev", "write", "utime", "rename", "rmtree"},
    StoreKind.PACKED: CALLS | {"preadv", "pwritev", "pwrite", "fdatasync", "has_data"},
}
"""The manifest and the marker were written before the history begins; its pages are too small to leave holes."""


@pytest.mark.parametrize("kind", StoreKind)
def test_the_history_makes_every_call_that_the_store_can_make(kind: StoreKind, tmp_path: Path) -> None:
    assert set(calls_of(kind, tmp_path / "capped", 6 * PAGE_BYTES)) >= CALLS_OF[kind]
