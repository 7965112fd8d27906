"""The file store: restarts, intruders, the cap, several processes, a directory that goes, no index without a cap."""

import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import (
    FILE_BYTES,
    INTRUDERS,
    DiskFault,
    FaultyDisk,
    bytes_in,
    dangle,
    descriptors,
    fill,
    held,
    hits,
    link,
    path_of,
    pipe,
    put,
    temps,
    touch,
)
from tests.unit.storage_backends.conftest import CLOCK_START_NS
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import FORMAT_VERSION
from unified_cache.storage_backends.directory.front import PAGES_WAITING_MAX, STAMP_GRAIN_NS, Clock
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    OTHER_MODEL,
    PAGE_BYTES,
    blank_page,
    label,
    sealed_page,
)

MANIFEST = manifest_of(MODEL, LAYOUT)


def capped(root: Path, pages_max: int, clock: Clock) -> FileStorage:
    return FileStorage.open(root, bytes_max=pages_max * FILE_BYTES, clock=clock)


# Restarts


def test_the_temp_directory_of_a_living_writer_is_left_alone(root: Path) -> None:
    first = FileStorage.open(root)
    second = FileStorage.open(root)
    assert len(list((root / "tmp").iterdir())) == 2
    assert put(first, [1]) == put(second, [2]) == [True]
    first.close()
    second.close()
    assert list((root / "tmp").iterdir()) == []


def test_temp_directories_of_dead_writers_are_swept_whatever_is_left_in_them(root: Path) -> None:
    FileStorage.open(root).close()
    (root / "tmp" / "dead" / "directory").mkdir(parents=True)
    (root / "tmp" / "dead" / "directory" / "file").write_bytes(b"x")
    (root / "tmp" / "dead" / "0").write_bytes(b"half a page")
    (root / "tmp" / "dead" / "lock").touch()
    (root / "tmp" / "unborn").mkdir()
    (root / "tmp" / "lockless").mkdir()
    (root / "tmp" / "lockless" / "0").write_bytes(b"half a page")
    storage = FileStorage.open(root, new_writer=lambda: "living")
    assert [path.name for path in (root / "tmp").iterdir()] == ["living"]
    storage.close()


def test_what_a_sweep_cannot_remove_is_removed_by_the_next_one(root: Path) -> None:
    FileStorage.open(root).close()
    (root / "tmp" / "dead").mkdir()
    (root / "tmp" / "dead" / "0").write_bytes(b"half a page")
    (root / "tmp" / "dead" / "lock").touch()
    FileStorage.open(root, disk=FaultyDisk(DiskFault.EACCES, range(1), only="unlink")).close()
    assert temps(root) == ["0"]
    FileStorage.open(root).close()
    assert list((root / "tmp").iterdir()) == []


# What stands in the place of an object


Intrude = Callable[[Path, Path], None]


def resized(object_bytes: int) -> Intrude:
    return lambda path, bystander: os.truncate(path, object_bytes)


