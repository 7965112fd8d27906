"""A server in the place of a bucket that answers as no bucket should, and counts what it is asked for."""

import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, islice
from threading import Event, Thread
from urllib.parse import parse_qs, urlsplit

BLOCK = bytes(1 << 20)
ENDLESS_BYTES = 256 << 20
"""As much as a test waits for."""

OBJECT_HEADERS = {"ETag": '"0"', "Last-Modified": "Sat, 28 Nov 2026 00:00:00 GMT"}


class BucketRequest(BaseHTTPRequestHandler):
    """One request, and the body that came with it."""

    protocol_version = "HTTP/1.1"
    body = b""

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def begin(self, status: int, **headers: str) -> None:
        """Send a status and headers; of names with a dash, the words are joined by an underscore."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole answer; of a HEAD, without the body."""
        self.begin(status, Content_Length=str(len(body)), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


BucketAnswer = Callable[[BucketRequest], None]


class HostileBucket:
    """Answers every request in the same way. ``asked`` has the method and the path of each."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.asked: list[str] = []

    @classmethod
    @contextmanager
    def running(
        cls, answer: BucketAnswer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> Iterator["HostileBucket"]:
        """Listen on a port of its own until the end."""

        class HostileHandler(BucketRequest):
            def do_GET(self) -> None:
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                bucket.asked.append(f"{self.command} {self.path}")
                with suppress(OSError):
                    answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  # named by the base class

            def handle_one_request(self) -> None:
                self.close_connection = True
                with suppress(OSError):
                    super().handle_one_request()

        with ThreadingHTTPServer((host, 0), HostileHandler) as server:
            server.daemon_threads = True
            server.block_on_close = False
            if tls is not None:
                server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            scheme = "http" if tls is None else "https"
            bucket = cls(f"{scheme}://{host}:{server.server_address[1]}")
            Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield bucket
            finally:
                server.shutdown()


def refusal(status: int, code: str = "") -> BucketAnswer:
    """Refuse with a status, and with a code where the answer may have a body."""
    body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
    return lambda request: request.send(status, body if request.command != "HEAD" else b"")


def policy(objects: dict[str, bytes], *, may_put: bool = True, may_list: bool = True) -> BucketAnswer:
    """Keep objects for who may get them, and put them or not; 403 for what is not there to who may not list."""

    def answer(request: BucketRequest) -> None:
        content = objects.get(request.path)
        if request.command == "PUT" and may_put:
            if content is not None and request.headers["If-None-Match"] == "*":
                return refusal(412, "PreconditionFailed")(request)
            objects[request.path] = request.body
            content = b""
        elif request.command not in ("GET", "HEAD"):
            return refusal(403, "AccessDenied")(request)
        elif content is None:
            return (refusal(404, "NoSuchKey") if may_list else refusal(403, "AccessDenied"))(request)
        return request.send(200, content, **OBJECT_HEADERS)

    return answer


def endless_listing(names: Callable[[int], str] | None = None) -> BucketAnswer:
    """List a thousand names below what is asked for, those of these numbers, or none; say that more follows."""
    numbers = count()
    date = "<LastModified>2026-11-28T00:00:00.000Z</LastModified>"
    token = "<IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken>"

    def answer(request: BucketRequest) -> None:
        prefix = parse_qs(urlsplit(request.path).query)["prefix"][0]
        listed = "".join(
            f'<Contents><Key>{prefix}{names(number)}</Key><Size>1</Size>{date}<ETag>"0"</ETag></Contents>'
            for number in islice(numbers, 1000)
            if names is not None
        )
        request.send(200, f"<ListBucketResult>{listed}{token}</ListBucketResult>".encode())

    return answer


def dripping(status: int, over: Event) -> BucketAnswer:
    """BucketAnswer with a body of which a little more comes until ``over`` is set."""

    def answer(request: BucketRequest) -> None:
        request.begin(status, Transfer_Encoding="chunked")
        while not over.wait(0.01):
            request.wfile.write(b"1\r\n<\r\n")

    return answer


def redirect(endpoint: str) -> BucketAnswer:
    """Send every request elsewhere."""
    return lambda request: request.send(302, Location=f"{endpoint}/elsewhere")


def endless(length: int, sent: list[int]) -> BucketAnswer:
    """Name a length, and send on in chunks until the client hangs up; add to ``sent`` the bytes that it took."""

    def answer(request: BucketRequest) -> None:
        request.begin(200, Content_Length=str(length), Transfer_Encoding="chunked", **OBJECT_HEADERS)
        while request.command == "GET" and sum(sent) < ENDLESS_BYTES:
            request.wfile.write(b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK))
            sent.append(len(BLOCK))

    return answer
