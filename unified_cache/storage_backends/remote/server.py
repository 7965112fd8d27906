"""One server of a service, as its client sees it: connections, what was agreed on, and rest after failures."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from threading import Lock

import grpc
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions

from unified_cache.core.errors import ConfigError, InputError, StorageError, StorageFullError, without_secrets
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import REASON, REASON_HELLO, Call, Parsed, parsed
from unified_cache.storage_backends.common.breaker import Backoff, CircuitBreaker
from unified_cache.storage_backends.remote.credentials import ClientCredentials
from unified_cache.storage_backends.remote.url import RemoteOptions, parse_rest

PARTS_AHEAD_BYTES = 8 << 20
"""Bytes of a stream that may be under way to a slow reader."""

RECONNECT_MS_MIN = 100
RECONNECT_MS_MAX = 2000
"""Pauses between attempts to reach a server that went away; meanwhile its calls fail at once."""

REST = Backoff(0.1, 5.0)
"""Time for which a server that failed is asked last, in seconds."""

SIGNS_OF_TLS = ("Socket closed", "Connection reset", "tls", "ssl", "SSL", "handshake")
"""In what gRPC says where one side speaks TLS and the other does not, or not as asked."""

PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Status codes for which another server, or the same one later, may succeed."""


class Connection:
    """One connection to a server, with its calls: gRPC takes as long to make one of these as to write a message."""

    __slots__ = ("channel", "get", "put", "unary")

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.unary: dict[Call, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {
            call: channel.unary_unary(call.path) for call in Call
        }
        self.get: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(Call.GET.path)
        self.put: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(Call.PUT.path)


Metadata = tuple[tuple[str, str], ...]


class Server:
    """Calls to one server. Thread-safe."""

    def __init__(
        self, name: str, credentials: ClientCredentials, options: RemoteOptions, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self._credentials = credentials
        self._options = options
        self._timeout_s = options.timeout_s
        self._clock = clock
        self._shown: grpc.ChannelCredentials | None = None
        """Credentials of the connections."""
        self._connections: Sequence[Connection] = ()
        self._replaced: list[tuple[float, Sequence[Connection]]] = []
        """Connections with credentials that have changed, and when the last call over them is over."""
        self._guard = Lock()
        self._turn = itertools.count()
        self._manifests_sent: dict[bytes, Manifest] = {}
        self.breaker = CircuitBreaker(1, REST, clock, name)
        self.agreed: pb.HelloReply | None = None
        """Latest description that the server gave of itself."""

    @classmethod
    def connect(cls, name: str, options: RemoteOptions, clock: Callable[[], float] = time.monotonic) -> "Server":
        """Read the credentials; nothing is sent, and no connection made, before the first call.

        Raises:
            ConfigError: a file of the options cannot be read, or makes no sense.
        """
        return cls(name, ClientCredentials(options.files, secure=options.secure), options, clock)

    def next_connection(self) -> tuple[Connection, Metadata]:
        """Return the connection whose turn it is, and the token of its call, both as the files are now."""
        read = self._credentials.latest()
        if not self._connections or read.channel is not self._shown or self._replaced:
            with self._guard:
                self._renew(read.channel)
        token = read.token or self._options.token
        connections = self._connections
        return (
            connections[next(self._turn) % len(connections)],
            (("authorization", f"Bearer {token}"),) if token else (),
        )

    def _connected(self, credentials: grpc.ChannelCredentials | None) -> Sequence[Connection]:
        options = self._options
        arguments: list[tuple[str, int | str]] = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS_MIN),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
            ("grpc.max_receive_message_length", PARTS_AHEAD_BYTES),
            # A proxy that the environment names for HTTP would see pages, and most take no calls of gRPC.
            ("grpc.enable_http_proxy", 0),
            # Who reads a stream waits for it in gRPC: else a thread is started for each get, to wake who waits.
            (ChannelOptions.SingleThreadedUnaryStream, 1),
        ]
        if options.server_name:
            arguments.append(("grpc.ssl_target_name_override", options.server_name))
        return [
            Connection(
                grpc.insecure_channel(self.name, arguments)
                if credentials is None
                else grpc.secure_channel(self.name, credentials, arguments)
            )
            for _ in range(options.channels)
        ]

    def knows(self, identities: Set[bytes]) -> bool:
        """Return whether the server said what it is, and Hello was sent to it for these identities."""
        return self.agreed is not None and identities <= self._manifests_sent.keys()

    def greet(self, manifests: Mapping[bytes, Manifest], timeout_s: Callable[[], float] | None = None) -> None:
        """Send Hello for the identities that the server does not know from here, or once for none."""
        fresh: list[Manifest | None] = [
            manifest for identity, manifest in manifests.items() if identity not in self._manifests_sent
        ]
        for manifest in fresh or [None] * (self.agreed is None):
            request = pb.HelloRequest(manifest=manifest)
            left_s = self._timeout_s if timeout_s is None else timeout_s()
            reply = parsed(pb.HelloReply, self.ask(Call.HELLO, request.SerializeToString(), left_s)())
            if not (reply.pages_max and reply.part_bytes):
                raise InputError("a server takes some pages in a request and some bytes in a message, found neither")
            self.agreed = reply
            if manifest is not None:
                self._manifests_sent[manifest.identity] = manifest

    def forget_greetings(self) -> None:
        """Send Hello again before the next call: the server does not remember."""
        self._manifests_sent.clear()

    def ask(
        self, call: Call, message: bytes, timeout_s: float | None = None, *, is_only: bool = True
    ) -> Callable[[], bytes]:
        """Begin a call of one message each way; return what waits for its answer. Both may raise ``grpc.RpcError``.

        If the call ``is_only``, who waits makes it: else gRPC's thread wakes who waits, which is half of a call's time.
        """
        connection, metadata = self.next_connection()
        begin = connection.unary[call]
        left_s = self._timeout_s if timeout_s is None else timeout_s
        if is_only:
            return lambda: begin(message, left_s, metadata)
        return begin.future(message, left_s, metadata).result

    def answer(
        self, call: Call, request: Message, kind: type[Parsed], manifests: Mapping[bytes, Manifest] | None = None
    ) -> Parsed:
        """Make a call of one message each way, to this server and no other, and wait for its answer.

        With ``manifests`` Hello goes before it where that is due, and once more where the server wants it first, having
        done nothing. Raises StorageError.
        """
        message = request.SerializeToString()
        try:
            if manifests is None:
                return parsed(kind, self.ask(call, message)())
            self.greet(manifests)
            try:
                return parsed(kind, self.ask(call, message)())
            except grpc.RpcError as error:
                if not wants_hello(error):
                    raise
            self.forget_greetings()
            self.greet(manifests)
            return parsed(kind, self.ask(call, message)())
        except (grpc.RpcError, InputError) as error:
            raise storage_error(error, call, self) from error

    def get(self, request: bytes, timeout_s: float, *, is_one: bool, is_only: bool) -> Iterator[bytes]:
        """Begin a get; return the messages of its answer, where it ``is_one`` by a call of one message each way.

        That is the same on the wire, and takes a tenth less of the time of a get of a MiB than a stream of one message.
        Waiting for a message may raise ``grpc.RpcError``.
        """
        if is_one:
            answer = self.ask(Call.GET, request, timeout_s, is_only=is_only)
            return (answer() for _ in range(1))
        connection, metadata = self.next_connection()
        return connection.get(request, timeout_s, metadata)

    def put(self, messages: Iterator[bytes] | bytes, timeout_s: float, *, is_only: bool) -> Callable[[], bytes]:
        """Begin a put, which sends a stream, or one message; return what waits for its answer.

        A thread of its own makes the messages of a stream. If the call ``is_only``, who waits looks after it: else each
        message wakes one more thread, which is 4 to 8 % of the time of a put of pages of 1 MiB and more. Waiting may
        raise ``grpc.RpcError``, and what making a message raises.
        """
        if isinstance(messages, bytes):
            return self.ask(Call.PUT, messages, timeout_s, is_only=is_only)
        connection, metadata = self.next_connection()
        if is_only:
            return lambda: connection.put(messages, timeout_s, metadata)
        return connection.put.future(messages, timeout_s, metadata).result

    def close(self) -> None:
        """Close the connections; calls under way are cancelled."""
        with self._guard:
            self._replaced.append((0.0, self._connections))
            self._close_replaced(math.inf)

    def _renew(self, credentials: grpc.ChannelCredentials | None) -> None:
        """Connect with these credentials; calls over the connections before go on to their end."""
        now_s = self._clock()
        if not self._connections or credentials is not self._shown:
            # A call that is about to begin over them ends within its timeout, too.
            self._replaced.append((now_s + 2 * self._timeout_s, self._connections))
            self._connections, self._shown = self._connected(credentials), credentials
        self._close_replaced(now_s)

    def _close_replaced(self, now_s: float) -> None:
        for over_s, connections in self._replaced:
            if over_s <= now_s:
                for connection in connections:
                    connection.channel.close()
        self._replaced = [each for each in self._replaced if each[0] > now_s]


