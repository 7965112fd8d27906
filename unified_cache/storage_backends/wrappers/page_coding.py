"""Objects that hold a page compressed, encrypted, or both: compressed, then encrypted, then sealed.

    offset  bytes  field
         0    128  header as of a page, version 2: it names the page, and its checksum is that of all below
       128      1  width of the numbers that it is compressed by, 0 if it is not
       129      1  1 if it is encrypted
       130      2  zeros
       132      4  bytes of data
       136      8  bytes of the page's payload
       144      8  ID of the key     } zeros if it is
       152     12  nonce             } not encrypted
       164      8  checksum of the page's payload
       172         data, then zeros
       end     16  tag of AES-256-GCM, zeros if it is not encrypted

Encrypted is what lies between nonce and tag. The tag binds to it the header as far as its payload checksum, which names
identity, key and pool, and all that follows: what is moved to another name is no page there. Lengths are rounded up, so
that they tell little, and stores that keep objects of one length together have few of them.
"""

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError, MissingExtraError
from unified_cache.core.extras import import_with_extra
from unified_cache.core.seal import (
    CODED_OVER_BYTES,
    CODED_VERSION,
    HEADER_BYTES,
    Flaw,
    checksum_of,
    coded_body_bytes,
    header_of,
    payload_checksum,
    payload_of,
    verify_buffers,
)
from unified_cache.storage_backends.protocol import PageIO, page_bytes

if TYPE_CHECKING:
    from unified_cache.storage_backends.wrappers.compression import PageCompressor
    from unified_cache.storage_backends.wrappers.page_keys import PageKeys

_FIELDS = struct.Struct("<BBHIQ8s12s")
_CHECKSUM = struct.Struct("<Q")
TAG_BYTES = 16
assert _FIELDS.size + TAG_BYTES == CODED_OVER_BYTES
_BOUND_HEADER_BYTES = 112
_NONCE_BYTES = 12
_BODY_START = HEADER_BYTES + _FIELDS.size


class Undecoded(Enum):
    """Reason why an object is not the page that was asked for."""

    DAMAGED = "damaged"
    """Its seal does not hold, or its data are those of a longer or a shorter page."""
    FORGED = "forged"
    """Its tag does not hold: made without the key, changed, or moved here from another name."""
    UNENCRYPTED = "unencrypted"
    """This store has keys, and anybody could have made it."""
    NO_KEY = "no_key"
    """Its key is not among those of its owner."""
    NO_OWNER = "no_owner"
    """Nobody has said whose page it is, so that no key is its owner's; see ``CodedStorage.own``."""
    NO_CODEC = "no_codec"
    """The package that reads it is not installed."""


@dataclass(frozen=True, slots=True)
class CodingChoice:
    """Coding of the pages that are written to a store."""

    compress: bool = False
    keys: str = ""
    """Source of its keys, see ``page_keys``; empty for none."""

    @classmethod
    def of(cls, text: str) -> "CodingChoice":
        """Read ``compress=lossless``, ``keys=SOURCE``, or both with ``&`` between them; raise ConfigError."""
        compress, keys = False, ""
        for option in text.split("&"):
            name, _, value = option.partition("=")
            if name == "compress" and value in ("lossless", "none"):
                compress = value == "lossless"
            elif name == "keys" and value:
                keys = value
            else:
                # What stands there may be a part of a command, and so a key.
                raise ConfigError(
                    "after # stand compress=lossless and keys=SOURCE with & between, found something else"
                )
        return cls(compress, keys)


