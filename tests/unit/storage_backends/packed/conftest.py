"""A packed store in a directory of its own, and what lies there."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk
from tests.unit.storage_backends.conftest import CLOCK_START_NS
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import Clock
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.testing.storage_contract import label

SLOT_BYTES = 1152
"""Of a page of ``PAGE_BYTES``."""

TAKEN_BYTES = SLOT_BYTES + 48
"""Of such a page with its line in the table."""


def opened(
    root: Path,
    disk: Disk | None = None,
    pages_max: int | None = None,
    clock: Clock = lambda: CLOCK_START_NS,
    free_bytes_min: int = 0,
) -> PackedStorage:
    """Open a store that waits for no sync, unless the disk does."""
    bytes_max = None if pages_max is None else pages_max * TAKEN_BYTES
    return PackedStorage.open(
        root, bytes_max=bytes_max, clock=clock, disk=disk or FaultyDisk(), free_bytes_min=free_bytes_min
    )


def packs(root: Path) -> list[str]:
    """Return the names of the files of pages."""
    return sorted(path.name for path in root.glob("*/*.pack"))


def slots(storage: PackedStorage, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the file and the slot of each page, by their numbers; pages that are not there have none."""
    found = storage._index.find_all([label(number) for number in numbers])
    return [(slot.segment.number, slot.number) for slot in found if slot is not None]


@pytest.fixture
def storage(root: Path) -> Iterator[PackedStorage]:
    with closing(opened(root)) as storage:
        yield storage
