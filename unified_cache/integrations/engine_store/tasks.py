"""Tasks of an engine's store: what one call asks of a store, part by part, on a thread that may be late.

    store    [header payload][header payload] ...      a piece of a bounce buffer: whole pages, sealed
    engine    row row        row row                   the payloads alone

Pages take one of two paths. The buffered path holds the engine's rows only while it copies: ``revoke`` takes them away,
waits for a copy under way and nothing else, and from then on no row is read or written. The zero-copy path gives the
rows themselves to a bounded store, which is never late, see ``Capability.bounded``.

What a store has in memory takes neither: see ``EngineStore.get``.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.integrations.engine_store.buffers import BounceBuffer
from unified_cache.integrations.engine_store.interface import Clock, EnginePage
from unified_cache.storage_backends.common.bounded_call import bound_steps
from unified_cache.storage_backends.protocol import NAMES_MAX, Answer, Level, PageIO, Store

ALIGN_BYTES = 64
"""A page in a bounce buffer begins on a cache line."""

LARGE_PAGE_BYTES = 16 << 10
"""From this size on it begins on a page of the machine's memory, as its object does in a file: the kernel copies much
slower between two places that differ by a few bytes within theirs."""

LARGE_ALIGN_BYTES = 4096

PART_BYTES_MIN = 2 << 20
"""Less is moved by one thread: handing it to a second one costs more than it saves."""

AT_ONCE_BYTES_MAX = 64 << 20
"""Bytes that are copied within memory between two looks at the clock."""

SMALL_ROW_BYTES = 2048
"""Below this a copy is over before another thread could take the interpreter lock."""


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


def payload_bytes(page: EnginePage) -> int:
    """Return the bytes of a page's rows."""
    return page.rows[0].nbytes if len(page.rows) == 1 else sum([row.nbytes for row in page.rows])


def _as_bytes(row: memoryview) -> memoryview:
    """Return a row as bytes, whatever its owner keeps there."""
    return row if row.format == "B" and row.ndim == 1 else row.cast("B")


def _parts_of(pages: Sequence[EnginePage], part_bytes: int) -> Iterator[Sequence[EnginePage]]:
    """Cut a call into parts of about ``part_bytes``, at least a page each."""
    start = taken_bytes = 0
    for number, page in enumerate(pages):
        page_bytes = payload_bytes(page)
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
        page_bytes = HEADER_BYTES + payload_bytes(page)
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


