"""Pages as one run of bytes, cut into messages and put together again without a parser that copies.

``GetPart`` and ``PutPart`` are ordinary messages of the contract with ``content`` as their last field; any protobuf
library reads and writes them. Here they are written by joining a short prefix with pieces of the pages, and read by
looking at the prefix: a view of the content is all that is made. What comes in another order is left to protobuf.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from unified_cache.errors import InputError
from unified_cache.proto.service_pb2 import GetPart, PutPart
from unified_cache.wire.sharing import SharedSlice

__all__ = [
    "Chunk",
    "SharedParts",
    "decoded",
    "encoded",
    "encoded_shared",
    "mark",
    "parts_of",
    "pieces_of",
    "shared_parts_of",
]

_OFFSET_TAG = 0x08
_HITS_TAG = 0x12
_CONTENT_TAG = 0x1A
_SHARED_TAG = 0x28
_REASONS_TAG = 0x32
"""Field number and wire type of ``offset``, ``hits``, ``content``, ``shared_bytes`` and ``reasons``."""

_REASON_SHIFT = 4
_HIT_MAX = (1 << _REASON_SHIFT) - 1
"""A mark has the hit in its low half and the reason in its high one."""

_VARINT_BYTES_MAX = 10

_NOTHING = memoryview(b"")


class Chunk(NamedTuple):
    """One message of a stream of pages."""

    offset: int
    """Bytes of content before it."""
    hits: bytes
    """A byte for each further page; empty in a put."""
    content: memoryview
    shared_bytes: int = 0
    """In place of content: bytes that lie in shared memory."""
    reasons: bytes = b""
    """A byte for each of ``hits``: why a page is a miss. Empty where there is nothing to say."""

    @property
    def end(self) -> int:
        """Bytes of content up to its last."""
        return self.offset + len(self.content) + self.shared_bytes


def encoded(offset: int, hits: bytes, pieces: Sequence[memoryview]) -> bytes:
    """Return the message of a part whose content lies in pieces: the one copy that sending needs.

    ``hits`` are bytes of ``mark``.
    """
    prefix = _prefix(offset, hits)
    content_bytes = sum(map(len, pieces))
    if content_bytes:
        prefix.append(_CONTENT_TAG)
        prefix += _varint(content_bytes)
    return b"".join((prefix, *pieces))


def encoded_shared(offset: int, hits: bytes, shared_bytes: int) -> bytes:
    """Return the message of a part whose content lies in shared memory."""
    prefix = _prefix(offset, hits)
    if shared_bytes:
        prefix.append(_SHARED_TAG)
        prefix += _varint(shared_bytes)
    return bytes(prefix)


def mark(hit: int, reason: int) -> bytes:
    """Return the byte that ``parts_of`` takes for one page: its byte of ``hits`` and that of ``reasons``."""
    return bytes((hit | reason << _REASON_SHIFT,))


def decoded(message: bytes) -> Chunk:
    """Return what a message says; its content is a view of the message.

    Raises:
        InputError: it is no part, or the start of a put.
    """
    return _quickly(message) or _by_protobuf(message)


def parts_of(pages: Iterable[tuple[bytes, Sequence[memoryview]]], part_bytes: int) -> Iterator[bytes]:
    """Cut pages, each with its ``mark`` or none, into messages of at most ``part_bytes`` of content.

    Small pages share a message. A large page has messages of its own, so that who keeps it keeps nothing else alive.
    Messages are made when they are asked for; until then buffers must stay as they are.
    """
    offset = held_bytes = 0
    hits = bytearray()
    held: list[memoryview] = []
    for hit, buffers in pages:
        page_bytes = sum(map(len, buffers))
        if held_bytes + page_bytes > part_bytes and held_bytes:
            yield encoded(offset, bytes(hits), held)
            offset, held_bytes = offset + held_bytes, 0
            hits.clear()
            held.clear()
        hits += hit
        if page_bytes <= part_bytes:
            held += buffers
            held_bytes += page_bytes
            continue
        for pieces in pieces_of(buffers, page_bytes, part_bytes):
            yield encoded(offset, bytes(hits), pieces)
            offset += sum(map(len, pieces))
            hits.clear()
    if hits or held_bytes:
        yield encoded(offset, bytes(hits), held)


class SharedParts:
    """Pages laid into shared memory end to end, and the messages that say so.

    A page is copied into its place with the next message, or has been put there before it is added. Pages of a message
    are copied at once: between two copies of many bytes, every look-up misses the processor's caches. Until the message
    is asked for, buffers of its pages must stay as they are.
    """

    __slots__ = ("_copied_end", "_end", "_hits", "_told_end", "_uncopied", "_window")

    def __init__(self, window: SharedSlice) -> None:
        self._window = window
        self._hits = bytearray()
        self._uncopied: list[memoryview] = []
        # [0, told_end)          what messages have told of
        # [told_end, copied_end) in place
        # [copied_end, end)      what the next message copies
        self._told_end = self._copied_end = self._end = 0

    @property
    def untold_bytes(self) -> int:
        """Bytes that no message has told of."""
        return self._end - self._told_end

    @property
    def is_untold(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._hits) or self._end > self._told_end

    @property
    def room_bytes(self) -> int:
        """Bytes of the window that no page has taken."""
        return self._window.length - self._end

    def place(self, offset: int, count_bytes: int) -> memoryview:
        """Return the memory that lies ``offset`` behind the last page."""
        return self._window.view(self._end + offset, count_bytes)

    def add(self, hit: bytes, buffers: Sequence[memoryview]) -> None:
        """Add a page, with its ``mark`` or none; to be copied."""
        self._hits += hit
        self._uncopied += buffers
        self._end += sum(map(len, buffers))

    def add_placed(self, hit: bytes, page_bytes: int) -> None:
        """Add a page that is in its place: right behind the last one."""
        self._copy()
        self._hits += hit
        self._end += page_bytes
        self._copied_end = self._end

    def message(self) -> bytes:
        """Return the message of what was added since the last one.

        Raises:
            InputError: the window is too small.
        """
        self._copy()
        told = encoded_shared(self._told_end, bytes(self._hits), self.untold_bytes)
        self._told_end = self._end
        self._hits.clear()
        return told

    def _copy(self) -> None:
        if self._uncopied:
            self._window.write(self._uncopied, self._copied_end)
            self._uncopied = []
        self._copied_end = self._end


def shared_parts_of(pages: Iterable[Sequence[memoryview]], window: SharedSlice, part_bytes: int) -> Iterator[bytes]:
    """Copy pages into shared memory, ``part_bytes`` or more at a time; yield a message that says so.

    Raises:
        InputError: the window is too small.
    """
    parts = SharedParts(window)
    for buffers in pages:
        parts.add(b"", buffers)
        if parts.untold_bytes >= part_bytes:
            yield parts.message()
    if parts.is_untold:
        yield parts.message()


def pieces_of(buffers: Sequence[memoryview], page_bytes: int, part_bytes: int) -> Iterator[list[memoryview]]:
    """Cut one page into as few runs as can be, all of about the same length."""
    count = -(-page_bytes // part_bytes)
    run_bytes = -(-page_bytes // count)
    pieces: list[memoryview] = []
    room = run_bytes
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            piece = buffer[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield pieces
                pieces, room = [], run_bytes
    if pieces:
        yield pieces


def _quickly(message: bytes) -> Chunk | None:
    """Read the fields in the order in which they are written; None where there is anything else."""
    end = len(message)
    at = offset = 0
    hits = b""
    if at < end and message[at] == _OFFSET_TAG:
        offset, at = _read_varint(message, at + 1)
    if at < end and message[at] == _HITS_TAG:
        count, at = _read_varint(message, at + 1)
        hits, at = message[at : at + count], at + count
    reasons = b""
    if at < end and message[at] == _REASONS_TAG:
        count, at = _read_varint(message, at + 1)
        reasons, at = message[at : at + count], at + count
        if len(reasons) != len(hits):
            return None
    if at == end:
        return Chunk(offset, hits, _NOTHING, 0, reasons)
    if at < end and message[at] == _CONTENT_TAG:
        count, at = _read_varint(message, at + 1)
        if at + count == end:
            return Chunk(offset, hits, memoryview(message)[at:], 0, reasons)
    if at < end and message[at] == _SHARED_TAG:
        count, at = _read_varint(message, at + 1)
        if at == end:
            return Chunk(offset, hits, _NOTHING, count, reasons)
    return None


def _by_protobuf(message: bytes) -> Chunk:
    try:
        part = PutPart.FromString(message)
        read = GetPart.FromString(message)
    except DecodeError as error:
        raise InputError("expected a part of a page, found something else") from error
    if part.HasField("start"):
        raise InputError("a stream of pages starts once, found a second start")
    if part.content and part.shared_bytes:
        raise InputError("a part's content lies in the message or in shared memory, found both")
    if read.reasons and len(read.reasons) != len(read.hits):
        raise InputError(f"expected a reason for each of {len(read.hits)} pages, found {len(read.reasons)}")
    return Chunk(part.offset, read.hits, memoryview(part.content), part.shared_bytes, read.reasons)


def _prefix(offset: int, hits: bytes) -> bytearray:
    prefix = bytearray()
    if offset:
        prefix.append(_OFFSET_TAG)
        prefix += _varint(offset)
    if hits:
        prefix.append(_HITS_TAG)
        prefix += _varint(len(hits))
        if max(hits) <= _HIT_MAX:
            prefix += hits
        else:
            prefix += bytes([each & _HIT_MAX for each in hits])
            prefix.append(_REASONS_TAG)
            prefix += _varint(len(hits))
            prefix += bytes([each >> _REASON_SHIFT for each in hits])
    return prefix


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at ``at`` and where it ends; past the end of the message where there is none."""
    value = 0
    for place, byte in enumerate(message[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return 0, len(message) + 1
