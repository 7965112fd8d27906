"""The calls of a router's questions, by their paths, for both ends."""

from enum import Enum

from unified_cache.events.index import Knowledge
from unified_cache.proto import router_pb2 as pb

__all__ = ["KNOWLEDGE_NUMBERS", "MESSAGE_BYTES_MAX", "ROUTER", "RouterCall"]

ROUTER: str = pb.DESCRIPTOR.services_by_name["Router"].full_name
"""Name of the service, package included."""

MESSAGE_BYTES_MAX = 16 << 20
"""Of a request: a prompt of two million tokens."""

KNOWLEDGE_NUMBERS = {
    Knowledge.NONE: pb.KNOWLEDGE_NONE,
    Knowledge.PART: pb.KNOWLEDGE_PART,
    Knowledge.WHOLE: pb.KNOWLEDGE_WHOLE,
}


class RouterCall(Enum):
    """A call of the contract."""

    SCORE = "Score"
    ENGINES = "Engines"

    @property
    def path(self) -> str:
        """Path of the call in HTTP/2."""
        return f"/{ROUTER}/{self.value}"
