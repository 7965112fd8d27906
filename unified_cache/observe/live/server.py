"""HTTP server of the live page: the page, its figures as JSON, and server-sent events; on a thread of its own."""

import asyncio
import contextlib
import json
import logging
import ssl
import threading
from base64 import b64decode
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Self

from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra
from unified_cache.core.settings.addresses import is_local
from unified_cache.observe.live.authenticator import LiveAuthenticator, View
from unified_cache.observe.live.figures import LiveSource
from unified_cache.observe.live.readers import UNREAD_S_MAX, EventReader, EventReaders, event_bytes
from unified_cache.observe.live.updates import LiveUpdates

with needs_extra("live", "the live page"):
    from aiohttp import web

__all__ = ["LiveAddress", "LiveServer"]

STREAMS_MAX = 32
"""Open pages at a time; one more is asked to come back."""

CLOSE_S = 5.0
"""Longest wait for the thread."""

RETRY_S = 5
"""Pause that a reader is asked for if it finds no room."""

CHALLENGE = 'Basic realm="unified-cache live", charset="UTF-8", Bearer'
"""A browser asks for a user and a password by itself; the password is the token, and any user name will do."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

ASSETS = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
    "/live.svg": ("live.svg", "image/svg+xml"),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveAddress:
    """Address of a live page, and how often it is brought up to date."""

    host: str
    port: int
    """0 lets the system choose."""
    every_s: float = 1.0
    """Between two updates of an open page."""
    tls: ssl.SSLContext | None = None
    """TLS of the server; None for plain HTTP."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"the port of a live page must be in [0, 65535], found {self.port}")
        if not 0.01 <= self.every_s <= 60:
            raise ConfigError(f"a live page is updated every 0.01 to 60 seconds, found {self.every_s}")


class LiveServer:
    """A live page that is being served. ``open`` makes one, ``close`` ends it. For any thread."""

    def __init__(
        self, port: int, host: str, *, scheme: str, stop: Callable[[], None], thread: threading.Thread
    ) -> None:
        self.port = port
        """Port that it listens at."""
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{shown}:{port}/"
        """Address of the page, for a browser on this machine."""
        self._stop = stop
        self._thread = thread

    @classmethod
    def open(cls, source: LiveSource, address: LiveAddress, authenticator: LiveAuthenticator) -> Self:
        """Listen, and serve the figures of ``source`` from now on.

        Raises:
            ConfigError: the address cannot be listened at, or other machines could reach it and need no token.
        """
        if not authenticator.needs_token and not is_local(address.host):
            raise ConfigError(
                f"a live page that other machines can reach needs a token, found {address.host} and none; "
                f"give it one, or listen at 127.0.0.1"
            )
        opened: Future[tuple[int, Callable[[], None]]] = Future()
        site = _Site(source, authenticator, address.every_s)
        thread = threading.Thread(target=_serve, args=(site, address, opened), name="unified-cache-live", daemon=True)
        thread.start()
        try:
            port, stop = opened.result()
        except OSError as error:
            thread.join(CLOSE_S)
            reason = error.strerror or str(error)
            raise ConfigError(f"the live page cannot be served at {address.host}:{address.port}: {reason}") from error
        scheme = "http" if address.tls is None else "https"
        return cls(port, address.host, scheme=scheme, stop=stop, thread=thread)

    def close(self) -> None:
        """Stop serving and cut off its readers. Once more does nothing."""
        self._stop()
        self._thread.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(site: "_Site", address: LiveAddress, opened: "Future[tuple[int, Callable[[], None]]]") -> None:
    """Serve until ``stop`` is called, which ``opened`` has with the port: the body of the server's thread."""
    try:
        asyncio.run(_serve_site(site, address, opened))
    finally:
        opened.cancel()  # nobody waits for a thread that has ended; of one that has opened it does nothing


