"""What a file store knows of itself: whose pages it holds, and when they were used."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk, put
from unified_cache.errors import ClosedError, ConfigError, StorageError
from unified_cache.storage_backends.catalog import UsedBetween, catalog_of
from unified_cache.storage_backends.directory.stamps import STAMP_GRAIN_NS
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import keys_only_storage
from unified_cache.testing.storage_contract import LAYOUT, MODEL, OTHER_MODEL, label

IDENTITY = MODEL.digest(LAYOUT)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(only="listdir")


@pytest.fixture
def storage(tmp_path: Path, disk: FaultyDisk) -> Iterator[FileStorage]:
    clock = itertools.count(STAMP_GRAIN_NS, STAMP_GRAIN_NS).__next__
    with closing(FileStorage.open(tmp_path / "store", clock=clock, disk=disk)) as storage:
        yield storage


def test_a_file_store_is_its_own_catalog(storage: FileStorage) -> None:
    assert catalog_of(storage) is storage


def test_a_store_without_a_catalog_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"keys_only has no manifests\(\)"):
        catalog_of(keys_only_storage())


def test_every_identity_is_named_with_its_manifest(storage: FileStorage) -> None:
    manifests = [manifest_of(model, LAYOUT) for model in (MODEL, OTHER_MODEL)]
    for manifest in manifests:
        storage.register(manifest, {})
    assert storage.manifests() == {manifest.identity: manifest for manifest in manifests}


def test_an_identity_without_a_readable_manifest_is_named_with_none(storage: FileStorage, tmp_path: Path) -> None:
    put(storage, [1])
    assert storage.manifests() == {IDENTITY: None}
    place = tmp_path / "store" / IDENTITY.hex() / "manifest.json"
    for spoil in (lambda: place.write_bytes(b"\xff"), lambda: place.write_text("{"), place.mkdir):
        spoil()
        assert storage.manifests() == {IDENTITY: None}
        if place.is_file():
            place.unlink()


def test_a_file_and_a_link_called_like_an_identity_are_none(storage: FileStorage, tmp_path: Path) -> None:
    (tmp_path / "store" / ("ab" * 32)).write_text("a letter")
    (tmp_path / "store" / ("cd" * 32)).symlink_to(tmp_path)
    assert storage.manifests() == {}


def test_use_is_told_by_the_times_that_eviction_goes_by(storage: FileStorage) -> None:
    assert storage.used_between(IDENTITY) is None
    put(storage, [1])
    put(storage, [2])
    first, last = storage.used_between(IDENTITY) or (0, 0)
    assert last - first == STAMP_GRAIN_NS
    put(storage, [1])
    assert storage.used_between(IDENTITY) == UsedBetween(last, last + STAMP_GRAIN_NS)
    assert storage.used_between(label(1, model=OTHER_MODEL).identity) is None


def test_a_directory_that_cannot_be_listed_raises(storage: FileStorage, disk: FaultyDisk) -> None:
    put(storage, [1])
    disk.failing = range(1 << 30)
    with pytest.raises(StorageError, match="cannot list the identities"):
        storage.manifests()
    with pytest.raises(StorageError, match="cannot list"):
        storage.used_between(IDENTITY)


def test_a_closed_store_has_no_catalog(storage: FileStorage) -> None:
    storage.close()
    with pytest.raises(ClosedError):
        storage.manifests()
    with pytest.raises(ClosedError):
        storage.used_between(IDENTITY)