class PageCoder:
    """Turns pages into objects of a store, and back. Thread-safe."""

    def __init__(self, choice: CodingChoice, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise MissingExtraError where a package is not installed, ConfigError where there are no keys."""
        self._compressor: PageCompressor | None = _compression().PageCompressor() if choice.compress else None
        keys_module = f"{__package__}.page_keys"
        self._keys: PageKeys | None = None
        if choice.keys:
            self._keys = import_with_extra(keys_module, "encrypt", "keys=").PageKeys(choice.keys, clock)
        self.is_coding = choice.compress or bool(choice.keys)
        """Whether pages are stored otherwise than as they are."""

    @property
    def is_encrypting(self) -> bool:
        """Whether pages are encrypted, so that no other is believed."""
        return self._keys is not None

    def encode(self, page: PageIO, owner: str | None) -> PageIO | None:
        """Return the object for a page: itself where it is to be stored as it is, None where its owner has no key."""
        label, buffers, _ = page
        payload_bytes = page_bytes(page) - HEADER_BYTES
        if payload_bytes < 0:
            return page
        key = None if self._keys is None else self._keys.writing(label.identity, owner)
        if self._keys is not None and key is None:
            return None
        payload = _joined(payload_of(buffers))
        compressed = None if self._compressor is None else self._compressor.compress(label, payload)
        width, data = (0, payload.data) if compressed is None else compressed
        body_bytes = coded_body_bytes(_CHECKSUM.size + len(data), payload_bytes)
        if key is None and (compressed is None or CODED_OVER_BYTES + body_bytes >= payload_bytes):
            return page
        checksum = payload_checksum(b"".join(buffer[:HEADER_BYTES] for buffer in buffers)[:HEADER_BYTES])
        zeros = bytes(body_bytes - _CHECKSUM.size - len(data))
        body = b"".join((_CHECKSUM.pack(checksum), data, zeros))
        nonce = b"" if key is None else os.urandom(_NONCE_BYTES)
        fields = _FIELDS.pack(
            width, key is not None, 0, len(data), payload_bytes, b"" if key is None else key.id, nonce
        )
        stored_bytes = CODED_OVER_BYTES + body_bytes
        if key is None:
            body += bytes(TAG_BYTES)
        else:
            header = header_of(label, stored_bytes, 0, CODED_VERSION)
            body = key.encrypt(nonce, body, header[:_BOUND_HEADER_BYTES] + fields[:-_NONCE_BYTES])
        parts = (memoryview(fields), memoryview(body))
        sealed = header_of(label, stored_bytes, checksum_of(parts), CODED_VERSION)
        return PageIO(label, (memoryview(sealed), *parts))

    def decode(self, stored: memoryview, page: PageIO, owner: str | None) -> Undecoded | None:
        """Fill the buffers of a page from its object; return why it is not that page, None where it is.

        Nothing is made that is longer than the page. The caller verifies the page by its seal.
        """
        label, buffers, _ = page
        flaw = verify_buffers((stored,), label, version=CODED_VERSION)
        if flaw is not None:
            return Undecoded.UNENCRYPTED if flaw is Flaw.FORMAT and self._keys is not None else Undecoded.DAMAGED
        width, is_encrypted, _, data_bytes, payload_bytes, key_id, nonce = _FIELDS.unpack_from(stored, HEADER_BYTES)
        body = stored[_BODY_START:-TAG_BYTES]
        data_end = _CHECKSUM.size + data_bytes
        if payload_bytes != sum(map(len, buffers)) - HEADER_BYTES or data_end > len(body):
            return Undecoded.DAMAGED
        if is_encrypted:
            key = None if self._keys is None else self._keys.reading(label.identity, owner, key_id)
            if key is None:
                return Undecoded.NO_OWNER if self._keys is not None and owner is None else Undecoded.NO_KEY
            bound = bytes(stored[:_BOUND_HEADER_BYTES]) + bytes(stored[HEADER_BYTES : _BODY_START - _NONCE_BYTES])
            decrypted = key.decrypt(nonce, stored[_BODY_START:], bound)
            if decrypted is None:
                return Undecoded.FORGED
            body = memoryview(decrypted)
        elif self._keys is not None:
            return Undecoded.UNENCRYPTED
        views = payload_of(buffers)
        payload = _joined(views) if len(views) == 1 else np.empty(payload_bytes, np.uint8)
        reason = _unpack(body[_CHECKSUM.size : data_end], width, payload)
        if reason is None:
            (checksum,) = _CHECKSUM.unpack_from(body)
            _fill(buffers, memoryview(header_of(label, payload_bytes, checksum)))
            if len(views) > 1:
                _fill(views, payload.data)
        return reason


def _joined(views: Sequence[memoryview]) -> npt.NDArray[np.uint8]:
    """Return bytes as one array: over the memory itself where they lie in one piece."""
    arrays = [np.frombuffer(view, np.uint8) for view in views]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint8), *arrays])


def _unpack(data: memoryview, width: int, payload: npt.NDArray[np.uint8]) -> Undecoded | None:
    """Fill ``payload`` with the page that ``data`` hold."""
    if not width:
        if len(data) != payload.size:
            return Undecoded.DAMAGED
        payload[:] = np.frombuffer(data, np.uint8)
        return None
    try:
        is_whole: bool = _compression().decompress(data, width, payload)
    except MissingExtraError:
        return Undecoded.NO_CODEC
    return None if is_whole else Undecoded.DAMAGED


def _fill(buffers: Sequence[memoryview], content: memoryview) -> None:
    """Copy ``content`` into the front of some buffers."""
    start = 0
    for buffer in buffers:
        part = content[start : start + len(buffer)]
        buffer[: len(part)] = part
        start += len(part)


def _compression() -> ModuleType:
    return import_with_extra(f"{__package__}.compression", "compress", "compress=lossless")
