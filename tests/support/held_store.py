"""Stores that stop in the middle of a command, so that it can be interrupted there however fast the machine is.

``tests.support.held_store:held:METHOD,N:DIR`` is the file store in DIR, whose N-th call of METHOD never returns, or
its N-th opening where that is ``open``.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

Result = TypeVar("Result")

HELD_VARIABLE = "UNIFIED_CACHE_TEST_HELD"
"""A FIFO, into which a byte is written when a call is held."""

_calls_count = Counter[str]()


def hold() -> None:
    """Say that a call is held, and hold it until the process ends."""
    fifo = os.environ.get(HELD_VARIABLE)
    if fifo is not None:
        Path(fifo).write_bytes(b"h")
    threading.Event().wait()


class HeldStorage(StorageLayer):
    """A store of which one call never returns."""

    def __init__(self, backend: Store, method: str, number: int) -> None:
        super().__init__(backend)
        self._held = method, number

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        _calls_count[method.value] += 1
        if self._held == (method.value, _calls_count[method.value]):
            hold()
        return work()


def held(rest: str, bytes_max: int | None) -> HeldStorage:
    """Open a file store that stops at a call."""
    call, _, path = rest.partition(":")
    method, _, number = call.partition(",")
    _calls_count["open"] += 1
    if (method, int(number)) == ("open", _calls_count["open"]):
        hold()
    return HeldStorage(FileStorage.open(Path(path), bytes_max=bytes_max), method, int(number))
