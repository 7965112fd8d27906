"""Lossless compression of a page: the bytes of its numbers in planes, each a frame of zstd, or as it is.

The exponents of neighbouring numbers are alike, their mantissas are noise. So of numbers of ``width`` bytes the first
bytes of all form a plane, then the second bytes, and so on; a plane that zstd makes no shorter is kept as it is. Data
begins with the length of each plane, 4 bytes each.
"""

import struct
from functools import partial
from threading import Lock, local
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.extras import needs_extra
from unified_cache.core.seal import Label

with needs_extra("compress", "compress=lossless"):
    import zstandard

Bytes = npt.NDArray[np.uint8]

WIDTHS = (1, 2, 4)
"""Bytes of a number: fp8 and integers, bfloat16 and float16, float32."""

SAMPLE_BYTES = 64 << 10
"""Looked at of a page to choose the width for those that follow."""

SAMPLED_PAGES = 64
"""Pages of a pool that follow one choice: a pool that does not gain costs a look at one page in so many."""

GAIN_MIN = 0.03
"""Part of a page that must be saved for the time that it takes."""

POOLS_MAX = 4096
"""Choices kept; with one more all are made again."""

_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
"""KV has hardly a match, so the search for them is kept short: twice as fast as level 1, and no longer."""


class _Threads(local):
    """A compressor for each thread."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdCompressor(compression_params=_HUFFMAN)


class _PlaneChoice(NamedTuple):
    """Width and planes that pages of one pool are compressed by."""

    width: int
    planes: frozenset[int]
    """Those that zstd makes shorter; none for a pool that does not gain."""


class PageCompressor:
    """Compresses pages, each pool as its first page and one in ``SAMPLED_PAGES`` gain most. Thread-safe."""

    def __init__(self) -> None:
        self._threads = _Threads()
        self._choices: dict[tuple[bytes, str], tuple[_PlaneChoice, int]] = {}
        """By identity and pool, with the number of pages that follow it still."""
        self._guard = Lock()

    def compress(self, label: Label, payload: Bytes) -> tuple[int, bytes] | None:
        """Return the width and the data of a page; None where it gains too little."""
        choice = self._choice((label.identity, label.pool), payload)
        if not choice.planes or payload.size % choice.width:
            return None
        data = self._data(payload, choice)
        return (choice.width, data) if len(data) < payload.size * (1 - GAIN_MIN) else None

    def _choice(self, pool: tuple[bytes, str], payload: Bytes) -> _PlaneChoice:
        with self._guard:
            choice, pages_left = self._choices.get(pool, (_PlaneChoice(1, frozenset()), 0))
            if pages_left:
                self._choices[pool] = (choice, pages_left - 1)
                return choice
        sample = payload[: min(SAMPLE_BYTES, payload.size // WIDTHS[-1] * WIDTHS[-1])]
        choice = min(map(partial(self._tried, sample), WIDTHS), key=lambda each: len(self._data(sample, each)))
        with self._guard:
            if len(self._choices) >= POOLS_MAX:
                self._choices.clear()
            self._choices[pool] = (choice, SAMPLED_PAGES - 1)
        return choice

    def _tried(self, sample: Bytes, width: int) -> _PlaneChoice:
        plane_bytes = sample.size // width
        kept_bytes = [len(self._frame(sample[number::width])) for number in range(width)]
        gaining = [number for number, kept in enumerate(kept_bytes) if kept < plane_bytes * (1 - GAIN_MIN)]
        return _PlaneChoice(width, frozenset(gaining))

    def _data(self, payload: Bytes, choice: _PlaneChoice) -> bytes:
        planes: list[bytes] = []
        for number in range(choice.width):
            plane = payload[number :: choice.width]
            frame = self._frame(plane) if number in choice.planes else b""
            planes.append(frame if 0 < len(frame) < plane.size else plane.tobytes())
        return struct.pack(f"<{choice.width}I", *map(len, planes)) + b"".join(planes)

    def _frame(self, plane: Bytes) -> bytes:
        return self._threads.zstd.compress(np.ascontiguousarray(plane).data)


def decompress(data: memoryview, width: int, target: Bytes) -> bool:
    """Fill ``target`` with a page; False where ``data`` is not one of just that length. Nothing longer is made."""
    table_bytes = 4 * width
    if width not in WIDTHS or len(data) < table_bytes or target.size % width:
        return False
    lengths = struct.unpack_from(f"<{width}I", data)
    plane_bytes = target.size // width
    if table_bytes + sum(lengths) != len(data) or max(lengths) > plane_bytes:
        return False
    start = table_bytes
    for number, length in enumerate(lengths):
        plane = data[start : start + length]
        start += length
        if length < plane_bytes:
            try:
                # zstd makes room for as much as a frame says that it holds.
                if zstandard.frame_content_size(plane) != plane_bytes:
                    return False
                plane = memoryview(zstandard.ZstdDecompressor().decompress(plane, allow_extra_data=False))
            except zstandard.ZstdError:
                return False
            if len(plane) != plane_bytes:
                return False
        target[number::width] = np.frombuffer(plane, np.uint8)
    return True
