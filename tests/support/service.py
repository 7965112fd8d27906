"""A server of this process on a port of its own, with a gate that believes what a header says."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from google.protobuf.message import Message

from unified_cache.service.access.callers import AuditEntry, CallContext, Caller
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.usage import TenantUsage
from unified_cache.service.servicer import CacheService
from unified_cache.service.store.tenants import TenantStore
from unified_cache.settings.access import Role
from unified_cache.settings.limits import LimitSettings, QuotaSettings
from unified_cache.storage_backends.protocol import Answer, StorageBackend
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.wire.calls import Call

THREADS = 24
NOBODY = Caller("default", Role.ADMIN)


@dataclass(frozen=True, slots=True)
class TurnAtOnce:
    """The place of a call that need not wait."""

    caller: Caller
    method: str
    held: list[int]
    """Told of what calls hold."""

    def check_role(self, needs: Role) -> None:
        if not self.caller.role.includes(needs):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"{self.method} needs the role {needs.value}")

    def hold(self, count_bytes: int) -> None:
        self.held.append(count_bytes)

    def take_turn(self) -> None:
        return None


class TokenGate:
    """Admit by ``authorization: Bearer TENANT:ROLE``; without it, everybody is an administrator of ``default``."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether the server answers nobody."""
        self.in_flight_count = 0
        self.held: list[int] = []
        """Bytes that calls said to hold, one by one."""
        self._guard = threading.Lock()

    @contextmanager
    def admitted(self, context: CallContext, needs: Role, *, method: str) -> Iterator[TurnAtOnce]:
        if self.is_closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "closed for a while")
        said = dict(context.invocation_metadata()).get("authorization")
        caller = NOBODY
        if isinstance(said, str):
            tenant, _, role = said.removeprefix("Bearer ").partition(":")
            caller = Caller(tenant, Role(role))
        place = TurnAtOnce(caller, method, self.held)
        place.check_role(needs)
        with self._guard:
            self.in_flight_count += 1
        try:
            yield place
        finally:
            with self._guard:
                self.in_flight_count -= 1


@dataclass
class Notes:
    """An observer that keeps codes and anomalies."""

    codes: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, tenant, code."""
    anomalies: list[tuple[str, str]] = field(default_factory=list)
    audits: list[AuditEntry] = field(default_factory=list)
    puts_count: Counter[Answer] = field(default_factory=Counter)
    """Pages that were put, by answer."""

    @property
    def kinds(self) -> list[str]:
        """Kinds of the anomalies."""
        return [kind for kind, _ in self.anomalies]

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        self.codes.append((method, tenant, code))

    def pages_looked_up(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        assert count > 0

    def pages_put(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        self.puts_count[answer] += count

    def audited(self, entry: AuditEntry) -> None:
        self.audits.append(entry)

    def anomaly(self, kind: str, text: str) -> None:
        self.anomalies.append((kind, text))


def limits_with(**settings: object) -> LimitSettings:
    """Return the limits of a server, these among them, as its settings would have them."""
    return LimitSettings.model_validate(settings)


class LoopbackServer:
    """A server that answers on loopback."""

    def __init__(self, service: CacheService, server: grpc.Server, port: int, usage: TenantUsage) -> None:
        self.service = service
        self.server = server
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.usage = usage
        self.gate = TokenGate()
        self.notes = Notes()
        self.drains: list[None] = []

    @classmethod
    def start(
        cls,
        store: StorageBackend,
        limits: LimitSettings | None = None,
        *,
        stored_bytes_max: int = 1 << 40,
        clock: Callable[[], float] | None = None,
        port: int = 0,
    ) -> "LoopbackServer":
        limits = limits or limits_with()
        gate, notes, quota = TokenGate(), Notes(), QuotaSettings(stored_bytes_max=stored_bytes_max)
        drains: list[None] = []
        usage = TenantUsage(quota, limits.counted_pages_max, store.capability().bytes_max)
        shared = TenantStore(VerifiedStorage(store), usage, notes)
        service = CacheService(shared, gate, notes, limits, lambda: drains.append(None), clock or time.monotonic)
        server = grpc.server(ThreadPoolExecutor(THREADS), options=limits.channel_options())
        server.add_generic_rpc_handlers((service.rpc_methods(),))
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        running = cls(service, server, bound, usage)
        running.gate, running.notes, running.drains = gate, notes, drains
        return running

    def client(self, token: str = "", timeout_s: float = 10.0, tenant: str = "") -> RemoteStorage:
        return RemoteStorage.open(RemoteOptions((self.address,), token=token, timeout_s=timeout_s, tenant=tenant))

    def stop(self) -> None:
        self.server.stop(None).wait()
        self.service.close()


class AddressWire:
    """A client of an address that sends what it is told to, right or wrong."""

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = grpc.insecure_channel(
            address, [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        )
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def ask(self, call: Call, message: Message | bytes, timeout_s: float = 10.0) -> bytes:
        begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(call.path)
        return begin(_bytes_of(message), timeout_s, self._metadata)

    def get(self, message: Message | bytes, timeout_s: float = 10.0) -> list[bytes]:
        begin: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(Call.GET.path)
        return list(begin(_bytes_of(message), timeout_s, self._metadata))

    def put(self, messages: Iterable[Message | bytes], timeout_s: float = 10.0) -> bytes:
        begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(Call.PUT.path)
        return begin((_bytes_of(message) for message in messages), timeout_s, self._metadata)

    def begin_put(self, messages: Iterable[Message | bytes], timeout_s: float = 10.0) -> "grpc.Future[bytes]":
        begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(Call.PUT.path)
        return begin.future((_bytes_of(message) for message in messages), timeout_s, self._metadata)

    def close(self) -> None:
        self._channel.close()


class Wire(AddressWire):
    """Such a client of a server in this process."""

    def __init__(self, running: LoopbackServer, token: str = "") -> None:
        super().__init__(running.address, token)
        self.running = running


def _bytes_of(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


@contextmanager
def refused(code: grpc.StatusCode, text: str = "") -> Iterator[None]:
    """Expect a status, and ``text`` in what it says."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    assert isinstance(error, grpc.Call)
    assert error.code() is code, f"{error.code()}: {error.details()}"
    assert text in (error.details() or "")


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Let other threads go on until something holds."""
    ends_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends_s, "it did not come to hold in time"
        pause.wait(0.005)
