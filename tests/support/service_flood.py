"""A tenant that asks a server as often as it can, in a process of its own: ``python -m tests.support.service_flood``.

It takes address, token and number of threads, says ``ready`` once its first answers came, floods until its standard
input ends, and then prints how many of its calls were answered and how many refused.
"""

import hashlib
import sys
from collections import Counter
from threading import Event, Thread

import grpc

from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.storage_backends.manifest import manifest_of

ASK_S = 30.0
KEYS_COUNT = 512
LAYOUT = ModelLayout(16, (Full((PoolSpec("kv", 4_096),)),))


class Asker:
    """Ask which of some pages there are, over a connection of its own."""

    def __init__(self, address: str, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._exists: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(Call.EXISTS.path)
        manifest = manifest_of(Identity("toy"), LAYOUT)
        keys = [hashlib.sha256(bytes((number & 255, number >> 8))).digest() for number in range(KEYS_COUNT)]
        run = pb.PageRun(identity=manifest.identity, pool="kv", keys=keys)
        self._request = pb.ExistsRequest(runs=[run]).SerializeToString()
        hello: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(Call.HELLO.path)
        hello(pb.HelloRequest(manifest=manifest).SerializeToString(), timeout=ASK_S, metadata=self._metadata)

    def ask(self) -> None:
        """Ask once.

        Raises:
            grpc.RpcError: it was refused.
        """
        self._exists(self._request, timeout=ASK_S, metadata=self._metadata)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def flood(address: str, token: str, threads_count: int) -> None:
    """Ask from many threads until standard input ends; print what came of it."""
    counts: Counter[str] = Counter()
    stopped = Event()

    def run() -> None:
        asker = Asker(address, token)
        while not stopped.is_set():
            try:
                asker.ask()
                counts["answered"] += 1
            except grpc.RpcError:
                counts["refused"] += 1
        asker.close()

    threads = [Thread(target=run) for _ in range(threads_count)]
    for thread in threads:
        thread.start()
    while not counts.total():
        stopped.wait(0.01)
    print("ready", flush=True)  # noqa: T201  # for the test that began it
    sys.stdin.read()
    stopped.set()
    for thread in threads:
        thread.join()
    print(counts["answered"], counts["refused"], flush=True)  # noqa: T201


if __name__ == "__main__":
    flood(sys.argv[1], sys.argv[2], int(sys.argv[3]))
