"""Tasks of an engine's store: what one call asks of a store, part by part, on a thread that may be late.

    store    [header payload][header payload] ...      a piece of a bounce buffer: whole pages, sealed
    engine    row row        row row                   the payloads alone

Pages take one of two paths. The buffered path holds the engine's rows only while it copies: ``revoke`` takes them away,
waits for a copy under way and nothing else, and from then on no row is read or written. The zero-copy path gives the
rows themselves to a bounded store, which is never late, see ``Capability.bounded``.

What a store has in memory takes neither: see ``EngineStore.get_at_once``.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from unified_cache.integrations.engine_store.buffers import BounceBuffer, RevocableBuffers
from unified_cache.integrations.engine_store.interface import Clock, EnginePage
from unified_cache.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.storage_backends.memory_reads import MemoryReader, targets_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StorageBackend

__all__ = [
    "AT_ONCE_BYTES_MAX",
    "BufferedPath",
    "ClearTask",
    "CopyPath",
    "GetTask",
    "LookupTask",
    "MemoryReadTask",
    "Piece",
    "PutMissingTask",
    "PutTask",
    "Task",
    "TouchTask",
    "ZeroCopyPath",
    "pieces_of",
]


ALIGN_BYTES = 64
"""A page in a bounce buffer begins on a cache line."""

LARGE_PAGE_BYTES = 16 << 10
"""From this size on it begins on a page of the machine's memory, as its object does in a file: the kernel copies much
slower between two places that differ by a few bytes within theirs."""

LARGE_ALIGN_BYTES = 4096

AT_ONCE_BYTES_MAX = 64 << 20
"""Bytes that are copied within memory between two looks at the clock."""

SMALL_ROW_BYTES = 2048
"""Below this a copy is over before another thread could take the interpreter lock."""

LOOKUP_LABELS_MAX = 1024
"""Labels of one call to the store, which takes some 10 us for each where they are files."""


class PlacedPage(NamedTuple):
    """One page in a bounce buffer."""

    start: int
    """Offset of its header in the buffer."""
    end: int


class Piece(NamedTuple):
    """Pages [start, end) of a call that go to the store together."""

    start: int
    end: int
    pages: tuple[PlacedPage, ...]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a bounce buffer that the piece takes."""
        return self.pages[-1].end


def _payload_bytes(page: EnginePage) -> int:
    """Return the bytes of a page's rows."""
    return page.rows[0].nbytes if len(page.rows) == 1 else sum([row.nbytes for row in page.rows])


def _as_bytes(row: memoryview) -> memoryview:
    """Return a row as bytes, whatever its owner keeps there."""
    return row if row.format == "B" and row.ndim == 1 else row.cast("B")


def _parts_of(pages: Sequence[EnginePage], part_bytes: int) -> Iterator[Sequence[EnginePage]]:
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


