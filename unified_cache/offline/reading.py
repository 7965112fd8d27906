"""Reading objects and believing none of them."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from unified_cache.errors import StorageError
from unified_cache.page import PageKey
from unified_cache.seal import Label, verify_buffers
from unified_cache.storage_backends.protocol import PageIO, StorageBackend, StoredObject

__all__ = ["FlawedObject", "ReadObject", "ReadOutcome", "blank", "read_verified"]


class ReadOutcome(Enum):
    """What came of reading an object."""

    SOUND = "sound"
    """It is exactly the page that its name says."""
    FLAWED = "flawed"
    """It is not."""
    UNREADABLE = "unreadable"
    """The store fails to read it, and would again."""
    GONE = "gone"
    """It was removed since it was listed; no fault of anybody."""


class ReadObject(NamedTuple):
    """One object that was asked for. The page's buffers hold it where it is sound, else anything."""

    page: PageIO
    object_bytes: int
    outcome: ReadOutcome
    reason: str = ""
    """What is wrong with it, for people."""


class FlawedObject(NamedTuple):
    """One object that something is wrong with."""

    label: Label
    outcome: ReadOutcome
    reason: str


def blank(found: StoredObject, parent: PageKey | None = None) -> PageIO:
    """Make room to read an object into."""
    return PageIO(found.label, parent, (memoryview(bytearray(found.object_bytes)),))


def read_verified(storage: StorageBackend, pages: Sequence[PageIO]) -> list[ReadObject]:
    """Read one batch and verify every page of it; nothing is removed.

    Where the batch fails, its pages are read one by one, so that one bad sector costs one page.

    Raises:
        StorageError: the store fails in a way that may pass; asking again later may succeed.
    """
    try:
        hits = storage.get(pages)
    except StorageError as error:
        if error.retryable:
            raise
        if len(pages) == 1:
            return [_reading(pages[0], ReadOutcome.UNREADABLE, str(error))]
        return [read_verified(storage, [page])[0] for page in pages]
    return [_verified(page) if hit else _reading(page, ReadOutcome.GONE) for page, hit in zip(pages, hits, strict=True)]


def _verified(page: PageIO) -> ReadObject:
    flaw = verify_buffers(page.buffers, page.label)
    return _reading(page, ReadOutcome.SOUND) if flaw is None else _reading(page, ReadOutcome.FLAWED, flaw.value)


def _reading(page: PageIO, outcome: ReadOutcome, reason: str = "") -> ReadObject:
    return ReadObject(page, sum(buffer.nbytes for buffer in page.buffers), outcome, reason)
