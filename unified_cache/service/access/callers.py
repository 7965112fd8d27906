"""Callers, the refusal of a call, and the protocol of what observes calls.

The tenant comes from the transport, a client certificate or a token, and never from a field of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from unified_cache.core.settings.service import Role
from unified_cache.storage_backends.protocol import Answer

NO_CREDENTIALS = "none"
"""Stands for the credential of a caller on a server that asks for none."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Tenant and role that a certificate or a token vouches for."""

    tenant: str
    role: Role
    credential: str = field(default="", compare=False)
    """Public name of what vouches for them, for the audit log: a token's ID, a certificate's serial number."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A line of the audit log: a call or a change of who may call, who asked for it, and the outcome."""

    kind: str
    """Method of a call, or one of few words for a change."""
    caller: Caller | None
    """None where nobody is known to have asked."""
    peer: str
    """Address that asked; empty for a change that was found in a file."""
    outcome: str
    """Name of a status."""
    about: str
    """Object of the call or the change, in words for the operator."""


class Refused(Exception):  # noqa: N818  # a refusal is an answer, not a fault
    """A call that is answered with a status instead of a result; ``message`` is for the client, without internals.

    ``trailing`` is metadata that goes with it, for clients that act on refusals.
    """

    def __init__(self, code: grpc.StatusCode, message: str, trailing: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.trailing = tuple(trailing)


class Observer(Protocol):
    """Receiver of figures and anomalies of every call. Thread-safe, never raises, never waits."""

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count a call that has ended; ``code`` is the name of its status."""
        ...

    def pages_looked_up(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that the store was asked for."""
        ...

    def pages_put(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that the store was to keep."""
        ...

    def audited(self, entry: AuditEntry) -> None:
        """Write down what those who are responsible for the server must be able to look up later."""
        ...

    def anomaly(self, kind: str, text: str) -> None:
        """Count and log what should not happen; ``kind`` is one of few words, ``text`` is for the operator alone."""
        ...
