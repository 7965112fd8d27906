"""Streams under watch: one on which nothing moves, or that never ends, is cancelled."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock

import grpc

from unified_cache.service.limits import RequestLimits

__all__ = ["Stream", "StreamWatch"]

LOOKS_PER_IDLE = 4
"""Looks at all streams in the time that one may idle: it is cancelled at most a quarter late."""


class Stream:
    """One call under watch."""

    __slots__ = ("context", "moved_s", "started_s")

    def __init__(self, context: grpc.ServicerContext, started_s: float) -> None:
        self.context = context
        self.started_s = started_s
        self.moved_s = started_s


class StreamWatch:
    """Look at open streams now and then, on a thread of its own that lives while there is one. Thread-safe."""

    def __init__(self, limits: RequestLimits, clock: Callable[[], float]) -> None:
        self._idle_s = limits.stream_idle_s
        self._call_s_max = limits.call_s_max
        self._clock = clock
        self._streams: set[Stream] = set()
        self._is_watching = False
        self._closed = Event()
        self._guard = Lock()

    @contextmanager
    def over(self, context: grpc.ServicerContext) -> Iterator[Callable[[], None]]:
        """Watch a call for the length of the with block; call what it yields whenever something moved."""
        stream = Stream(context, self._clock())
        with self._guard:
            self._streams.add(stream)
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._watch, name="stream-watch", daemon=True).start()

        def moved() -> None:
            stream.moved_s = self._clock()

        try:
            yield moved
        finally:
            with self._guard:
                self._streams.discard(stream)

    def close(self) -> None:
        """Watch no more; streams that are still open end with their server."""
        self._closed.set()

    def look(self) -> None:
        """Cancel the streams that have been idle, or open, for too long."""
        now_s = self._clock()
        with self._guard:
            late = [
                stream
                for stream in self._streams
                if now_s - stream.moved_s > self._idle_s or now_s - stream.started_s > self._call_s_max
            ]
        for stream in late:
            stream.context.cancel()

    def _watch(self) -> None:
        while not self._closed.wait(self._idle_s / LOOKS_PER_IDLE):
            self.look()
            with self._guard:
                if not self._streams:
                    self._is_watching = False
                    return
