"""Pages on their way between a store and an engine's rows, through landing memory, piece by piece.

    store    [header payload][header payload] ...      a piece of landing memory: whole pages, sealed
    engine    row row        row row                   the payloads alone

What moves here runs on a thread that may be late, so it holds the engine's rows only while it copies. ``let_go`` takes
them away: it waits for a copy under way and nothing else, and from then on no row is read or written.

A store that has a page in memory reads it into the rows themselves (``LentRows``), and its landing memory stays unused
but for the header. What it would have to wait for it reads into landing memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.external.landing import Span
from unified_cache.page import PageKey
from unified_cache.seal import HEADER_BYTES, Label, seal
from unified_cache.storage_backends.lent_rows import LentRows, RowsLoan
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StorageBackend

__all__ = ["ExternalPage", "LandedPage", "PageReads", "PageWrites", "Piece", "pieces_of"]

Clock = Callable[[], float]
"""Seconds, for ages and deadlines."""

ALIGN_BYTES = 64
"""A page in landing memory begins on a cache line."""

LARGE_PAGE_BYTES = 16 << 10
"""From this size on it begins on a page of the machine's memory, as its object does in a file: the kernel copies much
slower between two places that differ by a few bytes within theirs."""

LARGE_ALIGN_BYTES = 4096

SMALL_ROW_BYTES = 2048
"""Below this a copy is over before another thread could take the interpreter lock."""


class ExternalPage(NamedTuple):
    """One page in an engine's memory: the payload alone, without our header."""

    label: Label
    parent: PageKey | None
    """Key of the page before it in its chain; None for a first page, or where it is not known."""
    rows: tuple[memoryview, ...]
    """The payload in order, each a contiguous run of bytes; writable where a page is to be read.

    The engine keeps them from other use until the call has returned, and no longer.
    """


class LandedPage(NamedTuple):
    """One page in landing memory."""

    start: int
    """Offset of its header in the span."""
    end: int


class Piece(NamedTuple):
    """Pages [start, end) of a call that go to the store together."""

    start: int
    end: int
    pages: tuple[LandedPage, ...]

    @property
    def span_bytes(self) -> int:
        """Landing memory that the piece takes."""
        return self.pages[-1].end


def pieces_of(pages: Sequence[ExternalPage], piece_bytes: int) -> list[Piece]:
    """Cut a call into pieces of about ``piece_bytes``, at least a page each."""
    pieces: list[Piece] = []
    landed: list[LandedPage] = []
    first = start = 0
    for number, page in enumerate(pages):
        page_bytes = HEADER_BYTES + sum(row.nbytes for row in page.rows)
        if landed and start + page_bytes > piece_bytes:
            pieces.append(Piece(first, number, tuple(landed)))
            landed, first, start = [], number, 0
        align_bytes = LARGE_ALIGN_BYTES if page_bytes >= LARGE_PAGE_BYTES else ALIGN_BYTES
        start = -(-start // align_bytes) * align_bytes
        landed.append(LandedPage(start, start + page_bytes))
        start += page_bytes
    if landed:
        pieces.append(Piece(first, len(pages), tuple(landed)))
    return pieces


class _Transfer:
    """Pages of one call and the landing memory that they pass through."""

    __slots__ = ("_bytes", "_labels", "_loan", "_pieces", "_rows_counts", "_view", "answers", "copied_bytes")

    def __init__(self, pages: Sequence[ExternalPage], pieces: Sequence[Piece], span: Span) -> None:
        self._loan = RowsLoan([page.rows for page in pages])
        self._rows_counts = [len(page.rows) for page in pages]
        self._labels = [(page.label, page.parent) for page in pages]
        self._pieces = pieces
        self._view = span.view
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(span.view, np.uint8)
        self.answers: list[Answer] = []
        """Of the pages that the store was asked for so far, in order."""
        self.copied_bytes = 0
        """Payload that was copied so far."""

    def let_go(self) -> None:
        """Let go of the engine's rows, now and for good; wait for a copy under way."""
        self._loan.take_back()

    def _ios(self, piece: Piece) -> list[PageIO]:
        labels = self._labels[piece.start : piece.end]
        return [
            PageIO(label, parent, (self._view[landed.start : landed.end],))
            for (label, parent), landed in zip(labels, piece.pages, strict=True)
        ]

    def _tell(self, answers: Sequence[Answer]) -> bool:
        """Keep the answers of a piece; tell whether it makes sense to go on: not with a store that answers nothing."""
        self.answers += answers
        return any(answer is not Answer.UNAVAILABLE for answer in answers)


class PageReads(_Transfer):
    """Read pages of a store, verified below, and copy those that were hits and are not in the engine's rows yet."""

    __slots__ = ()

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Read piece by piece, as long as somebody waits and ``until_s`` has not come."""
        for piece in self._pieces:
            if clock() >= until_s:
                return
            lent = [
                LentRows(
                    self._loan,
                    number,
                    self._view[landed.start : landed.start + HEADER_BYTES],
                    self._rows_counts[number],
                )
                if landed.end - landed.start >= LARGE_PAGE_BYTES
                else None
                for number, landed in zip(range(piece.start, piece.end), piece.pages, strict=True)
            ]
            ios = [io._replace(lent=rows) for io, rows in zip(self._ios(piece), lent, strict=True)]
            answers = store.get(ios)
            proven = [rows is not None and rows.is_proven for rows in lent]
            if not self._hand_over(piece, answers, proven) or not self._tell(answers):
                return

    def _hand_over(self, piece: Piece, answers: Sequence[Answer], proven: Sequence[bool]) -> bool:
        """Copy the hits of a piece that are not in their rows; False if the rows are the engine's again."""
        with self._loan.guard:
            if self._loan.is_over:
                return False
            for place, (landed, answer) in enumerate(zip(piece.pages, answers, strict=True)):
                if answer is not Answer.HIT:
                    continue
                self.copied_bytes += landed.end - landed.start - HEADER_BYTES
                if proven[place]:
                    continue
                start = landed.start + HEADER_BYTES
                for row in self._loan.rows_of(piece.start + place):
                    end = start + row.nbytes
                    if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                        row[:] = self._view[start:end]
                    else:
                        np.copyto(np.frombuffer(row, np.uint8), self._bytes[start:end])
                    start = end
        return True


class PageWrites(_Transfer):
    """Copy pages out of the engine's rows, seal them and put them into a store."""

    __slots__ = ("_level",)

    def __init__(self, pages: Sequence[ExternalPage], pieces: Sequence[Piece], span: Span, level: Level) -> None:
        super().__init__(pages, pieces, span)
        self._level = level

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Put piece by piece, as long as somebody waits and ``until_s`` has not come."""
        for piece in self._pieces:
            if clock() >= until_s:
                return
            ios = self._ios(piece)
            for number, io in enumerate(ios):
                # One after the other: a page is sealed while it is in the processor's caches.
                if not self._take_over(piece.start + number, piece.pages[number]):
                    return
                seal(io.buffers[0], io.label)
            if not self._tell(store.put(ios, self._level)):
                return

    def _take_over(self, number: int, landed: LandedPage) -> bool:
        """Copy the rows of a page; False if the rows are the engine's again."""
        with self._loan.guard:
            if self._loan.is_over:
                return False
            start = landed.start + HEADER_BYTES
            for row in self._loan.rows_of(number):
                end = start + row.nbytes
                if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                    self._view[start:end] = row
                else:
                    np.copyto(self._bytes[start:end], np.frombuffer(row, np.uint8))
                start = end
            self.copied_bytes += landed.end - landed.start - HEADER_BYTES
        return True
