"""A file store whose directory somebody removes as a whole while it is open."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import bytes_in, descriptors, held, put
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.removals import removals_of
from unified_cache.testing.storage_contract import LAYOUT, MODEL, PAGE_BYTES, blank_page, label


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "above" / "store"


@pytest.fixture(params=[None, 20 * PAGE_BYTES], ids=["unbounded", "capped"])
def storage(request: pytest.FixtureRequest, root: Path) -> Iterator[FileStorage]:
    with closing(FileStorage.open(root, bytes_max=request.param)) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        put(storage, range(4))
        yield storage


@pytest.mark.parametrize("level", Level)
def test_the_next_put_makes_it_anew_and_a_restart_finds_its_pages(
    storage: FileStorage, level: Level, root: Path
) -> None:
    feed = removals_of(storage)
    shutil.rmtree(root.parent)
    assert held(storage, 4) == []
    assert storage.get([blank_page(label(0))]) == [Answer.MISS]
    assert put(storage, range(4, 9), level) == [True] * 5
    assert held(storage, 9) == list(range(4, 9))
    assert storage.bytes_used == bytes_in(root) == 5 * PAGE_BYTES
    assert feed is not None
    assert feed.take().lost_count > 0
    with closing(FileStorage.open(root, bytes_max=20 * PAGE_BYTES)) as other:
        assert put(other, [9]) == [True]
        assert storage.bytes_used == other.bytes_used == 6 * PAGE_BYTES
    storage.close()
    assert descriptors(root) == []
    assert list((root / "tmp").iterdir()) == []
    with closing(FileStorage.open(root)) as again:
        assert again.get([blank_page(label(number)) for number in range(4, 10)]) == [Answer.HIT] * 6


def test_registering_makes_it_anew_too(storage: FileStorage, root: Path) -> None:
    shutil.rmtree(root)
    manifest = manifest_of(MODEL, LAYOUT)
    storage.register(manifest, {})
    assert storage.manifests() == {manifest.identity: manifest}


def test_the_store_that_another_process_made_in_its_place_is_shared(storage: FileStorage, root: Path) -> None:
    shutil.rmtree(root)
    with closing(FileStorage.open(root)) as other:
        put(other, [7])
        assert put(storage, [8]) == [True]
        assert held(storage, 9) == held(other, 9) == [7, 8]


def test_what_stands_in_its_place_and_is_no_store_is_left_alone(storage: FileStorage, root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()
    (root / "somebody's").write_text("data")
    with pytest.raises(StorageError, match="must be empty or a file store"):
        put(storage, [5])
    assert [path.name for path in root.iterdir()] == ["somebody's"]
    (root / "somebody's").unlink()
    assert put(storage, [5]) == [True]


def test_it_is_made_where_it_was_wherever_the_process_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(FileStorage.open("store")) as storage:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        shutil.rmtree(tmp_path / "store")
        assert put(storage, [1]) == [True]
        assert bytes_in(tmp_path / "store") == PAGE_BYTES
