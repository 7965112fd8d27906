"""The bytes of the memory tiers: the engine's device tensors, our host slabs, and copies between them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from unified_cache.core.config import CacheConfig
from unified_cache.core.errors import ConfigError, LayoutError, check_each, check_kind
from unified_cache.core.extras import needs_extra
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec, Slots, Tier, dtype_name
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.core.sizes import check_available

with needs_extra("engine", "unified_cache.controller.memory"):
    import torch

    from unified_cache.controller.copies.gpu import (
        AT_ONCE,
        ComputeStreams,
        Copied,
        GpuCopies,
        PageDistance,
        PinnedBytes,
        PoolRows,
        check_lengths,
        copy_rows,
        gpu_copies,
        page_distance,
    )

TENSORS_CHARS_MAX = 128
"""Longer descriptions of a pool's tensors are digested; a service takes texts of 256."""

PAGE_ALIGN_BYTES = 64
"""A sealed page starts on a cache line."""


class PageMemory:
    """Bytes of pages in device and host memory, and copies between the two.

    This one has no bytes and moves nothing: the whole cache at full speed, for sizing. Copies are called from worker
    threads. The caller pins every slot it names until the call has returned.
    """

    __slots__ = ()

    def layers_count(self, pool: PoolSpec) -> int:
        """Return the number of layers of a pool on the device; 0 for a pool without bytes."""
        return 0

    def ordered(self, target: Tier) -> AbstractContextManager[None]:
        """Return a context for a worker's copies to a tier, which run after what the engine's streams have been given.

        Call it on the owner's thread. When the context is left, for whatever reason, no copy is in flight any more.
        Copies to the device and to the host do not wait for each other.
        """
        return nullcontext()

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool device to host."""

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        """Copy one layer of pages of a pool host to device; return the end of the copy."""
        return AT_ONCE

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool within the device. Called from the owner's thread, between forwards."""

    def compare(self, pool: PoolSpec, left: int, right: int) -> PageDistance:
        """Begin to compare two device pages of a pool with layers, on the owner's thread, between forwards.

        What is written to them later is not compared.
        """
        return PageDistance(torch.zeros(0), None)

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        """Seal host pages whose payload is complete."""

    def buffers(self, pool: PoolSpec, slots: Sequence[int]) -> list[tuple[memoryview, ...]]:
        """Return the sealed host page in each slot, for storage to read or fill; a pool with bytes."""
        return [()] * len(slots)

    def slabs(self) -> Mapping[str, memoryview]:
        """Return the host slab of every pool with bytes, by pool name."""
        return {}

    def close(self) -> None:
        """Release memory of the device and of the system, once no copy is under way."""


class DevicePool:
    """One pool of an engine: its own tensors, one per layer.

    Each layer has shape (slots, ...), and its rows are contiguous, one beside the other or further apart; slot 0 is the
    padding sink. The engine keeps the tensors.
    """

    __slots__ = ("dtypes", "layers", "offsets", "slots_count", "spec", "tensors")

    def __init__(self, spec: PoolSpec, layers: Sequence[torch.Tensor]) -> None:
        """Wrap ``layers``.

        Raises:
            LayoutError: layers whose rows are not contiguous, differ in slots, or do not add up to ``spec.page_bytes``.
        """
        check_kind(spec, PoolSpec, "a PoolSpec for a device pool", LayoutError)
        check_each(layers, torch.Tensor, f"the layers of pool {spec.name} as a list, a tensor for each", LayoutError)
        if not layers:
            raise LayoutError(f"pool {spec.name} needs at least one layer")
        self.layers = tuple(_rows_of(spec, layer) for layer in layers)
        """Bytes of each layer, shape (slots, bytes of one page in this layer)."""
        self.dtypes = tuple(layer.dtype for layer in layers)
        """Of each layer, as the engine has it."""
        self.slots_count = self.layers[0].shape[0]
        self.spec = spec
        row_bytes = [layer.shape[1] for layer in self.layers]
        if sum(row_bytes) != spec.page_bytes:
            raise LayoutError(f"pool {spec.name}: layers hold {sum(row_bytes)} bytes a page, not {spec.page_bytes}")
        if any(layer.shape[0] != self.slots_count for layer in self.layers):
            raise LayoutError(f"pool {spec.name}: layers differ in slots")
        self.tensors = _page_in(layers)
        """What they hold of a page, see ``PoolSpec.tensors``."""
        self.offsets = tuple(accumulate(row_bytes, initial=0))
        """Layer ``i`` of a page lies in bytes [offsets[i], offsets[i + 1]) of its payload."""


