"""Callers, and the protocols that the request path needs: a call, a gate, an observer.

The tenant comes from the transport, a client certificate or a token, and never from a field of a request.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Never, Protocol

import grpc

from unified_cache.settings.access import Role
from unified_cache.storage_backends.protocol import Answer

__all__ = [
    "AnsweringContext",
    "AuditEntry",
    "CallContext",
    "CallPlace",
    "Caller",
    "Gate",
    "Observer",
    "Role",
]


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


class CallContext(Protocol):
    """One call as gRPC knows it: what is asked of ``grpc.ServicerContext``."""

    def peer(self) -> str:
        """Say where the caller is, as gRPC does."""
        ...

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the headers of the call."""
        ...

    def auth_context(self) -> Mapping[str, bytes]:
        """Return what the connection proved of the caller."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have ``callback`` called when the call ends, where its transport notices; False where it has ended."""
        ...

    def is_active(self) -> bool:
        """Tell whether the caller still waits."""
        ...

    def time_remaining(self) -> float:
        """Return how long the caller waits, in seconds."""
        ...

    def cancel(self) -> bool:
        """Cut the call off. From any thread."""
        ...


class AnsweringContext(CallContext, Protocol):
    """A call that can be ended with a status."""

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Say what goes with the status."""
        ...

    def abort(self, code: grpc.StatusCode, details: str) -> Never:
        """End the call with a status; raises what only its transport catches."""
        ...


class CallPlace(Protocol):
    """The place of one admitted call, until it ends."""

    @property
    def caller(self) -> Caller:
        """The caller that the transport vouches for."""
        ...

    def check_role(self, needs: Role) -> None:
        """Check the caller's role once more, where what a call needs follows from its message.

        Raises:
            Refused: it is too low.
        """
        ...

    def hold(self, count_bytes: int) -> None:
        """Count memory that the call takes until it ends.

        Raises:
            Refused: it is more than the tenant may have in flight.
        """
        ...

    def take_turn(self) -> None:
        """Wait until the call may run.

        Raises:
            Refused: its turn did not come in time, or the client has gone.
        """
        ...


class Gate(Protocol):
    """CallPlace of calls: authentication, role and a place in flight, before any message is waited for."""

    def admitted(self, context: CallContext, needs: Role, *, method: str) -> AbstractContextManager[CallPlace]:
        """Authenticate the caller, check its role, and count the call as in flight during the with block.

        Raises:
            Refused: not authenticated, not allowed, over a quota, or draining. Nothing is held.
        """
        ...


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
