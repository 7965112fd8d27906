"""Oracle of page contents: the bytes of a page are a function of its key and its pool.

A page is a run of 64-bit words. Word ``i`` of page ``k`` is ``a(k) * c(i) + b(k)``, its halves folded together,
where ``c`` is a fixed table of random words that depends on the pool, and ``a`` and ``b`` mix all 256 bits of the
key. So pages swapped, shifted within themselves, torn between two writers, stale or of another pool all differ.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.pool import PoolSpec

_Words = npt.NDArray[np.uint64]

WORD_BYTES = 8

_HALF = np.uint64(32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)


class Oracle:
    """The oracle of one pool, with its table made once."""

    __slots__ = ("_table", "spec")

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        words = -(-spec.page_bytes // WORD_BYTES)
        seed = np.frombuffer(spec.name.encode("ascii").ljust(PAGE_KEY_BYTES, b"\0"), "<u8").astype(np.uint64)
        start = _mixed(np.add(seed * _GOLDEN, np.arange(len(seed), dtype=np.uint64), dtype=np.uint64)).sum(
            dtype=np.uint64
        )
        self._table: _Words = _mixed(start + np.arange(1, words + 1, dtype=np.uint64) * _GOLDEN)
        """``c``, one word for each word of a page."""

    def payloads(self, keys: Sequence[PageKey]) -> npt.NDArray[np.uint8]:
        """Return what the pages of ``keys`` hold, shape (pages, page_bytes); the caller's own."""
        key_words = (
            np.frombuffer(b"".join(keys), "<u8").astype(np.uint64).reshape(len(keys), PAGE_KEY_BYTES // WORD_BYTES)
        )
        folded = np.zeros(len(keys), np.uint64)
        for column in key_words.T:
            folded = _mixed(folded * _GOLDEN + column)
        factor = _mixed(folded + _GOLDEN) | np.uint64(1)
        words = factor[:, None] * self._table
        words += folded[:, None]
        words ^= words >> _HALF
        return words.astype("<u8", copy=False).view(np.uint8)[:, : self.spec.page_bytes]


def _mixed(words: _Words) -> _Words:
    """Scatter each word over all 64 bits. The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    for shift, factor in _MIX:
        words = (words ^ (words >> shift)) * factor
    return words ^ (words >> _LAST_SHIFT)
