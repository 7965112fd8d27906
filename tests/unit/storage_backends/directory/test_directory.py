"""A store in a directory: restarts, who may use the directory, what its names mean, manifests, closing."""

import itertools
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson

from tests.sources import ROOT
from tests.support.files import DiskFault, FaultyDisk, bytes_in, put
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.errors import ConfigError, InputError, StorageError
from unified_cache.core.pool import Identity
from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.disk import Disk, missing_mount
from unified_cache.storage_backends.directory.front import (
    FREE_BYTES_MIN,
    STAMP_GRAIN_NS,
    DirectoryAddress,
    parse_address,
)
from unified_cache.storage_backends.file import store as file_store
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import KeysOnlyStorage
from unified_cache.storage_backends.offline.listing import count_objects
from unified_cache.storage_backends.offline.stores import identities_of
from unified_cache.storage_backends.packed import store as packed_store
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, UsedBetween
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    OTHER_MODEL,
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    listing,
    sealed_page,
)

FORMAT_VERSIONS = {StoreKind.FILE: 2, StoreKind.PACKED: 1}


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(only="listdir")


@pytest.fixture
def storage(kind: StoreKind, root: Path, disk: FaultyDisk) -> Iterator[DirectoryStorage]:
    clock = itertools.count(STAMP_GRAIN_NS, STAMP_GRAIN_NS).__next__
    with closing(kind.open(root, clock=clock, disk=disk)) as storage:
        yield storage


# Restarts


@pytest.mark.parametrize("page_bytes", [0, 1, 127, PAGE_BYTES, 32_767, 32_768, 100_000])
@pytest.mark.parametrize("level", Level)
def test_a_restart_finds_every_page_whatever_its_length(
    page_bytes: int, level: Level, kind: StoreKind, root: Path
) -> None:
    content = random.Random(page_bytes).randbytes(page_bytes)
    named = [
        label(number, pool, model) for number in range(3) for pool in ("kv", "a") for model in (MODEL, OTHER_MODEL)
    ]
    with closing(kind.open(root)) as first:
        pages = [PageIO(each, (memoryview(bytes([number]) * page_bytes),)) for number, each in enumerate(named)]
        assert all(first.put(pages, level))
        assert first.put([PageIO(label(9), (memoryview(content),))], level) == [Answer.STORED]
    with closing(kind.open(root)) as second:
        found = [blank_page(each, page_bytes) for each in [*named, label(9)]]
        assert all(second.get(found))
        assert [bytes_of(page) for page in found] == [*map(bytes_of, pages), content]
        assert second.bytes_used == 13 * kind.taken_bytes(page_bytes)
        assert sorted(each.label for each in listing(second, label(0).identity)) == sorted([*named[::2], label(9)])


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_reads_and_writes_are_carried_on(call: str, kind: StoreKind, root: Path) -> None:
    disk = FaultyDisk(DiskFault.SHORT, range(1 << 30), only=call)
    with closing(kind.open(root, disk=disk)) as storage:
        pages = [sealed_page(label(number), cuts=cuts) for number, cuts in enumerate([(), (50, 60, 900)])]
        found = [blank_page(label(0)), blank_page(label(1), cuts=(50, 60, 900))]
        assert storage.put(pages, Level.CACHED) == [Answer.STORED] * 2
        assert storage.get(found) == [Answer.HIT] * 2
        assert list(map(bytes_of, found)) == list(map(bytes_of, pages))


def test_a_page_may_lie_in_more_buffers_than_one_system_call_takes(storage: DirectoryStorage) -> None:
    page = sealed_page(label(1), 3000, range(1, 3000))
    found = blank_page(label(1), 3000, [0, *range(2, 3000), 3000])
    assert storage.put([page], Level.CACHED) == [Answer.STORED]
    assert storage.get([found]) == [Answer.HIT]
    assert bytes_of(found) == bytes_of(page)


# Who may use the directory, and what its names mean


def test_directories_have_mode_0700_and_files_0600(kind: StoreKind, root: Path) -> None:
    mask = os.umask(0)
    try:
        storage = kind.open(root)
        storage.register(manifest_of(MODEL, LAYOUT), {})
        put(storage, range(3))
        paths = [root, *root.rglob("*")]
        modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
        storage.close()
    finally:
        os.umask(mask)
    assert modes == {(True, 0o700), (False, 0o600)}