async def _serve_site(site: "_Site", address: LiveAddress, opened: "Future[tuple[int, Callable[[], None]]]") -> None:
    runner = web.AppRunner(site.application(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, address.host.strip("[]"), address.port, ssl_context=address.tls)
        await listener.start()
    except OSError as error:
        await runner.cleanup()
        opened.set_exception(error)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
            loop.call_soon_threadsafe(ended.set)

    opened.set_result((int(runner.addresses[0][1]), stop))
    reading = asyncio.create_task(site.read())
    await asyncio.wait({reading, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        logger.error("the live page ends: its figures cannot be read", exc_info=reading.exception())
    reading.cancel()
    site.close()
    await runner.cleanup()


class _Site:
    """Answers of the server; all of it runs on the loop of the server's thread."""

    def __init__(self, source: LiveSource, authenticator: LiveAuthenticator, every_s: float) -> None:
        self._source = source
        self._authenticator = authenticator
        self._every_s = every_s
        self._streams_count = 0
        self._readers = EventReaders()
        self._updates = LiveUpdates(source)
        room = files("unified_cache.observe.live")
        self._assets = {path: (room / name).read_bytes() for path, (name, _) in ASSETS.items()}

    def application(self) -> web.Application:
        """Return the routes, behind the checks that every request passes."""
        application = web.Application(middlewares=[_headed])
        for path in ASSETS:
            application.router.add_get(path, self._asset)
        application.router.add_get("/figures.json", self._figures)
        application.router.add_get("/events", self._events)
        return application

    async def read(self) -> None:
        """Read the figures for ever: as often as open pages are brought up to date, and for the history alone else.

        Where nothing has been published since, nothing is sent, but for the point that the history gets once a second.
        """
        while True:
            await asyncio.sleep(self._every_s if self._streams_count else 1.0)
            if self._updates.read():
                self._readers.send(self._updates.latest.event)

    def close(self) -> None:
        """Close every open page."""
        self._readers.close()

    async def _asset(self, request: web.Request) -> web.Response:
        """Send a part of the page; a browser signs in for the page itself, and so for the figures too."""
        self._check_host(request)
        if request.path == "/":
            self._admitted(request)
        return web.Response(body=self._assets[request.path], content_type=ASSETS[request.path][1], charset="utf-8")

    async def _figures(self, request: web.Request) -> web.Response:
        """Send the figures of this moment."""
        view = self._admitted(request)
        if not self._streams_count:
            self._updates.read()
        return web.Response(body=self._updates.latest.text(view), content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the history, then the figures as they change, for as long as the reader reads."""
        view = self._admitted(request)
        if self._streams_count >= STREAMS_MAX:
            raise web.HTTPServiceUnavailable(text="too many open pages\n", headers={"Retry-After": str(RETRY_S)})
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        self._streams_count += 1
        try:
            await response.prepare(request)
            history = event_bytes("history", json.dumps([*self._updates.points], separators=(",", ":")).encode())
            async with asyncio.timeout(UNREAD_S_MAX):
                await response.write(history + self._updates.latest.event(view))
            await self._readers.listen(
                EventReader(request, response, partial(self._authenticator.view, _shown(request)))
            )
        except (ConnectionError, TimeoutError):
            pass  # the reader has gone, or does not read
        finally:
            self._streams_count -= 1
        return response

    def _admitted(self, request: web.Request) -> View:
        """Return what a reader may see."""
        self._check_host(request)
        view = self._authenticator.view(_shown(request))
        if view is None:
            raise web.HTTPUnauthorized(text="a valid token is needed\n", headers={"WWW-Authenticate": CHALLENGE})
        return view

    def _check_host(self, request: web.Request) -> None:
        """Refuse a page of elsewhere whose name leads to this machine, where no token would stop it."""
        if self._authenticator.needs_token:
            return
        host = request.url.host or ""
        if not is_local(host):
            raise web.HTTPForbidden(text="this page is served to this machine alone, under the name localhost\n")


def _shown(request: web.Request) -> str | None:
    """Return the token that a reader shows, as a bearer or as the password of a browser."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return token if scheme.lower() == "bearer" else None
    try:
        return b64decode(token, validate=True).decode().partition(":")[2]
    except ValueError:
        return None


@web.middleware
async def _headed(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Put the headers that browsers keep the page by on every answer, refusals too."""
    try:
        response = await handler(request)
    except web.HTTPException as refusal:
        refusal.headers.update(HEADERS)
        raise
    if not response.prepared:
        response.headers.update(HEADERS)
    return response
