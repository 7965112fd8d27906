"""A sealed page in the server's memory: header and payload apart, so that a page is renamed without a copy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unified_cache.seal import HEADER_BYTES, Label, relabelled

__all__ = ["HeldPage", "blank_page", "page_in"]

KEPT_SHARE_MIN = 0.5
"""Of a message, the part that a page must fill to be kept as a view of it: a smaller one would keep the rest alive."""


class HeldPage(NamedTuple):
    """Header and payload of one page, immutable; a reference keeps the bytes alive."""

    header: memoryview
    payload: tuple[memoryview, ...]

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """The page in order."""
        return (self.header, *self.payload)

    def named(self, label: Label) -> "HeldPage":
        """Return the same payload under another label."""
        return HeldPage(memoryview(relabelled(bytes(self.header), label)), self.payload)


def blank_page(object_bytes: int) -> HeldPage:
    """Make a page to be filled; its payload holds anything."""
    payload_bytes = object_bytes - HEADER_BYTES
    payload = (np.empty(payload_bytes, np.uint8).data,) if payload_bytes else ()  # not zeroed, unlike a bytearray
    return HeldPage(memoryview(bytearray(HEADER_BYTES)), payload)


def page_in(pieces: Sequence[memoryview]) -> HeldPage:
    """Return the page that lies in pieces of messages, at least a header long; copied where views would keep too much.

    A view keeps the whole message alive.
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
    return HeldPage(memoryview(header), tuple(payload))
