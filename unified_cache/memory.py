"""The bytes of the memory tiers: the engine's device tensors, our host slabs, and copies between them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from math import prod
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unified_cache.arguments import check_each, check_kind
from unified_cache.config import CacheConfig
from unified_cache.errors import ConfigError, CopyError, LayoutError
from unified_cache.extras import needs_extra
from unified_cache.pool import ModelLayout, Pages, PoolSpec, Slots, Tier, numbers_of
from unified_cache.seal import HEADER_BYTES, Label, seal

with needs_extra("engine", "unified_cache.memory"):
    import torch

__all__ = ["AT_ONCE", "ComputeStreams", "Copied", "DevicePool", "HostPool", "NoBytes", "PageMemory", "TieredMemory"]

PAGE_ALIGN_BYTES = 64
"""A sealed page starts on a cache line."""

RUN_COPY_BYTES_MIN = 8 * 1024
"""Average bytes per contiguous run from which copying run by run beats one gather and scatter."""

SELECTED_ROWS_MIN = 64
"""Average rows per run of targets from which selecting rows into them beats copying row by row."""

SELECTED_BYTES_MAX = 64 * 1024
"""Average bytes per contiguous run from which selecting gains nothing."""

WIDE = torch.complex128
"""Widest element that torch has, since a selection is shared among threads by its elements."""

SELECTED_MAX = 32_768
"""Elements that torch selects on the calling thread; for more it wakes threads, which spin where cores are busy."""

STAGING_BYTES = 32 << 20
"""Pinned memory that pages pass through on their way to or from a GPU, twice: one half fills while the other moves."""


ComputeStreams = Callable[[], Sequence[torch.cuda.Stream]]
"""Return the streams that an engine computes on; one at least."""


class Copied(Protocol):
    """End of a copy within the ordered work of a device."""

    def wait(self) -> None:
        """Make the device run whatever the calling thread submits from now on after the copy. Does not block."""
        ...


class _AtOnce:
    """End of a copy that is complete when its call returns."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once: the copy is complete."""


AT_ONCE: Copied = _AtOnce()
"""The end of every copy in host memory."""


class PageMemory(Protocol):
    """Bytes of pages in device and host memory, and copies between the two.

    Called from worker threads. The caller pins every slot it names until the call has returned.
    """

    def layers_count(self, pool: PoolSpec) -> int:
        """Return the number of layers of a pool on the device; 0 for a pool without bytes."""
        ...

    def ordered(self, target: Tier) -> AbstractContextManager[None]:
        """Return a context for a worker's copies to a tier, which run after what the engine's streams have been given.

        Call it on the owner's thread. A page that a forward still writes is backed up as written, and a page that it
        still reads is not overwritten. When the context is left, for whatever reason, no copy is in flight any more.
        Copies to the device and to the host do not wait for each other.
        """
        ...

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool device to host."""
        ...

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        """Copy one layer of pages of a pool host to device; return the end of the copy."""
        ...

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool within the device. Called from the owner's thread, between forwards."""
        ...

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        """Seal host pages whose payload is complete."""
        ...

    def buffers(self, pool: PoolSpec, slot: int) -> tuple[memoryview, ...]:
        """Return the sealed host page in a slot, for storage to read or fill."""
        ...

    def slabs(self) -> Mapping[str, memoryview]:
        """Return the host slab of every pool with bytes, by pool name."""
        ...


