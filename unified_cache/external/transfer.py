"""Pages on their way between a store and an engine's rows, through landing memory, piece by piece.

    store    [header payload][header payload] ...      a piece of landing memory: whole pages, sealed
    engine    row row        row row                   the payloads alone

What moves here runs on a thread that may be late, so it holds the engine's rows only while it copies. ``let_go`` takes
them away: it waits for a copy under way and nothing else, and from then on no row is read or written.

What a store has in memory does not come this way: see ``ExternalStore.get_at_once``. Nor does what a bounded store
moves, see ``Capability.bounded``: it is never late, so it is given the rows themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from unified_cache.external.landing import Span
from unified_cache.external.loan import RowsLoan
from unified_cache.page import PageKey
from unified_cache.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.storage_backends.memory_reads import MemoryReader, targets_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StorageBackend

__all__ = [
    "AT_ONCE_BYTES_MAX",
    "DirectPassage",
    "ExternalPage",
    "LandedPage",
    "LandingPassage",
    "MemoryReads",
    "MissingWrites",
    "PageReads",
    "PageWrites",
    "Passage",
    "Piece",
    "pieces_of",
]

Clock = Callable[[], float]
"""Seconds, for ages and deadlines."""

ALIGN_BYTES = 64
"""A page in landing memory begins on a cache line."""

LARGE_PAGE_BYTES = 16 << 10
"""From this size on it begins on a page of the machine's memory, as its object does in a file: the kernel copies much
slower between two places that differ by a few bytes within theirs."""

LARGE_ALIGN_BYTES = 4096

AT_ONCE_BYTES_MAX = 64 << 20
"""Bytes that are copied within memory between two looks at the clock."""

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


def _payload_bytes(page: ExternalPage) -> int:
    """Return the bytes of a page's rows."""
    return page.rows[0].nbytes if len(page.rows) == 1 else sum([row.nbytes for row in page.rows])


def _as_bytes(row: memoryview) -> memoryview:
    """Return a row as bytes, whatever its owner keeps there."""
    return row if row.format == "B" and row.ndim == 1 else row.cast("B")


def _parts_of(pages: Sequence[ExternalPage], part_bytes: int) -> Iterator[Sequence[ExternalPage]]:
    """Cut a call into parts of about ``part_bytes``, at least a page each."""
    start = taken_bytes = 0
    for number, page in enumerate(pages):
        page_bytes = _payload_bytes(page)
        if number > start and taken_bytes + page_bytes > part_bytes:
            yield pages[start:number]
            start, taken_bytes = number, 0
        taken_bytes += page_bytes
    if start < len(pages):
        yield pages[start:] if start else pages


def pieces_of(pages: Sequence[ExternalPage], piece_bytes: int) -> list[Piece]:
    """Cut a call into pieces of about ``piece_bytes``, at least a page each."""
    pieces: list[Piece] = []
    landed: list[LandedPage] = []
    first = start = 0
    for number, page in enumerate(pages):
        page_bytes = HEADER_BYTES + _payload_bytes(page)
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


