"""Bytes that are moved and checked without any store: what no store that verifies can do better in one thread."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import numpy as np
from xxhash import xxh3_64_intdigest

__all__ = ["raw_read_s", "raw_write_s"]

OTHER_BYTES = 64 << 20
"""Touched before each measurement, so that pages come from main memory, as the engine's do."""


def raw_read_s(directory: Path, total_bytes: int, page_bytes: int) -> float:
    """Return how long it takes to read so many bytes of a file, page by page, and take the checksum of each page.

    The file is in memory, as what a run has just written is, and the bytes land in memory that was used before.
    """
    target = np.full(total_bytes, 0x5A, np.uint8)
    pages = [target.data[start : start + page_bytes] for start in range(0, total_bytes, page_bytes)]
    with TemporaryFile(dir=directory) as file:
        file.write(np.full(total_bytes, 0xA5, np.uint8).data)
        file.flush()
        np.full(OTHER_BYTES, 1, np.uint8)
        started_s = time.perf_counter()
        for number, page in enumerate(pages):
            os.preadv(file.fileno(), [page], number * page_bytes)
            xxh3_64_intdigest(page)
        return time.perf_counter() - started_s


def raw_write_s(directory: Path, total_bytes: int, page_bytes: int) -> float:
    """Return how long it takes to copy so many bytes page by page, take the checksum of each, and write it to a file.

    The copy is what lets an engine have its memory back while a disk hangs.
    """
    source = np.full(total_bytes, 0x5A, np.uint8)
    landing = np.full(page_bytes, 0xA5, np.uint8)
    pages = [source[start : start + page_bytes] for start in range(0, total_bytes, page_bytes)]
    with TemporaryDirectory(dir=directory) as fresh:
        draft = f"{fresh}/draft"
        np.full(OTHER_BYTES, 1, np.uint8)
        started_s = time.perf_counter()
        for number, page in enumerate(pages):
            copied = landing[: len(page)]
            np.copyto(copied, page)
            xxh3_64_intdigest(copied.data)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, copied.data)
            os.close(fd)
            os.rename(draft, f"{fresh}/{number}")  # noqa: PTH104 - as bare as can be
        return time.perf_counter() - started_s
