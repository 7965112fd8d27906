"""Bytes that are read and checked without any store: what no store that verifies can do better in one thread."""

import os
import time
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from xxhash import xxh3_64_intdigest

__all__ = ["raw_read_s"]


def raw_read_s(directory: Path, total_bytes: int, page_bytes: int) -> float:
    """Return how long it takes to read so many bytes of a file, page by page, and take the checksum of each page.

    The file is in memory, as what a run has just written is, and the bytes land in memory that was used before.
    """
    target = np.full(total_bytes, 0x5A, np.uint8)
    pages = [target.data[start : start + page_bytes] for start in range(0, total_bytes, page_bytes)]
    with TemporaryFile(dir=directory) as file:
        file.write(np.full(total_bytes, 0xA5, np.uint8).data)
        file.flush()
        # So that the rows come from main memory, as the engine's do.
        np.full(64 << 20, 1, np.uint8)
        started_s = time.perf_counter()
        for number, page in enumerate(pages):
            os.preadv(file.fileno(), [page], number * page_bytes)
            xxh3_64_intdigest(page)
        return time.perf_counter() - started_s
