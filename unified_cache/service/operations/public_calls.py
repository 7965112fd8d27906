"""Calls that need no credentials, bounded: everybody may make them, and each takes a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import grpc

from unified_cache.service.access.errors import Refused
from unified_cache.service.access.timeouts import CallTimeouts, TimedCall

__all__ = ["PublicCalls"]


class PublicCalls:
    """Places for public calls of one kind. Thread-safe.

    Where all are taken, the call that has been half open for longest gives its place up: who sends headers alone cannot
    shut out who also sends a message. Where each has sent one, the new call is refused.
    """

    def __init__(self, calls_max: int, timeouts: CallTimeouts) -> None:
        self._calls_max = calls_max
        self._timeouts = timeouts
        self._open: dict[TimedCall, None] = {}
        """Those with a place, the oldest first."""
        self._guard = Lock()

    @contextmanager
    def admitted(self, context: grpc.ServicerContext) -> Iterator[TimedCall]:
        """Give a call a place for the length of the with block; ends the call where there is none."""
        with self._timeouts.over(context) as call:
            if not self._enter(call):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls of this kind")
            try:
                yield call
            except Refused as error:
                context.abort(error.code, error.message)
            finally:
                with self._guard:
                    self._open.pop(call, None)

    def _enter(self, call: TimedCall) -> bool:
        with self._guard:
            silent = None
            if len(self._open) >= self._calls_max:
                silent = next((each for each in self._open if each.is_half_open), None)
                if silent is None:
                    return False
                del self._open[silent]
            self._open[call] = None
        if silent is not None:
            silent.cut("another call needed its place")
        return True