INTRUSIONS: tuple[Intrude, ...] = (*map(resized, (PAGE_BYTES // 2, PAGE_BYTES + 1, 0)), *INTRUDERS)


def intrude_on(path: Path, intrude: Intrude, bystander: Path) -> None:
    if intrude in INTRUDERS:
        path.rename(bystander)
    intrude(path, bystander)


@pytest.mark.parametrize("intrude", INTRUSIONS)
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("is_read_first", [True, False], ids=["read", "put"])
def test_an_intruder_in_the_place_of_an_object_is_a_miss_is_cleared_away_blocks_no_put_and_leads_to_nothing_else(
    intrude: Intrude, level: Level, is_read_first: bool, storage: FileStorage, root: Path
) -> None:
    put(storage, [1])
    path, bystander = path_of(root, label(1)), root.parent / "bystander"
    before = path.stat()
    intrude_on(path, intrude, bystander)
    if is_read_first:
        assert storage.get([blank_page(label(1))]) == [Answer.FLAWED]
        assert storage.counts.foreign_count == 1
        assert storage.exists([label(1)]) == [Answer.MISS]
        assert not os.path.lexists(path)
    assert put(storage, [1], level) == [True]
    assert hits(storage, [1]) == [True]
    assert temps(root) == []
    if intrude in INTRUDERS:
        after = bystander.stat()
        assert (after.st_mtime_ns, after.st_ino, after.st_size) == (before.st_mtime_ns, before.st_ino, before.st_size)


def in_place_of(place: Path, bystander: Path, intrude: Intrude) -> None:
    """Put something in the place of a directory, which goes to the place of the bystander."""
    if place.exists():
        place.rename(bystander)
    else:
        bystander.mkdir()
    intrude(place, bystander)


@pytest.mark.parametrize(
    ("intrude", "is_used"), [(link, False), (dangle, False), (pipe, False), (touch, False), (touch, True)]
)
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("is_identity", [True, False], ids=["identity", "fan"])
def test_what_stands_in_the_place_of_a_directory_declines_its_pages_alone_and_is_named_once(
    intrude: Intrude,
    level: Level,
    is_used: bool,
    is_identity: bool,
    storage: FileStorage,
    root: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = [sealed_page(label(number, model=OTHER_MODEL)) for number in range(4)]
    numbers = range(40)
    if is_used:
        put(storage, numbers[::3])
    place = path_of(root, label(1)).parents[is_identity]
    place.parent.mkdir(exist_ok=True)
    in_place_of(place, root.parent / "bystander", intrude)
    mine = {number for number in numbers if place in path_of(root, label(number)).parents}
    before = sorted((root.parent / "bystander").rglob("*"))
    for _ in range(2):
        assert put(storage, numbers, level) == [number not in mine for number in numbers]
        assert all(storage.put(others, level))
    assert str(place) in storage.decline_reason
    assert [str(place) in record.message for record in caplog.records] == [True]
    assert storage.foreign_paths() == [str(place)]
    assert sorted((root.parent / "bystander").rglob("*")) == before
    place.unlink()
    assert all(put(storage, numbers, level))
    assert storage.foreign_paths() == []


# Cap and eviction


def times_of(root: Path, numbers: Iterable[int]) -> list[int]:
    return [path_of(root, label(number)).stat().st_mtime_ns for number in numbers]


def test_reads_are_stamped_together_when_the_grain_is_over(root: Path) -> None:
    now = [CLOCK_START_NS]
    storage = capped(root, 4, lambda: now[0])
    put(storage, [1, 2, 3])
    stored = times_of(root, [1, 2, 3])
    for number in (1, 2, 1):
        storage.get([blank_page(label(number))])
    assert times_of(root, [1, 2, 3]) == stored
    now[0] += 2 * STAMP_GRAIN_NS
    storage.get([blank_page(label(4))])
    first, second, third = times_of(root, [1, 2, 3])
    assert stored[0] < second < first < now[0]
    assert third == stored[2]
    storage.close()


def test_a_put_for_which_an_object_cannot_be_removed_is_declined_and_the_next_removes_others(
    root: Path, clock: Clock
) -> None:
    with closing(capped(root, 3, clock)) as storage:
        for number in range(3):
            put(storage, [number])
        intrude_on(path_of(root, label(0)), fill, root.parent / "bystander")
        assert put(storage, [3]) == [False]
        assert "could not be removed" in storage.decline_reason
        assert put(storage, [3]) == [True]
        assert held(storage, 4) == [2, 3]
        for number in (2, 3):
            intrude_on(path_of(root, label(number)), fill, root.parent / f"bystander-{number}")
        assert [put(storage, [number]) for number in range(4, 8)] == [[False]] * 4


# A file store whose directory somebody removes as a whole while it is open


@pytest.fixture
def below(tmp_path: Path) -> Path:
    return tmp_path / "above" / "store"


@pytest.fixture(params=[None, 20 * FILE_BYTES], ids=["unbounded", "capped"])
def removed(request: pytest.FixtureRequest, below: Path) -> Iterator[FileStorage]:
    """Yield a store whose directory is gone, and the one above it."""
    with closing(FileStorage.open(below, bytes_max=request.param)) as storage:
        storage.register(MANIFEST, {})
        put(storage, range(4))
        shutil.rmtree(below.parent)
        yield storage


@pytest.mark.parametrize("level", Level)
def test_the_next_put_makes_it_again_and_a_restart_finds_its_pages(
    removed: FileStorage, level: Level, below: Path
) -> None:
    storage, root = removed, below
    feed = storage.removals()
    assert held(storage, 4) == []
    assert storage.get([blank_page(label(0))]) == [Answer.MISS]
    assert put(storage, range(4, 9), level) == [True] * 5
    assert held(storage, 9) == list(range(4, 9))
    assert storage.bytes_used == bytes_in(root) == 5 * FILE_BYTES
    assert feed is not None
    assert feed.take().lost_count > 0
    assert storage.manifests() == {MANIFEST.identity: MANIFEST}
    with closing(FileStorage.open(root, bytes_max=20 * FILE_BYTES)) as other:
        assert put(other, [9]) == [True]
        assert storage.bytes_used == other.bytes_used == 6 * FILE_BYTES
    storage.close()
    assert descriptors(root) == []
    assert list((root / "tmp").iterdir()) == []
    with closing(FileStorage.open(root)) as again:
        assert again.get([blank_page(label(number)) for number in range(4, 10)]) == [Answer.HIT] * 6


def test_registering_makes_it_again_too(removed: FileStorage) -> None:
    removed.register(MANIFEST, {})
    assert removed.manifests() == {MANIFEST.identity: MANIFEST}


@pytest.mark.parametrize("part", [".", "tmp", MANIFEST.identity.hex()])
def test_however_often_it_is_removed_the_manifest_comes_back_and_no_descriptor_stays_open(
    part: str, storage: FileStorage, root: Path
) -> None:
    storage.register(MANIFEST, {})
    opened_before = descriptors(Path("/"))
    for number in range(5):
        shutil.rmtree(root / part)
        assert put(storage, [number]) == [True]
        assert storage.manifests() == {MANIFEST.identity: MANIFEST}
    assert len(descriptors(Path("/"))) == len(opened_before)


def test_of_many_manifests_those_registered_last_are_remembered(
    storage: FileStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.directory.root.KEPT_MAX", 1)
    other = manifest_of(OTHER_MODEL, LAYOUT)
    for manifest in (MANIFEST, other):
        storage.register(manifest, {})
    shutil.rmtree(root)
    put(storage, [1])
    storage.put([sealed_page(label(1, model=OTHER_MODEL))], Level.CACHED)
    assert storage.manifests() == {MANIFEST.identity: None, other.identity: other}


def test_the_store_that_another_process_made_in_its_place_is_shared(removed: FileStorage, below: Path) -> None:
    with closing(FileStorage.open(below)) as other:
        put(other, [7])
        assert put(removed, [8]) == [True]
        assert held(removed, 9) == held(other, 9) == [7, 8]


def test_what_stands_in_its_place_and_is_no_store_is_left_alone(removed: FileStorage, below: Path) -> None:
    below.mkdir(parents=True)
    (below / "somebody's").write_text("data")
    with pytest.raises(StorageError, match="must be empty or a file store"):
        put(removed, [5])
    assert [path.name for path in below.iterdir()] == ["somebody's"]
    (below / "somebody's").unlink()
    assert put(removed, [5]) == [True]


def test_it_is_made_where_it_was_wherever_the_process_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(FileStorage.open("store")) as storage:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        shutil.rmtree(tmp_path / "store")
        assert put(storage, [1]) == [True]
        assert bytes_in(tmp_path / "store") == FILE_BYTES


# A file store without a cap keeps no index of its objects: neither time at open nor memory grows with them


OBJECT_BYTES_MAX = 100
"""Memory for each object that would show an index: one takes four times as much."""


def test_opening_it_makes_as_many_calls_whatever_is_stored(root: Path) -> None:
    calls: list[int] = []
    for numbers in (range(4), range(4, 200), range(1)):
        disk = FaultyDisk()
        with closing(FileStorage.open(root, disk=disk)) as storage:
            calls.append(len(disk.calls))
            assert all(put(storage, numbers))
    assert calls[1] == calls[2]


def test_objects_take_no_memory_of_the_process(root: Path) -> None:
    with closing(FileStorage.open(root, disk=FaultyDisk())) as storage:
        pages = [sealed_page(label(number)) for number in range(4 * PAGES_WAITING_MAX)]
        assert all(storage.put(pages[:PAGES_WAITING_MAX], Level.CACHED))
        assert all(storage.get([blank_page(page.label) for page in pages[:PAGES_WAITING_MAX]]))
        tracemalloc.start()
        assert all(storage.put(pages, Level.CACHED))
        grown_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown_bytes < 3 * PAGES_WAITING_MAX * OBJECT_BYTES_MAX


# Pages that rot, shrink or change places on disk, read through the verifying wrapper: misses, every one of them


@pytest.fixture
def verified(root: Path) -> Iterator[VerifiedStorage]:
    storage = VerifiedStorage(FileStorage.open(root))
    storage.put([sealed_page(label(number)) for number in range(3)], Level.CACHED)
    yield storage
    storage.close()


@pytest.mark.parametrize("kind", ["foreign", "hard_link", "zeros", "sparse", "stale_format"])
def test_a_put_replaces_what_has_the_length_of_its_page_and_says_that_it_is_another(
    kind: str, verified: VerifiedStorage, root: Path
) -> None:
    path, other = path_of(root, label(1)), path_of(root, label(2))
    match kind:
        case "foreign":
            path.write_bytes(other.read_bytes())
        case "hard_link":
            path.unlink()
            path.hardlink_to(other)
        case "zeros":
            path.write_bytes(bytes(PAGE_BYTES))
        case "sparse":
            os.truncate(path, 0)
            os.truncate(path, PAGE_BYTES)
        case "stale_format":
            stale = bytearray(path.read_bytes())
            stale[4:6] = (FORMAT_VERSION + 1).to_bytes(2, "little")
            path.write_bytes(stale)
    assert verified.put([sealed_page(label(1))], Level.DURABLE) == [Answer.STORED]
    assert hits(verified, range(3)) == [True] * 3
    assert verified.flaws_count == {}
