"""Stores opened to be read alone: nothing of them changes, whoever else uses them."""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk, refuses
from tests.support.offline import LAYOUTS, TOY, description_of, fill, open_store, prompt_of
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.records import Table
from unified_cache.storage_backends.file.page_reader import FileReader
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.offline.copying import copy_identity
from unified_cache.storage_backends.offline.listing import count_objects, listed, unwatched
from unified_cache.storage_backends.offline.stores import StoredIdentity, identities_of, open_to_read
from unified_cache.storage_backends.offline.upkeep import Verification, verify
from unified_cache.storage_backends.packed import reader
from unified_cache.storage_backends.packed.reader import PackedReader
from unified_cache.storage_backends.packed.segment import Segment
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.testing.storage_contract import (
    PAGE_BYTES,
    blank_page,
    label,
    listing,
    open_for_contract,
    sealed_page,
)

LAYOUT = LAYOUTS["full_swa"]
KEPT = StoredIdentity(TOY.digest(LAYOUT), description_of(LAYOUT))
READERS: dict[str, type[FileReader | PackedReader]] = {"file": FileReader, "packed": PackedReader}

every_kind = pytest.mark.parametrize("kind", READERS)


refuse = refuses(errno.EROFS)


def unwritable_disk() -> Disk:
    """Return a disk as of a mount that cannot be written, which takes no locks either."""

    def open_(_path: object, flags: int, *_given: object, **_named: object) -> None:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()

    changes = {"makedirs", "mkdir", "rmdir", "rmtree", "flock", "write", "pwrite", "pwritev", "utime"}
    changes |= {"fsync", "fdatasync", "rename", "unlink", "punch"}
    return FaultyDisk(before={**dict.fromkeys(changes, refuse), "open": open_})


def everything(root: Path) -> dict[Path, tuple[int, int, int, bytes]]:
    """Return each file and directory of a store with its mode, time and content."""
    paths = [root, *root.rglob("*")]
    return {
        path: (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            path.stat().st_uid,
            (path.is_file() and path.read_bytes()) or b"",
        )
        for path in paths
    }


def filled(kind: str, path: Path) -> Path:
    fill(open_store(kind, path), LAYOUT, [prompt_of(1), prompt_of(2)])
    return path


def check_contents(storage: Store) -> None:
    """List, count, read and copy all of a store."""
    (kept,) = identities_of(storage)
    assert (kept.digest, kept.described().layout.pools) == (KEPT.digest, LAYOUT.pools)
    found = list(listing(storage, kept.digest))
    assert storage.exists([each.label for each in found]) == [Answer.HIT] * len(found)
    counted = count_objects(storage, kept.digest)
    assert (sum(counted.counts.values()), counted.used is None) == (len(found), False)
    result = Verification()
    verify(storage, kept, unwatched, result)
    assert (result.sound_count, result.findings.total) == (len(found), 0)
    target = MemoryStorage()
    assert copy_identity(storage, target, kept.described(), unwatched).copied.objects_count == len(found) > 0


@every_kind
def test_a_store_on_a_disk_that_cannot_be_written_is_listed_verified_and_copied(kind: str, tmp_path: Path) -> None:
    root = filled(kind, tmp_path / "store")
    before = everything(root)
    storage = READERS[kind].open(root, disk=unwritable_disk())
    check_contents(storage)
    storage.close()
    assert everything(root) == before


@every_kind
def test_a_store_that_an_engine_has_open_is_read_beside_it(kind: str, tmp_path: Path) -> None:
    root = filled(kind, tmp_path / "store")
    engine = open_store(kind, root)
    before = everything(root)
    storage = open_to_read(f"{kind}:{root}")
    check_contents(storage)
    assert everything(root) == before
    engine.put([sealed_page(label(1))], Level.CACHED)
    assert [each.label for each in listing(storage, label(1).identity)] == [label(1)]
    assert storage.get([blank_page(label(1))]) == [Answer.HIT]
    storage.close()
    engine.close()


@every_kind
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_looks_at_the_store_of_another_user_and_leaves_it_his(kind: str, tmp_path: Path) -> None:
    root = filled(kind, tmp_path / "store")
    for path in [root, *root.rglob("*")]:
        os.chown(path, 54321, 54321)
    before = everything(root)
    storage = open_to_read(f"{kind}:{root}")
    check_contents(storage)
    storage.close()
    assert everything(root) == before


@every_kind
def test_what_is_no_store_is_refused_and_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").write_text("dear", encoding="utf-8")
    other = filled("packed" if kind == "file" else "file", tmp_path / "other")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=r"found no store\.json in it"):
        open_to_read(f"{kind}:{tmp_path / 'letters'}")
    with pytest.raises(StorageError, match=f"must be of a {kind} store"):
        open_to_read(f"{kind}:{other}")
    with pytest.raises(ConfigError, match="found nothing there"):
        open_to_read(f"{kind}:{tmp_path / 'nothing'}")
    assert everything(tmp_path) == before


