"""A process that puts pages until it is killed or the store fails.

    python -m tests.support.file_writer KIND DIRECTORY FIRST_BATCH BYTES_MAX

It prints the number of each batch that the store has promised to keep; every second one is DURABLE.
"""

import sys

from tests.support.store_kinds import StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import PAGE_BYTES, label, sealed_page

PAGES_IN_BATCH = 4
LARGE_BYTES = 100_000
"""Of every fourth page."""


def bytes_of_page(number: int) -> int:
    return LARGE_BYTES if number % 4 == 0 else PAGE_BYTES


def writer_command(kind: StoreKind, directory: str, first_batch: int, bytes_max: int) -> list[str]:
    """Return what starts the process; ``bytes_max`` is 0 for no cap."""
    return [sys.executable, "-m", "tests.support.file_writer", kind.value, directory, str(first_batch), str(bytes_max)]


def main(kind: StoreKind, directory: str, batch: int, bytes_max: int) -> None:
    storage = kind.open(directory, bytes_max=bytes_max or None)
    while True:
        level = Level.DURABLE if batch % 2 else Level.CACHED
        numbers = range(batch * PAGES_IN_BATCH, (batch + 1) * PAGES_IN_BATCH)
        pages = [sealed_page(label(number), bytes_of_page(number)) for number in numbers]
        try:
            stored = storage.put(pages, level)
        except StorageError:
            return
        if not all(stored):
            return  # nothing can be evicted any more
        print(batch, flush=True)  # noqa: T201  # what it has been promised
        batch += 1


if __name__ == "__main__":
    main(StoreKind(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
