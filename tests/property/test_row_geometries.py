"""Rows of any geometry come and go as plain indexing copies them, on every kind of device and by every kind of copy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.gpu import devices
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Slots, Tier

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
ELEMENTS = (1, 3, 16, 24, 41, 128, 656, 8192)
POOL_SLOTS = (2, 7, 20, 400)
HISTORIES = 12 * len(POOL_SLOTS)


def strided(random: np.random.Generator, slots_count: int, device: torch.device) -> torch.Tensor:
    """Return a layer of a random type: alone, with padded rows, or as one of the layers of a page-first tensor."""
    dtype, elements = DTYPES[random.integers(len(DTYPES))], ELEMENTS[random.integers(len(ELEMENTS))]
    match int(random.integers(3)):
        case 0:
            return torch.zeros((slots_count, elements), dtype=dtype, device=device)
        case 1:
            return torch.zeros((slots_count, elements + 8), dtype=dtype, device=device)[:, :elements]
        case _:
            return torch.zeros((slots_count, 3, elements), dtype=dtype, device=device)[:, 1]


def chosen(random: np.random.Generator, count: int, slots_count: int) -> Slots:
    """Return so many slots: side by side in order, the same shuffled, or scattered over the whole pool."""
    start = int(random.integers(1, slots_count - count + 1))
    side_by_side = np.arange(start, start + count, dtype=np.int32)
    everywhere = np.arange(1, slots_count, dtype=np.int32)
    orders = (side_by_side, random.permutation(side_by_side), random.permutation(everywhere)[:count])
    return orders[random.integers(len(orders))]


@devices
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_rows_of_any_geometry_come_and_go_as_plain_indexing_copies_them(seed: int, device: torch.device) -> None:
    random = np.random.default_rng(seed)
    slots_count = POOL_SLOTS[seed % len(POOL_SLOTS)]
    layers = [strided(random, slots_count, device) for _ in range(random.integers(1, 4))]
    row_bytes = [layer.shape[1] * layer.element_size() for layer in layers]
    spec = PoolSpec("kv", sum(row_bytes))
    pool = DevicePool(spec, layers)
    memory = TieredMemory.allocate([pool], {"kv": slots_count + 3})
    payload = memory._host["kv"].payload
    filled = random.integers(0, 256, payload.shape, np.uint8)
    payload[:] = filled
    on_device = np.zeros((slots_count, spec.page_bytes), np.uint8)
    for _ in range(6):
        count = int(random.integers(0, slots_count))
        at, to = chosen(random, count, slots_count), chosen(random, count, slots_count + 4)
        match int(random.integers(3)):
            case 0:
                with memory.ordered(Tier.HOST):
                    memory.backup(spec, at, to)
                filled[to] = on_device[at]
            case 1:
                memory.load(spec, to, at)
                on_device[at] = filled[to]
            case _:
                source, target = np.split(chosen(random, count // 2 * 2, slots_count), 2)
                memory.duplicate(spec, source, target)
                on_device[target] = on_device[source]
        assert np.array_equal(payload, filled)
        for layer, (start, end) in zip(pool.layers, pairwise(pool.offsets), strict=True):
            assert np.array_equal(layer.cpu().numpy(), on_device[:, start:end])
    memory.close()
