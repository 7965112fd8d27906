"""Calls in flight of a store that several threads use, so that closing it waits for the last one."""

import math
import sys
from threading import Condition, Lock
from types import FrameType, TracebackType

from unified_cache.core.errors import ClosedError

LOOK_S = 0.1
"""Between two looks, while a close waits, whether a call was interrupted on its way out."""


class CallsInFlight:
    """Calls in flight: each enters while the store is open, and closing waits until the last has left.

    Entering and leaving take no lock, for they are on the path of every call: a call shows itself before it looks
    whether the store is closed, and closing looks for calls after it has said so, so one of them sees the other.

    An interrupt from the keyboard can cut a call short before it has left. So a call is known by the frame that it runs
    in: of one that is not running any more, nothing is in flight.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._frames: dict[FrameType, None] = {}
        self._closed = False
        self._last_left = Condition(Lock())

    def __enter__(self) -> None:
        frame = sys._getframe(1)  # noqa: SLF001  # documented, and nothing else names the caller's frame
        self._frames[frame] = None
        if self._closed:
            self._leave(frame)
            raise ClosedError(f"{self._store} was closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave(sys._getframe(1))  # noqa: SLF001  # as on entering

    def close(self, timeout_s: float = math.inf) -> bool:
        """Refuse new calls and wait for those in flight; True for the one caller that is to release."""
        with self._last_left:
            first = not self._closed
            self._closed = True
            while timeout_s > 0 and any(map(is_running, self._frames.copy())):
                self._last_left.wait(LOOK_S)
                timeout_s -= LOOK_S
            return first

    def _leave(self, frame: FrameType) -> None:
        self._frames.pop(frame, None)
        if self._closed:
            with self._last_left:
                self._last_left.notify_all()


def is_running(frame: FrameType) -> bool:
    """Return whether a frame has not returned and raised nothing yet; one that has releases what it held.

    Python tells it of no frame, but refuses to clear one that runs. Without this, a Ctrl-C between two lines of
    ``__enter__`` or ``__exit__`` left a call in flight for ever, and a close that waits for it. No method that enters
    is a generator, which this would close where it waits.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
