"""Copies of pages within host memory, and between it and a GPU: their order, pinned buffers, memory that it reaches."""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import prod
from threading import Lock
from types import ModuleType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import CopyError
from unified_cache.core.extras import needs_extra
from unified_cache.core.pool import Pages, Slots, numbers_of

with needs_extra("engine", "unified_cache.controller.memory"):
    import torch

# ---- within host memory: as few calls of numpy as the order of slots allows --------------------------------------

RUN_COPY_BYTES_MIN = 8 * 1024
"""Average bytes per contiguous run from which copying run by run beats one gather and scatter."""

WIDE = torch.complex128
"""Widest element that torch has."""


def check_lengths(source_slots: Slots, target_slots: Slots) -> None:
    """Raise CopyError unless there is a target for each source."""
    if len(source_slots) != len(target_slots):
        raise CopyError(f"{len(source_slots)} source slots for {len(target_slots)} target slots")


def _breaks(slots: Slots) -> Pages:
    """Return a mask of the slots, but the first, that do not follow the one before."""
    follows: Pages = slots[1:] - slots[:-1] != 1
    return follows


def wide(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes in the widest elements they can be taken for: a GPU moves one element a thread and step."""
    is_wide = not any(count % WIDE.itemsize for count in (rows.shape[1], rows.stride(0), rows.storage_offset()))
    return rows.view(WIDE) if is_wide else rows


def copy_rows(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows of bytes run by run, or tiny ones by gather and scatter."""
    check_lengths(source_slots, target_slots)
    if not len(source_slots):
        return
    from_rows: npt.NDArray[np.uint8] = source.numpy()
    to_rows: npt.NDArray[np.uint8] = target.numpy()
    breaks = numbers_of(_breaks(source_slots) | _breaks(target_slots)) + 1
    if from_rows.shape[1] * len(source_slots) < RUN_COPY_BYTES_MIN * (len(breaks) + 1):
        to_rows[target_slots] = from_rows[source_slots]
        return
    starts = np.concatenate(([0], breaks))
    ends = [*breaks.tolist(), len(source_slots)]
    runs = zip(starts.tolist(), ends, source_slots[starts].tolist(), target_slots[starts].tolist(), strict=True)
    for start, end, from_start, to_start in runs:
        to_rows[to_start : to_start + end - start] = from_rows[from_start : from_start + end - start]


# ---- between it and a GPU -----------------------------------------------------------------------------------------

REGISTERED_BYTES_MAX = 64 << 30
"""Bytes of one registration: drivers from R580 on refuse hundreds of GiB in one call."""

PORTABLE = 1
"""Pinned for every CUDA context (cudaHostRegisterPortable)."""


class PinnedBytes:
    """Zeros that take their own size and go back to the system when closed; torch rounds up to a power of two.

    A forked child has none of it: a page copied on write would have moved away from where the GPU knows it.
    """

    __slots__ = ("__weakref__", "_registered", "_runtime", "_unregister", "bytes")

    def __init__(self, memory: npt.NDArray[np.uint8], runtime: ModuleType) -> None:
        """Take memory that nothing of is registered yet."""
        self.bytes = memory
        self._runtime = runtime
        self._registered: list[int] = []
        """Addresses of the parts that are registered."""
        # Also where nobody closes it: memory must not go back to the system while CUDA knows it.
        self._unregister = weakref.finalize(self, _unregister, memory, runtime, self._registered)

    @classmethod
    def allocate(cls, size: int) -> "PinnedBytes":
        """Map ``size`` bytes and register them with CUDA; an OSError if there is not that much."""
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without huge pages takes three times as long to register them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        runtime: ModuleType = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch says no types
        pinned = cls(np.frombuffer(mapped, np.uint8), runtime)
        for start in range(0, size, REGISTERED_BYTES_MAX):
            pinned.register(start, min(start + REGISTERED_BYTES_MAX, size))
        return pinned

    def register(self, start: int, end: int) -> None:
        """Register bytes [start, end); after an error nothing is registered any more."""
        address = self.bytes.ctypes.data + start
        error = int(self._runtime.cudaHostRegister(address, end - start, PORTABLE))
        if error:
            self.close()
            raise OSError(f"cudaHostRegister of {end - start} bytes failed with CUDA error {error}")
        self._registered.append(address)

    def close(self) -> None:
        """End the registrations; the GPU must not use the memory any more. A second time does nothing."""
        self._unregister()


def _unregister(memory: npt.NDArray[np.uint8], runtime: ModuleType, registered: list[int]) -> None:
    """End registrations while the memory, which the first argument keeps, is still there."""
    while registered:
        runtime.cudaHostUnregister(registered.pop())


STAGING_BYTES = 32 << 20
"""Pinned memory that pages pass through on their way to or from a GPU, twice: one half fills while the other moves."""

ComputeStreams = Callable[[], Sequence[torch.cuda.Stream]]
"""Return the streams that an engine computes on; one at least."""


class Copied:
    """End of a copy within the ordered work of a device."""

    __slots__ = ("_end",)

    def __init__(self, end: tuple[torch.device, torch.cuda.Event] | None = None) -> None:
        """Take the device and the event that marks the end; None for a copy that is complete when its call returns."""
        self._end = end

    def wait(self) -> None:
        """Make the device run whatever the calling thread submits from now on after the copy. Does not block."""
        if self._end is not None:
            device, event = self._end
            torch.cuda.current_stream(device).wait_event(event)  # whatever the thread's current device is


AT_ONCE = Copied()
"""The end of every copy in host memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolRows:
    """Layers of a pool as rows of bytes, a row for each slot."""

    device: tuple[torch.Tensor, ...]
    host: tuple[torch.Tensor, ...]
    """By layer: its part of every page of the slab."""
    dtypes: tuple[torch.dtype, ...]
    """By layer: what the engine keeps in the device's rows."""


@dataclass(frozen=True, slots=True, eq=False)
class PageDistance:
    """Distance of two pages, by layer."""

    layers: torch.Tensor
    """Shape (layers,); see ``excess``."""
    made: torch.cuda.Event | None
    """Mark of the GPU that they have been computed; None in host memory."""

    @property
    def is_ready(self) -> bool:
        """Whether ``excess`` would not wait."""
        return self.made is None or self.made.query()  # type: ignore[no-untyped-call]

    @property
    def excess(self) -> list[float]:
        """The distance of each layer as a share of what noise explains: 0 for equal bytes, above 1 or NaN for more."""
        excess: list[float] = self.layers.tolist()
        return excess


def page_distance(rows: PoolRows, left: int, right: int) -> PageDistance:
    """Compare two device pages in host memory, layer by layer."""
    excess = torch.zeros(len(rows.device))
    for number, (layer, dtype) in enumerate(zip(rows.device, rows.dtypes, strict=True)):
        if not torch.equal(layer[left], layer[right]):
            excess[number] = _excess(layer[left], layer[right], dtype)
    return PageDistance(excess, None)


def _excess(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of two rows of bytes as a share of what noise explains.

    The larger of two distances, each relative to the row: of all elements together, and of the one farthest off. Noise
    is taken to reach half of the digits of ``dtype``: the square root of its epsilon. Integers have none.
    """
    if not dtype.is_floating_point:
        return torch.where((left != right).any(), torch.inf, 0.0)
    pair = torch.stack((left.view(dtype), right.view(dtype))).to(torch.float64)
    difference = pair[0] - pair[1]
    tiny = torch.finfo(torch.float32).tiny
    together = torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(pair, dim=1).max().clamp(min=tiny)
    farthest = difference.abs().max() / pair.abs().max().clamp(min=tiny)
    distance = torch.maximum(together, farthest).clamp(min=tiny)
    return torch.where((left != right).any(), distance / torch.finfo(dtype).eps ** 0.5, 0.0).float()


class GpuCopies(ABC):
    """Copies between host slabs and one GPU in one direction, on a stream beside the engine's. Callers take turns."""

    __slots__ = ("_after", "_device", "_guard", "_sent", "_stream")

    reaches_host: ClassVar[bool]
    """Whether the GPU reads and writes the slabs by itself, so that they must be pinned."""

    def __init__(self, device: torch.device, pools: Sequence[PoolRows], after: ComputeStreams) -> None:
        """Take what copies of ``pools`` need of the device; ``after`` returns the streams to come after."""
        self._after = after
        self._device = device
        # torch hands streams of normal priority out in turns, 32 of them: another user would get this one, too.
        stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream = stream
        self._sent: dict[tuple[int, ...], tuple[tuple[Slots, ...], torch.Tensor]] = {}
        """By identity: slots that the copies under way have sent to the device."""
        self._guard = Lock()

    @abstractmethod
    def load(self, rows: PoolRows, layer: int, sources: Slots, targets: Slots) -> Copied:
        """Copy rows of one layer host to device; return their end."""

    @abstractmethod
    def backup(self, rows: PoolRows, sources: Slots, targets: Slots) -> None:
        """Copy rows of all layers device to host; complete on return."""

    def ordered(self) -> AbstractContextManager[None]:
        """See ``PageMemory.ordered``."""
        return self._beside([event_on(stream) for stream in self._after()])

    @contextmanager
    def _beside(self, before: Sequence[torch.cuda.Event]) -> Iterator[None]:
        with self._guard, torch.cuda.stream(self._stream):
            for event in before:
                self._stream.wait_event(event)
            try:
                yield
            finally:
                self._stream.synchronize()
                self._sent.clear()

    def duplicate(self, rows: PoolRows, sources: Slots, targets: Slots) -> None:
        """Copy rows of all layers within the device, after and before what the engine's streams compute."""
        with self._among():
            self._duplicate(rows, self._on_device(sources, targets))

    def compare(self, rows: PoolRows, left: int, right: int) -> PageDistance:
        """Compare rows of all layers, after and before what the engine's streams compute; nothing is waited for."""
        with self._among() as stream:
            layers = zip(rows.device, rows.dtypes, strict=True)
            excess = torch.stack([_excess(layer[left], layer[right], dtype) for layer, dtype in layers])
            made = torch.empty(len(excess), pin_memory=True).copy_(excess, non_blocking=True)
            return PageDistance(made, event_on(stream))

    @contextmanager
    def _among(self) -> Iterator[torch.cuda.Stream]:
        """Run a block on the first of the engine's streams, after and before what the others compute."""
        first, *others = self._after()
        with torch.cuda.stream(first):
            for stream in others:
                first.wait_stream(stream)
            yield first
            for stream in others:
                stream.wait_stream(first)

    def _duplicate(self, rows: PoolRows, slots: torch.Tensor) -> None:
        """Copy rows within the device on the current stream; ``slots`` are sources and targets."""
        for layer in map(wide, rows.device):
            layer.index_copy_(0, slots[1], layer.index_select(0, slots[0]))

    def _slots(self, *slots: Slots) -> torch.Tensor:
        """Return slots on the device, sent once for all layers of the copies under way."""
        at = tuple(map(id, slots))
        if at not in self._sent:
            self._sent[at] = slots, self._on_device(*slots)
        return self._sent[at][1]

    def _on_device(self, *slots: Slots) -> torch.Tensor:
        """Return slots as int64, a row for each array, ordered on the current stream, which is not waited for."""
        # From pageable memory the copy would wait. The pinned snapshot is torch's: its block is not reused before the
        # copy out of it is done.
        return torch.from_numpy(np.stack(slots).astype(np.int64)).pin_memory().to(self._device, non_blocking=True)

    def _end(self) -> Copied:
        return Copied((self._device, event_on(self._stream)))


class StagedCopies(GpuCopies):
    """Copies by what torch offers: gathered into one of two pinned buffers, moved in one piece, and scattered."""

    __slots__ = ("_staged", "_staged_there", "_turn", "_used")

    reaches_host = False

    def __init__(self, device: torch.device, pools: Sequence[PoolRows], after: ComputeStreams) -> None:
        """Take buffers of STAGING_BYTES, or of one page of one layer if that is more: two pinned, one on the device."""
        super().__init__(device, pools, after)
        size = max([STAGING_BYTES, *(layer.shape[1] for rows in pools for layer in rows.device)])
        self._staged = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._staged_there = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = [event_on(self._stream) for _ in range(2)]
        """By buffer: the end of the last copy through it."""
        self._turn = 0

    def load(self, rows: PoolRows, layer: int, sources: Slots, targets: Slots) -> Copied:
        """Copy rows of one layer host to device; return their end."""
        source, target = rows.host[layer], rows.device[layer]
        for first, last, number in self._pieces(sources, targets, source.shape[1]):
            self._used[number].synchronize()
            staged, there, layer_rows = self._buffers(number, last - first, target)
            copy_rows(source, sources[first:last], staged, np.arange(last - first, dtype=np.int32))
            there.copy_(staged, non_blocking=True)
            self._used[number] = event_on(self._stream)
            layer_rows.index_copy_(0, self._slots(targets)[0, first:last], there.view(layer_rows.dtype))
        return self._end()

    def backup(self, rows: PoolRows, sources: Slots, targets: Slots) -> None:
        """Copy rows of all layers device to host; complete on return."""
        moving: deque[tuple[int, torch.Tensor, Slots, torch.Tensor]] = deque()
        for source, target in zip(rows.device, rows.host, strict=True):
            for first, last, number in self._pieces(sources, targets, source.shape[1]):
                staged, there, layer_rows = self._buffers(number, last - first, source)
                gather = self._slots(sources)[0, first:last]
                torch.index_select(layer_rows, 0, gather, out=there.view(layer_rows.dtype))
                staged.copy_(there, non_blocking=True)
                self._used[number] = event_on(self._stream)
                moving.append((number, staged, targets[first:last], target))
                if len(moving) == len(self._staged):
                    self._scatter(*moving.popleft())
        while moving:
            self._scatter(*moving.popleft())

    def _scatter(self, number: int, staged: torch.Tensor, slots: Slots, target: torch.Tensor) -> None:
        """Copy rows from a buffer to their slots in host memory, once the GPU has filled it."""
        self._used[number].synchronize()
        copy_rows(staged, np.arange(len(slots), dtype=np.int32), target, slots)

    def _pieces(self, sources: Slots, targets: Slots, row_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last, buffer): runs of pages that a buffer holds."""
        check_lengths(sources, targets)
        pages_max = len(self._staged[0]) // row_bytes
        for first in range(0, len(sources), pages_max):
            self._turn ^= 1
            yield first, min(first + pages_max, len(sources)), self._turn

    def _buffers(self, number: int, pages: int, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return room for pages of a layer, pinned and on the device, and the layer in its widest elements."""
        shape = pages, layer.shape[1]
        staged, there = (buffer[: prod(shape)].view(shape) for buffer in (self._staged[number], self._staged_there))
        return staged, there, wide(layer)


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that marks what a stream has been given so far."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says no types
    event.record(stream)
    return event


def gpu_copies() -> type[GpuCopies]:
    """Return how pages are copied from and to a GPU: by a kernel where there is Triton, as torch for CUDA brings it."""
    if find_spec("triton") is None:
        return StagedCopies
    copies: type[GpuCopies] = import_module("unified_cache.controller.copies.kernel").KernelCopies
    return copies
