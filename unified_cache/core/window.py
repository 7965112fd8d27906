"""The one rule that carries the design: which pages a component needs to resume after ``end`` pages.

A prefix of ``end`` pages is *restorable* iff every component holds all its pages in ``[window(end), end)``.
Match, lock, load, backup, the hit policy towards storage and the agreement between ranks all follow from it.
The answer is always the maximum of the intersection of restorable sets; a minimum of per-component maxima can
name a length that some component cannot resume from.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

SPAN_ALL = 1 << 30
"""Span of a component that needs every page since the root."""

SPAN_UNKNOWN = 0
"""Span of a component whose engine did not say how far back a resume reaches; nothing may be computed from it."""


def window(end: int, span: int) -> int:
    """Return the first page needed to resume after ``end`` pages, where ``span`` pages before it are needed."""
    return end - span if end > span else 0


def needed_pages(ends: Iterable[int], span: int, start: int, end: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the pages of [start, end) that a resume at one of ``ends`` needs, shape (end - start,).

    Ends outside (start, end] count as far as their windows reach into the range.
    """
    needed = np.zeros(end - start, np.bool_)
    for resumed in ends:
        needed[max(window(resumed, span) - start, 0) : max(resumed - start, 0)] = True
    return needed


def window_counts(pages: npt.NDArray[np.bool_], span: int) -> npt.NDArray[np.int64]:
    """Count for each end in ``[0, len(pages)]`` the pages of its window for which a mask is True; linear in pages."""
    before: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(pages, dtype=np.int64)])
    counts: npt.NDArray[np.int64] = before - before[np.maximum(np.arange(len(before)) - span, 0)]
    return counts


def restorable_ends(
    spans: Sequence[int], tombstones: Sequence[npt.NDArray[np.bool_] | None], count: int
) -> npt.NDArray[np.bool_]:
    """Return a mask of the ends in ``[1, count]`` at which a prefix is restorable, shape (count,). Linear in pages.

    ``tombstones[c]`` has shape (count,) and is True where component ``c`` lacks the page; None means no tombstone.
    """
    ends = np.arange(1, count + 1)
    ok = np.ones(count, np.bool_)
    for span, missing in zip(spans, tombstones, strict=True):
        if missing is None:
            continue
        last_tombstone = np.where(missing, ends, 0)
        np.maximum.accumulate(last_tombstone, out=last_tombstone)
        ok &= last_tombstone <= np.maximum(ends - span, 0)
    return ok


def last_end(ends: npt.NDArray[np.bool_]) -> int:
    """Return how many pages the last end takes that is True, counted from where ``ends`` begin; 0 if there is none."""
    found = ends.nonzero()[0]  # of few pages faster than flatnonzero
    return int(found[-1]) + 1 if found.size else 0
