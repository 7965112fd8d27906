"""Sealed pages: a header before the payload names the page that the bytes belong to, with checksums.

    offset  bytes  field
         0      4  magic
         4      2  format version
         6      2  header bytes
         8      8  payload bytes
        16     32  identity digest (model, revision, dtype, layout, page size, shard)
        48     32  page key (tokens, everything before them, namespace)
        80     32  pool name, zero-padded ASCII
       112      8  xxh3-64 of the payload
       120      8  xxh3-64 of the 120 bytes above

Integers are little-endian. A page is one contiguous run: header, then payload. It is sealed when its copy to
host memory is complete and verified on every read from storage, whatever the backend. A store may keep it compressed or
encrypted, see ``storage_backends.wrappers.page_coding``: such an object has a header of its own, of another version.
"""

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from unified_cache.core.page import PageKey

__all__ = ["Label"]

HEADER_BYTES = 128
FORMAT_VERSION = 1
CODED_VERSION = 2
"""Of an object whose payload is a page compressed or encrypted."""
CODED_OVER_BYTES = 52
"""Of such an object, around its body: how it is coded, and the tag."""

_MAGIC = b"UKVP"
_BODY = struct.Struct("<4sHHQ32s32s32sQ")
_CHECK = struct.Struct("<Q")
_ROUNDED_BYTES_MIN = 256
_ROUNDED_PARTS = 64
"""Bodies are multiples of this part of a page: less than 1 % of it is lost, and there are as many lengths at most."""


class Flaw(Enum):
    """Reason why a page does not verify."""

    LENGTH = "it has another length"
    HEADER = "its header is damaged"
    FORMAT = "it has another format version"
    FOREIGN = "it belongs to another identity, key or pool"
    PAYLOAD = "its payload is damaged"


class Label(NamedTuple):
    """Name of one sealed page: its header must say it to verify, and stores name the object by it."""

    identity: bytes
    """``Identity.digest``, 32 bytes."""
    key: PageKey
    pool: str
    """Name of the ``PoolSpec``; stores use it as a suffix and know no pool by name."""

    @property
    def object_name(self) -> str:
        """Name of the object in any store: ``<identity>/<page key>.<pool>``, hex digests."""
        return f"{self.identity.hex()}/{self.page_name}"

    @property
    def page_name(self) -> str:
        """Name of the object within its identity: ``<page key>.<pool>``."""
        return f"{self.key.hex()}.{self.pool}"


class PageChecksum:
    """Checksum of one page's payload, taken piece by piece while each is in the processor's caches. For one thread."""

    __slots__ = ("_digest", "_end", "_stream")

    def __init__(self) -> None:
        self._digest = 0
        """Of a page that was added at once."""
        self._stream: xxh3_64 | None = None
        """Of one that was added piece by piece; it costs several times what a small page does."""
        self._end = 0
        """Bytes of the page added so far, header included; -1 once some were left out."""

    def add(self, start: int, pieces: Sequence[memoryview]) -> None:
        """Add the bytes of the page from ``start`` on, which are in place now; the caller changes them no more.

        In order and without a gap, the header too. A ``start`` of 0 begins again: bytes read again count again.
        """
        if not start:
            self._stream = xxh3_64()
            self._end = 0
        elif start != self._end or self._stream is None:
            self._end = -1
            return
        for piece in payload_of(pieces, HEADER_BYTES - start):
            self._stream.update(piece)
        self._end += sum(map(len, pieces))

    def add_all(self, buffers: Sequence[memoryview]) -> None:
        """Add the whole page, which is in place now; what was added before counts no more."""
        self._stream = None
        self._digest = checksum_of(payload_of(buffers))
        self._end = sum(map(len, buffers))

    def of(self, page_bytes: int) -> int | None:
        """Return the checksum of the payload of a page of that length; None unless just so much was added."""
        if self._end != page_bytes:
            return None
        return self._digest if self._stream is None else self._stream.intdigest()


def seal_buffers(buffers: Sequence[memoryview], label: Label, version: int = FORMAT_VERSION) -> None:
    """Write the header of a page into its buffers; the payload, all bytes after the header, is complete."""
    if len(buffers) == 1 or (len(buffers) == 2 and len(buffers[0]) == HEADER_BYTES):  # as most are
        payload = buffers[1] if len(buffers) == 2 else buffers[0][HEADER_BYTES:]
        buffers[0][:HEADER_BYTES] = header_of(label, len(payload), xxh3_64_intdigest(payload), version)
        return
    payloads = payload_of(buffers)
    header = header_of(label, sum(map(len, payloads)), checksum_of(payloads), version)
    for buffer in buffers:
        part, header = header[: len(buffer)], header[len(buffer) :]
        buffer[: len(part)] = part


def relabelled(header: bytes, label: Label) -> bytes:
    """Return the header of the same payload under another label, checksum kept; ``header`` is one that verified."""
    _, _, _, payload_bytes, *_, checksum = _BODY.unpack(header[: _BODY.size])
    return header_of(label, payload_bytes, checksum)