def pieces_of(pages: Sequence[EnginePage], piece_bytes: int) -> list[Piece]:
    """Cut a call into pieces of about ``piece_bytes``, at least a page each."""
    pieces: list[Piece] = []
    placed: list[PlacedPage] = []
    first = start = 0
    for number, page in enumerate(pages):
        page_bytes = HEADER_BYTES + _payload_bytes(page)
        if placed and start + page_bytes > piece_bytes:
            pieces.append(Piece(first, number, tuple(placed)))
            placed, first, start = [], number, 0
        align_bytes = LARGE_ALIGN_BYTES if page_bytes >= LARGE_PAGE_BYTES else ALIGN_BYTES
        start = -(-start // align_bytes) * align_bytes
        placed.append(PlacedPage(start, start + page_bytes))
        start += page_bytes
    if placed:
        pieces.append(Piece(first, len(pages), tuple(placed)))
    return pieces


class Task(Protocol):
    """Work of one call to a store, page by page or label by label."""

    answers: list[Answer]
    """Answers of the store so far, in order."""

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Ask the store, part by part, as long as ``until_s`` has not come; raises as the store does."""
        ...

    def revoke(self) -> None:
        """Take the engine's rows away for good; a task that has none does nothing."""
        return


class LookupTask(Task):
    """Labels that the store is asked about; no page moves."""

    __slots__ = ("_ask", "_labels", "answers")

    def __init__(self, labels: Sequence[Label], ask: Callable[[Sequence[Label]], list[Answer]]) -> None:
        self._labels = labels
        self._ask = ask
        self.answers: list[Answer] = []

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Ask part by part, as long as ``until_s`` has not come."""
        for start in range(0, len(self._labels), LOOKUP_LABELS_MAX):
            if clock() >= until_s:
                return
            self.answers += self._ask(self._labels[start : start + LOOKUP_LABELS_MAX])


class TouchTask(Task):
    """Labels to be touched, the last of them first, so that the first are the most recent in the end."""

    __slots__ = ("_labels", "_touch", "answers", "touched_count")

    def __init__(self, labels: Sequence[Label], touch: Callable[[Sequence[Label]], None]) -> None:
        self._labels = labels
        self._touch = touch
        self.answers: list[Answer] = []
        self.touched_count = 0

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Touch part by part, as long as ``until_s`` has not come."""
        for end in range(len(self._labels), 0, -LOOKUP_LABELS_MAX):
            if clock() >= until_s:
                return
            part = self._labels[max(end - LOOKUP_LABELS_MAX, 0) : end]
            self._touch(part)
            self.touched_count += len(part)

    def revoke(self) -> None:
        """Do nothing: labels are not the engine's memory."""


class ClearTask(Task):
    """Removal of every page of an identity."""

    __slots__ = ("_clear", "answers", "is_cleared")

    def __init__(self, clear: Callable[[], int]) -> None:
        self._clear = clear
        self.answers: list[Answer] = []
        self.is_cleared = False

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Make the call."""
        self._clear()
        self.is_cleared = True


class MemoryReadTask(Task):
    """Reads of the pages that a store has in memory into their rows, on their owner's thread."""

    __slots__ = ("_memory", "_pages", "answers", "hits_count", "read_bytes")

    def __init__(self, memory: MemoryReader, pages: Sequence[EnginePage]) -> None:
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


class CopyPath(Protocol):
    """Path of the pages of one call between a store and an engine's rows."""

    copied_bytes: int
    """Payload that was moved so far."""

    def pages_of(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece as the store fills or reads them."""
        ...

    def read_rows(self, number: int, placed: PlacedPage) -> bool:
        """Bring the rows of a page to where the store reads them; False if they are revoked."""
        ...

    def fill_rows(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Bring the hits of a piece into their rows; False if they are revoked."""
        ...

    def revoke(self) -> None:
        """Let go of the engine's rows, now and for good."""
        ...


class BufferedPath(CopyPath):
    """Copies through a bounce buffer, for a store that may be late: rows are used only while they are copied."""

    __slots__ = ("_bytes", "_pages", "_rows", "_view", "copied_bytes")

    def __init__(self, pages: Sequence[EnginePage], buffer: BounceBuffer) -> None:
        self._rows = RevocableBuffers([page.rows for page in pages])
        self._pages = [(page.label, page.parent) for page in pages]
        self._view = buffer.view
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(buffer.view, np.uint8)
        self.copied_bytes = 0

    def revoke(self) -> None:
        """Let go of the engine's rows, now and for good; wait for a copy under way."""
        self._rows.revoke()

    def pages_of(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece in the bounce buffer."""
        named = self._pages[piece.start : piece.end]
        return [
            PageIO(label, parent, (self._view[placed.start : placed.end],))
            for (label, parent), placed in zip(named, piece.pages, strict=True)
        ]

    def read_rows(self, number: int, placed: PlacedPage) -> bool:
        """Copy the rows of a page; False if they are revoked."""
        with self._rows.guard:
            if self._rows.is_revoked:
                return False
            start = placed.start + HEADER_BYTES
            for row in self._rows.rows_of(number):
                end = start + row.nbytes
                if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                    self._view[start:end] = row
                else:
                    np.copyto(self._bytes[start:end], np.frombuffer(row, np.uint8))
                start = end
            self.copied_bytes += placed.end - placed.start - HEADER_BYTES
        return True

    def fill_rows(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Copy the hits of a piece into their rows; False if they are revoked."""
        with self._rows.guard:
            if self._rows.is_revoked:
                return False
            for place, (placed, answer) in enumerate(zip(piece.pages, answers, strict=True)):
                if answer is not Answer.HIT:
                    continue
                self.copied_bytes += placed.end - placed.start - HEADER_BYTES
                start = placed.start + HEADER_BYTES
                for row in self._rows.rows_of(piece.start + place):
                    end = start + row.nbytes
                    if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                        row[:] = self._view[start:end]
                    else:
                        np.copyto(np.frombuffer(row, np.uint8), self._bytes[start:end])
                    start = end
        return True


class ZeroCopyPath(CopyPath):
    """No copy: a bounded store reads and fills the rows themselves, while their owner waits for it.

    On the owner's own thread, so nobody else is given the rows meanwhile; and the store uses none of them afterwards.
    """

    __slots__ = ("_pages", "copied_bytes")

    def __init__(self, pages: Sequence[EnginePage]) -> None:
        self._pages = pages
        self.copied_bytes = 0

    def revoke(self) -> None:
        """Let go of the engine's rows."""
        self._pages = ()

    def pages_of(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece: their rows, behind memory for a header."""
        pages = self._pages[piece.start : piece.end]
        return [
            PageIO(page.label, page.parent, tuple(map(_as_bytes, target.buffers)))
            for page, target in zip(pages, targets_of(pages), strict=True)
        ]

    def read_rows(self, number: int, placed: PlacedPage) -> bool:
        """Count the rows of a page, which are where the store reads them."""
        self.copied_bytes += placed.end - placed.start - HEADER_BYTES
        return True

    def fill_rows(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Count the hits of a piece, which are in their rows."""
        hits = [answer is Answer.HIT for answer in answers]
        self.copied_bytes += sum(page.end - page.start - HEADER_BYTES for page in compress(piece.pages, hits))
        return True


class _CopyTask(Task):
    """Pages of one call, and their path."""

    __slots__ = ("_path", "_pieces", "answers")

    def __init__(self, pieces: Sequence[Piece], path: CopyPath) -> None:
        self._pieces = pieces
        self._path = path
        self.answers: list[Answer] = []
        """Of the pages that the store was asked for so far, in order."""

    @property
    def copied_bytes(self) -> int:
        """Payload that was moved so far."""
        return self._path.copied_bytes

    def revoke(self) -> None:
        """Let go of the engine's rows, now and for good; wait for a copy under way."""
        self._path.revoke()

    def _tell(self, answers: Sequence[Answer]) -> bool:
        """Keep the answers of a piece; tell whether it makes sense to go on: not with a store that answers nothing."""
        self.answers += answers
        return any(answer is not Answer.UNAVAILABLE for answer in answers)


class GetTask(_CopyTask):
    """Read pages of a store, verified below, into the engine's rows."""

    __slots__ = ()

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Read piece by piece, as long as somebody waits and ``until_s`` has not come."""
        for piece in self._pieces:
            if clock() >= until_s:
                return
            answers = store.get(self._path.pages_of(piece))
            if not self._path.fill_rows(piece, answers) or not self._tell(answers):
                return


class PutTask(_CopyTask):
    """Seal pages of the engine's rows and put them into a store."""

    __slots__ = ("_level",)

    def __init__(self, pieces: Sequence[Piece], path: CopyPath, level: Level) -> None:
        super().__init__(pieces, path)
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
        """Put the pages of these numbers, all of one piece; None if the rows are revoked."""
        pages = self._path.pages_of(piece)
        ios = [pages[number - piece.start] for number in numbers]
        for number, io in zip(numbers, ios, strict=True):
            # One after the other: a page is sealed while it is in the processor's caches.
            if not self._path.read_rows(number, piece.pages[number - piece.start]):
                return None
            seal_buffers(io.buffers, io.label)
        return store.put(ios, self._level)


class PutMissingTask(PutTask):
    """Ask a store which of the pages it has, and put the others: to seal a page costs more than to ask for it.

    Both are one piece of work: to hand one over to a thread of ours takes longer than to ask for a prompt's pages.
    """

    __slots__ = ("_labels",)

    def __init__(self, pages: Sequence[EnginePage], pieces: Sequence[Piece], path: CopyPath, level: Level) -> None:
        super().__init__(pieces, path, level)
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
