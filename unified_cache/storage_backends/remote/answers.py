"""Answers of a server: codes for why a page was not read or stored, and pages copied into the buffers of a call."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from unified_cache.core.errors import InputError
from unified_cache.proto.wire import Chunk
from unified_cache.storage_backends.protocol import Answer, PageIO

_CODES = {Answer.FLAWED: 1, Answer.UNAVAILABLE: 2}
_ANSWERS = {code: answer for answer, code in _CODES.items()}


def reason_of(answer: Answer) -> int:
    """Return the code of an answer; 0 where there is nothing to add to yes or no."""
    return _CODES.get(answer, 0)


def reasons_of(answers: Sequence[Answer]) -> bytes:
    """Return the code of each answer; nothing at all where all are 0."""
    if not any(answer in answers for answer in _CODES):
        return b""
    return bytes(map(reason_of, answers))


def answer_of(code: int, otherwise: Answer) -> Answer:
    """Return the answer that a code stands for; ``otherwise`` for 0, and for an unknown one of a newer server."""
    return _ANSWERS.get(code, otherwise)


def answers_of(given: Sequence[int], reasons: bytes, pages_count: int, *, yes: Answer, no: Answer) -> list[Answer]:
    """Return the answers of a reply: ``yes`` for each byte that is not 0, else by its reason, or ``no``."""
    codes = reasons or bytes(len(given))
    if not len(given) == len(codes) == pages_count:
        raise InputError(f"expected {pages_count} answers, found {len(given)}, and reasons of {len(codes)}")
    return [yes if there else answer_of(code, no) for there, code in zip(given, codes, strict=True)]


class BufferPiece(NamedTuple):
    """Bytes of one page that have come, or are about to."""

    number: int
    start: int
    buffer: memoryview


class ScatterReader:
    """Fill pages in the order asked for. Content is copied once, from the message into the page.

    Where a page has a checksum, each part that arrives is added at once, while the sender goes on with the next.
    """

    def __init__(self, pages: Sequence[PageIO]) -> None:
        self.hits: list[Answer | None] = [None] * len(pages)
        """By page; None while there is no answer, or not the whole page yet."""
        self._pages = pages
        self._answered_count = 0
        self._offset = 0
        self._coming: deque[BufferPiece | int] = deque()
        """Buffers to fill, and after the last of each page its number."""

    def take(self, part: Chunk) -> None:
        """Copy a part; raise InputError where the stream is not what was asked for."""
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        if self._answered_count + len(part.hits) > len(self._pages):
            raise InputError(f"expected {len(self._pages)} pages, found more")
        for index, hit in enumerate(part.hits):
            number = self._answered_count
            self._answered_count += 1
            if hit:
                start = 0
                for buffer in self._pages[number].buffers:
                    self._coming.append(BufferPiece(number, start, buffer))
                    start += len(buffer)
                self._coming.append(number)
            else:
                self.hits[number] = answer_of(part.reasons[index] if part.reasons else 0, Answer.MISS)
        self._copy(part)

    def _copy(self, part: Chunk) -> None:
        pieces: list[BufferPiece] = []
        whole: list[int] = []
        offset = self._offset
        while self._coming:
            coming = self._coming[0]
            if isinstance(coming, int):
                whole.append(coming)
            else:
                piece = coming.buffer[: part.end - offset]
                pieces.append(coming._replace(buffer=piece))
                offset += len(piece)
                if len(piece) < len(coming.buffer):
                    rest = coming.buffer[len(piece) :]
                    self._coming[0] = BufferPiece(coming.number, coming.start + len(piece), rest)
                    break
            self._coming.popleft()
        if offset < part.end:
            raise InputError(f"found {part.end - offset} bytes more than the pages have")
        self._fill(part, pieces)
        self._offset = offset
        for number in whole:
            self.hits[number] = Answer.HIT

    def _fill(self, part: Chunk, pieces: Sequence[BufferPiece]) -> None:
        start = 0
        for piece in pieces:
            end = start + len(piece.buffer)
            piece.buffer[:] = part.content[start:end]
            start = end
        for number, start, buffer in pieces:
            checksum = self._pages[number].checksum
            if checksum is not None:
                checksum.add(start, (buffer,))
