"""Sealed pages: a header beside the payload that says whose bytes these are, and proves it.

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
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from unified_cache.page import PageKey

__all__ = ["FORMAT_VERSION", "HEADER_BYTES", "Flaw", "Label", "seal", "verify"]

HEADER_BYTES = 128
FORMAT_VERSION = 1

_MAGIC = b"UKVP"
_BODY = struct.Struct("<4sHHQ32s32s32sQ")
_CHECK = struct.Struct("<Q")


class Flaw(Enum):
    """What is wrong with a page that does not verify."""

    LENGTH = "it has another length"
    HEADER = "its header is damaged"
    FORMAT = "it has another format version"
    FOREIGN = "it belongs to another identity, key or pool"
    PAYLOAD = "its payload is damaged"


class Label(NamedTuple):
    """Whose page this is: what a header must say to be believed, and what a store calls the object."""

    identity: bytes
    """``Identity.digest``, 32 bytes."""
    key: PageKey
    pool: str
    """Name of the ``PoolSpec``; stores use it as a suffix and know no pool by name."""

    @property
    def object_name(self) -> str:
        """Name of the object in any store: ``<identity>/<page key>.<pool>``, hex digests."""
        return f"{self.identity.hex()}/{self.key.hex()}.{self.pool}"


def seal(page: memoryview, label: Label) -> None:
    """Write the header of ``page``, whose payload (all bytes after the header) is complete."""
    body = _body(label, len(page) - HEADER_BYTES, xxh3_64_intdigest(page[HEADER_BYTES:]))
    page[: _BODY.size] = body
    page[_BODY.size : HEADER_BYTES] = _CHECK.pack(xxh3_64_intdigest(body))


def verify(page: memoryview, label: Label) -> Flaw | None:
    """Return what is wrong with ``page``, None if it is exactly the page that ``label`` names."""
    if len(page) < HEADER_BYTES:
        return Flaw.LENGTH
    found = bytes(page[: _BODY.size])
    (check,) = _CHECK.unpack(page[_BODY.size : HEADER_BYTES])
    if check != xxh3_64_intdigest(found) or found[: len(_MAGIC)] != _MAGIC:
        return Flaw.HEADER
    _, version, header_bytes, payload_bytes, *_, checksum = _BODY.unpack(found)
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return Flaw.FORMAT
    if payload_bytes != len(page) - HEADER_BYTES:
        return Flaw.LENGTH
    if found != _body(label, payload_bytes, checksum):
        return Flaw.FOREIGN
    if checksum != xxh3_64_intdigest(page[HEADER_BYTES:]):
        return Flaw.PAYLOAD
    return None


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
