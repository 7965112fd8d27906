"""Pages put together from the parts of a stream, verified, and renamed for the store."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unified_cache.errors import InputError
from unified_cache.page import PageKey
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label, verify_buffers
from unified_cache.service.store.pages import blank, page_in
from unified_cache.service.store.tiered import ArrivedPage
from unified_cache.wire.parts import Chunk
from unified_cache.wire.sharing import SharedSlice

__all__ = ["AnnouncedPage", "PageAssembler"]

COPIED_BYTES = 1 << 20
"""Bytes copied out of shared memory at a time: after each copy the next look-ups miss the processor's caches."""


@dataclass(frozen=True, slots=True)
class AnnouncedPage:
    """A page that the first message of a put names."""

    label: Label
    """Label as the client has it, and as the page's header will."""
    stored: Label
    parent: PageKey | None
    object_bytes: int
    manifest: Manifest
    """Manifest of its identity, for the store."""


class PageAssembler:
    """Assembly of the parts of one put into whole pages, in the order in which they were announced.

    It holds the pieces of one page at a time. With a ``window`` the pages lie in shared memory, else in the parts.
    """

    def __init__(self, announced: Sequence[AnnouncedPage], window: SharedSlice | None = None) -> None:
        self._announced = announced
        self._window = window
        self._done_count = 0
        self._offset = 0
        self._pieces: list[memoryview] = []
        self._held_bytes = 0

    @property
    def next_bytes(self) -> int:
        """Length of the page under way, or to come; 0 where all have come."""
        return self._announced[self._done_count].object_bytes if self._done_count < len(self._announced) else 0

    def take(self, part: Chunk) -> Iterator[ArrivedPage]:
        """Yield the pages that a part completes.

        Raises:
            InputError: a gap, an overlap, more than was announced, or a page whose seal does not hold.
            OSError: shared memory is not there any more.
        """
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        if part.end == part.offset:
            raise InputError("a part of a put has content")
        if bool(part.shared_bytes) is not (self._window is not None):
            raise InputError("a put has its pages in the stream or in shared memory, found both")
        for piece in self._pieces_in(part):
            expected = self._announced[self._done_count]
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            self._offset += len(piece)
            if self._held_bytes == expected.object_bytes:
                yield self._whole(expected)

    def check_complete(self) -> None:
        """Check that every page has come.

        Raises:
            InputError: the stream ended early.
        """
        if self._done_count < len(self._announced):
            raise InputError(f"expected {len(self._announced)} pages, found {self._done_count} whole ones")

    def _pieces_in(self, part: Chunk) -> Iterator[memoryview]:
        """Cut a part at the ends of pages; bytes in shared memory are copied first, so that they cannot change."""
        offset, end = part.offset, part.offset
        copies: list[memoryview] = []
        for size in self._sizes_in(part):
            end += size
            if self._window is None:
                yield part.content[end - size - part.offset : end - part.offset]
                continue
            copies.append(blank(size))
            if end - offset >= COPIED_BYTES or end == part.end:
                self._window.read_into(copies, offset)
                yield from copies
                offset, copies = end, []

    def _sizes_in(self, part: Chunk) -> Iterator[int]:
        left_bytes, held_bytes = part.end - part.offset, self._held_bytes
        for number in range(self._done_count, len(self._announced)):
            if not left_bytes:
                return
            size = min(left_bytes, self._announced[number].object_bytes - held_bytes)
            yield size
            left_bytes, held_bytes = left_bytes - size, 0
        if left_bytes:
            raise InputError(f"found more than the {len(self._announced)} pages announced")

    def _whole(self, expected: AnnouncedPage) -> ArrivedPage:
        flaw = verify_buffers(self._pieces, expected.label)
        if flaw is not None:
            raise InputError(f"page {self._done_count} does not verify: {flaw.value}")
        page = page_in(self._pieces).named(expected.stored)
        self._pieces = []
        self._held_bytes = 0
        self._done_count += 1
        return ArrivedPage(expected.stored, expected.parent, page, expected.manifest)
