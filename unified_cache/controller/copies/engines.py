"""Copies of long rows by a GPU's copy engines, which leave its processors to the forward beside them."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.core.errors import CopyError
from unified_cache.core.pool import Slots

ENGINE_ROW_BYTES_MIN = 64 << 10
"""Bytes of a row from which the copy engines are as fast as a kernel; a row costs them about 1 us on an H100."""

EngineCopy = Callable[[Sequence[torch.Tensor], Slots, Sequence[torch.Tensor], Slots, torch.cuda.Stream], None]
"""Copy rows of some layers on a stream: layers of one side, slots there, those of the other side, and slots there."""


class _Attributes(ctypes.Structure):
    """CUDA's ``CUmemcpyAttributes``: in the order of the stream, no hints, and beside what is computed."""

    _fields_ = (("access", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


IN_STREAM_ORDER = 1
BESIDE_COMPUTE = 1


def engine_copy() -> EngineCopy | None:
    """Return how copy engines are asked, or None where the driver is older than CUDA 13."""
    try:
        submit = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    attributes, first = _Attributes(IN_STREAM_ORDER, (0, 0, 0, 0), BESIDE_COMPUTE), ctypes.c_size_t(0)

    def copy(
        sources: Sequence[torch.Tensor],
        source_slots: Slots,
        targets: Sequence[torch.Tensor],
        target_slots: Slots,
        stream: torch.cuda.Stream,
    ) -> None:
        if not len(source_slots):
            return
        rows = (
            _addresses(targets, target_slots),
            _addresses(sources, source_slots),
            np.repeat(np.array([layer.shape[1] for layer in sources], np.uint64), len(source_slots)),
        )
        error = submit(
            *(ctypes.c_void_p(each.ctypes.data) for each in rows),
            ctypes.c_size_t(len(rows[0])),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if error:
            raise CopyError(f"a copy of {len(rows[0])} rows by the copy engines failed with CUDA error {error}")

    return copy


def _addresses(layers: Sequence[torch.Tensor], slots: Slots) -> npt.NDArray[np.uint64]:
    """Return where the rows of some slots begin, layer after layer, whichever side they are on."""
    starts, strides = (
        np.array(each, np.uint64)[:, None]
        for each in zip(*((layer.data_ptr(), layer.stride(0)) for layer in layers), strict=True)
    )
    return (starts + strides * slots.astype(np.uint64)).reshape(-1)
