"""A server of this process on a port of its own, which believes what a header says of the caller."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

import grpc
import pytest
from google.protobuf.message import Message

from tests.support.waiting import wait_until
from unified_cache.core.settings.service import QuotaSettings, Role
from unified_cache.proto.wire import Call
from unified_cache.service.access.callers import AuditEntry, Caller, Refused
from unified_cache.service.access.fairness import AdmissionSlot, FairScheduler
from unified_cache.service.access.gate import CallTimeouts, ServiceGate
from unified_cache.service.access.usage import COUNTED_PAGES_MAX, TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.service.servicer import CacheService
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.protocol import Answer, Store
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

THREADS = 24
NOBODY = Caller("default", Role.ADMIN)


class HeaderTenants:
    """Believe ``authorization: Bearer TENANT:ROLE``; without it, everybody is an administrator of ``default``."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether the server answers nobody."""

    def caller(self, context: grpc.ServicerContext) -> Caller:
        if self.is_closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "closed for a while")
        said = dict(context.invocation_metadata()).get("authorization")
        if not isinstance(said, str):
            return NOBODY
        tenant, _, role = said.removeprefix("Bearer ").partition(":")
        return Caller(tenant, Role(role))


class NotedScheduler(FairScheduler):
    """Let every call run at once, and keep what calls said to hold."""

    def __init__(self) -> None:
        limits = Limits(calls_max=2 * THREADS, tenant_running_max=THREADS, shared_running_max=THREADS)
        super().__init__(QuotaSettings(calls_max=THREADS), limits)
        self.held: list[int] = []
        """Bytes that calls said to hold, one by one."""

    @property
    def in_flight_count(self) -> int:
        """Calls that were admitted and have not ended."""
        counts = self.by_tenant().values()
        return sum(each.half_open_count + each.waiting_count + each.running_count for each in counts)

    def hold(self, slot: AdmissionSlot, count_bytes: int) -> bool:
        self.held.append(count_bytes)
        return super().hold(slot, count_bytes)


@dataclass
class Notes:
    """An observer that keeps codes and anomalies."""

    codes: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, tenant, code."""
    anomalies: list[tuple[str, str]] = field(default_factory=list)
    audits: list[AuditEntry] = field(default_factory=list)
    puts_count: Counter[Answer] = field(default_factory=Counter)
    """Pages that were put, by answer."""
    reads_count: Counter[tuple[str, Answer]] = field(default_factory=Counter)
    """Pages that were asked for, by tenant and answer."""

    @property
    def kinds(self) -> list[str]:
        """Kinds of the anomalies."""
        return [kind for kind, _ in self.anomalies]

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        self.codes.append((method, tenant, code))

    def pages_looked_up(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        assert count > 0
        self.reads_count[tenant, answer] += count

    def pages_put(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        self.puts_count[answer] += count

    def audited(self, entry: AuditEntry) -> None:
        self.audits.append(entry)

    def anomaly(self, kind: str, text: str) -> None:
        self.anomalies.append((kind, text))


@dataclass
class LoopbackServer:
    """A server that answers on loopback."""

    service: CacheService
    server: grpc.Server
    port: int
    usage: TenantUsage
    callers: HeaderTenants
    scheduler: NotedScheduler
    timeouts: CallTimeouts
    notes: Notes
    drains: list[None]

    @classmethod
    def start(
        cls,
        store: Store,
        limits: Limits | None = None,
        *,
        stored_bytes_max: int = 1 << 40,
        counted_pages_max: int = COUNTED_PAGES_MAX,
        clock: Callable[[], float] = time.monotonic,
        port: int = 0,
    ) -> "LoopbackServer":
        limits = limits or Limits()
        callers, scheduler, timeouts, notes = HeaderTenants(), NotedScheduler(), CallTimeouts(limits, clock), Notes()
        quota = QuotaSettings(stored_bytes_max=stored_bytes_max)
        capability = store.capability()
        usage = TenantUsage(quota, counted_pages_max, capability.bytes_max, capability.taken_bytes)
        shared = TenantStore(VerifiedStorage(store), usage, notes)
        shared.count_stored(Event())
        gate = ServiceGate(callers.caller, scheduler, timeouts, notes)
        drains: list[None] = []
        service = CacheService(shared, gate, limits, lambda: drains.append(None))
        server = grpc.server(ThreadPoolExecutor(THREADS), options=limits.channel_options())
        server.add_generic_rpc_handlers((service.rpc_methods(),))
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return cls(service, server, bound, usage, callers, scheduler, timeouts, notes, drains)

    @property
    def address(self) -> str:
        """Address that it listens at."""
        return f"127.0.0.1:{self.port}"

    def client(self, token: str = "", timeout_s: float = 10.0) -> RemoteStorage:
        return RemoteStorage.open(RemoteOptions((self.address,), token=token, timeout_s=timeout_s))

    def stop(self) -> None:
        self.server.stop(None).wait()
        self.timeouts.close()
        self.service.close()


class Wire:
    """A client of a server in this process that sends what it is told to, right or wrong."""

    def __init__(self, running: LoopbackServer, token: str = "") -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.running = running
        self._channel = grpc.insecure_channel(running.address, options)
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
    assert wait_until(condition, timeout_s), "it did not come to hold in time"
