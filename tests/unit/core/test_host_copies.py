"""Copies in host memory: whatever the order of slots and the length of rows, the bytes that plain indexing copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unified_cache.controller.copies import gpu as rows_module
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Slots

POOL_PAGES = 400
LAYERS = 2


class SelectedCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Elements of each selection that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: list[int] = []

    def __torch_dispatch__(
        self, called: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        selected = called(*arguments, **(options or {}))
        if called is torch.ops.aten.index_select.out:
            self.elements.append(selected.numel())
        return selected


@contextmanager
def selections() -> Iterator[list[int]]:
    with SelectedCounts() as counts:
        yield counts.elements


def pool_of(row_bytes: int) -> tuple[PoolSpec, list[torch.Tensor], TieredMemory]:
    """A pool of random bytes on the device, and its memory."""
    spec = PoolSpec("kv", row_bytes * LAYERS)
    random = torch.Generator().manual_seed(5)
    shape = (POOL_PAGES + 1, row_bytes)
    layers = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for _ in range(LAYERS)]
    return spec, layers, TieredMemory.allocate([DevicePool(spec, layers)], {"kv": POOL_PAGES})


def payloads(memory: TieredMemory, spec: PoolSpec, slots: Slots) -> list[bytes]:
    return [bytes(page[-spec.page_bytes :]) for (page,) in memory.buffers(spec, slots.tolist())]


def orders(count: int) -> dict[str, Slots]:
    """So many slots: in order, the same shuffled, and scattered over the whole pool."""
    random = np.random.default_rng(3)
    in_order = np.arange(7, 7 + count, dtype=np.int32)
    everywhere = np.arange(1, POOL_PAGES + 1, dtype=np.int32)
    return {
        "in order": in_order,
        "shuffled": random.permutation(in_order),
        "scattered": random.permutation(everywhere)[:count],
    }


@pytest.mark.parametrize("row_bytes", [40, 512, 8192])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 300])
@pytest.mark.parametrize("device_order", ["in order", "shuffled", "scattered"])
@pytest.mark.parametrize("host_order", ["in order", "shuffled", "scattered"])
def test_pages_come_back_from_host_memory_in_any_order_of_slots(
    row_bytes: int, count: int, device_order: str, host_order: str
) -> None:
    spec, layers, memory = pool_of(row_bytes)
    device, host = orders(count)[device_order], orders(count)[host_order]
    before = [layer.clone() for layer in layers]
    memory.backup(spec, device, host)
    expected = [b"".join(layer[slot].numpy().tobytes() for layer in before) for slot in device.tolist()]
    assert payloads(memory, spec, host) == expected
    for layer in layers:
        layer.zero_()
    memory.load(spec, host, device)
    named = np.zeros(POOL_PAGES + 1, np.bool_)
    named[device] = True
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[named], was[named])
        assert not layer[~named].any()


def test_rows_for_slots_in_a_row_are_selected_a_little_at_a_time() -> None:
    spec, _, memory = pool_of(8192)
    count = 300
    with selections() as elements:
        memory.backup(spec, orders(count)["scattered"], orders(count)["shuffled"])
    assert sum(elements) * rows_module.WIDE.itemsize == count * spec.page_bytes
    assert max(elements) <= rows_module.SELECTED_MAX


@pytest.mark.parametrize(
    ("row_bytes", "count", "device_order", "host_order"),
    [
        (8192, 63, "scattered", "in order"),
        (8192, 300, "scattered", "scattered"),
        (8200, 300, "scattered", "in order"),
        (8192, 300, "in order", "in order"),
    ],
    ids=["few", "slots that are not in a row", "rows of odd length", "in order at both ends"],
)
def test_other_rows_are_not_selected(row_bytes: int, count: int, device_order: str, host_order: str) -> None:
    spec, _, memory = pool_of(row_bytes)
    with selections() as elements:
        memory.backup(spec, orders(count)[device_order], orders(count)[host_order])
    assert not elements


def test_many_pages_are_duplicated_within_a_pool() -> None:
    spec, layers, memory = pool_of(512)
    source, target = np.arange(1, 151, dtype=np.int32)[::-1].copy(), np.arange(201, 351, dtype=np.int32)
    memory.duplicate(spec, source, target)
    for layer in layers:
        assert torch.equal(layer[201:351], layer[1:151].flip(0))
