"""Closing a store that several threads call: none enters after, and the last one in flight is waited for."""

from threading import Condition, Lock
from types import TracebackType

from unified_cache.errors import ClosedError

__all__ = ["Calls"]


class Calls:
    """Calls in flight: each enters while the store is open, and closing waits until the last has left."""

    __slots__ = ("_closed", "_count", "_guard", "_last_left", "_store")

    def __init__(self, store: str) -> None:
        self._store = store
        self._count = 0
        self._closed = False
        # Entered without the condition around it, which costs as much again: this is on the path of every call.
        self._guard = Lock()
        self._last_left = Condition(self._guard)

    def __enter__(self) -> None:
        with self._guard:
            if self._closed:
                raise ClosedError(f"{self._store} was closed")
            self._count += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._guard:
            self._count -= 1
            if self._closed and not self._count:
                self._last_left.notify_all()

    def close(self) -> bool:
        """Refuse new calls and wait for those in flight; True for the one caller who is to let go."""
        with self._guard:
            first = not self._closed
            self._closed = True
            while self._count:
                self._last_left.wait()
            return first
