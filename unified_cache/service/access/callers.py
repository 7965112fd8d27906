"""Callers, and the protocols that the request path needs: a gate, a byte quota, an observer.

The tenant comes from the transport, a client certificate or a token, and never from a field of a request.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import grpc

from unified_cache.service.settings import Role
from unified_cache.storage_backends.protocol import Answer

__all__ = ["ByteQuota", "Caller", "Gate", "Observer", "Role"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Tenant and role that a certificate or a token vouches for."""

    tenant: str
    role: Role


class Gate(Protocol):
    """Admission of calls: authentication, role and a place in flight."""

    def admitted(
        self, context: grpc.ServicerContext, needs: Role, *, method: str, request_bytes: int = 0
    ) -> AbstractContextManager[Caller]:
        """Authenticate the caller, check its role, and count the call as in flight during the with block.

        ``request_bytes`` is the memory that the request holds meanwhile.

        Raises:
            Refused: not authenticated, not allowed, over a quota, or draining. Nothing is held.
        """
        ...


class ByteQuota(Protocol):
    """Bytes stored by each tenant, under its cap. Thread-safe."""

    def bytes_max(self, tenant: str) -> int:
        """Return the cap of a tenant."""
        ...

    def reserve(self, tenant: str, count_bytes: int) -> bool:
        """Count bytes that are about to be stored; False, and nothing counted, where the cap would be passed."""
        ...

    def release(self, tenant: str, count_bytes: int) -> None:
        """Count bytes as gone: removed, evicted, or reserved and then not stored."""
        ...


class Observer(Protocol):
    """Receiver of figures and anomalies of every call. Thread-safe, never raises, never waits."""

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count a call that has ended; ``code`` is the name of its status."""
        ...

    def pages_looked_up(self, tenant: str, pool: str, tier: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that a tier was asked for."""
        ...

    def pages_put(self, tenant: str, pool: str, tier: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that a tier was to store."""
        ...

    def anomaly(self, kind: str, text: str) -> None:
        """Count and log what should not happen; ``kind`` is one of few words, ``text`` is for the operator alone."""
        ...