def coded_body_bytes(body_bytes: int, payload_bytes: int) -> int:
    """Return the length of a coded body of so many bytes, rounded up; the page as it is has no zeros behind it."""
    part = max(_ROUNDED_BYTES_MIN, payload_bytes // _ROUNDED_PARTS)
    rounded_bytes = -(-body_bytes // part) * part
    if rounded_bytes == payload_bytes - CODED_OVER_BYTES:  # an object of the page's own length is the page as it is
        rounded_bytes += part
    return min(rounded_bytes, _CHECK.size + payload_bytes)


def may_be_coded(payload_bytes: int, object_bytes: int) -> bool:
    """Return whether an object of that length may be a page of that payload, compressed or encrypted."""
    body_bytes = object_bytes - HEADER_BYTES - CODED_OVER_BYTES
    return body_bytes >= _CHECK.size and coded_body_bytes(body_bytes, payload_bytes) == body_bytes


def payload_checksum(header: bytes) -> int:
    """Return the checksum that a header says its payload has."""
    checksum: int = _BODY.unpack(header[: _BODY.size])[-1]
    return checksum


def is_sealed(stored: memoryview, label: Label) -> bool:
    """Return whether an object is whole, be it the page that ``label`` names as it is, or coded."""
    flaw = verify_buffers((stored,), label)
    return flaw is None or (flaw is Flaw.FORMAT and verify_buffers((stored,), label, version=CODED_VERSION) is None)


def verify_buffers(
    buffers: Sequence[memoryview],
    label: Label,
    checksum: PageChecksum | None = None,
    version: int = FORMAT_VERSION,
) -> Flaw | None:
    """Return what is wrong with a page, None if it is exactly the one that ``label`` names; its buffers are not joined.

    ``checksum`` is what the reader of these buffers has made of them. A page is flawed only by its bytes as they are:
    where the checksum is not that of the whole page, or says that something is wrong, they are all read again.
    """
    if len(buffers) == 1:
        header = buffers[0][:HEADER_BYTES].tobytes()
        payload: Sequence[memoryview] = [buffers[0][HEADER_BYTES:]]
    elif len(buffers[0]) == HEADER_BYTES:
        header, payload = buffers[0].tobytes(), buffers[1:]
    else:
        header = b"".join([buffer[:HEADER_BYTES] for buffer in buffers])[:HEADER_BYTES]
        payload = payload_of(buffers)
    if len(header) < HEADER_BYTES:
        return Flaw.LENGTH
    is_one = len(payload) == 1
    payload_bytes = len(payload[0]) if is_one else sum(map(len, payload))
    found = None if checksum is None else checksum.of(HEADER_BYTES + payload_bytes)
    if found is not None and header == header_of(label, payload_bytes, found, version):
        return None
    digest = xxh3_64_intdigest(payload[0]) if is_one else checksum_of(payload)
    if header == header_of(label, payload_bytes, digest, version):
        return None
    return _flaw_of(header, payload_bytes, label, version)


def _flaw_of(header: bytes, payload_bytes: int, label: Label, expected: int) -> Flaw:
    found = header[: _BODY.size]
    (check,) = _CHECK.unpack(header[_BODY.size :])
    if check != xxh3_64_intdigest(found) or found[: len(_MAGIC)] != _MAGIC:
        return Flaw.HEADER
    _, version, header_bytes, claimed_bytes, *_, checksum = _BODY.unpack(found)
    if version != expected or header_bytes != HEADER_BYTES:
        return Flaw.FORMAT
    if claimed_bytes != payload_bytes:
        return Flaw.LENGTH
    return Flaw.PAYLOAD if header == header_of(label, payload_bytes, checksum, version) else Flaw.FOREIGN


def payload_of(buffers: Sequence[memoryview], skip: int = HEADER_BYTES) -> Sequence[memoryview]:
    """Cut ``skip`` bytes, as a rule the header, off the front of the buffers."""
    number = 0
    while skip > 0 and number < len(buffers) and len(buffers[number]) <= skip:
        skip -= len(buffers[number])
        number += 1
    rest = buffers[number:]
    return [rest[0][skip:], *rest[1:]] if skip > 0 and rest else rest


def checksum_of(payload: Sequence[memoryview]) -> int:
    """Return the checksum of a payload that lies in several buffers."""
    if len(payload) == 1:
        return xxh3_64_intdigest(payload[0])
    stream = xxh3_64()
    for buffer in payload:
        stream.update(buffer)
    return stream.intdigest()


def header_of(label: Label, payload_bytes: int, checksum: int, version: int = FORMAT_VERSION) -> bytes:
    """Return the header of a page of that label, length and checksum of its payload."""
    pool = label.pool.encode("ascii")
    body = _BODY.pack(_MAGIC, version, HEADER_BYTES, payload_bytes, label.identity, label.key, pool, checksum)
    return body + _CHECK.pack(xxh3_64_intdigest(body))
