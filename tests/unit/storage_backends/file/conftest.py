"""A file store in a directory of its own, for the tests of this room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from unified_cache.storage_backends.file.store import FileStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(root: Path) -> Iterator[FileStorage]:
    storage = FileStorage.open(root)
    yield storage
    storage.close()
