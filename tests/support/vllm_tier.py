"""Parts of vLLM's adapter for tests without vLLM: facts of an engine, its host memory, and stores that wait."""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from mmap import PAGESIZE, mmap

from unified_cache.core.config import GuardConfig
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore, EngineStoreConfig
from unified_cache.integrations.vllm.moving import HostRows
from unified_cache.integrations.vllm.names import ChunkNames, GroupFacts, RowShape, VllmFacts
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO

TIMEOUT_S = 20.0
"""Longest wait of a test; reached only by a bug."""

ROW = RowShape(stride_bytes=PAGESIZE, payload_bytes=3000)

FACTS = VllmFacts(
    model="org/model",
    revision="commit 1",
    dtype="bfloat16",
    groups=(GroupFacts(0, 16, SPAN_ALL, "FullAttentionSpec: 2 layers"), GroupFacts(1, 16, 4, "SlidingWindowSpec")),
    others={"quantization": "none", "hash": "sha256"},
)

NAMES = ChunkNames.of(FACTS, ROW)
"""Names of its chunks."""


def offload_key(number: int, group: int = 0) -> bytes:
    """Return the key of a chunk, as vLLM makes them."""
    return hashlib.sha256(b"chunk %d" % number).digest() + group.to_bytes(4, "big")


class HostMemory:
    """vLLM's host memory: rows in a mapping that cannot be closed while anybody has a view of it."""

    def __init__(self, rows_count: int, shape: RowShape = ROW) -> None:
        self._shape = shape
        self._mapping = mmap(-1, rows_count * shape.stride_bytes)
        self.view = memoryview(self._mapping).cast("b", (rows_count, shape.stride_bytes))

    def rows(self) -> HostRows:
        """Return it as the tier sees it."""
        return HostRows(self.view, self._shape.stride_bytes, self._shape.payload_bytes)

    def fill(self, row: int, chunk: int | bytes) -> None:
        """Let a row hold a chunk, named by its number or its key."""
        start = row * self._shape.stride_bytes
        self._mapping[start : start + self._shape.payload_bytes] = self.payload(chunk)

    def payload(self, chunk: int | bytes) -> bytes:
        """Return the bytes of a chunk."""
        return hashlib.shake_128(b"payload %a" % (chunk,)).digest(self._shape.payload_bytes)

    def row(self, row: int) -> bytes:
        """Return what a row holds."""
        start = row * self._shape.stride_bytes
        return self._mapping[start : start + self._shape.payload_bytes]

    def close(self) -> None:
        """Unmap it as vLLM does; BufferError if a view is left."""
        self.view.release()
        self._mapping.close()


class GatedStorage(MemoryStorage):
    """A store that may be late; its calls wait while ``gate`` is closed, and are listed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.touched: list[Label] = []
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)

    def capability(self) -> Capability:
        """Say that it may be late, and that a call of any size is as good."""
        return replace(super().capability(), bounded=False, exists_costs_io=True, call_bytes=1 << 30)

    def opened(self) -> EngineStore:
        """Return an engine's store over it, which knows the identity of ``NAMES``."""
        store = EngineStore.opened_by(lambda: self, EngineStoreConfig(GuardConfig(deadline_s=TIMEOUT_S)))
        store.register(NAMES.identity, NAMES.layout)
        return store

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Wait for the gate, then fill the pages."""
        self._begin("get", len(pages))
        return [Answer.UNAVAILABLE] * len(pages) if self.is_away else super().get(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Wait for the gate, then hold the pages."""
        self._begin("put", len(pages))
        return [Answer.UNAVAILABLE] * len(pages) if self.is_away else super().put(pages, level)

    def touch(self, labels: Sequence[Label]) -> None:
        """List what is in use."""
        self.touched += labels
        self.begun.release()

    def _begin(self, method: str, count: int) -> None:
        self.calls.append((method, count))
        self.begun.release()
        assert self.gate.wait(TIMEOUT_S)
