"""Page memory whose pages hold one number each: what they are. Copies are captured, to be made later, one by one."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tests.sim.cells import PAYLOAD_BYTES, Cell
from unified_cache.controller.copies.gpu import AT_ONCE, Copied, PageDistance
from unified_cache.controller.memory import PageMemory
from unified_cache.core.page import PageKey
from unified_cache.core.pool import PoolSpec, Slots
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers

Contents = npt.NDArray[np.int64]
"""What pages are: ``key number * POOLS_MAX + pool number``."""

Rows = npt.NDArray[np.int64]
"""Where pages of a pool lie, in an array that holds all pools of a tier."""

POOLS_MAX = 16
POISON = -0x2424242424242425
"""What stands in a slot that nobody has written."""


class KeyNumbers:
    """Numbers for page keys, in the order in which they were first seen."""

    __slots__ = ("_numbers", "keys")

    def __init__(self) -> None:
        self._numbers: dict[PageKey, int] = {}
        self.keys: list[PageKey] = []

    def of(self, keys: Sequence[PageKey]) -> Contents:
        """Return a number for each key; new ones are numbered."""
        numbers = self._numbers
        for key in keys:
            if key not in numbers:
                numbers[key] = len(self.keys)
                self.keys.append(key)
        return np.array([numbers[key] for key in keys], np.int64)


class ContentMemory(PageMemory):
    """The twin of ``TieredMemory`` in which a page is a number; on the host it is sealed as every page is.

    All pools of a tier lie in one array, each from its own row on.
    """

    __slots__ = ("captured", "device", "device_rows", "host", "host_rows", "numbers", "slab")

    def __init__(self, cell: Cell) -> None:
        pools = [
            (pool, on_device + 1, on_host + 1)
            for component, on_device, on_host in zip(
                cell.layout.components, cell.device_pages, cell.host_pages, strict=True
            )
            for pool in component.pools
            if pool.page_bytes
        ]
        device_ends = np.cumsum([count for _, count, _ in pools]).tolist()
        host_ends = np.cumsum([count for _, _, count in pools]).tolist()
        names = [pool.name for pool, _, _ in pools]
        self.numbers = {name: number for number, name in enumerate(names)}
        self.device_rows = dict(zip(names, [0, *device_ends], strict=False))
        self.host_rows = dict(zip(names, [0, *host_ends], strict=False))
        """By pool: the row of its slot 0."""
        self.device: Contents = np.full(device_ends[-1], POISON)
        self.slab: npt.NDArray[np.uint8] = np.zeros((host_ends[-1], HEADER_BYTES + PAYLOAD_BYTES), np.uint8)
        self.host: Contents = self.slab[:, HEADER_BYTES:].view(np.int64)[:, 0]
        """The payloads of ``slab``, a view."""
        self.host[:] = POISON
        self.captured: list[Callable[[], None]] | None = None
        """Copies of the job that runs now, not made yet; None while no job does."""

    def contents(self, pool: PoolSpec, numbers: Contents) -> Contents:
        """Return what the pages of these keys hold in a pool."""
        return numbers * POOLS_MAX + self.numbers[pool.name]

    def on_device(self, pool: PoolSpec, slots: Slots) -> Rows:
        """Return where pages lie in ``device``."""
        return slots + np.int64(self.device_rows[pool.name])

    def on_host(self, pool: PoolSpec, slots: Slots) -> Rows:
        """Return where pages lie in ``host``."""
        return slots + np.int64(self.host_rows[pool.name])

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        if pool.page_bytes:
            self._capture(self.device, self.on_device(pool, source), self.host, self.on_host(pool, target))

    def layers_count(self, pool: PoolSpec) -> int:
        return int(pool.page_bytes > 0)

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        self._capture(self.host, self.on_host(pool, source), self.device, self.on_device(pool, target))
        return AT_ONCE

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        if pool.page_bytes:
            self.device[self.on_device(pool, target)] = self.device[self.on_device(pool, source)]

    def compare(self, pool: PoolSpec, left: int, right: int) -> PageDistance:
        pair = self.device[[self.device_rows[pool.name] + slot for slot in (left, right)]]
        return PageDistance(torch.tensor([0.0 if pair[0] == pair[1] else math.inf]), None)

    def _capture(self, source: Contents, source_rows: Rows, target: Contents, target_rows: Rows) -> None:
        def copy() -> None:
            target[target_rows] = source[source_rows]

        assert self.captured is not None, "bytes are moved outside a job"
        self.captured.append(copy)

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        if not pool.page_bytes:
            return

        def write() -> None:
            for slot, label in zip(slots.tolist(), labels, strict=True):
                seal_buffers((self.page(pool, slot),), label)

        assert self.captured is not None, "bytes are moved outside a job"
        self.captured.append(write)

    def page(self, pool: PoolSpec, slot: int) -> memoryview:
        """Return one sealed host page."""
        page: memoryview = self.slab[self.host_rows[pool.name] + slot].data
        return page

    def buffers(self, pool: PoolSpec, slots: Sequence[int]) -> list[tuple[memoryview, ...]]:
        return [(self.page(pool, slot),) for slot in slots]

    def slabs(self) -> Mapping[str, memoryview]:
        return {name: self.slab.reshape(-1).data for name in self.numbers}
