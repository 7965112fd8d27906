"""The file store on its file system: faults, durability, listing."""

import errno
import os
import stat
import subprocess
import sys
from contextlib import closing, suppress
from itertools import islice, zip_longest
from pathlib import Path

import pytest

from tests.support.files import FILE_BYTES, FaultyDisk, bytes_in, held, hits, path_of, put, refuses, temps
from unified_cache.core.errors import InputError, StorageError
from unified_cache.storage_backends.file import page_reader, store
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import (
    OTHER_MODEL,
    blank_page,
    label,
    listing,
    sealed_page,
)

LIMITED_WRITER = """
import resource, sys
from unified_cache.core.errors import StorageFullError
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import blank_page, label, sealed_page

storage = FileStorage.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    storage.put([sealed_page(label(0)), sealed_page(label(1), 100_000)], Level.CACHED)
except StorageFullError as error:
    print(error)
assert storage.get([blank_page(label(0)), blank_page(label(1), 100_000)]) == [Answer.HIT, Answer.MISS]
assert storage.put([sealed_page(label(2))], Level.CACHED) == [Answer.STORED]
storage.close()
"""


# Faults


def few_inodes(root: Path, inodes_max: int) -> FaultyDisk:
    """Return the disk of a file system that takes so many files and directories."""

    def free_count() -> int:
        return inodes_max - len(list(root.rglob("*")))

    def check_room(path: str, flags: int = os.O_CREAT, *_mode: int, dir_fd: int | None = None) -> None:
        if flags & os.O_CREAT and free_count() <= 0 and not has_name(path, dir_fd):
            refuses(errno.ENOSPC)()

    def has_name(path: str, dir_fd: int | None) -> bool:
        with suppress(FileNotFoundError):
            os.stat(path, dir_fd=dir_fd)
            return True
        return False

    def fstatvfs(fd: int) -> os.statvfs_result:
        found = list(os.fstatvfs(fd))
        found[5:8] = [inodes_max, free_count(), free_count()]
        return os.statvfs_result(found)

    before = {"open": check_room, "mkdir": lambda path, _mode, *, dir_fd: check_room(path, dir_fd=dir_fd)}
    return FaultyDisk(before=before, instead={"fstatvfs": fstatvfs})


@pytest.mark.parametrize("bytes_max", [None, 1 << 30], ids=["unbounded", "capped"])
def test_a_file_system_without_inodes_loses_the_pages_that_were_used_least_recently(
    bytes_max: int | None, memory_path: Path
) -> None:
    root = memory_path / "store"
    disk = few_inodes(root, 300)
    with closing(FileStorage.open(root, bytes_max=bytes_max, disk=disk)) as storage:
        for number in range(0, 1000, 8):
            assert put(storage, range(number, number + 8), Level.DURABLE) == [True] * 8
        assert storage.counts.evicted_count >= 1000 - 300
        assert storage.bytes_used == bytes_in(root) >= 200 * FILE_BYTES
        assert set(range(800, 1000)) <= set(held(storage, 1000))
        other = sealed_page(label(0, model=OTHER_MODEL))
        assert storage.put([other], Level.DURABLE) == [Answer.STORED]
    with closing(FileStorage.open(root, bytes_max=bytes_max, disk=disk)) as storage:
        assert storage.get([blank_page(label(999)), blank_page(other.label)]) == [Answer.HIT] * 2


def test_a_limit_on_file_sizes_raises_storage_full_and_leaves_nothing_half_written(root: Path) -> None:
    command = [sys.executable, "-c", LIMITED_WRITER, str(root)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "File too large" in child.stdout
    assert str(path_of(root, label(1)).relative_to(root).name) in child.stdout
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
def test_a_fault_while_storing_raises_and_leaves_nothing_half_written(call: str, root: Path) -> None:
    disk = FaultyDisk(only=call)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, [0])
        count = len(disk.calls)
        disk.failing = range(count, count + 1)
        with pytest.raises(StorageError, match=r"Input/output error \(EIO\)") as raised:
            put(storage, [1], Level.DURABLE)
        assert not raised.value.retryable
        assert temps(root) == []
        assert storage.get([blank_page(label(1))]) == [Answer.MISS]
        assert storage.bytes_used == bytes_in(root)
        assert put(storage, [1], Level.DURABLE) == [True]


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_object_that_cannot_be_read_is_a_miss_stays_and_is_replaced_by_the_next_put(call: str, root: Path) -> None:
    disk = FaultyDisk(only=call, before={"preadv_cached": refuses(errno.EAGAIN)})
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, range(3))
        at = len(disk.calls) + 1
        disk.failing = range(at, at + 1)
        assert storage.get([blank_page(label(number)) for number in range(3)]) == [
            Answer.HIT,
            Answer.UNAVAILABLE,
            Answer.HIT,
        ]
        assert storage.exists([label(1)]) == [Answer.HIT]
        assert storage.get([blank_page(label(1))]) == [Answer.HIT]


