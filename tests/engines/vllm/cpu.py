"""KV offloading for engines without a GPU: the spec and the copy worker that vLLM lacks there. Imports vLLM.

On such a machine the KV cache lies in host memory already, so a copy is done when it returns.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (  # pyright: ignore[reportMissingImports]
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # pyright: ignore[reportMissingImports]

from unified_cache.core.errors import ConfigError

Bytes = npt.NDArray[np.int8]


class _Places(NamedTuple):
    """Places of the blocks of one group in one transfer, each array of shape (blocks,)."""

    blocks: npt.NDArray[np.int64]
    """In the KV cache."""
    chunks: npt.NDArray[np.int64]
    """In host memory: the chunk of each block."""
    places: npt.NDArray[np.int64]
    """And its place within the chunk."""


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM's, untyped where it is not installed
    """Copies blocks between a KV cache in host memory and vLLM's host tier; each is over when its call returns.

    Owns its mapping of the host tier, and lets it go at ``shutdown``.
    """

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._groups: Sequence[Sequence[CanonicalKVCacheRef]] = caches.group_data_refs
        self._caches: list[Bytes] = []
        """By tensor, shape (blocks, bytes of a block)."""
        self._hosts: list[Bytes] = []
        """By tensor, shape (chunks, blocks of a chunk, bytes of a block)."""
        for cache in caches.tensors:
            self._caches.append(_rows(cache.tensor, cache.page_size_bytes))
            host = region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk).numpy()
            self._hosts.append(_blocks_of(host, blocks_per_chunk, cache.page_size_bytes))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks of the KV cache into chunks."""
        return self._copy(job_id, False, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy chunks into blocks of the KV cache."""
        return self._copy(job_id, True, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return: every copy is over."""

    def shutdown(self) -> None:
        """Release the KV cache and the host tier."""
        self._caches.clear()
        self._hosts.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, is_load: bool, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> bool:
        started_s = time.perf_counter()
        copied_bytes = 0
        for group, places in enumerate(_places(device, host, self._blocks_per_chunk)):
            for ref in self._groups[group] if len(places.blocks) else ():
                cache, chunks = self._caches[ref.tensor_idx], self._hosts[ref.tensor_idx]
                end = ref.page_size_bytes
                if is_load:
                    cache[places.blocks, :end] = chunks[places.chunks, places.places, :end]
                else:
                    chunks[places.chunks, places.places, :end] = cache[places.blocks, :end]
                copied_bytes += len(places.blocks) * end
        # A time of zero would be divided by.
        seconds = max(time.perf_counter() - started_s, 1e-9)
        self._finished.append(TransferResult(job_id, True, copied_bytes, seconds))
        return True


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM's, untyped where it is not installed
    """vLLM's tiering spec with a worker for a KV cache in host memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the copy worker of this rank.

        Raises:
            ConfigError: a layout of host memory that only vLLM's own worker has.
        """
        if self.config.canonical_layout:
            raise ConfigError("canonical_layout must be off on a machine without a GPU, found it on")
        worker = self._worker
        if worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = self._worker = CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return worker


def _rows(tensor: torch.Tensor, block_bytes: int) -> Bytes:
    """Return a tensor's bytes as (blocks, bytes of a block) without a copy; vLLM hands it over in this shape."""
    rows: Bytes = tensor.numpy()
    if rows.shape[1] < block_bytes:
        raise ConfigError(f"a block of the KV cache must have {block_bytes} bytes, found {rows.shape[1]}")
    return rows


def _blocks_of(host: Bytes, blocks_per_chunk: int, block_bytes: int) -> Bytes:
    """Cut rows of chunks (chunks, bytes) into (chunks, blocks, bytes) without a copy: rows are a stride apart."""
    shape = (host.shape[0], blocks_per_chunk, block_bytes)
    return np.lib.stride_tricks.as_strided(host, shape, (host.strides[0], block_bytes, 1))


def _places(device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, blocks_per_chunk: int) -> list[_Places]:
    """Pair the blocks of a transfer with their chunks, group by group; a first chunk may be entered in its middle."""
    pairs: list[_Places] = []
    block_start = chunk_start = 0
    for count, first in zip(device.group_sizes, device.block_indices, strict=True):
        numbers = np.arange(count, dtype=np.int64) + (first % blocks_per_chunk if count else 0)
        chunks = numbers // blocks_per_chunk
        chunk_end = chunk_start + (int(chunks[-1]) + 1 if count else 0)
        own = np.asarray(host.block_ids[chunk_start:chunk_end], np.int64)
        blocks = np.asarray(device.block_ids[block_start : block_start + count], np.int64)
        pairs.append(_Places(blocks, own[chunks], numbers % blocks_per_chunk))
        block_start, chunk_start = block_start + count, chunk_end
    return pairs