class HostPool:
    """One pool in host memory: a slab of sealed pages, header beside payload, one contiguous run per page."""

    __slots__ = ("payload", "pinned", "slab", "spec", "stride")

    def __init__(self, spec: PoolSpec, pages_max: int, *, pinned: bool) -> None:
        self.spec = spec
        page_bytes = HEADER_BYTES + spec.page_bytes
        self.stride = _stride_bytes(spec)
        need = _slab_bytes(spec, pages_max)
        self.pinned: PinnedBytes | None = None
        """What a GPU reaches the slab by, as long as it is open."""
        try:
            if pinned:
                self.pinned = PinnedBytes.allocate(need)
            memory = torch.zeros(need, dtype=torch.uint8).numpy() if self.pinned is None else self.pinned.bytes
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"pool {spec.name}: {need} bytes of host memory cannot be had: {error}") from error
        rows: npt.NDArray[np.uint8] = memory.reshape(-1, self.stride)
        self.slab = rows.reshape(-1).data
        """All pages, slot after slot, ``stride`` bytes each."""
        self.payload: npt.NDArray[np.uint8] = rows[:, HEADER_BYTES:page_bytes]
        """Payloads, shape (slots, page_bytes)."""

    def beside(self, device: DevicePool) -> PoolRows:
        """Return the rows of an engine's pool beside those of the slab."""
        parts = pairwise(device.offsets)
        host = tuple(torch.from_numpy(self.payload[:, start:end]) for start, end in parts)
        return PoolRows(device.layers, host, device.dtypes)

    def pages(self, slots: Sequence[int]) -> list[tuple[memoryview, ...]]:
        """Return sealed pages, header and payload: one buffer each."""
        slab, stride, page_bytes = self.slab, self.stride, HEADER_BYTES + self.spec.page_bytes
        return [(slab[slot * stride : slot * stride + page_bytes],) for slot in slots]