class MountedDisk(Disk):
    """A disk with tables of its own of what is to be mounted, and of what is."""

    def __init__(self, tables: Path) -> None:
        self.fstab, self.mounts = tables / "fstab", tables / "mountinfo"
        self.mounts.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")

    def mount(self, place: Path) -> None:
        with self.mounts.open("a") as mounts:
            mounts.write(f"23 22 8:2 / {escaped(place)} rw - ext4 /dev/sdb1 rw\n")

    def missing_mount(self, path: Path) -> Path | None:
        return missing_mount(path, self.fstab, self.mounts)


def escaped(path: Path) -> str:
    return str(path).replace(" ", "\\040")


def test_no_store_is_made_where_a_file_system_is_not_mounted_yet(kind: StoreKind, tmp_path: Path) -> None:
    disk, place, link = MountedDisk(tmp_path), tmp_path / "a disk", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    disk.fstab.write_text(f"# UUID=0 /\n\n/dev/sda2 none swap sw 0 0\n/dev/sdb1 {escaped(link)} ext4 defaults 0 2\n")
    for path in (place / "kv", link / "deep" / "kv", place):
        with pytest.raises(StorageError, match=f"{path} lies on {place}, which /etc/fstab names") as refused:
            kind.open(path, disk=disk)
        assert refused.value.retryable
    assert list(place.iterdir()) == []
    kind.open(tmp_path / "kv", disk=disk).close()
    disk.mount(place)
    kind.open(place / "kv", disk=disk).close()


def test_what_is_mounted_elsewhere_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, away = MountedDisk(tmp_path), tmp_path / "away"
    disk.fstab.write_text(f"server:/pages {away} nfs\n")
    disk.mount(away)
    resolved: list[str] = []
    realpath = os.path.realpath

    def counted(path: Path) -> str:
        resolved.append(str(path))
        return realpath(path)

    monkeypatch.setattr(os.path, "realpath", counted)
    assert disk.missing_mount(tmp_path / "kv") is None
    assert resolved == [str(tmp_path / "kv")]


def test_a_store_is_made_on_what_is_mounted_below_a_missing_one_and_where_nobody_says(
    kind: StoreKind, tmp_path: Path
) -> None:
    disk, place = MountedDisk(tmp_path), tmp_path / "srv"
    kind.open(place / "old", disk=disk).close()
    disk.fstab.write_text(f"/dev/sdb1 {place} ext4\n")
    disk.mount(place / "bound")
    kind.open(place / "bound" / "kv", disk=disk).close()


@pytest.mark.threat("a directory that others write")
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_may_write_is_refused(mode: int, kind: StoreKind, root: Path) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(StorageError, match=f"{root} must be writable by its owner alone, found mode {mode:04o}; run"):
        kind.open(root)
    assert list(root.iterdir()) == []


