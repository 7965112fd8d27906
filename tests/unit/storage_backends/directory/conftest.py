"""Fixtures of promises that every store in a directory keeps: the kind of store, its directory, a clock."""

import itertools
from pathlib import Path

import pytest

from tests.support.store_kinds import StoreKind
from unified_cache.storage_backends.directory.front import STAMP_GRAIN_NS, Clock

CLOCK_START_NS = 1_700_000_000_000_000_000


@pytest.fixture(params=StoreKind, ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> StoreKind:
    kind: StoreKind = request.param
    return kind


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def clock() -> Clock:
    """Each call is later than the one before by more than the grain of times of use."""
    return itertools.count(CLOCK_START_NS, 2 * STAMP_GRAIN_NS).__next__
