"""Copies in host memory: whatever the order of slots and the length of rows, the bytes that plain indexing copies."""

import numpy as np
import pytest
import torch

from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Slots

POOL_PAGES = 400
LAYERS = 2


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
@pytest.mark.parametrize("count", [0, 1, 64, 300])
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


def test_many_pages_are_duplicated_within_a_pool() -> None:
    spec, layers, memory = pool_of(512)
    source, target = np.arange(1, 151, dtype=np.int32)[::-1].copy(), np.arange(201, 351, dtype=np.int32)
    memory.duplicate(spec, source, target)
    for layer in layers:
        assert torch.equal(layer[201:351], layer[1:151].flip(0))