class DevicePool:
    """One pool of an engine: its own tensors, one per layer, page-major.

    Each layer has shape (slots, ...) and is contiguous; slot 0 is the padding sink. The engine keeps the tensors.
    """

    __slots__ = ("layers", "offsets", "slots_count", "spec")

    def __init__(self, spec: PoolSpec, layers: Sequence[torch.Tensor]) -> None:
        """Wrap ``layers``.

        Raises:
            LayoutError: layers that are not contiguous, differ in slots, or do not add up to ``spec.page_bytes``.
        """
        check_kind(spec, PoolSpec, "a PoolSpec for a device pool", LayoutError)
        check_each(layers, torch.Tensor, f"the layers of pool {spec.name} as a list, a tensor for each", LayoutError)
        if not layers:
            raise LayoutError(f"pool {spec.name} needs at least one layer")
        for layer in layers:
            if not layer.is_contiguous() or layer.dim() < 1:
                raise LayoutError(f"pool {spec.name}: a layer must be contiguous, shape (slots, ...)")
        self.layers = tuple(layer.view(layer.shape[0], -1).view(torch.uint8) for layer in layers)
        """Bytes of each layer, shape (slots, bytes of one page in this layer)."""
        self.slots_count = self.layers[0].shape[0]
        self.spec = spec
        row_bytes = [layer.shape[1] for layer in self.layers]
        if sum(row_bytes) != spec.page_bytes:
            raise LayoutError(f"pool {spec.name}: layers hold {sum(row_bytes)} bytes a page, not {spec.page_bytes}")
        if any(layer.shape[0] != self.slots_count for layer in self.layers):
            raise LayoutError(f"pool {spec.name}: layers differ in slots")
        self.offsets = tuple(accumulate(row_bytes, initial=0))
        """Layer ``i`` of a page lies in bytes [offsets[i], offsets[i + 1]) of its payload."""


