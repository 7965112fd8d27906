"""Longest restorable prefix of a prompt, by the rule of ``window``, asked of a store from the far end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import PageKey
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL, restorable_ends, window
from unified_cache.proto.wire.names import labels_of
from unified_cache.storage_backends.protocol import Answer

__all__ = ["PoolSpan", "Present", "RestorablePrefix", "labels_of_spans", "longest_prefix"]

BLOCK_PAGES_MIN = 64
"""Pages before the end at which a windowed pool is looked for first; its window twice, where that is more."""

BLOCK_GROWTH = 4
"""Factor by which each next block reaches further back, so that the whole search is linear in pages."""

Tombstones = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """A pool that a resume needs, and the number of its pages before the end that it needs."""

    name: str
    span: int


Present = Callable[[Sequence[tuple[str, int, int]]], list[Answer]]
"""Tells for pages [start, end) of pools by name, all in one list, which of them there are."""


@dataclass(frozen=True, slots=True)
class RestorablePrefix:
    """Longest restorable prefix, and the pool that bounds it."""

    end: int
    """The longest prefix that can be restored, in pages."""
    bound_by: str
    """Pool whose missing page ends it; empty if the whole prefix can be restored."""
    restorable: npt.NDArray[np.bool_]
    """True at ``i`` if ``i + 1`` pages can be restored, shape (pages,); complete if every end was asked for."""


def labels_of_spans(identity: bytes, keys: Sequence[PageKey], asked: Sequence[tuple[str, int, int]]) -> list[Label]:
    """Return the labels of pages [start, end) of pools by name, all in one list."""
    return list(chain.from_iterable(labels_of(identity, keys[start:end], pool) for pool, start, end in asked))


def longest_prefix(
    pools: Sequence[PoolSpan], pages_count: int, present: Present, *, every_end: bool
) -> RestorablePrefix:
    """Return the longest prefix of ``pages_count`` that all pools can restore, or every one.

    Pools that need all pages are asked for all of them; the others only as far back from there as the answer lies,
    unless every end is asked for.
    """
    full = [pool for pool in pools if pool.span >= min(pages_count, SPAN_ALL)]
    windowed = [pool for pool in pools if pool.span < min(pages_count, SPAN_ALL)]
    end, bound_by = pages_count, ""
    for pool, tombstones in zip(full, _tombstones(present, full, 0, pages_count), strict=True):
        first_tombstone = int(tombstones.argmax()) if tombstones.any() else pages_count
        if first_tombstone < end:
            end, bound_by = first_tombstone, pool.name
    restorable = np.zeros(pages_count, np.bool_)
    if not windowed or not end:
        restorable[:end] = True
        return RestorablePrefix(end, bound_by, restorable)
    back = max(BLOCK_PAGES_MIN, 2 * max(pool.span for pool in windowed))
    start = 0 if every_end else max(0, end - back)
    while True:
        missing = _tombstones(present, windowed, start, end)
        # What lies before is taken to be missing: of the ends that this leaves, the longest is right.
        ok = restorable_ends([pool.span for pool in windowed], missing, start, end - start, [start] * len(windowed))
        if ok.any() or not start:
            break
        back *= BLOCK_GROWTH
        start = max(0, end - back)
    restorable[start:end] = ok
    found = start + int(np.flatnonzero(ok)[-1]) + 1 if ok.any() else 0
    if found < end:
        short = zip(windowed, missing, strict=True)
        bound_by = next(
            pool.name for pool, tombstones in short if tombstones[max(window(end, pool.span) - start, 0) :].any()
        )
    return RestorablePrefix(found, bound_by, restorable)


def _tombstones(present: Present, pools: Sequence[PoolSpan], start: int, end: int) -> list[Tombstones]:
    """Return for each pool which pages of [start, end) are missing, all asked for at once."""
    if not pools or end == start:
        return [np.zeros(end - start, np.bool_) for _ in pools]
    answers = present([(pool.name, start, end) for pool in pools])
    there = Answer.HIT
    absent = np.array([answer is not there for answer in answers], np.bool_)
    edges = list(accumulate([end - start] * len(pools), initial=0))
    return [absent[first : first + end - start] for first in edges[:-1]]
