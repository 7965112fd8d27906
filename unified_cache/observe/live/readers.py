"""Readers of a live page's events: each gets what is newest, and nobody waits for one that is slow."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from unified_cache.core.extras import needs_extra
from unified_cache.observe.live.authenticator import View

with needs_extra("live", "the live page"):
    from aiohttp import web

__all__ = ["UNREAD_S_MAX", "EventReader", "EventReaders", "event_bytes"]

UNREAD_S_MAX = 10.0
"""Longest that a reader may leave bytes unread; then it is cut off, and its browser connects again."""


class EventReader:
    """One open page that listens to events. For one thread, as all of this module."""

    __slots__ = ("_request", "_response", "_sent_at_s", "_viewed", "gone")

    def __init__(self, request: web.Request, response: web.StreamResponse, viewed: Callable[[], View | None]) -> None:
        """Take an answer whose head has been sent; ``viewed`` says what the reader may see, None for nothing."""
        self._request = request
        self._response = response
        self._viewed = viewed
        self._sent_at_s = 0.0
        self.gone = asyncio.Event()
        """Set when nothing is sent to it any more."""

    def send(self, text: Callable[[View], bytes], now_s: float) -> None:
        """Send the newest event, unless an earlier one is still on its way: then the reader misses this one.

        A reader that does not read, has left or may not look any more is gone.
        """
        if self._has_unread():
            if now_s > self._sent_at_s + UNREAD_S_MAX:
                self.gone.set()
            return
        view = self._viewed()
        try:
            if view is not None:
                self._write(text(view))
        except ConnectionError:
            view = None
        if view is None:
            self.gone.set()
        self._sent_at_s = now_s

    def _has_unread(self) -> bool:
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() > 0

    def _write(self, event: bytes) -> None:
        """Give an event to the connection, in the first step of writing; what would follow waits until it is sent."""
        writing = self._response.write(event)
        with suppress(StopIteration):
            writing.send(None)
        writing.close()

    async def listen(self) -> None:
        """Return when the reader is gone; what it has not read is thrown away with its connection."""
        await self.gone.wait()
        if self._has_unread() and (transport := self._request.transport) is not None:
            transport.abort()


class EventReaders:
    """All open pages that listen."""

    __slots__ = ("_is_closing", "_readers")

    def __init__(self) -> None:
        self._readers: dict[EventReader, None] = {}
        self._is_closing = False

    async def listen(self, reader: EventReader) -> None:
        """Send events to a reader until it is gone."""
        if self._is_closing:
            return
        self._readers[reader] = None
        try:
            await reader.listen()
        finally:
            del self._readers[reader]

    def send(self, text: Callable[[View], bytes]) -> None:
        """Send an event to all; ``text`` makes it for a view."""
        now_s = time.monotonic()
        for reader in self._readers:
            reader.send(text, now_s)

    def close(self) -> None:
        """End all readers, and those that come from now on."""
        self._is_closing = True
        for reader in self._readers:
            reader.gone.set()


def event_bytes(kind: str, text: bytes) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), text)
