"""The stores that keep pages in a directory: how each is opened, and what it may take of the disk."""

import os
import time
from enum import Enum
from pathlib import Path

from tests.support.files import FILE_BYTES, bytes_in
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import FREE_BYTES_MIN, Clock
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.segment import BLOCK_BYTES, parse_file_name, taken_bytes
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.testing.storage_contract import PAGE_BYTES

DirectoryStorage = FileStorage | PackedStorage

ENTRY_BYTES = 48
"""What a page has in the table of a packed file."""

STRAY_PAGES_MAX = 16
"""Slots that a writer had written, and not entered, when it ended; nobody knows that they take room."""


class StoreKind(Enum):
    """One kind of store in a directory."""

    FILE = "file"
    """A file for each page."""
    PACKED = "packed"
    """Pages side by side in files."""

    def taken_bytes(self, object_bytes: int = PAGE_BYTES) -> int:
        """Return what a page takes of the file system, and so of a cap."""
        if self is StoreKind.PACKED:
            return taken_bytes(object_bytes)
        return -(-object_bytes // FILE_BYTES) * FILE_BYTES

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        bytes_max: int | None = None,
        free_bytes_min: int = FREE_BYTES_MIN,
        clock: Clock = time.time_ns,
        disk: Disk | None = None,
    ) -> DirectoryStorage:
        """Open a store, see there."""
        kind = FileStorage if self is StoreKind.FILE else PackedStorage
        return kind.open(path, bytes_max=bytes_max, free_bytes_min=free_bytes_min, clock=clock, disk=disk)

    def check_room(self, root: Path, bytes_used: int) -> None:
        """Check that a store with so many bytes of objects, now closed, takes no more of the disk than it says.

        Of pages of ``PAGE_BYTES`` and more.
        """
        if self is StoreKind.FILE:
            assert bytes_in(root) == bytes_used
            return
        # What is free goes back by whole blocks, so the first and the last of each page may stay in part.
        pages_bytes = bytes_used + (bytes_used // self.taken_bytes()) * 2 * BLOCK_BYTES
        files = list(root.glob("?" * 64 + "/*.pack"))
        taken_bytes = sum(path.stat().st_blocks * 512 for path in files)
        assert taken_bytes <= pages_bytes + sum(map(_spare_bytes, files))


def _spare_bytes(path: Path) -> int:
    """Return what a packed file may take beside its pages: its table as far as it was used, and stray pages."""
    parsed = parse_file_name(b"", path.name)
    assert parsed is not None
    shape, _ = parsed
    table_bytes = -(-shape.slots_count * ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES
    slots_reached = (path.stat().st_size - table_bytes) // shape.slot_bytes + 1
    return max(slots_reached, 0) * ENTRY_BYTES + STRAY_PAGES_MAX * (shape.slot_bytes + BLOCK_BYTES)
