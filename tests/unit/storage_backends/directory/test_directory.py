"""The file store: faults of the file system, durability, who may use the directory, listing, closing."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import DiskFault, FaultyDisk, bytes_in, descriptors, path_of, put, temps
from unified_cache.errors import ClosedError, ConfigError, InputError, StorageError, StorageFullError
from unified_cache.pool import Identity
from unified_cache.seal import Label
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.file.store import DIRECTORIES_OPEN_MAX, FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    blank_page,
    bytes_of,
    label,
    listing,
    sealed_page,
)

LIMITED_WRITER = """
import resource, sys
from unified_cache.errors import StorageFullError
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(root: Path) -> Iterator[FileStorage]:
    storage = FileStorage.open(root)
    yield storage
    storage.close()


# Faults


def test_a_full_file_system_raises_storage_full_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        with closing(FileStorage.open(disk, free_bytes_min=0)) as storage:
            with pytest.raises(StorageFullError, match=f"{disk}.*No space left on device") as raised:
                storage.put([sealed_page(label(number), 300_000) for number in range(4)], Level.CACHED)
            assert raised.value.retryable
            assert temps(disk) == []
            found = [blank_page(label(number), 300_000) for number in range(4)]
            assert storage.get(found) == [Answer.HIT, Answer.HIT, Answer.HIT, Answer.MISS]
            storage.remove([label(0)])
            assert storage.put([sealed_page(label(3), 300_000)], Level.DURABLE) == [Answer.STORED]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_limit_on_file_sizes_raises_storage_full_and_leaves_nothing_half_written(root: Path) -> None:
    command = [sys.executable, "-c", LIMITED_WRITER, str(root)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "File too large" in child.stdout
    assert str(path_of(root, label(1)).relative_to(root).name) in child.stdout
    assert list((root / "tmp").iterdir()) == []


def test_the_free_space_floor_declines_a_put_before_the_file_system_is_full(root: Path) -> None:
    status = os.statvfs(root.parent)
    free_bytes = status.f_bavail * status.f_frsize
    with closing(FileStorage.open(root, free_bytes_min=free_bytes * 2)) as storage:
        assert put(storage, range(3)) == [False] * 3
        assert storage.counts.declined_count == 3
        assert storage.bytes_used == 0
    with closing(FileStorage.open(root, free_bytes_min=free_bytes // 2)) as storage:
        assert put(storage, range(3)) == [True] * 3


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_fault_while_storing_raises_and_leaves_nothing_half_written(call: str, root: Path) -> None:
    disk = FaultyDisk(only=call)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, [0])
        # Of the writes, the first one is the journal's.
        count = len(disk.calls) + (call == "write")
        disk.failing = range(count, count + 1)
        with pytest.raises(StorageError, match=r"Input/output error \(EIO\)") as raised:
            put(storage, [1], Level.DURABLE)
        assert not raised.value.retryable
        assert temps(root) == []
        assert storage.get([blank_page(label(1))]) == [Answer.MISS]
        assert storage.bytes_used == bytes_in(root)
        assert put(storage, [1], Level.DURABLE) == [True]


@pytest.mark.parametrize("call", ["open", "readv"])
def test_an_object_that_cannot_be_read_is_a_miss_stays_and_is_replaced_by_the_next_put(call: str, root: Path) -> None:
    disk = FaultyDisk(only=call)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, range(3))
        at = len(disk.calls) + 1
        disk.failing = range(at, at + 1)
        assert storage.get([blank_page(label(number)) for number in range(3)]) == [
            Answer.HIT,
            Answer.UNAVAILABLE,
            Answer.HIT,
        ]
        assert storage.counts.unreadable_count == 1
        assert storage.exists([label(1)]) == [Answer.HIT]
        assert storage.get([blank_page(label(1))]) == [Answer.HIT]


def test_a_bad_block_does_not_block_a_put_of_its_page(root: Path) -> None:
    disk = FaultyDisk(only="pread")
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, [1])
        before = path_of(root, label(1)).stat().st_ino
        disk.failing = range(len(disk.calls), 1 << 30)
        assert put(storage, [1], Level.DURABLE) == [True]
        assert path_of(root, label(1)).stat().st_ino != before


