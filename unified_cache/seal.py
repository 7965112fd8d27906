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
host memory is complete and verified on every read from storage, whatever the backend.
"""

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from unified_cache.page import PageKey

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "Flaw",
    "Label",
    "relabelled",
    "seal",
    "seal_buffers",
    "verify",
    "verify_buffers",
]

HEADER_BYTES = 128
FORMAT_VERSION = 1

_MAGIC = b"UKVP"
_BODY = struct.Struct("<4sHHQ32s32s32sQ")
_CHECK = struct.Struct("<Q")


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


def seal(page: memoryview, label: Label) -> None:
    """Write the header of ``page``, whose payload (all bytes after the header) is complete."""
    page[:HEADER_BYTES] = _header(label, len(page) - HEADER_BYTES, xxh3_64_intdigest(page[HEADER_BYTES:]))


def seal_buffers(buffers: Sequence[memoryview], label: Label) -> None:
    """Write the header of a page that lies in several buffers: ``seal`` of what they would be if joined."""
    if len(buffers) == 1:
        seal(buffers[0], label)
        return
    payload = _payload(buffers)
    header = _header(label, sum(map(len, payload)), _checksum(payload))
    start = 0
    for buffer in buffers:
        end = min(start + len(buffer), HEADER_BYTES)
        buffer[: end - start] = header[start:end]
        start = end


def relabelled(header: bytes, label: Label) -> bytes:
    """Return the header of the same payload under another label, checksum kept; ``header`` is one that verified."""
    _, _, _, payload_bytes, *_, checksum = _BODY.unpack(header[: _BODY.size])
    return _header(label, payload_bytes, checksum)


def verify(page: memoryview, label: Label) -> Flaw | None:
    """Return what is wrong with ``page``, None if it is exactly the page that ``label`` names."""
    if len(page) < HEADER_BYTES:
        return Flaw.LENGTH
    payload = page[HEADER_BYTES:]
    header = page[:HEADER_BYTES].tobytes()
    if header == _header(label, len(payload), xxh3_64_intdigest(payload)):
        return None
    claimed = _claim(header, len(payload), label)
    return claimed if isinstance(claimed, Flaw) else Flaw.PAYLOAD


def verify_buffers(buffers: Sequence[memoryview], label: Label) -> Flaw | None:
    """Return what is wrong with a page that lies in several buffers, whose payloads are not joined for it."""
    if len(buffers) == 1:
        return verify(buffers[0], label)
    page_bytes = sum(map(len, buffers))
    if page_bytes < HEADER_BYTES:
        return Flaw.LENGTH
    header = b"".join(buffer[:HEADER_BYTES] for buffer in buffers)[:HEADER_BYTES]
    checksum = _claim(header, page_bytes - HEADER_BYTES, label)
    if isinstance(checksum, Flaw):
        return checksum
    return None if checksum == _checksum(_payload(buffers)) else Flaw.PAYLOAD


def _claim(header: bytes, payload_bytes: int, label: Label) -> int | Flaw:
    """Return the payload checksum that a header claims, or why the header is not to be believed."""
    found = header[: _BODY.size]
    (check,) = _CHECK.unpack(header[_BODY.size :])
    if check != xxh3_64_intdigest(found) or found[: len(_MAGIC)] != _MAGIC:
        return Flaw.HEADER
    _, version, header_bytes, claimed_bytes, *_, checksum = _BODY.unpack(found)
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return Flaw.FORMAT
    if claimed_bytes != payload_bytes:
        return Flaw.LENGTH
    if found != _body(label, payload_bytes, checksum):
        return Flaw.FOREIGN
    return int(checksum)


def _payload(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Cut the header off the front of the buffers."""
    payload: list[memoryview] = []
    skip = HEADER_BYTES
    for buffer in buffers:
        payload.append(buffer[skip:])
        skip = max(0, skip - len(buffer))
    return payload


def _checksum(payload: Sequence[memoryview]) -> int:
    stream = xxh3_64()
    for buffer in payload:
        stream.update(buffer)
    return stream.intdigest()


def _header(label: Label, payload_bytes: int, checksum: int) -> bytes:
    body = _body(label, payload_bytes, checksum)
    return body + _CHECK.pack(xxh3_64_intdigest(body))


def _body(label: Label, payload_bytes: int, checksum: int) -> bytes:
    return _BODY.pack(
        _MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        payload_bytes,
        label.identity,
        label.key,
        label.pool.encode("ascii"),
        checksum,
    )