class Part(NamedTuple):
    """Pages of a call that are moved one piece after the other."""

    pages: Sequence[EnginePage]
    pieces: list[Piece]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a bounce buffer that its pieces take, one at a time."""
        return max(piece.buffer_bytes for piece in self.pieces)


def parts_of(pages: Sequence[EnginePage], piece_bytes: int, parts_max: int) -> list[Part]:
    """Cut a call into at most ``parts_max`` parts of ``PART_BYTES_MIN`` or more, whose pieces share ``piece_bytes``."""
    count = -(-len(pages) // parts_max)
    if count * payload_bytes(pages[0]) < PART_BYTES_MIN:
        count = len(pages)
    cut = [pages[start : start + count] for start in range(0, len(pages), count)]
    return [Part(part, pieces_of(part, piece_bytes // len(cut))) for part in cut]


class BufferedPath:
    """Copies through a bounce buffer, for a store that may be late: rows are used only while they are copied.

    The call runs on one thread, and the owner of the rows revokes them on another: both under a guard.
    """

    __slots__ = ("_bytes", "_guard", "_labels", "_rows", "_view", "copied_bytes")

    def __init__(self, pages: Sequence[EnginePage], buffer: BounceBuffer) -> None:
        self._rows: Sequence[tuple[memoryview, ...]] | None = [page.rows for page in pages]
        self._guard = Lock()
        self._labels = [page.label for page in pages]
        self._view = buffer.view
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(buffer.view, np.uint8)
        self.copied_bytes = 0
        """Payload that was moved so far."""

    def revoke(self) -> None:
        """Release the engine's rows, now and for good; wait for a copy under way."""
        with self._guard:
            self._rows = None

    def pages_of(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece in the bounce buffer."""
        labels = self._labels[piece.start : piece.end]
        return [
            PageIO(label, (self._view[placed.start : placed.end],))
            for label, placed in zip(labels, piece.pages, strict=True)
        ]

    def read_rows(self, number: int, placed: PlacedPage) -> bool:
        """Copy the rows of a page; False if they are revoked."""
        with self._guard:
            if self._rows is None:
                return False
            start = placed.start + HEADER_BYTES
            for row in self._rows[number]:
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
        with self._guard:
            if self._rows is None:
                return False
            for place, (placed, answer) in enumerate(zip(piece.pages, answers, strict=True)):
                if answer is not Answer.HIT:
                    continue
                self.copied_bytes += placed.end - placed.start - HEADER_BYTES
                start = placed.start + HEADER_BYTES
                for row in self._rows[piece.start + place]:
                    end = start + row.nbytes
                    if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                        row[:] = self._view[start:end]
                    else:
                        np.copyto(np.frombuffer(row, np.uint8), self._bytes[start:end])
                    start = end
        return True


def with_headers(pages: Sequence[EnginePage]) -> list[PageIO]:
    """Put memory for a header before the rows of each page."""
    headers = memoryview(bytearray(HEADER_BYTES * len(pages)))
    starts = range(0, len(headers), HEADER_BYTES)
    return [
        PageIO(page.label, (headers[start : start + HEADER_BYTES], *map(_as_bytes, page.rows)))
        for page, start in zip(pages, starts, strict=True)
    ]


class ZeroCopyPath:
    """No copy: a bounded store reads and fills the rows themselves, while their owner waits for it.

    On the owner's own thread, so nobody else is given the rows meanwhile; and the store uses none of them afterwards.
    """

    __slots__ = ("_pages", "copied_bytes")

    def __init__(self, pages: Sequence[EnginePage]) -> None:
        self._pages = pages
        self.copied_bytes = 0

    def revoke(self) -> None:
        """Release the engine's rows."""
        self._pages = ()

    def pages_of(self, piece: Piece) -> list[PageIO]:
        """Return the pages of a piece: their rows, behind memory for a header."""
        return with_headers(self._pages[piece.start : piece.end])

    def read_rows(self, number: int, placed: PlacedPage) -> bool:
        """Count the rows of a page, which are where the store reads them."""
        self.copied_bytes += placed.end - placed.start - HEADER_BYTES
        return True

    def fill_rows(self, piece: Piece, answers: Sequence[Answer]) -> bool:
        """Count the hits of a piece, which are in their rows."""
        hits = [answer is Answer.HIT for answer in answers]
        self.copied_bytes += sum(page.end - page.start - HEADER_BYTES for page in compress(piece.pages, hits))
        return True


CopyPath = BufferedPath | ZeroCopyPath


class CallTime(NamedTuple):
    """Time of one call to an engine's store."""

    started_s: float
    until_s: float
    """No step is begun from then on."""
    deadline_s: float
    """Longest wait for a store that does not answer."""
    due_s: float
    """When the engine waits no longer, however well the store answers."""

    @property
    def first_due_s(self) -> float:
        """End of the wait for the first answer: for the store to open, a buffer, and a thread too."""
        return min(self.started_s + self.deadline_s, self.due_s)


class Task:
    """Work of one call to a store, step by step; each step adds its answers, and says whether the store gave all."""

    __slots__ = ("_steps", "answers", "path")

    def __init__(self, steps: Callable[[list[Answer]], Iterator[bool]], path: CopyPath | None = None) -> None:
        """``path`` is that of the engine's rows, for a task that has any."""
        self.answers: list[Answer] = []
        """Answers of the store so far, in order."""
        self.path = path
        self._steps = steps(self.answers)

    def run(self, time: CallTime, clock: Clock) -> None:
        """Step on as long as there is time, in a call of this thread's; raises as the store does.

        A store that answers has a deadline for each step; once it does not, no step gets another one.
        """
        due_s = time.first_due_s
        while clock() < min(time.until_s, due_s):
            bound_steps(due_s)
            is_answered = next(self._steps, None)
            if is_answered is None:
                return
            if is_answered:
                due_s = min(time.due_s, clock() + time.deadline_s)

    def revoke(self) -> None:
        """Release the engine's rows, now and for good; wait for a copy under way."""
        if self.path is not None:
            self.path.revoke()


def look_up(store: Store, labels: Sequence[Label], answers: list[Answer]) -> Iterator[bool]:
    """Ask the store about labels; no page moves."""
    for start in range(0, len(labels), NAMES_MAX):
        found = store.exists(labels[start : start + NAMES_MAX])
        answers += found
        yield Answer.UNAVAILABLE not in found


def touch(store: Store, labels: Sequence[Label], answers: list[Answer]) -> Iterator[bool]:
    """Touch labels, the last of them first, so that the first are the most recent in the end; HIT for each."""
    for end in range(len(labels), 0, -NAMES_MAX):
        part = labels[max(end - NAMES_MAX, 0) : end]
        store.touch(part)
        answers += [Answer.HIT] * len(part)
        yield True


def clear(store: Store, identity: bytes, answers: list[Answer]) -> Iterator[bool]:
    """Remove every page of an identity; one HIT once that is done."""
    store.clear(identity)
    answers.append(Answer.HIT)
    yield True


def read_memory(memory: Store, pages: Sequence[EnginePage], answers: list[Answer]) -> Iterator[bool]:
    """Read the pages that a store has in memory into their rows, on their owner's thread; HIT or UNAVAILABLE."""
    hit, unavailable = Answer.HIT, Answer.UNAVAILABLE
    for part in _parts_of(pages, AT_ONCE_BYTES_MAX):
        answers += [hit if is_there else unavailable for is_there in memory.read_memory(with_headers(part))]
        yield True


def get(store: Store, pieces: Sequence[Piece], path: CopyPath, answers: list[Answer]) -> Iterator[bool]:
    """Read pages of a store, verified below, into the engine's rows, as long as somebody waits."""
    for piece in pieces:
        found = store.get(path.pages_of(piece))
        if not path.fill_rows(piece, found):
            return
        answers += found
        if not _answers_anything(found):
            return
        yield Answer.UNAVAILABLE not in found


def put(
    store: Store,
    level: Level,
    labels: Sequence[Label],
    pieces: Sequence[Piece],
    path: CopyPath,
    answers: list[Answer],
) -> Iterator[bool]:
    """Seal pages of the engine's rows and put them into a store, but for those that it has.

    ``labels`` names each page; the pages themselves have rows, which a task that is late must not hold.
    To seal a page costs more than to ask for it, and to hand the look-up over to a thread of ours longer than to ask
    for a prompt's pages: so both are one task.
    """
    known = store.exists(labels)
    yield Answer.UNAVAILABLE not in known
    there = list(map(bool, known))
    for piece in pieces:
        numbers = range(piece.start, piece.end)
        missing = [number for number in numbers if not there[number]]
        stored = _put(store, level, piece, missing, path) if missing else []
        if stored is None:
            return
        rest = iter(stored)
        piece_answers = [Answer.STORED if there[number] else next(rest) for number in numbers]
        answers += piece_answers
        if not _answers_anything(piece_answers):
            return
        yield Answer.UNAVAILABLE not in piece_answers


def _put(store: Store, level: Level, piece: Piece, numbers: Sequence[int], path: CopyPath) -> list[Answer] | None:
    """Put the pages of these numbers, all of one piece; None if the rows are revoked."""
    pages = path.pages_of(piece)
    ios = [pages[number - piece.start] for number in numbers]
    for number, io in zip(numbers, ios, strict=True):
        # One after the other: a page is sealed while it is in the processor's caches.
        if not path.read_rows(number, piece.pages[number - piece.start]):
            return None
        seal_buffers(io.buffers, io.label)
    return store.put(ios, level)


def _answers_anything(answers: Sequence[Answer]) -> bool:
    """Return whether it makes sense to go on: not with a store that answers nothing."""
    return any(answer is not Answer.UNAVAILABLE for answer in answers)
