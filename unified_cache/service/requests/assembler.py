"""Pages put together from the parts of a stream, verified, and renamed for the store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unified_cache.core.errors import InputError
from unified_cache.core.seal import HEADER_BYTES, Label, verify_buffers
from unified_cache.proto.wire.parts import Chunk
from unified_cache.service.store.tenants import named_page
from unified_cache.storage_backends.protocol import PageIO

KEPT_SHARE_MIN = 0.5
"""Of a message, the part that a page must fill to be kept as a view of it: a smaller one would keep the rest alive."""


@dataclass(frozen=True, slots=True)
class AnnouncedPage:
    """A page that the first message of a put names."""

    label: Label
    """Label as the client has it, and as the page's header will."""
    stored: Label
    object_bytes: int


class PageAssembler:
    """Assembly of the parts of one put into whole pages, in the order in which they were announced.

    It holds the pieces of one page at a time.
    """

    def __init__(self, announced: Sequence[AnnouncedPage]) -> None:
        self._announced = announced
        self._done_count = 0
        self._offset = 0
        self._pieces: list[memoryview] = []
        self._held_bytes = 0

    @property
    def next_bytes(self) -> int:
        """Length of the page under way, or to come; 0 where all have come."""
        return self._announced[self._done_count].object_bytes if self._done_count < len(self._announced) else 0

    def take(self, part: Chunk) -> Iterator[PageIO]:
        """Yield the pages that a part completes, as the store calls them.

        Raises:
            InputError: a gap, an overlap, more than was announced, or a page whose seal does not hold.
        """
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        if part.end == part.offset:
            raise InputError("a part of a put has content")
        for piece in self._pieces_in(part):
            expected = self._announced[self._done_count]
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            self._offset += len(piece)
            if self._held_bytes == expected.object_bytes:
                yield self._whole(expected)

    def check_complete(self) -> None:
        """Raise ``InputError`` unless every page has come."""
        if self._done_count < len(self._announced):
            raise InputError(f"expected {len(self._announced)} pages, found {self._done_count} whole ones")

    def _pieces_in(self, part: Chunk) -> Iterator[memoryview]:
        """Cut a part at the ends of pages."""
        start, held_bytes = 0, self._held_bytes
        for number in range(self._done_count, len(self._announced)):
            if start == len(part.content):
                return
            end = min(len(part.content), start + self._announced[number].object_bytes - held_bytes)
            yield part.content[start:end]
            start, held_bytes = end, 0
        if start < len(part.content):
            raise InputError(f"found more than the {len(self._announced)} pages announced")

    def _whole(self, expected: AnnouncedPage) -> PageIO:
        flaw = verify_buffers(self._pieces, expected.label)
        if flaw is not None:
            raise InputError(f"page {self._done_count} does not verify: {flaw.value}")
        buffers = named_page(page_in(self._pieces), expected.stored)
        self._pieces = []
        self._held_bytes = 0
        self._done_count += 1
        return PageIO(expected.stored, buffers)


def page_in(pieces: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Return the page that lies in pieces of messages, at least a header long, its header apart.

    A view keeps the whole message alive: it is copied where that would keep too much.
    """
    header = b"".join(piece[:HEADER_BYTES] for piece in pieces[:HEADER_BYTES])[:HEADER_BYTES]
    payload: list[memoryview] = []
    skip = HEADER_BYTES
    for piece in pieces:
        if len(piece) > skip:
            payload.append(piece[skip:])
        skip = max(0, skip - len(piece))
    held_bytes = sum(memoryview(message).nbytes for message in {id(piece.obj): piece.obj for piece in pieces}.values())
    if sum(map(len, payload)) < KEPT_SHARE_MIN * held_bytes:
        payload = [memoryview(b"".join(payload))] if payload else []
    return (memoryview(header), *payload)
