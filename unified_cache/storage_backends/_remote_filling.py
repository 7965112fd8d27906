"""A stream of pages, landed straight in the buffers that they were asked for with."""

from collections import deque
from collections.abc import Sequence

from unified_cache.errors import InputError
from unified_cache.storage_backends.protocol import PageIO
from unified_cache.wire.parts import Part

__all__ = ["Filling"]


class Filling:
    """Fill pages in the order asked for. Content is copied once, from the message into the page."""

    def __init__(self, pages: Sequence[PageIO]) -> None:
        self.hits: list[bool | None] = [None] * len(pages)
        """By page; None while there is no answer, or not the whole page yet."""
        self._pages = pages
        self._answered_count = 0
        self._offset = 0
        self._coming: deque[tuple[int, memoryview | None]] = deque()
        """Buffers to fill, by page, and None after the last of each page."""

    def take(self, part: Part) -> None:
        """Copy a part.

        Raises:
            InputError: the stream is not what was asked for.
        """
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        self._offset += len(part.content)
        if self._answered_count + len(part.hits) > len(self._pages):
            raise InputError(f"expected {len(self._pages)} pages, found more")
        for hit in part.hits:
            number = self._answered_count
            self._answered_count += 1
            if hit:
                self._coming.extend((number, buffer) for buffer in self._pages[number].buffers)
                self._coming.append((number, None))
            else:
                self.hits[number] = False
        self._copy(part.content)

    def _copy(self, content: memoryview) -> None:
        start = 0
        while self._coming:
            number, buffer = self._coming[0]
            if buffer is None:
                self.hits[number] = True
            else:
                piece = content[start : start + len(buffer)]
                buffer[: len(piece)] = piece
                start += len(piece)
                if len(piece) < len(buffer):
                    self._coming[0] = (number, buffer[len(piece) :])
                    break
            self._coming.popleft()
        if start < len(content):
            raise InputError(f"found {len(content) - start} bytes more than the pages have")
