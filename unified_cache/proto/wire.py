"""The contract of the service as both ends use it: its calls, labels as messages, pages as one run of bytes.

Both ends pass messages as bytes and parse for themselves: parts of pages are too large to be copied by a parser, and a
server that parses can answer what it cannot parse with INVALID_ARGUMENT.

``GetPart`` and ``PutPart`` are ordinary messages of the contract with ``content`` as their last field; any protobuf
library reads and writes them. Here they are written by joining a short prefix with pieces of the pages, and read by
looking at the prefix: a view of the content is all that is made. What comes in another order is left to protobuf. A put
of few pages is one message, which takes two thirds of the processor's time of a stream of two.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import groupby, repeat
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from unified_cache.core.errors import InputError
from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.seal import Label
from unified_cache.proto import service_pb2
from unified_cache.proto.service_pb2 import GetPart, PageRun, PutPart, PutStart

SERVICE: str = service_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
"""Name of the service, package included."""

REASON = "unified-cache-reason"
"""Trailing metadata that says what a client can do about a refusal."""

REASON_HELLO = "hello"
"""The server does not know the identity: say Hello, then ask again."""

RETRY_AFTER = "retry-after-ms"
"""Trailing metadata: when asking again may be worth it."""


Parsed = TypeVar("Parsed", bound=Message)


class Call(Enum):
    """A call of the contract."""

    HELLO = "Hello"
    EXISTS = "Exists"
    GET = "Get"
    PUT = "Put"
    TOUCH = "Touch"
    REMOVE = "Remove"
    SCAN = "Scan"
    IDENTITIES = "Identities"
    CLEAR = "Clear"
    DRAIN = "Drain"

    @property
    def path(self) -> str:
        """Path of the call in HTTP/2."""
        return f"/{SERVICE}/{self.value}"


def parsed(kind: type[Parsed], message: bytes) -> Parsed:
    """Read a message.

    Raises:
        InputError: it is none of that kind.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InputError(f"expected a {kind.DESCRIPTOR.name}, found something else") from error


DIGEST_BYTES = PAGE_KEY_BYTES
"""Length of identities and keys."""


_label = partial(tuple.__new__, Label)
"""``Label`` of a tuple, without a Python call for each."""


def labels_of(identity: bytes, keys: Iterable[PageKey], pool: str) -> list[Label]:
    """Return the labels of pages that share identity and pool."""
    return list(map(_label, zip(repeat(identity), keys, repeat(pool), strict=False)))


def named_runs(labels: Iterable[Label]) -> list[PageRun]:
    """Return labels as runs in their order; no parents, no lengths."""
    return [
        PageRun(identity=identity, pool=pool, keys=[label.key for label in run])
        for (identity, pool), run in groupby(labels, lambda label: (label.identity, label.pool))
    ]


def labels_in(run: PageRun) -> list[Label]:
    """Return the labels that a run of digests names."""
    identity, pool, keys = run.identity, run.pool, list(run.keys)
    check_digests((identity,), "an identity")
    check_digests(keys, "a key")
    return labels_of(identity, keys, pool)


def check_digests(digests: Sequence[bytes], what: str) -> None:
    """Raise ``InputError`` unless all are digests."""
    lengths = set(map(len, digests)) - {DIGEST_BYTES}
    if lengths:
        raise InputError(f"{what} has {DIGEST_BYTES} bytes, found {min(lengths)}")


_OFFSET_TAG = 0x08
_HITS_TAG = 0x12
_CONTENT_TAG = 0x1A
_START_TAG = 0x22
_REASONS_TAG = 0x32
"""Field number and wire type of ``offset``, ``hits``, ``content``, ``start`` and ``reasons``."""

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
    reasons: bytes = b""
    """A byte for each of ``hits``: why a page is a miss. Empty where there is nothing to say."""

    @property
    def end(self) -> int:
        """Bytes of content up to its last."""
        return self.offset + len(self.content)


