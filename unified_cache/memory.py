"""The bytes of the memory tiers: the engine's device tensors, our host slabs, and copies between them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.config import CacheConfig
from unified_cache.errors import ConfigError, CopyError, LayoutError
from unified_cache.pool import ModelLayout, PoolSpec, Slots
from unified_cache.seal import HEADER_BYTES, Label, seal

__all__ = ["DevicePool", "HostPool", "NoBytes", "PageMemory", "TieredMemory"]

PAGE_ALIGN_BYTES = 64
"""A sealed page starts on a cache line."""

RUN_COPY_BYTES_MIN = 16 * 1024
"""Average bytes per contiguous run from which copying run by run beats one gather and scatter."""


class PageMemory(Protocol):
    """Where pages lie in device and host memory, and how they get from one to the other.

    Called from worker threads. The caller pins every slot it names until the call has returned.
    """

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool device to host."""
        ...

    def load(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool host to device."""
        ...

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages of a pool within the device. Called from the owner's thread, between forwards."""
        ...

    def seal(self, pool: PoolSpec, slots: Slots, labels: Sequence[Label]) -> None:
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

    __slots__ = ("layers", "slots_count", "spec")

    def __init__(self, spec: PoolSpec, layers: Sequence[torch.Tensor]) -> None:
        """Wrap ``layers``.

        Raises:
            LayoutError: layers that are not contiguous, differ in slots, or do not add up to ``spec.page_bytes``.
        """
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


class HostPool:
    """One pool in host memory: a slab of sealed pages, header beside payload, one contiguous run per page."""

    __slots__ = ("payload", "slab", "spec", "stride")

    def __init__(self, spec: PoolSpec, pages_max: int, *, pinned: bool) -> None:
        self.spec = spec
        page_bytes = HEADER_BYTES + spec.page_bytes
        self.stride = -(-page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        try:
            tensor = torch.zeros((pages_max + 1, self.stride), dtype=torch.uint8, pin_memory=pinned)
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

    __slots__ = ("_device", "_host")

    def __init__(self, device: Mapping[str, DevicePool], host: Mapping[str, HostPool]) -> None:
        self._device = dict(device)
        self._host = dict(host)

    @classmethod
    def allocate(cls, device_pools: Sequence[DevicePool], host_pages: Mapping[str, int]) -> "TieredMemory":
        """Wrap the engine's pools and allocate a host slab for each, pinned where the pool is on a GPU.

        ``host_pages`` gives the pages of each pool's slab, by pool name.

        Raises:
            ConfigError: the slabs do not fit into memory.
        """
        host = {
            pool.spec.name: HostPool(pool.spec, host_pages[pool.spec.name], pinned=pool.layers[0].is_cuda)
            for pool in device_pools
        }
        return cls({pool.spec.name: pool for pool in device_pools}, host)

    @classmethod
    def fitting(cls, layout: ModelLayout, config: CacheConfig, device_pools: Sequence[DevicePool]) -> "TieredMemory":
        """Check that the engine's pools are those of ``layout``, with slots for ``config``; then as ``allocate``.

        Raises:
            ConfigError: pools, layout and sizes do not fit each other, or the slabs do not fit into memory.
        """
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
        return cls.allocate(device_pools, host_pages)

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages device to host, layer by layer into each page's run of bytes."""
        if pool.page_bytes:
            payload = self._host[pool.name].payload
            offset = 0
            for layer in self._device[pool.name].layers:
                end = offset + layer.shape[1]
                _copy(layer, source, torch.from_numpy(payload[:, offset:end]), target)
                offset = end

    def load(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages host to device, each layer from its part of the page."""
        if pool.page_bytes:
            payload = self._host[pool.name].payload
            offset = 0
            for layer in self._device[pool.name].layers:
                end = offset + layer.shape[1]
                _copy(torch.from_numpy(payload[:, offset:end]), source, layer, target)
                offset = end

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy pages within the device, layer by layer."""
        if pool.page_bytes:
            for layer in self._device[pool.name].layers:
                _copy(layer, source, layer, target)

    def seal(self, pool: PoolSpec, slots: Slots, labels: Sequence[Label]) -> None:
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

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy nothing."""

    def load(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy nothing."""

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        """Copy nothing."""

    def seal(self, pool: PoolSpec, slots: Slots, labels: Sequence[Label]) -> None:
        """Seal nothing."""

    def buffers(self, pool: PoolSpec, slot: int) -> tuple[memoryview, ...]:
        """Return no buffer."""
        return ()

    def slabs(self) -> Mapping[str, memoryview]:
        """Return no slab."""
        return {}


def _copy(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows between two byte tensors; in memory run by run where runs are long, else by gather and scatter."""
    if len(source_slots) != len(target_slots):
        raise CopyError(f"{len(source_slots)} source slots for {len(target_slots)} target slots")
    if not len(source_slots):
        return
    if source.is_cuda or target.is_cuda:
        _copy_indexed(source, source_slots, target, target_slots)
        return
    from_rows: npt.NDArray[np.uint8] = source.numpy()
    to_rows: npt.NDArray[np.uint8] = target.numpy()
    breaks = np.flatnonzero((np.diff(source_slots) != 1) | (np.diff(target_slots) != 1)) + 1
    if from_rows.shape[1] * len(source_slots) < RUN_COPY_BYTES_MIN * (len(breaks) + 1):
        to_rows[target_slots] = from_rows[source_slots]
        return
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(source_slots)]
    for start, end in zip(starts, ends, strict=True):
        count = end - start
        from_start, to_start = int(source_slots[start]), int(target_slots[start])
        to_rows[to_start : to_start + count] = from_rows[from_start : from_start + count]


def _copy_indexed(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows between devices: gather where they lie, move once, scatter where they go; complete on return."""
    gather = torch.from_numpy(source_slots.astype(np.int64)).to(source.device)
    scatter = torch.from_numpy(target_slots.astype(np.int64)).to(target.device)
    target[scatter] = source[gather].to(target.device)
    if target.is_cuda:
        torch.cuda.synchronize(target.device)
