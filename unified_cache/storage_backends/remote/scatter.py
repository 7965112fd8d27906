"""A stream of pages, landed straight in the buffers that they were asked for with."""

from collections import deque
from collections.abc import Sequence

from unified_cache.errors import InputError
from unified_cache.storage_backends.protocol import Answer, PageIO
from unified_cache.storage_backends.remote.reasons import read_answer
from unified_cache.wire.parts import Chunk
from unified_cache.wire.sharing import SharedSlice

__all__ = ["ScatterReader"]


class ScatterReader:
    """Fill pages in the order asked for. Content is copied once, from the message or the window into the page."""

    def __init__(self, pages: Sequence[PageIO], window: SharedSlice | None = None) -> None:
        self.hits: list[Answer | None] = [None] * len(pages)
        """By page; None while there is no answer, or not the whole page yet."""
        self._pages = pages
        self._window = window
        self._answered_count = 0
        self._offset = 0
        self._coming: deque[tuple[int, memoryview | None]] = deque()
        """Buffers to fill, by page, and None after the last of each page."""

    def take(self, part: Chunk) -> None:
        """Copy a part.

        Raises:
            InputError: the stream is not what was asked for.
            OSError: shared memory is not there any more.
        """
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        if bool(part.shared_bytes) and self._window is None:
            raise InputError("found a part in shared memory, where none was offered")
        if self._answered_count + len(part.hits) > len(self._pages):
            raise InputError(f"expected {len(self._pages)} pages, found more")
        for index, hit in enumerate(part.hits):
            number = self._answered_count
            self._answered_count += 1
            if hit:
                self._coming.extend((number, buffer) for buffer in self._pages[number].buffers)
                self._coming.append((number, None))
            else:
                self.hits[number] = read_answer(part.reasons[index] if part.reasons else 0)
        self._copy(part)

    def _copy(self, part: Chunk) -> None:
        pieces: list[memoryview] = []
        whole: list[int] = []
        offset = self._offset
        while self._coming:
            number, buffer = self._coming[0]
            if buffer is None:
                whole.append(number)
            else:
                piece = buffer[: part.end - offset]
                pieces.append(piece)
                offset += len(piece)
                if len(piece) < len(buffer):
                    self._coming[0] = (number, buffer[len(piece) :])
                    break
            self._coming.popleft()
        if offset < part.end:
            raise InputError(f"found {part.end - offset} bytes more than the pages have")
        self._land(part, pieces)
        self._offset = offset
        for number in whole:
            self.hits[number] = Answer.HIT

    def _land(self, part: Chunk, pieces: list[memoryview]) -> None:
        if part.shared_bytes and self._window is not None:
            self._window.read_into(pieces, part.offset)
            return
        start = 0
        for piece in pieces:
            end = start + len(piece)
            piece[:] = part.content[start:end]
            start = end