class MemoryReads:
    """Reads of the pages that a store has in memory into their rows, on the thread of whoever owns these."""

    __slots__ = ("_memory", "_pages", "answers", "hits_count", "read_bytes")

    def __init__(self, memory: MemoryReader, pages: Sequence[ExternalPage]) -> None:
        self._memory = memory
        self._pages = pages
        self.answers: list[Answer] = []
        """HIT or UNAVAILABLE, of the pages that the store was asked for so far, in order."""
        self.hits_count = 0
        self.read_bytes = 0
        """Payload that came so far."""

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Read part by part, as long as ``until_s`` has not come."""
        hit, unavailable = Answer.HIT, Answer.UNAVAILABLE
        for part in _parts_of(self._pages, AT_ONCE_BYTES_MAX):
            if clock() >= until_s:
                return
            came = self._memory.read_memory(targets_of(part))
            self.answers += [hit if is_there else unavailable for is_there in came]
            self.hits_count += sum(came)
            self.read_bytes += sum(map(_payload_bytes, compress(part, came)))

    def let_go(self) -> None:
        """Do nothing: whoever owns the rows is here, and nobody else has them."""


class Passage(Protocol):
    """Way of the pages of one call between a store and an engine's rows."""

    copied_bytes: int
    """Payload that has passed so far."""

    def pages_in(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece as the store fills or reads them."""
        ...

    def take_over(self, number: int, landed: LandedPage) -> bool:
        """Have the rows of a page where the store reads them; False if the rows are the engine's again."""
        ...

    def hand_over(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Have the hits of a piece in their rows; False if the rows are the engine's again."""
        ...

    def let_go(self) -> None:
        """Let go of the engine's rows, now and for good."""
        ...


class LandingPassage:
    """Way through landing memory, for a store that may be late: rows are touched while they are copied alone."""

    __slots__ = ("_bytes", "_loan", "_pages", "_view", "copied_bytes")

    def __init__(self, pages: Sequence[ExternalPage], span: Span) -> None:
        self._loan = RowsLoan([page.rows for page in pages])
        self._pages = [(page.label, page.parent) for page in pages]
        self._view = span.view
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(span.view, np.uint8)
        self.copied_bytes = 0

    def let_go(self) -> None:
        """Let go of the engine's rows, now and for good; wait for a copy under way."""
        self._loan.take_back()

    def pages_in(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece in landing memory."""
        named = self._pages[piece.start : piece.end]
        return [
            PageIO(label, parent, (self._view[landed.start : landed.end],))
            for (label, parent), landed in zip(named, piece.pages, strict=True)
        ]

    def take_over(self, number: int, landed: LandedPage) -> bool:
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

    def hand_over(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Copy the hits of a piece into their rows; False if the rows are the engine's again."""
        with self._loan.guard:
            if self._loan.is_over:
                return False
            for place, (landed, answer) in enumerate(zip(piece.pages, answers, strict=True)):
                if answer is not Answer.HIT:
                    continue
                self.copied_bytes += landed.end - landed.start - HEADER_BYTES
                start = landed.start + HEADER_BYTES
                for row in self._loan.rows_of(piece.start + place):
                    end = start + row.nbytes
                    if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                        row[:] = self._view[start:end]
                    else:
                        np.copyto(np.frombuffer(row, np.uint8), self._bytes[start:end])
                    start = end
        return True


class DirectPassage:
    """No way at all: a bounded store reads and fills the rows themselves, while whoever owns them waits for it.

    On the owner's own thread, so nobody else is given the rows meanwhile; and the store uses none of them afterwards.
    """

    __slots__ = ("_pages", "copied_bytes")

    def __init__(self, pages: Sequence[ExternalPage]) -> None:
        self._pages = pages
        self.copied_bytes = 0

    def let_go(self) -> None:
        """Let go of the engine's rows."""
        self._pages = ()

    def pages_in(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece: their rows, behind memory for a header."""
        pages = self._pages[piece.start : piece.end]
        return [
            PageIO(page.label, page.parent, tuple(map(_as_bytes, target.buffers)))
            for page, target in zip(pages, targets_of(pages), strict=True)
        ]

    def take_over(self, number: int, landed: LandedPage) -> bool:
        """Count the rows of a page, which are where the store reads them."""
        self.copied_bytes += landed.end - landed.start - HEADER_BYTES
        return True

    def hand_over(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Count the hits of a piece, which are in their rows."""
        hits = [answer is Answer.HIT for answer in answers]
        self.copied_bytes += sum(page.end - page.start - HEADER_BYTES for page in compress(piece.pages, hits))
        return True


class _Transfer:
    """Pages of one call, and their way."""

    __slots__ = ("_passage", "_pieces", "answers")

    def __init__(self, pieces: Sequence[Piece], passage: Passage) -> None:
        self._pieces = pieces
        self._passage = passage
        self.answers: list[Answer] = []
        """Of the pages that the store was asked for so far, in order."""

    @property
    def copied_bytes(self) -> int:
        """Payload that has passed so far."""
        return self._passage.copied_bytes

    def let_go(self) -> None:
        """Let go of the engine's rows, now and for good; wait for a copy under way."""
        self._passage.let_go()

    def _tell(self, answers: Sequence[Answer]) -> bool:
        """Keep the answers of a piece; tell whether it makes sense to go on: not with a store that answers nothing."""
        self.answers += answers
        return any(answer is not Answer.UNAVAILABLE for answer in answers)


class PageReads(_Transfer):
    """Read pages of a store, verified below, into the engine's rows."""

    __slots__ = ()

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Read piece by piece, as long as somebody waits and ``until_s`` has not come."""
        for piece in self._pieces:
            if clock() >= until_s:
                return
            answers = store.get(self._passage.pages_in(piece))
            if not self._passage.hand_over(piece, answers) or not self._tell(answers):
                return


class PageWrites(_Transfer):
    """Seal pages of the engine's rows and put them into a store."""

    __slots__ = ("_level",)

    def __init__(self, pieces: Sequence[Piece], passage: Passage, level: Level) -> None:
        super().__init__(pieces, passage)
        self._level = level

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Put piece by piece, as long as somebody waits and ``until_s`` has not come."""
        for piece in self._pieces:
            if clock() >= until_s:
                return
            answers = self._put(store, piece, range(piece.start, piece.end))
            if answers is None or not self._tell(answers):
                return

    def _put(self, store: StorageBackend, piece: Piece, numbers: Sequence[int]) -> list[Answer] | None:
        """Put the pages of these numbers, all of one piece; None if the rows are the engine's again."""
        pages = self._passage.pages_in(piece)
        ios = [pages[number - piece.start] for number in numbers]
        for number, io in zip(numbers, ios, strict=True):
            # One after the other: a page is sealed while it is in the processor's caches.
            if not self._passage.take_over(number, piece.pages[number - piece.start]):
                return None
            seal_buffers(io.buffers, io.label)
        return store.put(ios, self._level)


class MissingWrites(PageWrites):
    """Ask a store which of the pages it has, and put the others: to seal a page costs more than to ask for it.

    Both are one piece of work: to hand one over to a thread of ours takes longer than to ask for a prompt's pages.
    """

    __slots__ = ("_labels",)

    def __init__(self, pages: Sequence[ExternalPage], pieces: Sequence[Piece], passage: Passage, level: Level) -> None:
        super().__init__(pieces, passage, level)
        self._labels = [page.label for page in pages]

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Ask for all pages, then put piece by piece, as long as somebody waits and ``until_s`` has not come."""
        there = list(map(bool, store.exists(self._labels)))
        for piece in self._pieces:
            if clock() >= until_s:
                return
            numbers = range(piece.start, piece.end)
            missing = [number for number in numbers if not there[number]]
            stored = self._put(store, piece, missing) if missing else []
            if stored is None:
                return
            answers = iter(stored)
            if not self._tell([Answer.STORED if there[number] else next(answers) for number in numbers]):
                return
