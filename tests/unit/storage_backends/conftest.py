"""Fixtures of promises that every store in a directory keeps: the kind of store, its directory, a clock."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.store_kinds import StoreKind
from unified_cache.storage_backends.directory.front import STAMP_GRAIN_NS, Clock

CLOCK_START_NS = 1_700_000_000_000_000_000
MEMORY = "/dev/shm"


@pytest.fixture(params=StoreKind, ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> StoreKind:
    kind: StoreKind = request.param
    return kind


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Yield a directory in memory, where there is such: for tests that make a disk up, or wait for none."""
    with TemporaryDirectory(prefix="unified-cache-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def clock() -> Clock:
    """Each call is later than the one before by more than the grain of times of use."""
    return itertools.count(CLOCK_START_NS, 2 * STAMP_GRAIN_NS).__next__
