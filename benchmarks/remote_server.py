"""The other end of ``benchmarks.remote``, in a process of its own: the service, bare gRPC, and bare TCP."""

import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc

from unified_cache.core.settings.service import QuotaSettings, Role
from unified_cache.core.sizes import PART_BYTES
from unified_cache.service.access.callers import AuditEntry, Caller
from unified_cache.service.access.fairness import FairScheduler
from unified_cache.service.access.gate import CallTimeouts, ServiceGate
from unified_cache.service.access.usage import COUNTED_PAGES_MAX, TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.service.operations.process import keep_freed_memory
from unified_cache.service.servicer import CacheService
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

BARE_GET = "/bare/get"
BARE_PUT = "/bare/put"
TCP_GET = b"g"
TCP_PUT = b"p"
THREADS = 16
STORE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ListeningPorts:
    """Ports of the two servers."""

    service: int
    """The service and bare gRPC."""
    tcp: int


class IdleObserver:
    """An observer that looks away."""

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        return None

    def pages_looked_up(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        return None

    def pages_put(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        return None

    def audited(self, entry: AuditEntry) -> None:
        return None

    def anomaly(self, kind: str, text: str) -> None:
        raise AssertionError(f"{kind}: {text}")


class BareServicer:
    """Bare gRPC and TCP: sends messages made beforehand, and keeps those received until the next ones come."""

    def __init__(self) -> None:
        self._made: dict[int, list[bytes]] = {}
        self._kept: dict[int, list[bytes]] = {}

    def messages(self, total_bytes: int) -> Sequence[bytes]:
        if total_bytes not in self._made:
            count = -(-total_bytes // PART_BYTES)
            self._made = {total_bytes: [bytes([n % 256]) * (total_bytes // count) for n in range(count)]}
        return self._made[total_bytes]

    def get(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from self.messages(int(request))

    def put(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        thread = threading.get_ident()
        self._kept.pop(thread, None)
        kept = self._kept[thread] = list(messages)
        return b"%d" % sum(map(len, kept))

    def methods(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "bare",
            {
                "get": grpc.unary_stream_rpc_method_handler(self.get),
                "put": grpc.stream_unary_rpc_method_handler(self.put),
            },
        )

    def answer(self, connection: socket.socket) -> None:
        """Serve one TCP connection: a letter and a length, then the bytes, there or back."""
        landing = memoryview(bytearray(4 << 20))
        with connection, connection.makefile("rb") as commands:
            while command := commands.readline():
                total_bytes = int(command[1:])
                if command[:1] == TCP_GET:
                    for message in self.messages(total_bytes):
                        connection.sendall(message)
                    continue
                while total_bytes:
                    total_bytes -= commands.readinto1(landing[: min(total_bytes, len(landing))])
                connection.sendall(b"\n")


def _listening(bare: BareServicer) -> tuple[int, grpc.Server]:
    limits = Limits()
    observer, quota = IdleObserver(), QuotaSettings(stored_bytes_max=1 << 60)
    everyone = Caller("bench", Role.ADMIN)
    gate = ServiceGate(lambda _: everyone, FairScheduler(quota, limits), CallTimeouts(limits, time.monotonic), observer)
    usage = TenantUsage(quota, COUNTED_PAGES_MAX, None)
    store = TenantStore(VerifiedStorage(MemoryStorage(STORE_BYTES)), usage, observer)
    service = CacheService(store, gate, limits, lambda: None)
    server = grpc.server(ThreadPoolExecutor(THREADS), options=limits.channel_options())
    server.add_generic_rpc_handlers((service.rpc_methods(), bare.methods()))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, server


def serve(ports: "Connection[ListeningPorts, None]") -> None:
    """Listen, say where, and serve until the process is ended."""
    keep_freed_memory()
    bare = BareServicer()
    service, _server = _listening(bare)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports.send(ListeningPorts(service, listener.getsockname()[1]))
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=bare.answer, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    keep_freed_memory()
    bare = grpc.server(ThreadPoolExecutor(THREADS), options=Limits().channel_options())
    bare.add_generic_rpc_handlers((BareServicer().methods(),))
    bare.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    bare.start()
    bare.wait_for_termination()
