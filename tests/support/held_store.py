"""Stores that stop in the middle of a command, so that it can be interrupted there however fast the machine is.

``tests.support.held_store:held:METHOD,N:DIR`` is the file store in DIR, whose N-th call of METHOD never returns;
``tests.support.held_store:third_open`` is a memory store that lets nobody open it a third time.
"""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unified_cache.core.seal import Label
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO, Scan

__all__ = ["HELD_VARIABLE", "HeldFileStorage", "held", "third_open"]

HELD_VARIABLE = "UNIFIED_CACHE_TEST_HELD"
"""A FIFO, into which a byte is written when a call is held."""

_opened = Counter[str]()


def hold() -> None:
    """Say that a call is held, and hold it until the process ends."""
    fifo = os.environ.get(HELD_VARIABLE)
    if fifo is not None:
        Path(fifo).write_bytes(b"h")
    threading.Event().wait()


class HeldFileStorage(FileStorage):
    """File store of which one call never returns."""

    holds = ("", 0)

    def count_call(self, method: str) -> None:
        """Count a call, and hold it if it is the one."""
        _opened[method] += 1
        if self.holds == (method, _opened[method]):
            hold()

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        self.count_call("scan")
        return super().scan(identity, cursor)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self.count_call("exists")
        return super().exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.count_call("get")
        return super().get(pages)


def held(rest: str, bytes_max: int | None) -> HeldFileStorage:
    """Open a file store that stops at a call."""
    call, _, path = rest.partition(":")
    method, _, number = call.partition(",")
    storage = HeldFileStorage.open(Path(path), bytes_max=bytes_max)
    assert isinstance(storage, HeldFileStorage)
    storage.holds = (method, int(number))
    return storage


def third_open(_rest: str, bytes_max: int | None) -> MemoryStorage:
    """Open a memory store; the third opening after the first check is held."""
    _opened["open"] += 1
    if _opened["open"] == 5:
        hold()
    return MemoryStorage(bytes_max)