def encoded(offset: int, hits: bytes, pieces: Sequence[memoryview], start: bytes = b"") -> bytes:
    """Return the message of a part whose content lies in pieces: the one copy that sending needs.

    ``hits`` are bytes of ``mark``, ``start`` is a message with the start of a put alone, whose part this is.
    """
    prefix = _prefix(offset, hits)
    content_bytes = sum(map(len, pieces))
    if content_bytes:
        prefix.append(_CONTENT_TAG)
        prefix += _varint(content_bytes)
    return b"".join((start, prefix, *pieces))


def mark(hit: int, reason: int) -> bytes:
    """Return the byte that ``parts_of`` takes for one page: its byte of ``hits`` and that of ``reasons``."""
    return bytes((hit | reason << _REASON_SHIFT,))


def decoded(message: bytes) -> Chunk:
    """Return what a message says; its content is a view of the message.

    Raises:
        InputError: it is no part, or the start of a put.
    """
    part = _quickly(message)
    if part is None:
        start, part = _by_protobuf(message)
        if start is not None:
            raise InputError("a stream of pages starts once, found a second start")
    return part


def put_begun(message: bytes) -> tuple[PutStart, Chunk]:
    """Return what the first message of a put says: its start, and the part beside it, a view as in ``decoded``.

    Raises:
        InputError: it has no start.
    """
    if message[:1] == bytes((_START_TAG,)):
        count, at = _read_varint(message, 1)
        part = _quickly(message, at + count)
        if part is not None:
            return parsed(PutStart, message[at : at + count]), part
    start, part = _by_protobuf(message)
    if start is None:
        raise InputError("a put begins with its start")
    return start, part


def parts_of(
    pages: Iterable[tuple[bytes, Sequence[memoryview]]], part_bytes: int, start: bytes = b""
) -> Iterator[bytes]:
    """Cut pages, each with its ``mark`` or none, into messages of at most ``part_bytes`` of content.

    The first of them has ``start`` before it, see ``encoded``. Small pages share a message. A large page has messages
    of its own, so that who keeps it keeps nothing else alive. Messages are made when they are asked for; until then
    buffers must stay as they are.
    """
    offset = held_bytes = 0
    hits = bytearray()
    held: list[memoryview] = []
    for hit, buffers in pages:
        page_bytes = sum(map(len, buffers))
        if held_bytes + page_bytes > part_bytes and held_bytes:
            yield encoded(offset, bytes(hits), held, start)
            offset, held_bytes, start = offset + held_bytes, 0, b""
            hits.clear()
            held.clear()
        hits += hit
        if page_bytes <= part_bytes:
            held += buffers
            held_bytes += page_bytes
            continue
        for pieces in pieces_of(buffers, page_bytes, part_bytes):
            yield encoded(offset, bytes(hits), pieces, start)
            offset, start = offset + sum(map(len, pieces)), b""
            hits.clear()
    if hits or held_bytes or start:
        yield encoded(offset, bytes(hits), held, start)


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


def _quickly(message: bytes, at: int = 0) -> Chunk | None:
    """Read the fields from ``at`` on, in the order in which they are written; None where there is anything else."""
    end = len(message)
    offset = 0
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
        return Chunk(offset, hits, _NOTHING, reasons)
    if at < end and message[at] == _CONTENT_TAG:
        count, at = _read_varint(message, at + 1)
        if at + count == end:
            return Chunk(offset, hits, memoryview(message)[at:], reasons)
    return None


def _by_protobuf(message: bytes) -> tuple[PutStart | None, Chunk]:
    try:
        part = PutPart.FromString(message)
        read = GetPart.FromString(message)
    except DecodeError as error:
        raise InputError("expected a part of a page, found something else") from error
    if read.reasons and len(read.reasons) != len(read.hits):
        raise InputError(f"expected a reason for each of {len(read.hits)} pages, found {len(read.reasons)}")
    start = part.start if part.HasField("start") else None
    return start, Chunk(part.offset, read.hits, memoryview(part.content), read.reasons)


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
