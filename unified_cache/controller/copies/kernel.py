"""Copies of rows straight from and into the pinned slab: by a kernel, and long ones by the copy engines."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from unified_cache.controller.copies.gpu import ComputeStreams, Copied, GpuCopies, PoolRows, check_lengths
from unified_cache.core.errors import CopyError
from unified_cache.core.pool import Slots

PROGRAMS_MAX = 8
"""Programs of one launch. On an H100, 8 reach 0.8 to 0.95 of the bus; 64 gain 0.05, and slow a forward down by half."""

SUBMITTED_BYTES_MIN = 8 << 20
"""Bytes of layers that are submitted together, 0.15 ms of the bus, since each submission takes the host some 50 us."""

BLOCK_BYTES = 16384
"""Bytes that a program moves at a time, of one row or of several short ones: 64 for each thread of 8 warps."""

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Types that rows are moved by, by their bytes; aligned at 16, two of 8 go together."""


@triton.jit(do_not_specialize=["pages_count", "layers_count", "row_blocks"])  # type: ignore[untyped-decorator,unused-ignore]
def move_rows(  # type: ignore[no-untyped-def,unused-ignore]  # noqa: PLR0913  # a kernel takes numbers one by one
    table,
    slots,
    pages_count,
    layers_count,
    row_blocks,
    to_host: tl.constexpr,
    word: tl.constexpr,
    align_bytes: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
):
    """Move rows of layers between slots of the device and of the host, a block of rows or of a row at a time.

    By layer in ``table``: address and stride on the device, address and stride on the host, words of a row, and one
    number more, so that every entry is aligned. In ``slots``: all pages' on the device, then those on the host.
    ``row_blocks`` is how many blocks the longest row takes.
    """
    layer_blocks = (pages_count + block_rows - 1) // block_rows * row_blocks
    block = tl.program_id(0)
    while block < layers_count * layer_blocks:
        entry = table + (block // layer_blocks) * 6
        page = block % layer_blocks // row_blocks * block_rows + tl.arange(0, block_rows)
        is_page = page < pages_count
        device = tl.load(entry) + tl.load(slots + page, mask=is_page, other=0) * tl.load(entry + 1)
        host = tl.load(entry + 2) + tl.load(slots + page + pages_count, mask=is_page, other=0) * tl.load(entry + 3)
        words_count = tl.multiple_of(tl.load(entry + 4), align_bytes * 8 // word.primitive_bitwidth)
        at = block % row_blocks * block_words + tl.arange(0, block_words)
        on_device = tl.multiple_of(device.to(tl.pointer_type(word)), align_bytes)[:, None] + at[None, :]
        on_host = tl.multiple_of(host.to(tl.pointer_type(word)), align_bytes)[:, None] + at[None, :]
        is_word = is_page[:, None] & (at < words_count)[None, :]
        if to_host:
            tl.store(on_host, tl.load(on_device, mask=is_word), mask=is_word)
        else:
            tl.store(on_device, tl.load(on_host, mask=is_word), mask=is_word)
        block += tl.num_programs(0)


@dataclass(frozen=True, slots=True)
class _Table:
    """Layers of a pool as ``move_rows`` takes them."""

    numbers: torch.Tensor
    """int64 on the device, shape (layers, 6)."""
    align_bytes: int
    """Power of two that divides every address, stride and row, at most 16."""
    row_words: int
    """Words of the longest row."""

    @classmethod
    def between(cls, device: torch.device, layers: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> "_Table":
        """Pair layers on the device with their parts of the slab, or with themselves."""
        numbers = [
            [layer.data_ptr(), layer.stride(0), other.data_ptr(), other.stride(0), layer.shape[1], 0]
            for layer, other in zip(layers, others, strict=True)
        ]
        align_bytes = gcd(16, reduce(gcd, (number for layer in numbers for number in layer)))
        for layer in numbers:
            layer[4] //= min(align_bytes, 8)
        row_words = max(layer[4] for layer in numbers)
        return cls(torch.tensor(numbers, dtype=torch.int64, device=device), align_bytes, row_words)

    def move(self, layers: slice, slots: torch.Tensor, *, to_host: bool) -> None:
        """Launch the kernel over some layers on the current stream; ``slots`` are the device's and the host's."""
        numbers, pages_count = self.numbers[layers], slots.shape[1]
        word_bytes = min(self.align_bytes, 8)
        block_words = min(BLOCK_BYTES // word_bytes, triton.next_power_of_2(self.row_words))
        block_rows = BLOCK_BYTES // word_bytes // block_words
        row_blocks = triton.cdiv(self.row_words, block_words)
        blocks_count = len(numbers) * triton.cdiv(pages_count, block_rows) * row_blocks
        move_rows[(max(min(blocks_count, PROGRAMS_MAX), 1),)](  # pyright: ignore[reportIndexIssue]
            numbers,
            slots,
            pages_count,
            len(numbers),
            row_blocks,
            to_host=to_host,
            word=WORDS[word_bytes],
            align_bytes=self.align_bytes,
            block_rows=block_rows,
            block_words=block_words,
            num_warps=8,
        )


# ---- the copy engines, which leave the GPU's processors to the forward beside them ---------------------------------

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


# ---- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Submitted:
    """Layers of a load that were submitted together."""

    after_first: range
    """The layers that need no submission of their own."""
    copied: Copied
    slots: tuple[Slots, Slots]
    """Kept, since they are known by their identity."""


class KernelCopies(GpuCopies):
    """Copies that the processor moves nothing of: long rows by the copy engines, others by a kernel.

    Layers of few bytes are submitted several at a time.
    """

    __slots__ = ("_across", "_ahead", "_engine_copy", "_within")

    reaches_host = True

    def __init__(self, device: torch.device, pools: Sequence[PoolRows], after: ComputeStreams) -> None:
        """Put tables of all pools on the device, and compile the kernel."""
        super().__init__(device, pools, after)
        self._engine_copy = engine_copy()
        self._ahead: dict[tuple[int, ...], _Submitted] = {}
        """By pool and slots of the loads under way: the layers submitted last."""
        self._across = {rows: _Table.between(device, rows.device, rows.host) for rows in pools}
        self._within = {rows: _Table.between(device, rows.device, rows.device) for rows in pools}
        with torch.cuda.stream(self._stream):
            for table in (*self._across.values(), *self._within.values()):
                for to_host in (False, True):
                    table.move(slice(1), table.numbers[:, :0], to_host=to_host)

    @contextmanager
    def _beside(self, before: Sequence[torch.cuda.Event]) -> Iterator[None]:
        with super()._beside(before):
            try:
                yield
            finally:
                self._ahead.clear()

    def load(self, rows: PoolRows, layer: int, sources: Slots, targets: Slots) -> Copied:
        """Copy rows of one layer host to device, and of layers after it where they are short; return their end."""
        check_lengths(sources, targets)
        at = id(rows), id(sources), id(targets)
        found = self._ahead.get(at)
        if found is None or layer not in found.after_first:
            layers = slice(layer, layer + _layers_together(rows, len(sources)))
            self._move(rows, layers, targets, sources, to_host=False)
            found = self._ahead[at] = _Submitted(range(layers.start + 1, layers.stop), self._end(), (sources, targets))
        return found.copied

    def backup(self, rows: PoolRows, sources: Slots, targets: Slots) -> None:
        """Copy rows of all layers device to host; complete on return."""
        check_lengths(sources, targets)
        self._move(rows, slice(None), sources, targets, to_host=True)
        self._stream.synchronize()

    def _move(self, rows: PoolRows, layers: slice, device_slots: Slots, host_slots: Slots, *, to_host: bool) -> None:
        """Submit rows of some layers, by the copy engines or by the kernel."""
        device, host = rows.device[layers], rows.host[layers]
        if self._engine_copy is None or min(layer.shape[1] for layer in device) < ENGINE_ROW_BYTES_MIN:
            self._across[rows].move(layers, self._slots(device_slots, host_slots), to_host=to_host)
            return
        together = _layers_together(rows, len(device_slots))
        for start in range(0, len(device), together):
            parts = slice(start, start + together)
            there, here = (device[parts], device_slots), (host[parts], host_slots)
            self._engine_copy(*there, *here, self._stream) if to_host else self._engine_copy(
                *here, *there, self._stream
            )

    def _duplicate(self, rows: PoolRows, slots: torch.Tensor) -> None:
        self._within[rows].move(slice(None), slots, to_host=True)


def _layers_together(rows: PoolRows, pages_count: int) -> int:
    """Return how many layers to submit together."""
    layer_bytes = pages_count * max(layer.shape[1] for layer in rows.device)
    return max(SUBMITTED_BYTES_MIN // max(layer_bytes, 1), 1)