@every_kind
def test_a_marker_of_thousands_of_brackets_is_refused_as_no_store(kind: str, tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("[" * 4000, encoding="utf-8")
    with pytest.raises(StorageError, match=r"must be of a .* store .*, found none"):
        open_to_read(f"{kind}:{tmp_path}")


def test_what_lies_in_the_place_of_an_object_is_flawed_and_stays(tmp_path: Path) -> None:
    root = filled("file", tmp_path / "store")
    path = min(root.rglob("*.toy0"))
    storage = open_to_read(f"file:{root}")
    wanted = min(found.label for found in listing(storage, KEPT.digest) if found.label.page_name == path.name)
    path.unlink()
    path.symlink_to("elsewhere")
    assert storage.get([blank_page(wanted)]) == [Answer.FLAWED]
    assert path.is_symlink()
    storage.close()


def test_verify_tells_what_the_disk_does_not_give(tmp_path: Path) -> None:
    disk = FaultyDisk(before=dict.fromkeys(("preadv", "preadv_cached"), refuses(errno.EIO)))
    storage = FileReader.open(filled("file", tmp_path / "store"), disk=disk)
    result = Verification()
    verify(storage, KEPT, unwatched, result)
    assert result.findings.counts[Answer.UNAVAILABLE] == result.read.objects_count > 0
    storage.close()


class TestPagesThatTheirOwnerMoves:
    """A page of a packed store whose slot its owner gives to others while it is read."""

    @pytest.fixture
    def owner(self, tmp_path: Path) -> PackedStorage:
        storage = PackedStorage.open(tmp_path)
        open_for_contract(storage)
        storage.put([sealed_page(label(1))], Level.CACHED)
        return storage

    def test_a_page_whose_slot_has_become_another_ones_is_a_miss(self, owner: PackedStorage, tmp_path: Path) -> None:
        waiting: list[Callable[[], None]] = []
        disk = FaultyDisk(before={"preadv": lambda *_: waiting.pop()() if waiting else None})
        storage = PackedReader.open(tmp_path, disk=disk)
        assert storage.exists([label(1), label(2)]) == [Answer.HIT, Answer.MISS]

        def replace() -> None:
            owner.remove([label(1)])
            owner.put([sealed_page(label(2))], Level.CACHED)

        waiting.append(replace)
        assert storage.get([blank_page(label(1))]) == [Answer.MISS]
        assert storage.get([blank_page(label(2))]) == [Answer.MISS]
        assert [found.label for found in listing(storage, label(1).identity)] == [label(2)]
        assert storage.get([blank_page(label(2)), blank_page(label(1))]) == [Answer.HIT, Answer.MISS]
        storage.close()
        owner.close()

    def test_a_page_beyond_the_end_of_its_file_is_flawed(self, owner: PackedStorage, tmp_path: Path) -> None:
        storage = PackedReader.open(tmp_path)
        assert storage.exists([label(1)]) == [Answer.HIT]
        (path,) = tmp_path.rglob("*.pack")
        os.truncate(path, path.stat().st_size // 2)
        assert storage.get([blank_page(label(1))]) == [Answer.FLAWED]
        storage.close()
        owner.close()

    def test_a_page_of_another_length_is_flawed_and_stays(self, owner: PackedStorage, tmp_path: Path) -> None:
        storage = PackedReader.open(tmp_path)
        assert storage.get([blank_page(label(1), PAGE_BYTES - 1)]) == [Answer.FLAWED]
        assert owner.get([blank_page(label(1))]) == [Answer.HIT]
        storage.close()
        owner.close()


def test_a_packed_store_larger_than_a_part_is_listed_and_read_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PART_PAGES", 32)
    monkeypatch.setattr(reader, "NAMES_MAX", 7)
    digest, count = TOY.digest(LAYOUT), 400
    labels = [Label(digest, sha256(b"%d" % number).digest(), pool) for number in range(count) for pool in ("kv", "swa")]
    with closing(PackedStorage.open(tmp_path)) as owner:
        assert all(owner.put([sealed_page(named) for named in labels], Level.CACHED))
    read_tables, tables_count = Segment.table, 0
    listed_count = 0

    def count_lines(segment: Segment) -> Table:
        nonlocal tables_count
        tables_count += 1
        return read_tables(segment)

    monkeypatch.setattr(Segment, "table", count_lines)
    storage = PackedReader.open(tmp_path)
    for objects in listed(storage, digest):
        assert [each.label for each in objects] == sorted(labels)[listed_count : listed_count + len(objects)]
        assert all(storage.get([blank_page(each.label) for each in objects]))
        listed_count += len(objects)
    assert listed_count == len(labels)
    assert tables_count == 2 * 27, "both files once to count, and once for each of 26 parts"
    tables_count = 0
    others = [Label(digest, bytes(31) + b"\x01", "kv"), Label(digest, bytes([255] * 32), "swa")]
    assert storage.exists([*labels, *others]) == [Answer.HIT] * len(labels) + [Answer.MISS] * 2
    assert tables_count == 2, "one look into each file for all pages of a call"
    assert storage.lengths(others) == [None, None]
    storage.close()