class HostPool:
    """One pool in host memory: a slab of sealed pages, header beside payload, one contiguous run per page."""

    __slots__ = ("payload", "slab", "spec", "stride")

    def __init__(self, spec: PoolSpec, pages_max: int) -> None:
        self.spec = spec
        page_bytes = HEADER_BYTES + spec.page_bytes
        self.stride = -(-page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        try:
            tensor = torch.zeros((pages_max + 1, self.stride), dtype=torch.uint8)
        except RuntimeError as error:
            need = (pages_max + 1) * self.stride
            raise ConfigError(f"pool {spec.name}: {need} bytes of host memory cannot be allocated") from error
        rows: npt.NDArray[np.uint8] = tensor.numpy()
        self.slab = rows.reshape(-1).data
        """All pages, slot after slot, ``stride`` bytes each."""
        self.payload: npt.NDArray[np.uint8] = rows[:, HEADER_BYTES:page_bytes]
        """Payloads, shape (slots, page_bytes)."""

    def page(self, slot: int) -> memoryview:
        """Return one sealed page, header and payload."""
        start = slot * self.stride
        return self.slab[start : start + HEADER_BYTES + self.spec.page_bytes]


class TieredMemory:
    """Device tensors and host slabs of all pools of a layout."""

    __slots__ = ("_device", "_gpu", "_host")

    def __init__(
        self,
        device: Mapping[str, DevicePool],
        host: Mapping[str, HostPool],
        gpu: "Mapping[Tier, GpuCopies]" = MappingProxyType({}),
    ) -> None:
        """Take pools of one name on both tiers, and the copies to each tier where ``device`` lies on a GPU."""
        self._device = dict(device)
        self._host = dict(host)
        self._gpu = gpu

    @classmethod
    def allocate(
        cls, device_pools: Sequence[DevicePool], host_pages: Mapping[str, int], after: ComputeStreams | None = None
    ) -> "TieredMemory":
        """Wrap the engine's pools and allocate a host slab for each, and the buffers of copies where they are on a GPU.

        ``host_pages`` gives the pages of each pool's slab, by pool name. ``after`` returns the streams that compute on
        the pools; the current one of whoever calls, if it is left out.

        Raises:
            ConfigError: the slabs do not fit into memory, or the pools are on two devices, or on one that is neither
                the CPU nor a GPU.
        """
        layers = [layer for pool in device_pools for layer in pool.layers]
        device = _one_device(layers)
        host = {pool.spec.name: HostPool(pool.spec, host_pages[pool.spec.name]) for pool in device_pools}
        gpu: dict[Tier, GpuCopies] = {}
        if device.type == "cuda":
            streams = after or (lambda: [torch.cuda.current_stream(device)])
            row_bytes_max = max(layer.shape[1] for layer in layers)
            gpu = {target: GpuCopies(device, row_bytes_max, streams) for target in (Tier.DEVICE, Tier.HOST)}
        return cls({pool.spec.name: pool for pool in device_pools}, host, gpu)

    @classmethod
    def fitting(
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        device_pools: Sequence[DevicePool],
        after: ComputeStreams | None = None,
    ) -> "TieredMemory":
        """Check that the engine's pools are those of ``layout``, with slots for ``config``; then as ``allocate``.

        Raises:
            ConfigError: pools, layout and sizes do not fit each other, or the slabs do not fit into memory.
        """
        check_kind(layout, ModelLayout, "layout as a ModelLayout", ConfigError)
        check_kind(
            config, CacheConfig, "config as a CacheConfig, such as CacheConfig(device_pages=(100,))", ConfigError
        )
        check_each(device_pools, DevicePool, "device_pools as a list, a DevicePool for each pool", ConfigError)
        if len(config.device_pages) != len(layout.components):
            names = ", ".join(component.name for component in layout.components)
            raise ConfigError(
                f"device_pages and host_pages need an entry for each of {names}, found {config.device_pages}"
            )
        pools = {pool.spec.name: pool for pool in device_pools}
        host_pages: dict[str, int] = {}
        for number, component in enumerate(layout.components):
            for spec in component.pools:
                host_pages[spec.name] = config.host_pages[number]
                if not spec.page_bytes:
                    continue
                found = pools.get(spec.name)
                if found is None or found.spec != spec:
                    raise ConfigError(f"the layout needs a device pool {spec}, found {found and found.spec}")
                if found.slots_count <= config.device_pages[number]:
                    raise ConfigError(
                        f"pool {spec.name} needs {config.device_pages[number] + 1} slots "
                        f"(the padding sink and device_pages), found {found.slots_count}"
                    )
        return cls.allocate(device_pools, host_pages, after)

    def layers_count(self, pool: PoolSpec) -> int:
        """Count the engine's tensors of a pool."""
        return len(self._device[pool.name].layers) if pool.page_bytes else 0

    def ordered(self, target: Tier) -> AbstractContextManager[None]:
        """On a GPU, have copies go on a stream beside the engine's; in memory, whoever computes has computed."""
        return self._gpu[target].ordered() if self._gpu else nullcontext()

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages device to host, layer by layer into each page's run of bytes."""
        layers = self._device[pool.name].layers if pool.page_bytes else ()
        pairs = [(layer, self._rows(pool, number)) for number, layer in enumerate(layers)]
        if self._gpu:
            self._gpu[Tier.HOST].backup(pairs, source, target)
            return
        for layer, rows in pairs:
            _copy(layer, source, rows, target)

    def load(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages host to device, each layer from its part of the page; complete on return."""
        with self.ordered(Tier.DEVICE):
            for layer in range(self.layers_count(pool)):
                self.load_layer(pool, layer, source, target)

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        """Copy one layer from its part of each page; on a GPU the call returns before the copy ends."""
        rows = self._device[pool.name].layers[layer]
        if self._gpu:
            return self._gpu[Tier.DEVICE].load(self._rows(pool, layer), source, rows, target)
        _copy(self._rows(pool, layer), source, rows, target)
        return AT_ONCE

    def _rows(self, pool: PoolSpec, layer: int) -> torch.Tensor:
        """Return one layer of every host page, a view of shape (slots, bytes of one page in this layer)."""
        start, end = self._device[pool.name].offsets[layer : layer + 2]
        return torch.from_numpy(self._host[pool.name].payload[:, start:end])

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages within the device, layer by layer."""
        layers = self._device[pool.name].layers if pool.page_bytes else ()
        if self._gpu and layers:
            self._gpu[Tier.DEVICE].duplicate(layers, source, target)
            return
        for layer in layers:
            _check_lengths(source, target)
            _copy_rows(layer, source, layer, target)

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        """Write the header of each page."""
        if pool.page_bytes:
            page = self._host[pool.name].page
            for slot, label in zip(slots.tolist(), labels, strict=True):
                seal(page(slot), label)

    def buffers(self, pool: PoolSpec, slot: int) -> tuple[memoryview, ...]:
        """Return the one buffer of a page in its slab."""
        return (self._host[pool.name].page(slot),)

    def slabs(self) -> Mapping[str, memoryview]:
        """Return every slab that holds bytes."""
        return {name: host.slab for name, host in self._host.items() if host.spec.page_bytes}


class NoBytes:
    """The twin of ``TieredMemory`` that moves nothing: the whole cache at full speed, for sizing."""

    __slots__ = ()

    def layers_count(self, pool: PoolSpec) -> int:
        """Return 0: no layer has bytes."""
        return 0

    def ordered(self, target: Tier) -> AbstractContextManager[None]:
        """Order nothing."""
        return nullcontext()

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy nothing."""

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        """Copy nothing."""
        return AT_ONCE

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy nothing."""

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        """Seal nothing."""

    def buffers(self, pool: PoolSpec, slot: int) -> tuple[memoryview, ...]:
        """Return no buffer."""
        return ()

    def slabs(self) -> Mapping[str, memoryview]:
        """Return no slab."""
        return {}


class GpuCopies:
    """Copies between host slabs and one GPU in one direction, on a stream beside the engine's.

    Pages are gathered where they lie into one of two pinned buffers, moved in one piece, and scattered where they go:
    a few launches for each layer, however many pages. While pages move, the next are gathered or the last put away.
    Callers take turns.
    """

    __slots__ = ("_after", "_device", "_guard", "_sent", "_staged", "_staged_there", "_stream", "_turn", "_used")

    def __init__(self, device: torch.device, row_bytes_max: int, after: ComputeStreams) -> None:
        """Take buffers of STAGING_BYTES, or of one page of one layer if that is more: two pinned, one on the device."""
        self._after = after
        self._device = device
        # torch hands streams of normal priority out in turns, 32 of them: another user would get this one, too.
        stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream = stream
        size = max(STAGING_BYTES, row_bytes_max)
        self._staged = [pinned_bytes(size) for _ in range(2)]
        self._staged_there = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = [_event_on(stream) for _ in range(2)]
        """By buffer: the end of the last copy through it."""
        self._turn = 0
        self._sent: dict[int, tuple[Slots, torch.Tensor]] = {}
        """By identity: slots that the copies under way have sent to the device."""
        self._guard = Lock()

    def ordered(self) -> AbstractContextManager[None]:
        """See ``PageMemory.ordered``."""
        return self._beside([_event_on(stream) for stream in self._after()])

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

    def load(self, source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> Copied:
        """Copy rows of a layer host to device on the calling thread's stream; return their end."""
        scatter = self._indices(target_slots)
        for first, last, number in self._pieces(source_slots, target_slots, source.shape[1]):
            self._used[number].synchronize()
            staged, there, wide = self._buffers(number, last - first, target)
            _copy(source, source_slots[first:last], staged, np.arange(last - first, dtype=np.int32))
            there.copy_(staged, non_blocking=True)
            self._used[number] = _event_on(self._stream)
            wide.index_copy_(0, scatter[first:last], there.view(wide.dtype))
        return _CopyEnd(self._device, _event_on(self._stream))

    def backup(self, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], sources: Slots, targets: Slots) -> None:
        """Copy rows device to host, of pairs of a layer and its part of the slab; complete on return."""
        gather = self._indices(sources)
        moving: deque[tuple[int, torch.Tensor, Slots, torch.Tensor]] = deque()
        for source, target in layers:
            for first, last, number in self._pieces(sources, targets, source.shape[1]):
                staged, there, wide = self._buffers(number, last - first, source)
                torch.index_select(wide, 0, gather[first:last], out=there.view(wide.dtype))
                staged.copy_(there, non_blocking=True)
                self._used[number] = _event_on(self._stream)
                moving.append((number, staged, targets[first:last], target))
                if len(moving) == len(self._staged):
                    self._scatter(*moving.popleft())
        while moving:
            self._scatter(*moving.popleft())

    def duplicate(self, layers: Sequence[torch.Tensor], source_slots: Slots, target_slots: Slots) -> None:
        """Copy rows of every layer within the device, after and before what the engine's streams compute."""
        _check_lengths(source_slots, target_slots)
        first, *others = self._after()
        with torch.cuda.stream(first):
            for stream in others:
                first.wait_stream(stream)
            gather, scatter = _slots_on(self._device, source_slots), _slots_on(self._device, target_slots)
            for layer in layers:
                rows = _wide(layer)
                rows.index_copy_(0, scatter, rows.index_select(0, gather))
            for stream in others:
                stream.wait_stream(first)

    def _scatter(self, number: int, staged: torch.Tensor, slots: Slots, target: torch.Tensor) -> None:
        """Copy rows from a buffer to their slots in host memory, once the GPU has filled it."""
        self._used[number].synchronize()
        _copy(staged, np.arange(len(slots), dtype=np.int32), target, slots)

    def _indices(self, slots: Slots) -> torch.Tensor:
        """Return slots on the device, sent once for all layers of the copies under way."""
        if id(slots) not in self._sent:
            self._sent[id(slots)] = slots, _slots_on(self._device, slots)
        return self._sent[id(slots)][1]

    def _pieces(self, source_slots: Slots, target_slots: Slots, row_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last, buffer): runs of pages that a buffer holds."""
        _check_lengths(source_slots, target_slots)
        pages_max = len(self._staged[0]) // row_bytes
        for first in range(0, len(source_slots), pages_max):
            self._turn ^= 1
            yield first, min(first + pages_max, len(source_slots)), self._turn

    def _buffers(self, number: int, pages: int, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return room for pages of a layer, pinned and on the device, and the layer in its widest elements."""
        shape = pages, layer.shape[1]
        staged, there = (buffer[: prod(shape)].view(shape) for buffer in (self._staged[number], self._staged_there))
        return staged, there, _wide(layer)


class _CopyEnd:
    """End of a copy on the stream of a GPU."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """See ``Copied.wait``; whatever the calling thread's current device is."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _slots_on(device: torch.device, slots: Slots) -> torch.Tensor:
    """Return slots as int64 on a GPU, ordered on the current stream, which is not waited for."""
    # From pageable memory the copy would wait. The pinned snapshot is torch's: its block is not reused before the copy
    # out of it is done.
    return torch.from_numpy(slots.astype(np.int64)).pin_memory().to(device, non_blocking=True)


def _one_device(layers: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all layers.

    Raises:
        ConfigError: there are several, or it is neither the CPU nor a GPU.
    """
    devices = {layer.device for layer in layers} or {torch.device("cpu")}
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"expected all device pools on one device, the CPU or a CUDA device, found {names}")
    return devices.pop()


def pinned_bytes(size: int) -> torch.Tensor:
    """Allocate bytes of host memory that a GPU copies from and to by itself; what they hold is left open."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says no types
    event.record(stream)
    return event


def _check_lengths(source_slots: Slots, target_slots: Slots) -> None:
    if len(source_slots) != len(target_slots):
        raise CopyError(f"{len(source_slots)} source slots for {len(target_slots)} target slots")


def _copy(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows between two tensors of bytes without memory in common; where rows are many, in the order of targets."""
    _check_lengths(source_slots, target_slots)
    if len(target_slots) >= SELECTED_ROWS_MIN:
        order = target_slots.argsort()
        source_slots, target_slots = source_slots[order], target_slots[order]
        target_breaks = _breaks(target_slots)
        run_rows = len(target_slots) / (np.count_nonzero(target_breaks) + 1)
        both_rows = len(target_slots) / (np.count_nonzero(target_breaks | _breaks(source_slots)) + 1)
        is_worth = run_rows >= SELECTED_ROWS_MIN and both_rows * source.shape[1] < SELECTED_BYTES_MAX
        if is_worth and _is_wide(source) and _is_wide(target):
            _select(source, source_slots, target, target_slots)
            return
    _copy_rows(source, source_slots, target, target_slots)


def _breaks(slots: Slots) -> Pages:
    """Tell of each slot but the first whether it does not follow the one before."""
    follows: Pages = slots[1:] - slots[:-1] != 1
    return follows


def _is_wide(rows: torch.Tensor) -> bool:
    """Tell whether rows of bytes can be taken for rows of WIDE."""
    return not any(count % WIDE.itemsize for count in (rows.shape[1], rows.stride(0), rows.storage_offset()))


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes in the widest elements they can be taken for: a GPU moves one element a thread and step."""
    return rows.view(WIDE) if _is_wide(rows) else rows


def _select(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows to slots that ascend in long runs: a call of torch for as much of a run as goes without its threads."""
    from_rows, to_rows = source.view(WIDE), target.view(WIDE)
    rows_max = max(1, SELECTED_MAX // from_rows.shape[1])
    gather = torch.from_numpy(source_slots.astype(np.int64))
    start = 0
    for end in [*(numbers_of(_breaks(target_slots)) + 1).tolist(), len(target_slots)]:
        for first in range(start, end, rows_max):
            last = min(first + rows_max, end)
            to_start = int(target_slots[first])
            torch.index_select(from_rows, 0, gather[first:last], out=to_rows[to_start : to_start + last - first])
        start = end


def _copy_rows(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows run by run, or tiny ones by gather and scatter."""
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
