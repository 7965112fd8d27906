"""Sealed pages in host memory, which the benchmarks of stores move."""

import hashlib

import numpy as np
import torch

from unified_cache.components import Full
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import PageIO, Store


def announced_pages(storage: Store, page_kib: int, pages_count: int) -> list[PageIO]:
    """Seal random payloads in a slab, announce it to a store, and return its pages."""
    spec = PoolSpec("kv", page_kib << 10)
    layout = ModelLayout(64, (Full((spec,)),))
    identity = Identity("bench")
    layer = torch.from_numpy(np.random.default_rng(7).integers(0, 256, (pages_count + 1, page_kib << 10), np.uint8))
    memory = TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: pages_count})
    slots = np.arange(1, pages_count + 1, dtype=np.int32)
    digest = identity.digest(layout)
    labels = [Label(digest, hashlib.sha256(b"%d" % slot).digest(), spec.name) for slot in slots.tolist()]
    memory.backup(spec, slots, slots)
    memory.seal(spec, slots, labels)
    storage.register(manifest_of(identity, layout), memory.slabs())
    return list(map(PageIO, labels, memory.buffers(spec, slots.tolist())))
