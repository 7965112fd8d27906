"""Calls of a tool to a store: one that hangs ends the tool with an error, and not never."""

from collections.abc import Callable
from typing import TypeVar

from unified_cache.core.errors import StorageTimeoutError
from unified_cache.storage_backends.common.bounded_call import CallThreads, call_within
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

CALL_S = 60.0
"""Longest call: 64 MiB at the least, or 4,096 look-ups, of a store far away."""

SHRINK_S = 3600.0
"""Longest opening under a cap: it lists all that there is, and evicts what is too much."""

Result = TypeVar("Result")


class _BoundedStore(StorageLayer):
    """A store that a tool asks: each call is made on a thread of its own, left where it hangs or is interrupted."""

    def __init__(self, backend: Store) -> None:
        super().__init__(backend)
        self._threads = CallThreads("tool-call", 1)
        self._is_left = False
        """Whether the store is in a call that nobody waits for."""

    def close(self) -> None:
        """Close the store, unless it is in a call: that would wait for it."""
        if not self._is_left:
            super().close()

    def _call(self, method: Method, work: Callable[[], Result], asked_count: int | None = None) -> Result:
        call = self._threads.submit(work, name=method.value)
        try:
            if call.settle(CALL_S):
                return call.result()
            raise StorageTimeoutError(f"the store did not return from {method.value} within {CALL_S:g} s", call)
        finally:
            if not call.returned:
                self._is_left = True
                self._threads.leave(call)


def open_in_time(open_store: Callable[[str], Store], url: str, opening_s: float | None = None) -> Store:
    """Open a store by a function of ``offline.stores``; opening it, and each call, ends within ``CALL_S``.

    ``opening_s`` is for an opening that may take longer.
    """
    return _BoundedStore(
        call_within(CALL_S if opening_s is None else opening_s, "its opening", lambda: open_store(url))
    )
