"""Answers of a server: codes for why a page was not read or stored, and pages copied into the buffers of a call."""

from collections import deque
from collections.abc import Sequence

from unified_cache.core.errors import InputError
from unified_cache.proto.wire import Chunk
from unified_cache.storage_backends.protocol import Answer, PageIO, page_bytes

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


class ScatterReader:
    """Fill pages in the order asked for. Content is copied once, from the message into the page.

    Where a page has a checksum, each part that arrives is added at once, while the sender goes on with the next.
    """

    def __init__(self, pages: Sequence[PageIO]) -> None:
        self.hits: list[Answer | None] = [None] * len(pages)
        """By page; None while there is no answer, or not the whole page yet."""
        self._pages = pages
        self._answered_count = 0
        self._offset = self._due_bytes = 0
        self._coming: deque[int] = deque()
        """Pages that the server has, and that are not whole here."""
        self._filled_bytes = 0
        """Of the first of them."""

    def take(self, part: Chunk) -> None:
        """Copy a part; raise InputError where the stream is not what was asked for."""
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        if self._answered_count + len(part.hits) > len(self._pages):
            raise InputError(f"expected {len(self._pages)} pages, found more")
        answered = self._pages[self._answered_count : self._answered_count + len(part.hits)]
        self._due_bytes += sum(page_bytes(page) for page, hit in zip(answered, part.hits, strict=True) if hit)
        if part.end > self._due_bytes:
            raise InputError(f"found {part.end - self._due_bytes} bytes more than the pages have")
        for index, hit in enumerate(part.hits):
            if hit:
                self._coming.append(self._answered_count)
            else:
                reason = part.reasons[index] if part.reasons else 0
                self.hits[self._answered_count] = answer_of(reason, Answer.MISS)
            self._answered_count += 1
        self._offset = part.end
        rest = part.content
        while self._coming:
            rest, is_whole = self._fill(self._pages[self._coming[0]], rest)
            if not is_whole:
                break
            self.hits[self._coming.popleft()] = Answer.HIT
            self._filled_bytes = 0

    def _fill(self, page: PageIO, content: memoryview) -> tuple[memoryview, bool]:
        """Copy content into what a page lacks; return what is left of it, and whether the page is whole."""
        start = 0
        for buffer in page.buffers:
            end = start + len(buffer)
            if self._filled_bytes < end:
                lacking = buffer[self._filled_bytes - start :]
                piece, content = content[: len(lacking)], content[len(lacking) :]
                lacking[: len(piece)] = piece
                if page.checksum is not None:
                    page.checksum.add(self._filled_bytes, (lacking[: len(piece)],))
                self._filled_bytes += len(piece)
                if self._filled_bytes < end:
                    return content, False
            start = end
        return content, True
