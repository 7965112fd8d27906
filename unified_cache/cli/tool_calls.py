"""Calls of a tool to a store: one that hangs ends the tool with an error, and not never."""

from collections.abc import Callable
from threading import TIMEOUT_MAX
from typing import TypeVar

from unified_cache.core.errors import StorageTimeoutError
from unified_cache.storage_backends.common.call_threads import CallThreads, call_within
from unified_cache.storage_backends.offline.stores import (
    open_existing,
    open_pages_to_read,
    open_to_read,
    open_to_write,
)
from unified_cache.storage_backends.protocol import StorageBackend, StorageReader
from unified_cache.storage_backends.wrappers.layer import Method, ReaderLayer, StorageLayer

__all__ = ["open_in_time_to_change", "open_in_time_to_read", "open_in_time_to_write", "open_pages_in_time"]

CALL_S = 60.0
"""Longest call: 64 MiB at the least, or 4,096 look-ups, of a store far away. A clear takes as long as it takes."""

Result = TypeVar("Result")


class _ToolCalls:
    """Makes calls on a thread of its own, and leaves it in one that hangs, or that is interrupted."""

    def __init__(self) -> None:
        self._threads = CallThreads("tool-call", 1)
        self.is_left = False
        """Whether the store is in a call that nobody waits for."""

    def make(self, method: Method, work: Callable[[], Result]) -> Result:
        call = self._threads.submit(work, name=method.value)
        try:
            if call.settle(TIMEOUT_MAX if method is Method.CLEAR else CALL_S):
                return call.result()
            self.is_left = True
            raise StorageTimeoutError(f"the store did not return from {method.value} within {CALL_S:g} s", call)
        finally:
            if not call.returned:
                self.is_left = True
                self._threads.leave(call)


class _BoundedReader(ReaderLayer[StorageReader]):
    """A store that a tool reads."""

    def __init__(self, backend: StorageReader) -> None:
        super().__init__(backend)
        self._calls = _ToolCalls()

    def close(self) -> None:
        """Close the store, unless it is in a call: that would wait for it."""
        if not self._calls.is_left:
            super().close()

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        return self._calls.make(method, work)


class _BoundedStore(StorageLayer):
    """A store that a tool changes."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self._calls = _ToolCalls()

    def close(self) -> None:
        """Close the store, unless it is in a call: that would wait for it."""
        if not self._calls.is_left:
            super().close()

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        return self._calls.make(method, work)


def open_in_time_to_read(url: str) -> StorageReader:
    """Open a store as ``open_to_read``; opening it, and each call, ends within ``CALL_S``."""
    return _BoundedReader(_within(lambda: open_to_read(url)))


def open_pages_in_time(url: str) -> StorageReader:
    """Open a store as ``open_pages_to_read``, bounded as ``open_in_time_to_read``."""
    return _BoundedReader(_within(lambda: open_pages_to_read(url)))


def open_in_time_to_write(url: str) -> StorageBackend:
    """Open a store as ``open_to_write``, bounded as ``open_in_time_to_read``."""
    return _BoundedStore(_within(lambda: open_to_write(url)))


def open_in_time_to_change(url: str) -> StorageBackend:
    """Open a store as ``open_existing``, bounded as ``open_in_time_to_read``."""
    return _BoundedStore(_within(lambda: open_existing(url)))


def _within(opened: Callable[[], Result]) -> Result:
    return call_within(CALL_S, "its opening", opened)