@contextmanager
def connected(url: str) -> Iterator[list[Server]]:
    """Open connections to the servers that a URL of a service names, each to be asked by itself."""
    scheme, _, rest = url.partition(":")
    if scheme not in ("grpc", "grpcs"):
        raise ConfigError(
            f"a service is named as grpc://HOST:PORT or grpcs://HOST:PORT, found {without_secrets(url)!r}"
        )
    options = parse_rest(rest, secure=scheme == "grpcs")
    servers = [Server.connect(name, options) for name in options.servers]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def is_passing(error: grpc.RpcError) -> bool:
    """Return whether another server, or the same one later, may answer otherwise."""
    return isinstance(error, grpc.Call) and error.code() in PASSING


def wants_hello(error: grpc.RpcError) -> bool:
    """Return whether the server does not know an identity that it once knew."""
    return isinstance(error, grpc.Call) and (REASON, REASON_HELLO) in tuple(error.trailing_metadata() or ())


def storage_error(error: grpc.RpcError | InputError | OSError, call: Call, server: Server) -> StorageError:
    """Return the store's error for a failed call or a broken answer; release what the call held.

    A call that streams is its own error: with its traceback, it would keep the caller's pages until cycles of
    references are collected.
    """
    error.__traceback__ = None
    if not isinstance(error, grpc.RpcError):
        return StorageError(f"{server.name}: {call.value}: {error}", retryable=True)
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    text = f"{server.name}: {call.value}: {code.name}: {error.details() if isinstance(error, grpc.Call) else error}"
    if code is grpc.StatusCode.UNAVAILABLE and any(sign in text for sign in SIGNS_OF_TLS):
        text += "; a server with TLS is named as grpcs://, with cert_file and key_file where it asks for certificates"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return StorageFullError(text) if call is Call.PUT else StorageError(text, retryable=True)
    return StorageError(text, retryable=code in PASSING or wants_hello(error))
