"""gRPC alone, in a process of its own: ``PORT``. Messages are as long as the service's, and made beforehand."""

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from unified_cache.core.sizes import PART_BYTES
from unified_cache.service.limits import Limits
from unified_cache.service.operations.process import keep_freed_memory

BARE_GET = "/bare/get"
BARE_PUT = "/bare/put"
THREADS = 16


class BareServicer:
    """Sends messages made beforehand, and keeps those received until the next ones come."""

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


if __name__ == "__main__":
    keep_freed_memory()
    server = grpc.server(ThreadPoolExecutor(THREADS), options=Limits().channel_options())
    server.add_generic_rpc_handlers((BareServicer().methods(),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()