def test_a_directory_of_somebody_else_is_refused(kind: StoreKind, root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a directory away")
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(StorageError, match=f"{root} must belong to user 0, .* found owner 12345; chown"):
        kind.open(root)


def test_a_directory_that_holds_something_else_is_refused_and_not_touched(kind: StoreKind, root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "thesis.txt").write_text("irreplaceable")
    (root / "tmp").mkdir()
    (root / "tmp" / "0").touch()
    with pytest.raises(StorageError, match=f"{root} must be empty or a {kind.value} store, found 2 entries") as refused:
        kind.open(root)
    assert not refused.value.retryable
    assert sorted(path.name for path in root.rglob("*")) == ["0", "thesis.txt", "tmp"]


def test_a_store_of_another_format_is_refused(kind: StoreKind, root: Path) -> None:
    kind.open(root).close()
    for text in ('{"format_version": 1}', "[]", "not json", "[" * 4000):
        (root / "store.json").write_text(text)
        expected = f"must be of a {kind.value} store of format_version {FORMAT_VERSIONS[kind]}, found none; open it"
        with pytest.raises(StorageError, match=expected) as refused:
            kind.open(root)
        assert not refused.value.retryable


def test_a_store_of_another_kind_is_refused(kind: StoreKind, root: Path) -> None:
    (other,) = set(StoreKind) - {kind}
    other.open(root).close()
    found = f"found a {other.value} store of {FORMAT_VERSIONS[other]}"
    with pytest.raises(StorageError, match=f"must be of a {kind.value} store .* {found}"):
        kind.open(root)


def test_a_root_that_cannot_be_made_or_is_a_file_is_one_clear_line(kind: StoreKind, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StorageError, match=f"^cannot open a {kind.value} store in {path}: .*$"):
            kind.open(path)


def test_a_store_that_is_to_leave_more_than_its_disk_has_is_refused_and_makes_nothing(
    kind: StoreKind, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"free= of {kind.value}:.* must be less than its file system"):
        kind.open(tmp_path / "deep" / "store", free_bytes_min=1 << 60)
    assert list(tmp_path.iterdir()) == []
    kind.open(tmp_path / "store").close()
    with pytest.raises(ConfigError, match="must be less than its file system"):
        kind.open(tmp_path / "store", free_bytes_min=1 << 60)


def test_a_marker_draft_left_by_a_crash_does_not_make_a_directory_foreign(kind: StoreKind, root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "store.json.abc").touch()
    (root / "lost+found").mkdir()
    kind.open(root).close()
    visits = {"visits"} if kind is StoreKind.FILE else set()
    assert {path.name for path in root.iterdir()} == {"lost+found", "store.json", "tmp"} | visits


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
def test_a_label_that_cannot_name_an_object_is_refused(named: Label, storage: DirectoryStorage) -> None:
    page = PageIO(named, (memoryview(bytearray(10)),))
    for call in (
        lambda: storage.exists([named]),
        lambda: storage.get([page]),
        lambda: storage.put([page], Level.CACHED),
        lambda: storage.remove([named]),
    ):
        with pytest.raises(InputError):
            call()


def test_a_negative_cap_or_floor_is_refused(kind: StoreKind, root: Path) -> None:
    with pytest.raises(ConfigError, match="bytes_max"):
        kind.open(root, bytes_max=-1)
    with pytest.raises(ConfigError, match="free_bytes_min"):
        kind.open(root, free_bytes_min=-1)
    assert not root.exists()


# Manifest, closing


def test_a_manifest_is_written_once_and_a_differing_one_is_refused(storage: DirectoryStorage, root: Path) -> None:
    manifest = manifest_of(MODEL, LAYOUT)
    storage.register(manifest, {})
    path = root / manifest.identity.hex() / "manifest.json"

    def written() -> tuple[int, int, int]:
        status = path.stat()  # without the time of access: who reads it sets that, once a day at the latest
        return status.st_ino, status.st_size, status.st_mtime_ns

    before = written()
    assert '"model": "contract/model"' in path.read_text()
    storage.register(manifest, {})
    assert written() == before
    other = manifest_of(Identity("contract/other"), LAYOUT)
    other.identity = manifest.identity
    with pytest.raises(StorageError, match="describes another identity or layout"):
        storage.register(other, {})
    assert written() == before


def check_mended(storage: DirectoryStorage, root: Path, damage: bytes) -> None:
    manifest = manifest_of(MODEL, LAYOUT)
    (root / manifest.identity.hex() / "manifest.json").write_bytes(damage)
    storage.register(manifest, {})
    assert storage.manifests() == {manifest.identity: manifest}


def test_a_manifest_that_does_not_have_its_digest_is_written_again(storage: DirectoryStorage, root: Path) -> None:
    storage.register(manifest_of(MODEL, LAYOUT), {})
    sound = (root / manifest_of(MODEL, LAYOUT).identity.hex() / "manifest.json").read_bytes()
    for bit in range(0, len(sound) * 8, 7):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        check_mended(storage, root, bytes(damaged))
    other = MessageToJson(manifest_of(Identity("contract/other"), LAYOUT)).encode()
    for damage in (b"", b"{", b"\xff", b"[" * 100_000, bytes(len(sound)), sound[:-9], other):
        check_mended(storage, root, damage)


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_manifest_that_cannot_be_read_is_written_again(call: str, kind: StoreKind, root: Path) -> None:
    disk = FaultyDisk(only=call)
    with closing(kind.open(root, disk=disk)) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        # Of the files that are opened, the first is the directory.
        at = len(disk.calls) + (call == "open")
        disk.failing = range(at, at + 1)
        path = root / manifest_of(MODEL, LAYOUT).identity.hex() / "manifest.json"
        before = path.stat().st_ino
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert path.stat().st_ino != before
        assert list(storage.manifests().values()) == [manifest_of(MODEL, LAYOUT)]


@pytest.mark.parametrize("name", ["with\0nul", "lone \ud800"])
def test_what_no_system_takes_for_a_path_is_refused(name: str, kind: StoreKind, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a name that the system can read"):
        kind.open(tmp_path / name)


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("pages_max", [None, 20], ids=["unbounded", "capped"])
@pytest.mark.parametrize("removed", ["*", "?" * 64, "tmp/*", "tmp"], ids=["everything", "identities", "temps", "tmp"])
def test_what_somebody_removed_under_an_open_store_is_made_again_and_a_restart_finds_it(
    removed: str, pages_max: int | None, is_known: bool, level: Level, kind: StoreKind, root: Path
) -> None:
    model = MODEL if is_known else OTHER_MODEL
    bytes_max = None if pages_max is None else pages_max * kind.taken_bytes()
    with closing(kind.open(root, bytes_max=bytes_max)) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        put(storage, range(4), level)
        for path in list(root.glob(removed)):
            path.unlink() if path.is_file() else shutil.rmtree(path)
        storage.register(manifest_of(model, LAYOUT), {})
        pages = [sealed_page(label(number, model=model)) for number in range(4, 12)]
        with suppress(StorageError):  # a packed file from under a durable page
            storage.put(pages, level)
        assert storage.put(pages, level) == [Answer.STORED] * 8
        assert storage.get([blank_page(page.label) for page in pages]) == [Answer.HIT] * 8
        with closing(kind.open(root, bytes_max=bytes_max)) if kind is StoreKind.FILE else nullcontext() as other:
            if other is not None:
                assert put(other, [20], level) == [True]
                assert storage.bytes_used == other.bytes_used == bytes_in(root)
    with closing(kind.open(root, bytes_max=bytes_max)) as storage:
        if kind is StoreKind.FILE or level is Level.DURABLE or not is_known:
            assert storage.get([blank_page(page.label) for page in pages]) == [Answer.HIT] * 8
        assert put(storage, range(4, 12), level) == [True] * 8


# The text after ``file:`` in the name of a store


@pytest.mark.parametrize(
    ("rest", "directory", "free_bytes_min"),
    [
        ("pages", "pages", FREE_BYTES_MIN),
        ("/var/cache/pages", "/var/cache/pages", FREE_BYTES_MIN),
        ("pages?free=0", "pages", 0),
        ("pages?free=4096", "pages", 4096),
        ("a:b?free=3KiB", "a:b", 3 << 10),
        ("pages?free=512MiB", "pages", 512 << 20),
        ("pages?free=1GiB", "pages", 1 << 30),
        ("pages?free=2TiB", "pages", 2 << 40),
        ("pages?free=1.5GiB", "pages", 3 << 29),
        ("pages?free=5GB", "pages", 5_000_000_000),
        ("odd?name?", "odd?name", FREE_BYTES_MIN),
        ("odd?name?free=1", "odd?name", 1),
    ],
)
def test_an_address_names_a_directory_and_the_free_space_to_leave(
    rest: str, directory: str, free_bytes_min: int
) -> None:
    assert parse_address(rest) == DirectoryAddress(Path(directory), free_bytes_min)


@pytest.mark.parametrize(
    ("rests", "message"),
    [
        (["", "?", "?free=1GiB"], "file: needs a directory"),
        (
            ["pages?size=1", "pages?free", "pages?free=1XiB", "pages?name", "pages?free=1&free=2", "a?FREE=1"],
            r"free=SIZE alone|free= of file:",
        ),
    ],
)
def test_an_address_without_a_directory_or_with_an_unknown_option_is_refused(rests: list[str], message: str) -> None:
    for rest in rests:
        with pytest.raises(ConfigError, match=message):
            parse_address(rest)


@pytest.mark.parametrize("open_url", [file_store.open_url, packed_store.open_url])
def test_a_store_opened_by_its_address_keeps_the_floor_that_it_names(
    open_url: Callable[[str, int | None], DirectoryStorage], tmp_path: Path
) -> None:
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with closing(open_url(f"{tmp_path / 'high'}?free={free_bytes * 2}", None)) as storage:
        assert storage.path == tmp_path / "high"
        assert put(storage, [1]) == [False]
    with closing(open_url(f"{tmp_path / 'low'}?free=0", 1 << 20)) as storage:
        assert storage.capability().bytes_max == 1 << 20
        assert put(storage, [1]) == [True]


# Identities of a store in a directory: whose pages it holds, and when they were used


IDENTITY = MODEL.digest(LAYOUT)


def test_a_store_that_names_no_identities_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"keys_only has no manifests\(\)"):
        identities_of(KeysOnlyStorage())


def test_every_identity_is_named_with_its_manifest(storage: DirectoryStorage) -> None:
    manifests = [manifest_of(model, LAYOUT) for model in (MODEL, OTHER_MODEL)]
    for manifest in manifests:
        storage.register(manifest, {})
    assert storage.manifests() == {manifest.identity: manifest for manifest in manifests}


def test_an_identity_without_a_readable_manifest_is_named_with_none(storage: DirectoryStorage, root: Path) -> None:
    put(storage, [1])
    assert storage.manifests() == {IDENTITY: None}
    place = root / IDENTITY.hex() / "manifest.json"
    for spoil in (lambda: place.write_bytes(b"\xff"), lambda: place.write_text("{"), place.mkdir):
        spoil()
        assert storage.manifests() == {IDENTITY: None}
        if place.is_file():
            place.unlink()


def test_a_file_and_a_link_called_like_an_identity_are_none(storage: DirectoryStorage, root: Path) -> None:
    (root / ("ab" * 32)).write_text("a letter")
    (root / ("cd" * 32)).symlink_to(root.parent)
    assert storage.manifests() == {}


def test_use_is_known_by_the_times_that_eviction_goes_by(storage: DirectoryStorage) -> None:
    assert count_objects(storage, IDENTITY).used is None
    put(storage, [1])
    put(storage, [2])
    first, last = count_objects(storage, IDENTITY).used or (0, 0)
    assert last - first == STAMP_GRAIN_NS
    put(storage, [1])
    assert count_objects(storage, IDENTITY).used == UsedBetween(last, last + STAMP_GRAIN_NS)
    storage.get([blank_page(label(2))])
    assert count_objects(storage, IDENTITY).used == UsedBetween(last + STAMP_GRAIN_NS, last + 2 * STAMP_GRAIN_NS)
    assert count_objects(storage, label(1, model=OTHER_MODEL).identity).used is None
    storage.remove([label(1), label(2)])
    assert count_objects(storage, IDENTITY).used is None


def test_a_directory_that_cannot_be_listed_raises(storage: DirectoryStorage, disk: FaultyDisk) -> None:
    put(storage, [1])
    disk.failing = range(1 << 30)
    with pytest.raises(StorageError, match="cannot list the identities"):
        storage.manifests()
    if isinstance(storage, FileStorage):
        with pytest.raises(StorageError, match="cannot list"):
            count_objects(storage, IDENTITY)


# Stores in a directory work where the operating system has less than Linux: as macOS, which has no fallocate


TIMEOUT_S = 60.0

PROGRAM = """
import ctypes, errno, os, sys

for name in ("fdatasync", "posix_fallocate"):
    delattr(os, name)
del errno.errorcode[errno.EUCLEAN], errno.EUCLEAN


class LesserLibrary(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "fallocate":
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = LesserLibrary

from tests.support.files import put
from tests.support.store_kinds import StoreKind
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

CUTS = (100, 600)

kind, path = StoreKind(sys.argv[1]), sys.argv[2]
store = kind.open(path)
assert all(put(store, range(8), Level.DURABLE))
assert all(store.put([sealed_page(label(8), cuts=CUTS)], Level.DURABLE))
assert store.remove([label(2), label(3)]) == 2
store.close()
store = kind.open(path)
LEFT = (0, 1, 4, 5, 6, 7, 8)
assert [number for number in range(9) if store.exists([label(number)])[0]] == list(LEFT)
for number in LEFT:
    for cuts in ((), CUTS):
        page = blank_page(label(number), cuts=cuts)
        assert all(store.get([page]))
        assert bytes_of(page) == bytes_of(sealed_page(label(number)))
store.close()
"""
"""Takes away what only Linux has, before anything of ours is imported; then uses a store."""


@pytest.mark.parametrize("kind", StoreKind, ids=lambda kind: kind.value)
def test_a_store_keeps_pages_where_only_linux_calls_are_missing(kind: StoreKind, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind.value, str(tmp_path / "store")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
