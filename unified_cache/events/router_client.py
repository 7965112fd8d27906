"""Client of a router's server: scores and engines as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from unified_cache.errors import InputError, StateError
from unified_cache.events.index import EngineScore, Knowledge
from unified_cache.events.router_calls import KNOWLEDGE_NUMBERS, MESSAGE_BYTES_MAX, RouterCall
from unified_cache.extras import needs_extra
from unified_cache.page import DEFAULT_NAMESPACE, Namespace
from unified_cache.proto import router_pb2 as pb

with needs_extra("router", "a router's client"):
    import grpc

__all__ = ["EngineReport", "RouterClient"]

Reply = TypeVar("Reply", bound=Message)

_KNOWLEDGE = {number: knowledge for knowledge, number in KNOWLEDGE_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine that a server follows."""

    engine: str
    knowledge: Knowledge
    pages: int
    """Pages known of it, once for each tier and component."""
    batches: int
    gaps: int
    losses: int
    restarts: int


class RouterClient:
    """Connection to one server; threads may share it."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        """Prepare to ask at ``HOST:PORT`` or ``unix:PATH``; nothing is sent before the first call."""
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)])

    def score(self, tokens: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE) -> list[EngineScore]:
        """Ask how many pages of a prompt each engine could resume.

        Raises:
            InputError: the server refuses the tokens.
            StateError: the server does not answer, or not as a router of this version.
        """
        told = pb.PromptNamespace(
            extra_key=namespace.extra_key,
            cache_salt=namespace.cache_salt,
            lora_id=namespace.lora_id,
            tenant=namespace.tenant,
            bigrams=namespace.bigrams,
        )
        try:
            request = pb.ScoreRequest(tokens=tokens, namespace=told)
        except ValueError as error:
            raise InputError(f"token ids are in [0, 2^31): {error}") from error
        reply = self._ask(RouterCall.SCORE, request, pb.ScoreReply)
        return [
            EngineScore(
                each.engine,
                self._knowledge(each.knowledge),
                each.page_size,
                each.device_pages,
                each.host_pages,
                each.storage_pages,
            )
            for each in reply.engines
        ]

    def engines(self) -> list[EngineReport]:
        """Ask which engines are followed.

        Raises:
            StateError: the server does not answer, or not as a router of this version.
        """
        reply = self._ask(RouterCall.ENGINES, pb.EnginesRequest(), pb.EnginesReply)
        return [
            EngineReport(
                each.engine,
                self._knowledge(each.knowledge),
                each.pages,
                each.batches,
                each.gaps,
                each.losses,
                each.restarts,
            )
            for each in reply.engines
        ]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _knowledge(self, number: "pb.Knowledge") -> Knowledge:
        if number not in _KNOWLEDGE:
            raise StateError(f"{self._address} must say how much it knows by one of {[*_KNOWLEDGE]}, found {number}")
        return _KNOWLEDGE[number]

    def _ask(self, call: RouterCall, request: Message, kind: type[Reply]) -> Reply:
        try:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(call.path)
            return kind.FromString(ask(request.SerializeToString(), timeout=self._timeout_s))
        except DecodeError as error:
            raise StateError(f"{self._address} must answer with a {kind.DESCRIPTOR.name}, found none") from error
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InputError(str(error.details())) from error
            said = error.details() if isinstance(error, grpc.Call) else str(error)
            raise StateError(f"{self._address} does not answer: {said}") from error
