"""A file store in a directory of its own."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from unified_cache.storage_backends.file.store import FileStorage


@pytest.fixture
def storage(root: Path) -> Iterator[FileStorage]:
    with closing(FileStorage.open(root)) as storage:
        yield storage
