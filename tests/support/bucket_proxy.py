"""A proxy in front of a bucket that does to requests what networks and services do to them, and counts it."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from http.client import HTTPConnection, HTTPException
from threading import Lock

from tests.support.hostile_bucket import BucketRequest, HostileBucket, refusal


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
        with HostileBucket.running(proxy.answer) as server:
            proxy.endpoint = server.endpoint
            yield proxy

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

    def answer(self, request: BucketRequest) -> None:
        """Answer one request, by its fault or by what the bucket says."""
        match self.drawn():
            case BucketFault.BUSY:
                refusal(503, "SlowDown")(request)
            case BucketFault.EXPIRED:
                refusal(403, "ExpiredToken")(request)
            case BucketFault.RESET:
                request.reset()
            case BucketFault.SLOW:
                with self._held():
                    request.connection.recv(1)
                request.close_connection = True
            case fault:
                self._pass_on(request, fault)

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._guard:
            self.held_count += 1
        try:
            yield
        finally:
            with self._guard:
                self.held_count -= 1

    def _pass_on(self, request: BucketRequest, fault: BucketFault | None) -> None:
        upstream = HTTPConnection(self._host, self._port, timeout=30)
        try:
            upstream.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(request.body or None)
            found = upstream.getresponse()
            content = bytearray(found.read())
        except (HTTPException, OSError):
            return request.reset()
        finally:
            upstream.close()
        if fault is BucketFault.LOST_ANSWER:
            return request.reset()
        if fault is BucketFault.FLIPPED and content:
            content[len(content) // 2] ^= 1
        headers = dict(found.getheaders())
        headers = {name: value for name, value in headers.items() if name.lower() not in OF_A_CONNECTION}
        if fault is BucketFault.WRONG_ETAG:
            headers |= {name: '"0123456789abcdef"' for name in headers if name.lower() == "etag"}
        length = found.getheader("Content-Length", "0") if request.command == "HEAD" else str(len(content))
        request.begin(found.status, Content_Length=length, **headers)
        request.close_connection |= fault is BucketFault.CUT
        request.wfile.write(content[: len(content) // 2] if fault is BucketFault.CUT else content)
        return None


OF_A_CONNECTION = ("connection", "content-length", "transfer-encoding")
"""Headers that are not the object's."""
