"""Cancellation of streams that are idle, or that never end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import grpc

from unified_cache.service.requests.sweep import PeriodicSweep
from unified_cache.service.settings import LimitSettings

__all__ = ["StreamWatch", "WatchedStream"]


class WatchedStream:
    """Start and last progress of one open stream."""

    __slots__ = ("context", "moved_s", "started_s")

    def __init__(self, context: grpc.ServicerContext, started_s: float) -> None:
        self.context = context
        self.started_s = started_s
        self.moved_s = started_s


class StreamWatch:
    """Periodic check of the open streams. Thread-safe."""

    def __init__(self, limits: LimitSettings, clock: Callable[[], float]) -> None:
        self._idle_s = limits.stream_idle_s
        self._call_s_max = limits.call_s_max
        self._clock = clock
        self._streams: set[WatchedStream] = set()
        self._guard = Lock()
        self._sweeper = PeriodicSweep(self.sweep, limits.stream_idle_s, "stream-watch")

    @contextmanager
    def over(self, context: grpc.ServicerContext) -> Iterator[Callable[[], None]]:
        """Watch a call for the length of the with block; call what it yields whenever something moved."""
        stream = WatchedStream(context, self._clock())
        with self._guard:
            self._streams.add(stream)
        self._sweeper.start()

        def moved() -> None:
            stream.moved_s = self._clock()

        try:
            yield moved
        finally:
            with self._guard:
                self._streams.discard(stream)

    def close(self) -> None:
        """Watch no more; streams that are still open end with their server."""
        self._sweeper.close()

    def sweep(self) -> bool:
        """Cancel the streams that have been idle, or open, for too long; tell whether any is open."""
        now_s = self._clock()
        with self._guard:
            late = [
                stream
                for stream in self._streams
                if now_s - stream.moved_s > self._idle_s or now_s - stream.started_s > self._call_s_max
            ]
            is_any_open = bool(self._streams)
        for stream in late:
            stream.context.cancel()
        return is_any_open