def _stride_bytes(spec: PoolSpec) -> int:
    return -(-(HEADER_BYTES + spec.page_bytes) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def _slab_bytes(spec: PoolSpec, pages_max: int) -> int:
    """Return the bytes of a slab of so many pages, with the padding sink."""
    return (pages_max + 1) * _stride_bytes(spec)


class TieredMemory(PageMemory):
    """Device tensors and host slabs of all pools of a layout."""

    __slots__ = ("_gpu", "_host", "_rows")

    def __init__(
        self,
        rows: Mapping[str, PoolRows],
        host: Mapping[str, HostPool],
        gpu: Mapping[Tier, GpuCopies] = MappingProxyType({}),
    ) -> None:
        """Take pools of one name on both tiers, and the copies to each tier where the device is a GPU."""
        self._rows = dict(rows)
        self._host = dict(host)
        self._gpu = gpu

    @classmethod
    def allocate(
        cls, device_pools: Sequence[DevicePool], host_pages: Mapping[str, int], after: ComputeStreams | None = None
    ) -> "TieredMemory":
        """Wrap the engine's pools and allocate a host slab for each, and the buffers of copies where they are on a GPU.

        ``host_pages`` gives the pages of each pool's slab, by pool name; ``after`` and errors as ``UnifiedCache.open``.
        """
        device = _one_device(device_pools)
        need_bytes = sum(_slab_bytes(pool.spec, host_pages[pool.spec.name]) for pool in device_pools)
        check_available(need_bytes, "the pages of the host tier")
        copies = gpu_copies() if device.type == "cuda" else None
        pinned = copies is not None and copies.reaches_host
        host = {pool.spec.name: HostPool(pool.spec, host_pages[pool.spec.name], pinned=pinned) for pool in device_pools}
        rows = {pool.spec.name: host[pool.spec.name].beside(pool) for pool in device_pools}
        if copies is None:
            return cls(rows, host)
        streams = after or (lambda: [torch.cuda.current_stream(device)])
        if not streams():
            raise ConfigError("after must return the streams that compute, one at least; found none")
        return cls(rows, host, {tier: copies(device, list(rows.values()), streams) for tier in Tier})

    @classmethod
    def fitting(
        cls,
        layout: ModelLayout,
        config: CacheConfig,
        device_pools: Sequence[DevicePool],
        after: ComputeStreams | None = None,
    ) -> "TieredMemory":
        """Check that pools, ``layout`` and ``config`` fit each other, or raise ConfigError; then as ``allocate``."""
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
        return len(self._rows[pool.name].device) if pool.page_bytes else 0

    def ordered(self, target: Tier) -> AbstractContextManager[None]:
        """On a GPU, run copies on a stream beside the engine's; in memory the computation is already done."""
        return self._gpu[target].ordered() if self._gpu else nullcontext()

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages device to host, layer by layer into each page's run of bytes."""
        if not pool.page_bytes:
            return
        rows = self._rows[pool.name]
        if self._gpu:
            self._gpu[Tier.HOST].backup(rows, source, target)
            return
        for device, host in zip(rows.device, rows.host, strict=True):
            copy_rows(device, source, host, target)

    def load(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages host to device, each layer from its part of the page; complete on return."""
        with self.ordered(Tier.DEVICE):
            for layer in range(self.layers_count(pool)):
                self.load_layer(pool, layer, source, target)

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        """Copy one layer from its part of each page; on a GPU the call returns before the copy ends."""
        rows = self._rows[pool.name]
        if self._gpu:
            return self._gpu[Tier.DEVICE].load(rows, layer, source, target)
        copy_rows(rows.host[layer], source, rows.device[layer], target)
        return AT_ONCE

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages within the device, layer by layer."""
        check_lengths(source, target)
        if not pool.page_bytes:
            return
        rows = self._rows[pool.name]
        if self._gpu:
            self._gpu[Tier.DEVICE].duplicate(rows, source, target)
            return
        for layer in rows.device:
            copy_rows(layer, source, layer, target)

    def compare(self, pool: PoolSpec, left: int, right: int) -> PageDistance:
        """Compare two device pages layer by layer; on a GPU the call returns before that is done."""
        rows = self._rows[pool.name]
        return self._gpu[Tier.HOST].compare(rows, left, right) if self._gpu else page_distance(rows, left, right)

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        """Write the header of each page."""
        if pool.page_bytes:
            for (page,), label in zip(self._host[pool.name].pages(slots.tolist()), labels, strict=True):
                seal_buffers((page,), label)

    def buffers(self, pool: PoolSpec, slots: Sequence[int]) -> list[tuple[memoryview, ...]]:
        """Return the one buffer of each page in the slab."""
        return self._host[pool.name].pages(slots)

    def slabs(self) -> Mapping[str, memoryview]:
        """Return every slab that holds bytes."""
        return {name: host.slab for name, host in self._host.items() if host.spec.page_bytes}

    def close(self) -> None:
        """Unpin the memory; nothing may be copied any more."""
        for host in self._host.values():
            if host.pinned is not None:
                host.pinned.close()


def _rows_of(spec: PoolSpec, layer: torch.Tensor) -> torch.Tensor:
    """Return a layer as bytes, shape (slots, bytes of a row); rows may lie apart, and are contiguous each."""
    try:
        rows = layer.view(layer.shape[0], -1).view(torch.uint8)
    except (RuntimeError, IndexError):
        rows = None
    if rows is None or rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) < rows.shape[1]):
        raise LayoutError(f"pool {spec.name}: a layer must have contiguous rows, shape (slots, ...)")
    return rows


def _page_in(layers: Sequence[torch.Tensor]) -> str:
    """Return dtype and shape of a page, layer by layer, or their digest; strides follow, as rows are contiguous."""
    pages = [f"{str(layer.dtype).removeprefix('torch.')}{list(layer.shape[1:])}" for layer in layers]
    text = ", ".join(f"{len(list(run))} x {page}" for page, run in groupby(pages))
    if len(text) <= TENSORS_CHARS_MAX:
        return text
    return f"{len(layers)} x {pages[0]} and others, {hashlib.sha256(text.encode()).hexdigest()}"


def check_dtype(identity: Identity, pools: Sequence[DevicePool]) -> None:
    """Raise ConfigError where an identity says a dtype that no pool has; tensors of bytes may hold any."""
    found = {dtype_name(str(dtype)) or str(dtype) for pool in pools for dtype in pool.dtypes}
    if identity.dtype and identity.dtype not in found and "uint8" not in found:
        raise ConfigError(
            f"the identity says {identity.dtype}, and the pools' tensors are {', '.join(sorted(found))}: "
            f"leave dtype out, or say one of theirs"
        )


def _one_device(pools: Sequence[DevicePool]) -> torch.device:
    """Return the device of all pools; a ConfigError if there are several, or it is neither the CPU nor a GPU."""
    devices = {layer.device for pool in pools for layer in pool.layers} or {torch.device("cpu")}
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"expected all device pools on one device, the CPU or a CUDA device, found {names}")
    return devices.pop()
