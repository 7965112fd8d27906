"""The calls of the contract, by their paths.

Both ends pass messages as bytes and parse for themselves: parts of pages are too large to be copied by a parser, and a
server that parses can answer what it cannot parse with INVALID_ARGUMENT.
"""

from enum import Enum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from unified_cache.core.errors import InputError
from unified_cache.proto import service_pb2

SERVICE: str = service_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
"""Name of the service, package included."""

REASON = "unified-cache-reason"
"""Trailing metadata that says what a client can do about a refusal."""

REASON_HELLO = "hello"
"""The server does not know the identity: say Hello, then ask again."""

RETRY_AFTER = "retry-after-ms"
"""Trailing metadata: when asking again may be worth it."""


Parsed = TypeVar("Parsed", bound=Message)


class Call(Enum):
    """A call of the contract."""

    HELLO = "Hello"
    EXISTS = "Exists"
    GET = "Get"
    PUT = "Put"
    TOUCH = "Touch"
    REMOVE = "Remove"
    SCAN = "Scan"
    IDENTITIES = "Identities"
    STATS = "Stats"
    CLEAR = "Clear"
    DRAIN = "Drain"

    @property
    def path(self) -> str:
        """Path of the call in HTTP/2."""
        return f"/{SERVICE}/{self.value}"


def parsed(kind: type[Parsed], message: bytes) -> Parsed:
    """Read a message.

    Raises:
        InputError: it is none of that kind.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InputError(f"expected a {kind.DESCRIPTOR.name}, found something else") from error
