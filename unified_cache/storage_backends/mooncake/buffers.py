"""Pages as the store client takes them: a name, and pointers with sizes."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["ObjectBuffers", "batches", "object_buffers", "pointer_to"]

BATCH_BYTES = (2 << 20) + 16 * HEADER_BYTES
"""In flight in one call, headers beside payloads: more leaves the receiver's processor caches, and runs at half the
speed over TCP."""

BATCH_OBJECTS = 16
"""In one call: a node that stalls holds it up for a second per four objects, and a call has a deadline."""

_address_of = ctypes.addressof
_char_in = ctypes.c_char.from_buffer


class ObjectBuffers(NamedTuple):
    """One object to move."""

    number: int
    """Of the page in its call."""
    name: str
    object_bytes: int
    pointers: list[int]
    sizes: list[int]
    """Of each pointer; no empty ones."""

    @property
    def is_whole(self) -> bool:
        """Whether it lies in one buffer."""
        return len(self.pointers) == 1


def pointer_to(memory: memoryview) -> int:
    """Return where memory lies; the caller keeps it alive."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return _address_of(_char_in(memory))


def object_buffers(number: int, page: PageIO) -> ObjectBuffers:
    """Point to the buffers of a page; its owner keeps them alive."""
    buffers = page.buffers
    if len(buffers) == 1 and (size := buffers[0].nbytes):
        return ObjectBuffers(number, page.label.object_name, size, [pointer_to(buffers[0])], [size])
    filled = [buffer for buffer in buffers if buffer.nbytes]
    sizes = [buffer.nbytes for buffer in filled]
    return ObjectBuffers(number, page.label.object_name, sum(sizes), [pointer_to(buffer) for buffer in filled], sizes)


def batches(objects: Sequence[ObjectBuffers]) -> Iterator[Sequence[ObjectBuffers]]:
    """Cut a run of objects into calls, of objects in one buffer each or of objects in several; a large one goes alone.

    No call names an object twice: of two buffers for one key the client fills the last, and says it filled both.
    """
    start = taken_bytes = 0
    names: set[str] = set()
    for end, item in enumerate(objects):
        taken_bytes += item.object_bytes
        if end > start and (
            taken_bytes > BATCH_BYTES
            or end - start >= BATCH_OBJECTS
            or item.name in names
            or item.is_whole is not objects[start].is_whole
        ):
            yield objects[start:end]
            start, taken_bytes = end, item.object_bytes
            names.clear()
        names.add(item.name)
    if objects:
        yield objects[start:]
