"""A device that is host memory, of which torch has streams that are always done; here are the copies of kernels."""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache import memory_pool_host
from sglang.srt.mem_cache.pool_host import common, mamba, mha, mla
from sglang.srt.runtime_context import get_context, get_parallel


def _address(place: "torch.Tensor | int") -> int:
    return place.data_ptr() if isinstance(place, torch.Tensor) else int(place)


def _rows(address: int, rows: torch.Tensor, item_bytes: int, stride_bytes: int) -> npt.NDArray[np.uint8]:
    """View all rows up to the last one named, writable."""
    count = int(rows.max()) + 1
    memory = (ctypes.c_ubyte * ((count - 1) * stride_bytes + item_bytes)).from_address(address)
    return np.lib.stride_tricks.as_strided(np.ctypeslib.as_array(memory), (count, item_bytes), (stride_bytes, 1))


def _copy(source: int, target: int, sources: torch.Tensor, targets: torch.Tensor, sizes: tuple[int, int, int]) -> None:
    """Copy rows from one place to another; ``sizes`` are bytes of a row, and strides at both ends."""
    item_bytes, source_stride, target_stride = sizes
    if len(sources):
        rows = _rows(source, sources, item_bytes, source_stride)[sources.numpy()]
        _rows(target, targets, item_bytes, target_stride)[targets.numpy()] = rows


def _back_up(
    src_layers: torch.Tensor,
    dst: torch.Tensor | int,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    **options: object,
) -> None:
    for layer, source in enumerate(src_layers.tolist()):
        target = _address(dst) + layer * item_size
        _copy(source, target, src_indices, dst_indices, (item_size, item_size, dst_layout_dim))


def _load(src: torch.Tensor | int, dst: torch.Tensor | int, *, layer_id: int, item_size: int, **options: Any) -> None:
    source = _address(src) + layer_id * item_size
    sizes = (item_size, options["src_layout_dim"], item_size)
    _copy(source, _address(dst), options["src_indices"], options["dst_indices"], sizes)


def _back_up_pair(
    src_k_layers: torch.Tensor, dst_k: torch.Tensor, src_v_layers: torch.Tensor, dst_v: torch.Tensor, **options: Any
) -> None:
    _back_up(src_k_layers, dst_k, **options)
    _back_up(src_v_layers, dst_v, **options)


def _load_pair(
    src_k: torch.Tensor, dst_k: torch.Tensor, src_v: torch.Tensor, dst_v: torch.Tensor, **options: Any
) -> None:
    _load(src_k, dst_k, **options)
    _load(src_v, dst_v, **options)


def _back_up_states(src_ptrs: torch.Tensor, **options: Any) -> None:
    _back_up(src_ptrs, **options)


def _copy_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    **options: object,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


COPIES: dict[str, Callable[..., None]] = {
    "transfer_kv_all_layer_lf_pf": _back_up_pair,
    "transfer_kv_per_layer_pf_lf": _load_pair,
    "transfer_kv_all_layer_mla_lf_pf": _back_up,
    "transfer_kv_per_layer_mla_pf_lf": _load,
    "transfer_kv_mamba_lf_pf": _back_up_states,
    "transfer_kv_mamba_pf_lf": _load,
    "transfer_kv_direct": _copy_direct,
}
"""Kernels by SGLang's names: layer-first device to page-first host and back, and layer by layer."""


def serve_as_device(rank: int = 0, stage: int = 0, **arguments: object) -> None:
    """Publish the arguments of a server, and stand in for the device. Once, after ``absent.provide``."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    get_context().override_server_args(device="cpu", **arguments).install()
    get_parallel().override_permanently(tp_rank=rank, pp_rank=stage, attn_tp_rank=rank, attn_dcp_rank=0)
    common._cuda_host_register = lambda *args, **options: None
    for module in (mha, mla, mamba, memory_pool_host):
        for name, copy in COPIES.items():
            if not hasattr(module, name):
                setattr(module, name, copy)
