"""Copies of pages: within host memory, and between it and a GPU.

rows      within host memory
gpu       the order of a GPU's copies, copies through pinned buffers, and host memory that a GPU reaches where it lies
kernel    copies straight from and into a pinned slab, by one launch or by the copy engines; needs Triton
engines   the copy engines, which long rows are given to; needs a driver of CUDA 13
"""

from importlib import import_module
from importlib.util import find_spec

from unified_cache.core.extras import needs_extra

with needs_extra("engine", "unified_cache.controller.memory"):
    from unified_cache.controller.copies.gpu import (
        AT_ONCE,
        ComputeStreams,
        Copied,
        GpuCopies,
        PageDistance,
        PinnedBytes,
        PoolRows,
        StagedCopies,
        page_distance,
    )
    from unified_cache.controller.copies.rows import check_lengths, copy_rows, copy_runs

__all__ = [
    "AT_ONCE",
    "ComputeStreams",
    "Copied",
    "GpuCopies",
    "PageDistance",
    "PinnedBytes",
    "PoolRows",
    "StagedCopies",
    "check_lengths",
    "copy_rows",
    "copy_runs",
    "gpu_copies",
    "page_distance",
]


def gpu_copies() -> type[GpuCopies]:
    """Return how pages are copied from and to a GPU: by a kernel where there is Triton, as torch for CUDA brings it."""
    if find_spec("triton") is None:
        return StagedCopies
    copies: type[GpuCopies] = import_module("unified_cache.controller.copies.kernel").KernelCopies
    return copies
