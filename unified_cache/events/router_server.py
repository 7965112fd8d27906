"""A server that answers routers over gRPC: how much of a prompt each engine could resume.

It has no tenants and knows no page's bytes: it answers whoever reaches it, and so listens on this machine alone unless
told otherwise.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from unified_cache.errors import ConfigError, TokenError
from unified_cache.events.index import PrefixIndex
from unified_cache.events.router_calls import KNOWLEDGE_NUMBERS, MESSAGE_BYTES_MAX, ROUTER, RouterCall
from unified_cache.events.subscriber import EventSubscriber
from unified_cache.extras import needs_extra
from unified_cache.page import Namespace
from unified_cache.proto import router_pb2 as pb

with needs_extra("router", "a router's server"):
    import grpc

__all__ = ["RouterServer", "RouterSettings", "is_local"]

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Address and bounds of a server."""

    listen: str = "127.0.0.1:50061"
    """HOST:PORT or unix:PATH; port 0 draws one."""
    insecure: bool = False
    """True to listen where other machines reach it."""
    threads: int = 8
    """Calls answered at a time."""
    calls_max: int = 256
    """Calls answered or waiting; more are refused."""
    tokens_max: int = 1 << 20
    """Tokens of one prompt."""

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("calls_max", self.calls_max), ("tokens_max", self.tokens_max)):
            if value < 1:
                raise ConfigError(f"{name} must be positive, found {value}")
        if not self.insecure and not is_local(self.listen):
            raise ConfigError(
                f"other machines could ask at {self.listen}, without credentials: say insecure, or listen on 127.0.0.1"
            )


def is_local(listen: str) -> bool:
    """Tell whether only this machine reaches an address."""
    return listen.startswith("unix:") or listen.rpartition(":")[0] in LOCAL_HOSTS


class RouterServer:
    """A server over one subscriber, which stays the caller's. ``open`` makes one, ``close`` ends it."""

    def __init__(self, server: grpc.Server, port: int) -> None:
        self._server = server
        self.port = port
        """Port that it listens at; 0 for a Unix socket."""

    @classmethod
    def open(cls, subscriber: EventSubscriber, settings: RouterSettings) -> "RouterServer":
        """Begin to answer.

        Raises:
            ConfigError: the address is in use, or none.
        """
        answers = RouterAnswers(subscriber, settings.tokens_max)
        server = grpc.server(
            ThreadPoolExecutor(settings.threads, thread_name_prefix="router"),
            handlers=[answers.handler()],
            options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=settings.calls_max,
        )
        try:
            port = server.add_insecure_port(settings.listen)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen at {settings.listen}: {error}") from error
        server.start()
        return cls(server, 0 if settings.listen.startswith("unix:") else port)

    def close(self, grace_s: float = 1.0) -> bool:
        """Take no calls any more and give those under way ``grace_s``; tell whether they ended."""
        return self._server.stop(grace_s).wait(grace_s + 1.0)


class RouterAnswers:
    """The calls of the contract, over one index."""

    def __init__(self, subscriber: EventSubscriber, tokens_max: int) -> None:
        self._subscriber = subscriber
        self._index: PrefixIndex = subscriber.index
        self._tokens_max = tokens_max

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the methods by name, for a server."""
        return grpc.method_handlers_generic_handler(
            ROUTER,
            {
                RouterCall.SCORE.value: grpc.unary_unary_rpc_method_handler(self._score),
                RouterCall.ENGINES.value: grpc.unary_unary_rpc_method_handler(self._engines),
            },
        )

    def _score(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            request = pb.ScoreRequest.FromString(message)
        except DecodeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no ScoreRequest: {error}")
        if len(request.tokens) > self._tokens_max:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"at most {self._tokens_max} tokens, found {len(request.tokens)}"
            )
        try:
            scores = self._index.score(list(request.tokens), _namespace(request.namespace))
        except TokenError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        reply = pb.ScoreReply(
            engines=[
                pb.EngineScore(
                    engine=score.engine,
                    knowledge=KNOWLEDGE_NUMBERS[score.knowledge],
                    page_size=score.page_size,
                    device_pages=score.device_pages,
                    host_pages=score.host_pages,
                    storage_pages=score.storage_pages,
                )
                for score in scores
            ]
        )
        return reply.SerializeToString()

    def _engines(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        counts = self._subscriber.counts()
        reply = pb.EnginesReply()
        for name, knowledge in sorted(self._index.engines().items()):
            found = reply.engines.add(
                engine=name, knowledge=KNOWLEDGE_NUMBERS[knowledge], pages=self._index.pages_count(name)
            )
            if name in counts:
                found.batches, found.gaps = counts[name].batches, counts[name].gaps
                found.losses, found.restarts = counts[name].losses, counts[name].restarts
        return reply.SerializeToString()


def _namespace(told: pb.PromptNamespace) -> Namespace:
    return Namespace(
        told.extra_key if told.HasField("extra_key") else None,
        told.cache_salt if told.HasField("cache_salt") else None,
        told.lora_id if told.HasField("lora_id") else None,
        told.tenant if told.HasField("tenant") else None,
        bigrams=told.bigrams,
    )
