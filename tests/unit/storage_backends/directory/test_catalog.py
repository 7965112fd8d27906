"""Catalog of a store in a directory: whose pages it holds, and when they were used."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk, put
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.errors import ClosedError, ConfigError, StorageError
from unified_cache.storage_backends.catalog import UsedBetween, catalog_of
from unified_cache.storage_backends.directory.front import STAMP_GRAIN_NS
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import KeysOnlyStorage
from unified_cache.testing.storage_contract import LAYOUT, MODEL, OTHER_MODEL, blank_page, label

IDENTITY = MODEL.digest(LAYOUT)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(only="listdir")


@pytest.fixture
def storage(kind: StoreKind, root: Path, disk: FaultyDisk) -> Iterator[DirectoryStorage]:
    clock = itertools.count(STAMP_GRAIN_NS, STAMP_GRAIN_NS).__next__
    with closing(kind.open(root, clock=clock, disk=disk)) as storage:
        yield storage


def test_a_store_in_a_directory_is_its_own_catalog(storage: DirectoryStorage) -> None:
    assert catalog_of(storage) is storage


def test_a_store_without_a_catalog_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"keys_only has no manifests\(\)"):
        catalog_of(KeysOnlyStorage())


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


def test_use_is_told_by_the_times_that_eviction_goes_by(storage: DirectoryStorage) -> None:
    assert storage.used_between(IDENTITY) is None
    put(storage, [1])
    put(storage, [2])
    first, last = storage.used_between(IDENTITY) or (0, 0)
    assert last - first == STAMP_GRAIN_NS
    put(storage, [1])
    assert storage.used_between(IDENTITY) == UsedBetween(last, last + STAMP_GRAIN_NS)
    storage.get([blank_page(label(2))])
    assert storage.used_between(IDENTITY) == UsedBetween(last + STAMP_GRAIN_NS, last + 2 * STAMP_GRAIN_NS)
    assert storage.used_between(label(1, model=OTHER_MODEL).identity) is None
    storage.remove([label(1), label(2)])
    assert storage.used_between(IDENTITY) is None


def test_a_directory_that_cannot_be_listed_raises(storage: DirectoryStorage, disk: FaultyDisk) -> None:
    put(storage, [1])
    disk.failing = range(1 << 30)
    with pytest.raises(StorageError, match="cannot list the identities"):
        storage.manifests()


def test_a_closed_store_has_no_catalog(storage: DirectoryStorage) -> None:
    storage.close()
    with pytest.raises(ClosedError):
        storage.manifests()
    with pytest.raises(ClosedError):
        storage.used_between(IDENTITY)
