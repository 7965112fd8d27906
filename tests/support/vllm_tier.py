"""Parts of vLLM's adapter for tests without vLLM: facts of an engine, its host memory, and its tier over any store."""

import hashlib
from mmap import PAGESIZE, mmap

from unified_cache.core.config import GuardConfig
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore, EngineStoreConfig
from unified_cache.integrations.vllm.chunks import ChunkNames, ChunkTier
from unified_cache.integrations.vllm.facts import GroupFacts, RowShape, VllmFacts
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Store

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

    def __init__(self, rows_count: int) -> None:
        self._mapping = mmap(-1, rows_count * ROW.stride_bytes)
        self.view = memoryview(self._mapping).cast("b", (rows_count, ROW.stride_bytes))

    def fill(self, row: int, chunk: int) -> None:
        """Let a row hold a chunk."""
        start = row * ROW.stride_bytes
        self._mapping[start : start + ROW.payload_bytes] = self.payload(chunk)

    def payload(self, chunk: int) -> bytes:
        """Return the bytes of a chunk."""
        return hashlib.shake_128(b"payload %d" % chunk).digest(ROW.payload_bytes)

    def row(self, row: int) -> bytes:
        """Return what a row holds."""
        start = row * ROW.stride_bytes
        return self._mapping[start : start + ROW.payload_bytes]

    def close(self) -> None:
        """Unmap it as vLLM does; BufferError if a view is left."""
        self.view.release()
        self._mapping.close()


def tier_over(
    store: EngineStore | Store, memory: HostMemory, settings: TierSettings, piece_bytes: int | None = None
) -> ChunkTier:
    """Return the tier of an engine over a store that is open, which knows its identity."""
    if isinstance(store, Store):
        backend, config = store, EngineStoreConfig(GuardConfig(deadline_s=TIMEOUT_S), piece_bytes=piece_bytes)
        store = EngineStore.opened_by(lambda: backend, config)
    names = ChunkNames.of(FACTS, ROW)
    store.register(names.identity, names.layout)
    return ChunkTier(store, names, memory.view, ROW, settings)
