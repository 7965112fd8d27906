"""A tier that hands out wrong blocks, each verified: what is wrong happens to it after that, as in a connector.

Imports vLLM, in whose process it runs. The file named by ``LYING_FILE`` holds the name of a fault, or nothing.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import OffloadingSpec  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob  # pyright: ignore[reportMissingImports]

from unified_cache.integrations.vllm.facts import row_shape
from unified_cache.integrations.vllm.tier import UnifiedCacheTier

LYING_FILE = "LYING_FILE"
LAYERS = 30
"""Of SmolLM2-135M."""

Rows = npt.NDArray[np.uint8]
"""Blocks in host memory, shape (blocks, bytes)."""


def lie(fault: str, rows: Rows, numbers: list[int], stale: Rows, others: Rows) -> None:
    """Change the blocks that a load has brought. ``stale`` and ``others`` are blocks stored first and last."""
    layers = rows[:, : rows.shape[1] // LAYERS * LAYERS].reshape(len(rows), LAYERS, -1)
    half = layers.shape[2] // 2
    match fault:
        case "stale":
            rows[numbers] = stale
        case "others":
            rows[numbers] = others
        case "swapped":
            layers[numbers] = np.roll(layers[numbers], half, axis=2)
        case "zeros":
            layers[numbers, LAYERS // 2] = 0
        case "short":
            rows[numbers[0]] = 0


class LyingTier(UnifiedCacheTier):
    """Our tier with a fault above its checksums."""

    def __init__(self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, **options)
        stride = self.block_size_bytes
        payload = row_shape(offloading_spec, stride).payload_bytes
        self._rows: Rows = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, stride)[:, :payload]
        self._loading: dict[int, list[int]] = {}
        self._stored: list[Rows] = []
        """The blocks that were stored first and last."""

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._stored[1:] = [self._rows[job_metadata.chunk_ids.tolist()[0]].copy()]
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = job_metadata.chunk_ids.tolist()
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        fault = Path(os.environ[LYING_FILE]).read_text()
        for result in results:
            numbers = self._loading.pop(result.job_id, None)
            if fault and numbers and self._stored:
                lie(fault, self._rows, numbers, self._stored[0], self._stored[-1])
        return results
