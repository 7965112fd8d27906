"""Copies of rows by one launch: a kernel that reads and writes the pinned slab where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from unified_cache.controller.copies.gpu import ComputeStreams, Copied, GpuCopies, PoolRows
from unified_cache.controller.copies.rows import check_lengths
from unified_cache.core.pool import Slots

__all__ = ["KernelCopies"]

PROGRAMS_MAX = 64
"""Programs of one launch: enough reads under way for any bus, and most of a GPU left to the forward beside it."""

BLOCK_BITS = tl.constexpr(8 * 4096)
"""Bits of a row that a program moves at a time: 16 for each thread of 8 warps."""

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Types that rows are moved by, by their bytes; aligned at 16, two of 8 go together."""


@triton.jit(do_not_specialize=["pages_count", "layers_count"])  # type: ignore[untyped-decorator,unused-ignore]
def move_rows(  # type: ignore[no-untyped-def,unused-ignore]
    table,
    slots,
    pages_count,
    layers_count,
    to_host: tl.constexpr,
    word: tl.constexpr,
    align_bytes: tl.constexpr,
):
    """Move rows of layers between slots of the device and of the host, a row at a time for each program.

    By layer in ``table``: address and stride on the device, address and stride on the host, words of a row, and one
    number more, so that every entry is aligned. In ``slots``: all pages' on the device, then those on the host.
    """
    block_words: tl.constexpr = BLOCK_BITS // word.primitive_bitwidth
    row = tl.program_id(0)
    while row < pages_count * layers_count:
        entry = table + (row // pages_count) * 6
        page = slots + row % pages_count
        device = tl.load(entry) + tl.load(page) * tl.load(entry + 1)
        host = tl.load(entry + 2) + tl.load(page + pages_count) * tl.load(entry + 3)
        words_count = tl.multiple_of(tl.load(entry + 4), align_bytes * 8 // word.primitive_bitwidth)
        on_device = tl.multiple_of(device.to(tl.pointer_type(word)), align_bytes)
        on_host = tl.multiple_of(host.to(tl.pointer_type(word)), align_bytes)
        start = 0
        while start < words_count:
            at = start + tl.arange(0, block_words)
            if to_host:
                tl.store(on_host + at, tl.load(on_device + at, mask=at < words_count), mask=at < words_count)
            else:
                tl.store(on_device + at, tl.load(on_host + at, mask=at < words_count), mask=at < words_count)
            start += block_words
        row += tl.num_programs(0)


@dataclass(frozen=True, slots=True)
class _Table:
    """Layers of a pool as ``move_rows`` takes them."""

    numbers: torch.Tensor
    """int64 on the device, shape (layers, 6)."""
    align_bytes: int
    """Power of two that divides every address, stride and row, at most 16."""

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
        return cls(torch.tensor(numbers, dtype=torch.int64, device=device), align_bytes)

    def move(self, layers: slice, slots: torch.Tensor, *, to_host: bool) -> None:
        """Launch the kernel over some layers on the current stream; ``slots`` are the device's and the host's."""
        numbers, pages_count = self.numbers[layers], slots.shape[1]
        programs_count = max(min(pages_count * len(numbers), PROGRAMS_MAX), 1)
        move_rows[(programs_count,)](  # pyright: ignore[reportIndexIssue]
            numbers,
            slots,
            pages_count,
            len(numbers),
            to_host=to_host,
            word=WORDS[min(self.align_bytes, 8)],
            align_bytes=self.align_bytes,
            num_warps=8,
        )


class KernelCopies(GpuCopies):
    """Copies by one launch for a layer that is loaded, and for all layers of a backup; the processor moves nothing."""

    __slots__ = ("_across", "_within")

    reaches_host = True

    def __init__(self, device: torch.device, pools: Sequence[PoolRows], after: ComputeStreams) -> None:
        """Put tables of all pools on the device, and compile the kernel."""
        super().__init__(device, pools, after)
        self._across = {rows: _Table.between(device, rows.device, rows.host) for rows in pools}
        self._within = {rows: _Table.between(device, rows.device, rows.device) for rows in pools}
        with torch.cuda.stream(self._stream):
            for table in (*self._across.values(), *self._within.values()):
                for to_host in (False, True):
                    table.move(slice(1), table.numbers[:, :0], to_host=to_host)

    def load(self, rows: PoolRows, layer: int, sources: Slots, targets: Slots) -> Copied:
        """Copy rows of one layer host to device; return their end."""
        check_lengths(sources, targets)
        self._across[rows].move(slice(layer, layer + 1), self._slots(targets, sources), to_host=False)
        return self._end()

    def backup(self, rows: PoolRows, sources: Slots, targets: Slots) -> None:
        """Copy rows of all layers device to host; complete on return."""
        check_lengths(sources, targets)
        self._across[rows].move(slice(None), self._slots(sources, targets), to_host=True)
        self._stream.synchronize()

    def _duplicate(self, rows: PoolRows, slots: torch.Tensor) -> None:
        self._within[rows].move(slice(None), slots, to_host=True)
