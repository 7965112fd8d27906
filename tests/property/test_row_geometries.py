"""Rows of any geometry come and go as plain indexing copies them, on every kind of device and by every kind of copy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.gpu import devices
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Tier

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
ELEMENTS = (1, 3, 16, 24, 41, 128, 656)
HISTORIES = 12


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


@devices
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_rows_of_any_geometry_come_and_go_as_plain_indexing_copies_them(seed: int, device: torch.device) -> None:
    random = np.random.default_rng(seed)
    slots_count = int(random.integers(2, 20))
    layers = [strided(random, slots_count, device) for _ in range(random.integers(1, 4))]
    row_bytes = [layer.shape[1] * layer.element_size() for layer in layers]
    spec = PoolSpec("kv", sum(row_bytes))
    pool = DevicePool(spec, layers)
    memory = TieredMemory.allocate([pool], {"kv": slots_count + 3})
    payload = memory._host["kv"].payload
    filled = random.integers(0, 256, payload.shape, np.uint8)
    payload[:] = filled
    on_device = np.zeros((slots_count, spec.page_bytes), np.uint8)
    for _ in range(4):
        count = int(random.integers(0, slots_count))
        at = random.permutation(np.arange(1, slots_count, dtype=np.int32))[:count]
        to = random.permutation(np.arange(1, slots_count + 4, dtype=np.int32))[:count]
        if random.integers(2):
            with memory.ordered(Tier.HOST):
                memory.backup(spec, at, to)
            filled[to] = on_device[at]
        else:
            memory.load(spec, to, at)
            on_device[at] = filled[to]
        assert np.array_equal(payload, filled)
        for layer, (start, end) in zip(pool.layers, pairwise(pool.offsets), strict=True):
            assert np.array_equal(layer.cpu().numpy(), on_device[:, start:end])
    memory.close()
