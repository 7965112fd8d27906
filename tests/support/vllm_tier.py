"""Parts of vLLM's adapter for tests without vLLM: facts of an engine, its host memory, and stores that wait."""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import PAGESIZE, mmap

from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.integrations.vllm.moving import HostRows
from unified_cache.integrations.vllm.names import GroupFacts, RowShape, VllmFacts
from unified_cache.storage_backends.protocol import Answer, Level

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


@dataclass
class DictChunks(EngineStore):
    """Chunks in a dictionary; calls wait while ``gate`` is closed, and are listed in their order."""

    held: dict[Label, bytes] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    touched: list[Label] = field(default_factory=list)
    away: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @classmethod
    def opened(cls) -> "DictChunks":
        """Return one whose gate is open."""
        chunks = cls()
        chunks.gate.set()
        return chunks

    def get(self, pages: Sequence[EnginePage], parts_max: int = 1) -> list[Answer]:
        """Fill the rows of what is held."""
        self._begin("get", len(pages))
        if self.away:
            return [Answer.UNAVAILABLE] * len(pages)
        answers: list[Answer] = []
        for page in pages:
            found = self.held.get(page.label)
            if found is not None:
                page.rows[0][:] = found
            answers.append(Answer.MISS if found is None else Answer.HIT)
        return answers

    def put(self, pages: Sequence[EnginePage], level: Level = Level.CACHED, parts_max: int = 1) -> list[Answer]:
        """Hold copies of the rows that are not held."""
        self._begin("put", len(pages))
        if self.away:
            return [Answer.UNAVAILABLE] * len(pages)
        for page in pages:
            self.held.setdefault(page.label, bytes(page.rows[0]))
        return [Answer.STORED] * len(pages)

    def touch(self, labels: Sequence[Label]) -> None:
        """Note what is in use."""
        self.touched += labels
        self.begun.release()

    def _begin(self, method: str, count: int) -> None:
        self.calls.append((method, count))
        self.begun.release()
        assert self.gate.wait(TIMEOUT_S)
