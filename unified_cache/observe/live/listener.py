"""HTTP listener for ``/metrics``, and for a page at ``/`` that reads them in a browser.

It answers scrapes, whatever else connects to it. Needs the extra ``metrics``.
"""

import base64
import binascii
import errno
import math
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread

from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra
from unified_cache.core.settings.addresses import ListenAddress, is_local

with needs_extra("metrics", "metrics and the live page"):
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONNECTIONS_MAX = 16
"""Connections at a time; one more cuts the oldest off, so that nobody who says nothing keeps a scrape out."""

REQUEST_S_MAX = 5.0
"""Time from a connection to its end: handshake, request and answer."""

LOOK_S = 0.1
"""Time between two checks for connections that are late, and for the end of the listener."""

CLOSE_S = 5.0
"""Longest wait for the listener's thread; it never waits for a connection."""

IN_USE = (
    ", by another server, it seems, as of a second service with the same settings; name another address for this one: "
    'listen = "127.0.0.1:9465" in the table [metrics], or UNIFIED_CACHE_SERVE_METRICS__LISTEN in the environment'
)
"""What follows where the address is taken: a port of 0 would do too, but nobody could tell Prometheus of it."""

Readers = Callable[[socket.socket, str | None], int]
"""Decides about a reader by the connection and the token that it shows, None for none: 200 admits it, 401 asks for a
token, 403 refuses it."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]+)?")
"""Host header with nothing in it that a browser would read otherwise."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_Connection = socket.socket | tuple[bytes, socket.socket]
"""Connection as the base class has it; the second kind is of datagrams, which nobody sends here."""


class MetricsListener(ThreadingMixIn, TCPServer):
    """Listener for ``/metrics`` and the page, a few connections at a time, each within a time limit; else 404.

    Each connection has a thread; the listener's own accepts, cuts off who is late, and waits for nobody.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        address: ListenAddress,
        registry: CollectorRegistry,
        readers: Readers | None = None,
        context: Callable[[], ssl.SSLContext] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen; nothing is served before ``start``.

        ``readers`` decides who may read; without, all who reach the address, and of a loopback address under a name of
        this machine alone, so that no page from elsewhere reads it. ``context`` gives the TLS of each connection.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.registry = registry
        self._readers = readers
        self._is_local = is_local(address.host)
        self._context = context
        self._clock = clock
        self._connected: dict[socket.socket, float] = {}
        """Time at which each connection was accepted, the oldest first."""
        self._guard = Lock()
        self._thread = Thread(target=self.serve_forever, args=(LOOK_S,), name="unified-cache-metrics", daemon=True)
        try:
            super().__init__((address.host, address.port), _Scrape)
        except OSError as error:
            advice = IN_USE if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"metrics cannot be served at {address.text}: {error.strerror}{advice}") from error
        self.socket.setblocking(False)  # a client that has gone before it was accepted stops nobody

    @property
    def port(self) -> int:
        """Port that is listened at."""
        return int(self.server_address[1])

    def status_of(self, connection: socket.socket, host: str | None, authorization: str | None) -> int:
        """Return 200 for a request that may be answered, else the status that refuses it."""
        if self._readers is not None:
            return self._readers(connection, _token_in(authorization))
        if self._is_local and host is not None:
            named = _HOST.fullmatch(host)
            return 200 if named is not None and is_local(named[1]) else 403
        return 200

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving, cut off its clients, and let the address go."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join(CLOSE_S)
        self.server_close()
        self.cut_off(math.inf)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection and wait for nothing that it says."""
        accepted, peer = super().get_request()
        accepted.settimeout(REQUEST_S_MAX)
        if self._context is not None:
            accepted = self._context().wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        now_s = self._clock()
        with self._guard:
            self._connected[accepted] = now_s
            surplus_count = max(0, len(self._connected) - CONNECTIONS_MAX)
            oldest_s = list(self._connected.values())[:surplus_count]
        if oldest_s:
            self.cut_off(oldest_s[-1])
        return accepted, peer

    def finish_request(self, request: _Connection, client_address: object) -> None:
        """Serve a connection, on its own thread."""
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()
        super().finish_request(request, client_address)

    def close_request(self, request: _Connection) -> None:
        """Release a connection that has ended."""
        if isinstance(request, socket.socket):
            with self._guard:
                self._connected.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """Cut off who is late; called every ``LOOK_S``."""
        self.cut_off(self._clock() - REQUEST_S_MAX)

    def cut_off(self, accepted_s: float) -> None:
        """Cut off the connections that were accepted at a time or before; their threads see their end."""
        with self._guard:
            late = [connection for connection, since_s in self._connected.items() if since_s <= accepted_s]
        for connection in late:
            with suppress(OSError):
                # Of the socket and not of TLS, which its own thread uses at this moment.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: the reader has gone."""


class _Scrape(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # as the base calls it
        """Answer one request."""
        listener = self.server
        assert isinstance(listener, MetricsListener)
        path = self.path.partition("?")[0]
        status = listener.status_of(self.connection, self.headers.get("Host"), self.headers.get("Authorization"))
        if status != 200:
            self._answer(status, "text/plain", b"a valid token is needed\n" if status == 401 else b"not for you\n", {})
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, generate_latest(listener.registry), {})
        elif path == "/":
            page, policy = _page()
            self._answer(200, "text/html; charset=utf-8", page, {"Content-Security-Policy": policy})
        else:
            self._answer(404, "text/plain", b"there are /metrics, and a page at /\n", {})

    def _answer(self, status: int, kind: str, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        # One challenge in one header: Chromium drops a header with two. The password is the token, the user any name.
        challenge = {"WWW-Authenticate": 'Basic realm="unified-cache", charset="UTF-8"'} if status == 401 else {}
        of_content = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in {**of_content, **HEADERS, **challenge, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as in the base
        """Log nothing: a reader comes every few seconds."""


@cache
def _page() -> tuple[bytes, str]:
    """Return the page, and the policy that lets its own style and script alone work."""
    text = (files("unified_cache.observe.live") / "live.html").read_text(encoding="utf-8")
    hashes = {
        tag: base64.b64encode(sha256(re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1].encode()).digest()).decode()  # type: ignore[index]
        for tag in ("style", "script")
    }
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return text.encode(), policy


def _token_in(authorization: str | None) -> str | None:
    """Return the token of an Authorization header: of a program a bearer's, of a browser the password."""
    scheme, _, shown = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return shown.strip()
    try:
        found = base64.b64decode(shown, validate=True).decode() if scheme.lower() == "basic" else ""
    except (binascii.Error, UnicodeDecodeError):
        return None
    return found.partition(":")[2] or None