def test_short_reads_and_writes_are_carried_on(root: Path) -> None:
    for call in ("write", "writev", "readv"):
        disk = FaultyDisk(DiskFault.SHORT, only=call)
        with closing(FileStorage.open(root, disk=disk)) as storage:
            for number, cuts in enumerate([(), (50, 60, 900)]):
                page = sealed_page(label(number), cuts=cuts)
                found = blank_page(label(number), cuts=cuts)
                disk.failing = range(1 << 30)
                assert storage.put([page], Level.CACHED) == [Answer.STORED]
                assert storage.get([found]) == [Answer.HIT]
                disk.failing = range(0)
                assert bytes_of(found) == bytes_of(page)
            storage.remove([label(0), label(1)])


def test_a_page_may_lie_in_more_buffers_than_one_system_call_takes(storage: FileStorage) -> None:
    cuts = range(1, 3000)
    page = sealed_page(label(1), 3000, tuple(cuts))
    found = blank_page(label(1), 3000, tuple(cuts))
    assert storage.put([page], Level.CACHED) == [Answer.STORED]
    assert storage.get([found]) == [Answer.HIT]
    assert bytes_of(found) == bytes_of(page)


# Durability


class SyncLog(Disk):
    """Notes what is synced and renamed."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self.events.append("file" if regular else str(Path(f"/proc/self/fd/{fd}").readlink()))
        os.fsync(fd)

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:  # type: ignore[override]
        self.events.append("rename")
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def test_durable_syncs_the_file_before_its_name_and_every_directory_before_the_answer(root: Path) -> None:
    disk = SyncLog()
    with closing(FileStorage.open(root, disk=disk)) as storage:
        disk.events.clear()
        put(storage, [1])
        assert disk.events == ["rename"]
        disk.events.clear()
        fan = path_of(root, label(1)).parent
        put(storage, [1], Level.DURABLE)
        assert disk.events == ["file", str(fan), str(fan.parent), str(root)]
        disk.events.clear()
        put(storage, [2], Level.DURABLE)
        assert disk.events == ["file", "rename", str(path_of(root, label(2)).parent), str(fan.parent), str(root)]


def test_a_durable_batch_of_64_syncs_each_file_and_at_most_sixteen_directories_and_what_they_stand_in(
    root: Path,
) -> None:
    disk = SyncLog()
    with closing(FileStorage.open(root, disk=disk)) as storage:
        disk.events.clear()
        put(storage, range(64), Level.DURABLE)
        assert disk.events.count("file") == 64
        assert len(disk.events) - disk.events.count("rename") <= 64 + 16 + 2
        disk.events.clear()
        put(storage, range(64, 128), Level.DURABLE)
        assert len(disk.events) - disk.events.count("rename") <= 64 + 16


def test_a_new_store_is_synced_with_every_directory_that_leads_to_it(root: Path) -> None:
    disk = SyncLog()
    FileStorage.open(root / "a" / "b", disk=disk).close()
    assert [path for path in disk.events if path.startswith(str(root.parent))][:3] == [
        str(root / "a"),
        str(root),
        str(root.parent),
    ]


# Who may use the directory, and what its names mean


def test_directories_have_mode_0700_and_files_0600(root: Path) -> None:
    mask = os.umask(0)
    try:
        storage = FileStorage.open(root)
        storage.register(manifest_of(MODEL, LAYOUT), {})
        put(storage, range(3))
        paths = [root, *root.rglob("*")]
        modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
        storage.close()
    finally:
        os.umask(mask)
    assert modes == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_may_write_is_refused(mode: int, root: Path) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(StorageError, match=f"{root} must be writable by its owner alone, found mode {mode:04o}; run"):
        FileStorage.open(root)
    assert list(root.iterdir()) == []


def test_a_directory_of_somebody_else_is_refused(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a directory away")
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(StorageError, match=f"{root} must belong to user 0, .* found owner 12345; chown"):
        FileStorage.open(root)


def test_a_directory_that_holds_something_else_is_refused_and_not_touched(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "thesis.txt").write_text("irreplaceable")
    (root / "tmp").mkdir()
    (root / "tmp" / "0").touch()
    with pytest.raises(StorageError, match=f"{root} must be empty or a file store, found 2 entries"):
        FileStorage.open(root)
    assert sorted(path.name for path in root.rglob("*")) == ["0", "thesis.txt", "tmp"]


def test_a_store_of_another_format_is_refused(root: Path) -> None:
    FileStorage.open(root).close()
    for text in ('{"format_version": 1}', "[]", "not json"):
        (root / "store.json").write_text(text)
        with pytest.raises(StorageError, match="must be of a file store of format_version 2, found none; open it"):
            FileStorage.open(root)


def test_a_root_that_cannot_be_made_or_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StorageError, match=f"^cannot open a file store in {path}: .*$"):
            FileStorage.open(path)


def test_a_marker_draft_left_by_a_crash_does_not_make_a_directory_foreign(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "store.json.abc").touch()
    (root / "lost+found").mkdir()
    FileStorage.open(root).close()
    assert sorted(path.name for path in root.iterdir()) == ["journal", "lost+found", "store.json", "tmp"]


@pytest.mark.parametrize(
    "named",
    [
        Label(b"short", bytes(32), "kv"),
        Label(bytes(32), bytes(31), "kv"),
        Label(bytes(32), bytes(32), "../../etc/passwd"),
        Label(bytes(32), bytes(32), "KV"),
        Label(bytes(32), bytes(32), "k" * 33),
        Label(bytes(32), bytes(32), ""),
    ],
)
def test_a_label_that_cannot_name_an_object_is_refused(named: Label, storage: FileStorage) -> None:
    page = PageIO(named, None, (memoryview(bytearray(10)),))
    for call in (
        lambda: storage.exists([named]),
        lambda: storage.get([page]),
        lambda: storage.put([page], Level.CACHED),
        lambda: storage.remove([named]),
    ):
        with pytest.raises(InputError):
            call()


def test_a_negative_cap_or_floor_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="bytes_max"):
        FileStorage.open(root, bytes_max=-1)
    with pytest.raises(ConfigError, match="free_bytes_min"):
        FileStorage.open(root, free_bytes_min=-1)
    assert not root.exists()


# Listing, manifest, closing


def test_a_long_scan_goes_on_from_its_cursor_in_order_of_names_and_passes_over_foreign_names(
    storage: FileStorage, root: Path
) -> None:
    labels = [label(number) for number in range(2500)]
    storage.put([PageIO(named, None, (memoryview(b"x"),)) for named in labels], Level.CACHED)
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


def test_a_manifest_is_written_once_and_a_differing_one_is_refused(storage: FileStorage, root: Path) -> None:
    manifest = manifest_of(MODEL, LAYOUT)
    storage.register(manifest, {})
    path = root / manifest.identity.hex() / "manifest.json"
    before = path.stat()
    assert '"model": "contract/model"' in path.read_text()
    storage.register(manifest, {})
    assert path.stat() == before
    other = manifest_of(Identity("contract/other"), LAYOUT)
    other.identity = manifest.identity
    with pytest.raises(StorageError, match="describes another identity or layout"):
        storage.register(other, {})
    path.write_text("{")
    with pytest.raises(StorageError, match="must hold a manifest"):
        storage.register(manifest, {})


def test_closing_gives_back_every_descriptor(root: Path) -> None:
    before = descriptors(root)
    for _ in range(3):
        storage = FileStorage.open(root)
        put(storage, range(20), Level.DURABLE)
        storage.close()
    assert descriptors(root) == before


def test_open_directories_are_bounded(storage: FileStorage, root: Path) -> None:
    before = len(descriptors(root))
    identities = [Identity(f"model {i}").digest(LAYOUT) for i in range(DIRECTORIES_OPEN_MAX // 8)]
    labels = [Label(identity, bytes([fan * 16]) * 32, "kv") for identity in identities for fan in range(16)]
    pages = [PageIO(named, None, (memoryview(bytearray(b"x")),)) for named in labels]
    assert all(storage.put(pages, Level.CACHED))
    assert all(storage.get(pages))
    assert len(descriptors(root)) <= before + DIRECTORIES_OPEN_MAX


def test_closing_waits_for_calls_in_flight(root: Path) -> None:
    storage = FileStorage.open(root)
    put(storage, range(8))
    reading = threading.Barrier(5)
    outcomes: list[str] = []

    def read() -> None:
        reading.wait()
        try:
            while True:
                assert all(storage.get([blank_page(label(number)) for number in range(8)]))
        except ClosedError:
            outcomes.append("closed")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    reading.wait()
    storage.close()
    for thread in threads:
        thread.join()
    assert outcomes == ["closed"] * 4
