"""A proxy in front of a bucket that does to requests what networks and services do to them, and counts it."""

import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


class BucketFault(Enum):
    """Fault of one request or of its answer."""

    BUSY = "503, and nothing is done"
    EXPIRED = "403, the credentials have expired, and nothing is done"
    RESET = "the connection is reset, and nothing is done"
    LOST_ANSWER = "the connection is reset once the bucket has done it"
    CUT = "the answer ends in its middle"
    FLIPPED = "one bit of the answer's body is wrong"
    WRONG_ETAG = "the answer has the ETag of another object"
    SLOW = "the answer does not come; the client hangs up"


class BucketProxy:
    """Passes requests on, but for those that get a fault, drawn at a rate. Thread-safe."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._host, _, port = endpoint.rpartition("//")[2].partition(":")
        self._port = int(port)
        self._rng = random.Random(seed)
        self._guard = Lock()
        self.endpoint = ""
        """URL of the proxy."""
        self.rates: Mapping[BucketFault, float] = {}
        self.fired_count: Counter[BucketFault] = Counter()
        self.held_count = 0
        """Slow answers that a client has not hung up on."""

    @classmethod
    @contextmanager
    def running(cls, endpoint: str, seed: int = 0) -> Iterator["BucketProxy"]:
        """Listen on a port of its own until the end."""
        proxy = cls(endpoint, seed)
        with ThreadingHTTPServer(("127.0.0.1", 0), proxy._handler()) as server:
            proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield proxy
            finally:
                server.shutdown()

    def drawn(self) -> BucketFault | None:
        """Draw the fault of the next request."""
        with self._guard:
            drawn = self._rng.random()
            for fault, rate in self.rates.items():
                drawn -= rate
                if drawn < 0:
                    self.fired_count[fault] += 1
                    return fault
            return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with suppress(OSError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.answer(self, body)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  # named by the base class

        return Handler

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one request, by its fault or by what the bucket says."""
        match self.drawn():
            case BucketFault.BUSY:
                _send_error(request, 503, "SlowDown")
            case BucketFault.EXPIRED:
                _send_error(request, 403, "ExpiredToken")
            case BucketFault.RESET:
                _reset(request)
            case BucketFault.SLOW:
                with self._held():
                    request.connection.recv(1)
                request.close_connection = True
            case fault:
                self._pass_on(request, body, fault)

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._guard:
            self.held_count += 1
        try:
            yield
        finally:
            with self._guard:
                self.held_count -= 1

    def _pass_on(self, request: BaseHTTPRequestHandler, body: bytes, fault: BucketFault | None) -> None:
        upstream = HTTPConnection(self._host, self._port, timeout=30)
        try:
            upstream.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            found = upstream.getresponse()
            content = bytearray(found.read())
        except (HTTPException, OSError):
            _reset(request)
            return
        finally:
            upstream.close()
        if fault is BucketFault.LOST_ANSWER:
            _reset(request)
            return
        if fault is BucketFault.FLIPPED and content:
            content[len(content) // 2] ^= 1
        request.send_response_only(found.status)
        for name, value in found.getheaders():
            if name.lower() in ("connection", "content-length", "transfer-encoding"):
                continue
            is_wrong = fault is BucketFault.WRONG_ETAG and name.lower() == "etag"
            request.send_header(name, '"0123456789abcdef"' if is_wrong else value)
        length = found.getheader("Content-Length", "0") if request.command == "HEAD" else str(len(content))
        request.send_header("Content-Length", length)
        request.end_headers()
        if fault is BucketFault.CUT and content:
            request.wfile.write(content[: len(content) // 2])
            request.close_connection = True
        else:
            request.wfile.write(content)


def _send_error(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
    request.send_response_only(status)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _reset(request: BaseHTTPRequestHandler) -> None:
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()
    request.close_connection = True