@pytest.mark.parametrize(("level", "call"), [(Level.CACHED, "pread"), (Level.DURABLE, "preadv")])
def test_a_bad_block_does_not_block_a_put_of_its_page(level: Level, call: str, root: Path) -> None:
    disk = FaultyDisk(only=call)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, [1])
        before = path_of(root, label(1)).stat().st_ino
        disk.failing = range(len(disk.calls), 1 << 30)
        assert put(storage, [1], level) == [True]
        assert path_of(root, label(1)).stat().st_ino != before


# Durability


def sync_log() -> tuple[FaultyDisk, list[str]]:
    """Return a disk, and what is synced and renamed on it."""
    events: list[str] = []

    def note(fd: int) -> None:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        events.append("file" if is_file else str(Path(f"/proc/self/fd/{fd}").readlink()))

    return FaultyDisk(before={"fsync": note, "rename": lambda *_, **_fds: events.append("rename")}), events


def test_a_directory_that_another_process_made_again_is_synced_by_its_name_again(root: Path) -> None:
    disk, events = sync_log()
    with closing(FileStorage.open(root, disk=disk)) as storage, closing(FileStorage.open(root)) as other:
        put(storage, [1], Level.DURABLE)
        fan = path_of(root, label(1)).parent
        fan.parent.rename(root.parent / "removed")  # so that its inodes are not given again
        put(other, [1])
        events.clear()
        put(storage, [1], Level.DURABLE)
        assert events == ["file", str(fan), str(fan.parent), str(root)]


def test_a_process_that_remembers_few_directories_stores_in_all_of_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DIRECTORIES_KNOWN_MAX", 1)
    disk, events = sync_log()
    with closing(FileStorage.open(root, disk=disk)) as storage:
        assert put(storage, range(40), Level.DURABLE) == [True] * 40
        assert hits(storage, range(40)) == [True] * 40
    fans = {str(path_of(root, label(number)).parent) for number in range(40)}
    assert len(fans) > 1
    assert fans <= set(events)


# Listing


def test_a_long_scan_goes_on_from_its_cursor_in_order_of_names_and_passes_over_foreign_names(
    storage: FileStorage, root: Path
) -> None:
    labels = [label(number) for number in range(2500)]
    storage.put([PageIO(named, (memoryview(b"x"),)) for named in labels], Level.CACHED)
    fan = path_of(root, labels[0]).parent
    for name in ("README", "00" * 32 + ".KV", "g" * 64 + ".kv", fan.name + ".kv"):
        (fan / name).touch()
    (root / labels[0].identity.hex() / "zz").mkdir()
    found = list(listing(storage, labels[0].identity))
    assert [one.label for one in found] == sorted(labels)
    assert len(storage.scan(labels[0].identity).objects) == 1000
    for cursor in ("../x", "zz", "0"):
        with pytest.raises(InputError, match="a cursor is"):
            storage.scan(labels[0].identity, cursor)


def test_a_scan_lists_every_directory_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_reader, "NAMES_MAX", 7)
    disk = FaultyDisk(only="listdir")
    storage = FileStorage.open(root, disk=disk)
    labels = [label(number) for number in range(200)]
    storage.put([PageIO(named, (memoryview(b"x"),)) for named in labels], Level.CACHED)
    disk.calls.clear()
    assert [each.label for each in listing(storage, labels[0].identity)] == sorted(labels)
    assert len(disk.calls) == 1 + len({named.page_name[0] for named in labels})
    disk.calls.clear()
    ahead = listing(storage, labels[0].identity)
    found = list(islice(ahead, 50))
    beside = [(mine, theirs) for mine, theirs in zip_longest(listing(storage, labels[0].identity), ahead)]
    assert [mine for mine, _ in beside] == found + [theirs for _, theirs in beside if theirs is not None]
    assert len(disk.calls) == 2 * (1 + len({named.page_name[0] for named in labels}))
    first = storage.scan(labels[0].identity)
    storage.scan(labels[0].identity, first.cursor)
    # One that goes on with an older scan finds what comes then, too.
    again = storage.scan(labels[0].identity, first.cursor)
    assert [each.label for each in again.objects] == sorted(labels)[7:14]
    storage.close()
