"""Copies between device and host memory, against a plain memcpy of the same bytes. Ratios are ours / memcpy."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Slots
from unified_cache.core.seal import Label

PAGE_KIB = (16, 64, 1024, 4096)
LAYERS_COUNT = 2


def copies_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Back up and load pages in two layers, slots in order and in disorder; seal them."""
    for page_kib in PAGE_KIB:
        yield from _page_figures(plan, page_kib)


def _page_figures(plan: BenchmarkPlan, page_kib: int) -> Iterator[Figure]:
    page_bytes = page_kib << 10
    pages = plan.effort.copy_bytes // page_bytes
    spec = PoolSpec("kv", page_bytes)
    shape = (pages + 1, page_bytes // LAYERS_COUNT)
    device = DevicePool(spec, [torch.full(shape, layer + 1, dtype=torch.uint8) for layer in range(LAYERS_COUNT)])
    memory = TieredMemory.allocate([device], {spec.name: pages})
    total = pages * page_bytes
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    in_order = np.arange(1, pages + 1, dtype=np.int32)
    random = np.random.default_rng(7)
    disorder = (random.permutation(in_order), random.permutation(in_order))
    for order, (device_slots, host_slots) in (("contiguous", (in_order, in_order)), ("shuffled", disorder)):

        def backup(device_slots: Slots = device_slots, host_slots: Slots = host_slots) -> None:
            memory.backup(spec, device_slots, host_slots)

        def load(device_slots: Slots = device_slots, host_slots: Slots = host_slots) -> None:
            memory.load(spec, host_slots, device_slots)

        taken = interleaved(
            [timed(backup), timed(lambda: np.copyto(target, source)), timed(load)], plan.effort.copy_rounds
        )
        d_to_h, plain, h_to_d = (Spread.of([total / ns for ns in values]) for values in taken)
        for direction, rate in (("D->H", d_to_h), ("H->D", h_to_d)):
            against = Comparison("memcpy", plain.median, rate.median / plain.median)
            name = f"{direction}, pages of {_size(page_kib)}, {order}"
            yield Figure("copies on the CPU", name, "GB/s", rate, (against,))
    labels = [Label(bytes(32), n.to_bytes(32, "little"), spec.name) for n in range(pages)]
    (sealing,) = interleaved([timed(lambda: memory.seal(spec, in_order, labels))], plan.effort.copy_rounds)
    rate = Spread.of([total / ns for ns in sealing])
    note = "header and xxh3 of the payload, once per page after D->H"
    yield Figure("copies on the CPU", f"seal, pages of {_size(page_kib)}", "GB/s", rate, note=note)


def _size(kib: int) -> str:
    return f"{kib >> 10} MiB" if kib >= 1024 else f"{kib} KiB"
