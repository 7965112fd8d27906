"""HTTP listener for ``/metrics``. It answers scrapes, whatever else connects to it."""

import errno
import math
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.access import Role
from unified_cache.core.settings.addresses import ListenAddress
from unified_cache.service.access.tls import CertifiedClients

__all__ = ["MetricsListener"]

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

_Connection = socket.socket | tuple[bytes, socket.socket]
"""Connection as the base class has it; the second kind is of datagrams, which nobody sends here."""


class MetricsListener(ThreadingMixIn, TCPServer):
    """Listener for ``/metrics``, a few connections at a time, each within a time limit; 404 for any other path.

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
        clients: CertifiedClients | None = None,
        context: Callable[[], ssl.SSLContext] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen; nothing is served before ``start``.

        Metrics name every tenant: of ``clients``, if given, an admin alone may read them. ``context`` gives the TLS of
        each connection, if any.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.registry = registry
        self._clients = clients
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

    def admits(self, connection: socket.socket) -> bool:
        """Return whether the client at the other end of a connection may read."""
        if self._clients is None:
            return True
        certificate = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
        caller = None if certificate is None else self._clients.named(ssl.DER_cert_to_PEM_cert(certificate).encode())
        return caller is not None and caller.role is Role.ADMIN

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
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
        elif not listener.admits(self.connection):
            self.send_error(403)
        else:
            content = generate_latest(listener.registry)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as in the base
        """Log nothing: a reader comes every few seconds."""
