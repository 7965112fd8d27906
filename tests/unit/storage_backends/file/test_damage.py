"""Pages that rot, shrink or change places on disk, read through the verifying wrapper: misses, every one of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.files import path_of
from unified_cache.core.seal import FORMAT_VERSION, Flaw
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, sealed_page

TRUNCATIONS = 64


@pytest.fixture
def root(memory_path: Path) -> Path:
    return memory_path / "store"


@pytest.fixture
def storage(root: Path) -> Iterator[VerifiedStorage]:
    storage = VerifiedStorage(FileStorage.open(root))
    storage.put([sealed_page(label(number)) for number in range(3)], Level.CACHED)
    yield storage
    storage.close()


def is_hit(storage: VerifiedStorage, number: int) -> bool:
    found = blank_page(label(number))
    (hit,) = storage.get([found])
    assert not hit or bytes_of(found) == bytes_of(sealed_page(label(number)))
    return bool(hit)


def check_recovery(storage: VerifiedStorage, number: int) -> None:
    """Check that a flawed page left nothing behind that keeps it from being stored again."""
    assert storage.exists([label(number)]) == [Answer.MISS]
    assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
    assert is_hit(storage, number)


def test_a_file_cut_anywhere_is_a_miss_whether_it_keeps_its_length_or_not(storage: VerifiedStorage, root: Path) -> None:
    whole = bytes_of(sealed_page(label(1)))
    path = path_of(root, label(1))
    for number in range(TRUNCATIONS):
        cut = number * PAGE_BYTES // TRUNCATIONS
        for torn in (whole[:cut], whole[:cut] + bytes(PAGE_BYTES - cut)):
            path.write_bytes(torn)
            assert not is_hit(storage, 1), (cut, len(torn))
            check_recovery(storage, 1)


def test_files_that_changed_places_are_misses_and_the_next_put_heals_them(storage: VerifiedStorage, root: Path) -> None:
    one, two = (path_of(root, label(number)) for number in (1, 2))
    for _ in range(2):
        one.rename(root / "aside")
        two.rename(one)
        (root / "aside").rename(two)
        assert [is_hit(storage, number) for number in range(3)] == [True, False, False]
        for number in (1, 2):
            check_recovery(storage, number)
    assert storage.flaws_count == {Flaw.FOREIGN: 4}


@pytest.mark.parametrize("kind", ["foreign", "hard_link", "zeros", "sparse", "stale_format"])
def test_a_put_replaces_what_has_the_length_of_its_page_and_says_that_it_is_another(
    kind: str, storage: VerifiedStorage, root: Path
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
    assert storage.put([sealed_page(label(1))], Level.DURABLE) == [Answer.STORED]
    assert [is_hit(storage, number) for number in range(3)] == [True] * 3
    assert storage.flaws_count == {}
