"""The one way into every call: authenticate the caller, check its role, count the call, wait for its turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc

from unified_cache.errors import InputError
from unified_cache.service.access.callers import Caller, Observer
from unified_cache.service.access.clients import CertifiedClients
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.fairness import FairScheduler, Ticket
from unified_cache.service.access.timeouts import CallTimeouts, TimedCall
from unified_cache.service.access.tokens import Tokens
from unified_cache.settings.access import Role
from unified_cache.wire.calls import RETRY_AFTER

__all__ = ["RETRY_KEYS", "AdmittedCall", "Authenticator", "ServiceGate"]

RETRY_KEYS = (RETRY_AFTER, "grpc-retry-pushback-ms")
"""Trailing metadata that says when to come back; the second is what gRPC's own retries obey."""

_AUTHORIZATION = "authorization"
_BEARER = "bearer "


class Authenticator:
    """Authentication of a call: by its token if it has one, else by the certificate of its connection.

    A call with a wrong token is refused, whatever its certificate, and one over a revoked certificate, whatever its
    token. With neither ``tokens`` nor ``clients`` every caller
    is ``local``; None refuses all.
    """

    def __init__(self, tokens: Tokens | None, clients: CertifiedClients | None, local: Caller | None) -> None:
        self._tokens = tokens
        self._clients = clients
        self._local = local

    def caller(self, context: grpc.ServicerContext) -> Caller | None:
        """Return the caller that the transport vouches for; None if there is none."""
        token = _token_in(context)
        if token is not None:
            trusted = self._clients is None or self._clients.trusts(context)
            return self._tokens.caller(token) if trusted and self._tokens is not None else None
        return self._local if self._clients is None else self._clients.caller(context)


class ServiceGate:
    """The way into every call, before any message is waited for: authentication, role, and a place in flight.

    Thread-safe.
    """

    def __init__(
        self, callers: Authenticator, scheduler: FairScheduler, timeouts: CallTimeouts, observer: Observer
    ) -> None:
        self.timeouts = timeouts
        self._callers = callers
        self._scheduler = scheduler
        self._observer = observer
        self._closed = False

    def close(self) -> None:
        """Admit no further call; those in flight go on."""
        self._closed = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for all admitted calls to end; tell whether they have."""
        return self._scheduler.wait_idle(timeout_s)

    @contextmanager
    def admitted(self, context: grpc.ServicerContext, needs: Role, *, method: str) -> Iterator["AdmittedCall"]:
        """Authenticate the caller, check its role, and count the call in flight for the length of the with block.

        Raises:
            Refused: not authenticated, not allowed, over a quota, or closed. Nothing is held.
        """
        if self._closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this server is draining; another may do")
        caller = self._callers.caller(context)
        if caller is None:
            self._observer.anomaly("unauthenticated", f"{method} from {context.peer()} without valid credentials")
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "valid credentials are needed")
        self.check_role(caller, needs, method)
        ticket = self._scheduler.enter(caller.tenant)
        if ticket is None:
            self.refuse(caller, method, "the tenant has as many calls in flight as it may")
        try:
            if not context.add_callback(ticket.give_up):
                raise Refused(grpc.StatusCode.CANCELLED, "the client has gone")
            call = AdmittedCall(context, self, caller, ticket, method)
            with self.timeouts.over(call):
                yield call
        finally:
            ticket.leave()

    def check_role(self, caller: Caller, needs: Role, method: str) -> None:
        """Check that a caller may do what ``needs`` may.

        Raises:
            Refused: it may not.
        """
        if not caller.role.includes(needs):
            self._observer.anomaly("permission_denied", f"{method} by a {caller.role.value} of {caller.tenant}")
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"{method} needs the role {needs.value}", (), caller)

    def patience_s(self, context: grpc.ServicerContext) -> float:
        """Return how long a call may wait for its turn."""
        remaining_s = context.time_remaining()
        turn_s_max = self._scheduler.quota.turn_s_max
        return turn_s_max if remaining_s is None else min(turn_s_max, remaining_s)

    def refuse(self, caller: Caller, method: str, reason: str) -> NoReturn:
        """Refuse a call that is over a quota, and say when to come back.

        Raises:
            Refused: always.
        """
        self._observer.anomaly("over_quota", f"{method} by {caller.tenant}: {reason}")
        retry_ms = str(round(self._scheduler.quota.retry_s * 1000))
        hints = [(key, retry_ms) for key in RETRY_KEYS]
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}; try again in {retry_ms} ms", hints, caller)


class AdmittedCall(TimedCall):
    """A call that a gate admitted: whose it is, what it may still take, and what it has moved."""

    def __init__(
        self, context: grpc.ServicerContext, gate: ServiceGate, caller: Caller, ticket: Ticket, method: str
    ) -> None:
        super().__init__(context, gate.timeouts)
        self._gate = gate
        self._ticket = ticket
        self._method = method
        self.caller = caller
        """The caller that the transport vouches for."""
        self.about = ""
        """Object of the call, for the audit log."""
        self.bytes_in = 0
        self.bytes_out = 0

    @property
    def tenant(self) -> str:
        """Tenant of the caller."""
        return self.caller.tenant

    def first(self, messages: Iterator[bytes]) -> bytes:
        """Wait for the call's first message, and then for its turn.

        Raises:
            InputError: the client ended the call without one.
            Refused: the tenant has too much in flight, or the turn did not come in time.
            Refused, grpc.RpcError: none came in time, or the client has gone.
        """
        message = super().first(messages)
        if message is None:
            raise InputError("a call has a message, found none")
        self.bytes_in += len(message)
        self.hold(len(message))
        self._take_turn()
        return message

    def received(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the messages after the first, each of which must come in time.

        Raises:
            Refused, grpc.RpcError: one did not come in time, or the client has gone.
        """
        for message in super().received(messages):
            self.bytes_in += len(message)
            yield message

    def hold(self, count_bytes: int) -> None:
        """Count memory that the call takes until it ends.

        Raises:
            Refused: it is more than the tenant may have in flight.
        """
        if not self._ticket.hold(count_bytes):
            self._gate.refuse(self.caller, self._method, "the tenant has as many bytes in flight as it may")

    def check_role(self, needs: Role) -> None:
        """Check the caller's role once more, where what a call needs follows from its message.

        Raises:
            Refused: it is too low.
        """
        self._gate.check_role(self.caller, needs, self._method)

    def _take_turn(self) -> None:
        if self._ticket.wait(self._gate.patience_s(self._context)):
            return
        if not self._context.is_active():
            raise Refused(grpc.StatusCode.CANCELLED, "the client has gone")
        self._gate.refuse(self.caller, self._method, "the call's turn did not come in time")


def _token_in(context: grpc.ServicerContext) -> str | None:
    """Return the token that the call presents; None if it presents none."""
    presented = [value for key, value in context.invocation_metadata() if key == _AUTHORIZATION]
    if not presented:
        return None
    text = presented[0] if len(presented) == 1 and isinstance(presented[0], str) else ""
    return text[len(_BEARER) :] if text.lower().startswith(_BEARER) else ""
