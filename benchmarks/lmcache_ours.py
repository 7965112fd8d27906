"""A store of ours as an engine's adapter uses it, for ``benchmarks.lmcache``: ``KIND ROOT PAGE_BYTES PAGES``."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc.experimental import ChannelOptions

from benchmarks.bare_grpc import BARE_GET, BARE_PUT, BareServicer
from benchmarks.lmcache_child import (
    BATCH_PAGES,
    WAIT_S,
    Found,
    PageStore,
    digest_of,
    free_port,
    serve,
    serve_beside,
)
from unified_cache import Full, Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.storage_backends.remote.store import ONE_MESSAGE_PARTS


class OurStore:
    """A store of ours as an engine's adapter uses it: sealed, verified, each call with a deadline."""

    def __init__(self, url: str, page_bytes: int, server: subprocess.Popen[str] | None = None) -> None:
        self.server = server
        layout = ModelLayout(16, (Full((PoolSpec("kv", page_bytes),)),))
        identity = Identity("bench", dtype="bf16")
        self._store = EngineStore.open(url)
        self._store.register(identity, layout)
        self._digest = identity.digest(layout)
        self.sources = [memoryview(bytearray(page_bytes)) for _ in range(BATCH_PAGES)]
        self._rows = [memoryview(bytearray(page_bytes)) for _ in range(BATCH_PAGES)]
        end_s = time.monotonic() + WAIT_S
        while not self._store.is_up:
            assert time.monotonic() < end_s
            time.sleep(0.01)

    def put(self, pages: Sequence[int]) -> None:
        assert all(self._store.put(self._engine_pages(pages, self.sources))), self._store.counts()

    def get(self, pages: Sequence[int]) -> Found:
        answers = self._store.get(self._engine_pages(pages, self._rows))
        return [row if answer else None for row, answer in zip(self._rows, answers, strict=True)]

    def exists(self, pages: Sequence[int]) -> int:
        return sum(map(bool, self._store.exists([self._labelled(page) for page in pages])))

    def _engine_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> list[EnginePage]:
        return [EnginePage(self._labelled(page), (row,)) for page, row in zip(pages, rows, strict=True)]

    def _labelled(self, page: int) -> Label:
        return Label(self._digest, digest_of(page), "kv")


class BareCalls:
    """gRPC alone with messages as long as those of ``grpc://``, made beforehand; what comes back is copied once."""

    def __init__(self, page_bytes: int, server: subprocess.Popen[str], port: int) -> None:
        self.server: subprocess.Popen[str] | None = server
        self.sources = [memoryview(bytearray(page_bytes)) for _ in range(BATCH_PAGES)]
        self._rows = [memoryview(bytearray(page_bytes)) for _ in range(BATCH_PAGES)]
        channel = grpc.insecure_channel(
            f"127.0.0.1:{port}",
            [("grpc.max_receive_message_length", 8 << 20), (ChannelOptions.SingleThreadedUnaryStream, 1)],
        )
        self._ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(BARE_PUT)
        self._put: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(BARE_PUT)
        self._get: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(BARE_GET)
        self._total_bytes = BATCH_PAGES * (HEADER_BYTES + page_bytes)
        parts = BareServicer().messages(self._total_bytes)
        self._sent = [b"".join(parts)] if len(parts) <= ONE_MESSAGE_PARTS else parts
        self._landing = memoryview(bytearray(self._total_bytes))

    def put(self, pages: Sequence[int]) -> None:
        self._ask(self._sent[0]) if len(self._sent) == 1 else self._put(iter(self._sent))

    def get(self, pages: Sequence[int]) -> Found:
        start = 0
        for message in self._get(b"%d" % self._total_bytes):
            self._landing[start : start + len(message)] = message
            start += len(message)
        return self._rows[: len(pages)]

    def exists(self, pages: Sequence[int]) -> int:
        self._ask(bytes(64 + 34 * len(pages)))
        return len(pages)


def opened(kind: str, root: str, page_bytes: int) -> PageStore:
    """Open a store in this process, or beside a server in a process of its own."""
    port = free_port()
    if kind == "bare":
        command = [sys.executable, "-m", "benchmarks.bare_grpc", str(port)]
        return BareCalls(page_bytes, serve_beside(command, port), port)
    if kind != "grpc":
        return OurStore(f"{kind}:{root}", page_bytes)
    settings = Path(root) / "service.toml"
    settings.write_text('[metrics]\nlisten = "none"\n')
    serve_ours = "import sys; from unified_cache.cli.main import main; main()"
    flags = ["--config", str(settings), "--listen", f"127.0.0.1:{port}", "--storage", f"file:{root}/pages"]
    server = serve_beside([sys.executable, "-c", serve_ours, "serve", *flags], port)
    return OurStore(f"grpc://127.0.0.1:{port}", page_bytes, server)


if __name__ == "__main__":
    kind, root, page_bytes, pages = sys.argv[1:]
    serve(opened(kind, root, int(page_bytes)), Path(root), int(page_bytes), int(pages))
