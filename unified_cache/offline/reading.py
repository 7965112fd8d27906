"""Reads objects of a store and verifies each of them."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from unified_cache.errors import StorageError
from unified_cache.page import PageKey
from unified_cache.seal import Label, verify_buffers
from unified_cache.storage_backends.protocol import Answer, PageIO, StorageReader, StoredObject
from unified_cache.storage_backends.verified import summed

__all__ = ["FlawedObject", "ReadObject", "ReadOutcome", "empty_page", "read_verified"]


class ReadOutcome(Enum):
    """Outcome of reading an object."""

    SOUND = "sound"
    """Its seal and checksum hold for the page that its name says."""
    FLAWED = "flawed"
    """Its seal or checksum does not hold, or it has a wrong pool or length."""
    UNREADABLE = "unreadable"
    """The store cannot read it, and trying again would not help."""
    GONE = "gone"
    """It was removed after it was listed; no failure."""


class ReadObject(NamedTuple):
    """One object that was read. The page's buffers hold it if it is sound; otherwise their content is undefined."""

    page: PageIO
    object_bytes: int
    outcome: ReadOutcome
    reason: str = ""
    """Its flaw in words; empty if it is sound."""


class FlawedObject(NamedTuple):
    """An object that is flawed or cannot be read."""

    label: Label
    outcome: ReadOutcome
    reason: str


def empty_page(found: StoredObject, parent: PageKey | None = None) -> PageIO:
    """Allocate a buffer to read an object into."""
    return PageIO(found.label, parent, (memoryview(bytearray(found.object_bytes)),))


def read_verified(storage: StorageReader, pages: Sequence[PageIO]) -> list[ReadObject]:
    """Read one batch and verify every page of it; nothing is removed.

    Where the batch fails, its pages are read one by one, so that one bad sector costs one page.

    Raises:
        StorageError: the store fails in a way that may pass; asking again later may succeed.
    """
    asked = summed(pages)
    try:
        answers = storage.get(asked)
    except StorageError as error:
        if error.retryable:
            raise
        if len(pages) == 1:
            return [_reading(pages[0], ReadOutcome.UNREADABLE, str(error))]
        return [read_verified(storage, [page])[0] for page in pages]
    return [_verified(page, answer) for page, answer in zip(asked, answers, strict=True)]


def _verified(page: PageIO, answer: Answer) -> ReadObject:
    if answer is Answer.FLAWED:
        return _reading(page, ReadOutcome.FLAWED, "the store has something else in its place")
    if answer is Answer.UNAVAILABLE:
        return _reading(page, ReadOutcome.UNREADABLE, "the store did not give it")
    if not answer:
        return _reading(page, ReadOutcome.GONE)
    flaw = verify_buffers(page.buffers, page.label, page.checksum)
    return _reading(page, ReadOutcome.SOUND) if flaw is None else _reading(page, ReadOutcome.FLAWED, flaw.value)


def _reading(page: PageIO, outcome: ReadOutcome, reason: str = "") -> ReadObject:
    return ReadObject(page, sum(buffer.nbytes for buffer in page.buffers), outcome, reason)
