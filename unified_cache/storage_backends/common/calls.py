"""Calls in flight of a store that several threads use, so that closing it waits for the last one."""

from threading import Condition, Lock
from types import TracebackType

from unified_cache.errors import ClosedError

__all__ = ["CallsInFlight"]


class CallsInFlight:
    """Calls in flight: each enters while the store is open, and closing waits until the last has left.

    Entering and leaving take no lock, for they are on the path of every call: a call shows itself before it looks
    whether the store is closed, and closing looks for calls after it has said so, so one of them sees the other.
    """

    __slots__ = ("_closed", "_in_flight", "_last_left", "_store")

    def __init__(self, store: str) -> None:
        self._store = store
        self._in_flight: list[None] = []
        self._closed = False
        self._last_left = Condition(Lock())

    def __enter__(self) -> None:
        self._in_flight.append(None)
        if self._closed:
            self.__exit__(None, None, None)
            raise ClosedError(f"{self._store} was closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._in_flight.pop()
        if self._closed:
            with self._last_left:
                self._last_left.notify_all()

    def close(self) -> bool:
        """Refuse new calls and wait for those in flight; True for the one caller who is to let go."""
        with self._last_left:
            first = not self._closed
            self._closed = True
            while self._in_flight:
                self._last_left.wait()
            return first
