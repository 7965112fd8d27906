"""Copies between a device and host memory against the copy engine, and what a forward's metadata costs on a device.

On a GPU the reference is one ``cudaMemcpyAsync`` of the same bytes between pinned and device memory: no copy of pages
can be faster than that. Beside it stands a call for each row of a page, straight from and into the pinned slab. Ratios
are ours / reference of rates. On the CPU the same code runs, with plain memory on both sides, and shows that it runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.check_gpu import CHANGED_PAGES, FULL_SIZES, GpuMap, GpuSizes
from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Slots, Tier
from unified_cache.forward import init_metadata

SHAPES = ((64, 2), (1024, 2), (4096, 2), (8192, 32))
"""KiB and layers of a page; the last is one of 64 tokens with 8 heads of 128 in bfloat16, K and V."""

PRODUCTS = 8
PRODUCT_WIDTH = {"cuda": 8192, "cpu": 256}
"""Side of the matrices of a forward that goes on beside copies, by kind of device."""


@dataclass(frozen=True, slots=True)
class BenchedDevice:
    """A device that holds the tensors, with the wait for what it was given."""

    device: torch.device
    settle: Callable[[], None]
    """Return when the device has done all that it was given."""

    @classmethod
    def of(cls, device: torch.device) -> "BenchedDevice":
        """Wait for a CUDA device's work; on the CPU nothing is left when a call returns."""
        return cls(device, torch.cuda.synchronize if device.type == "cuda" else _nothing)

    def settled(self, call: Callable[[], object]) -> Subject:
        """Make a subject of a call that ends when the device has done its part."""

        def settling() -> None:
            call()
            self.settle()

        subject = timed(settling)

        def begun_idle() -> int:
            self.settle()
            return subject()

        return begun_idle

    def host(self, *shape: int) -> torch.Tensor:
        """Return bytes in host memory, pinned for a GPU."""
        return torch.ones(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def _nothing() -> None:
    """Return at once."""


def device_figures(plan: BenchmarkPlan, device: torch.device) -> Iterator[Figure]:
    """Measure copies, then copies beside a forward, then maps and buffers."""
    bench = BenchedDevice.of(device)
    for page_kib, layers_count in SHAPES:
        yield from _copy_figures(plan, bench, page_kib, layers_count)
    yield from _beside_figures(plan, bench)
    yield from _metadata_figures(plan, bench)


@dataclass(frozen=True, slots=True)
class _DevicePages:
    """A pool of pages on a device, with as many in host memory."""

    spec: PoolSpec
    memory: TieredMemory
    pages: int

    @classmethod
    def of(cls, plan: BenchmarkPlan, bench: BenchedDevice, page_kib: int, layers_count: int) -> "_DevicePages":
        page_bytes = page_kib << 10
        pages = max(plan.effort.copy_bytes // page_bytes, 2)
        spec = PoolSpec("kv", page_bytes)
        shape = (pages + 1, page_bytes // layers_count)
        layers = [torch.ones(shape, dtype=torch.uint8, device=bench.device) for _ in range(layers_count)]
        return cls(spec, TieredMemory.allocate([DevicePool(spec, layers)], {spec.name: pages}), pages)

    def backup(self, device_slots: Slots, host_slots: Slots) -> None:
        with self.memory.ordered(Tier.HOST):
            self.memory.backup(self.spec, device_slots, host_slots)


def _copy_figures(plan: BenchmarkPlan, bench: BenchedDevice, page_kib: int, layers_count: int) -> Iterator[Figure]:
    """Move pages in order and in disorder, in turns with the references."""
    held = _DevicePages.of(plan, bench, page_kib, layers_count)
    total = held.pages * held.spec.page_bytes
    row_bytes = held.spec.page_bytes // layers_count
    host, device = bench.host(total), torch.ones(total, dtype=torch.uint8, device=bench.device)
    host_rows, device_rows = host.view(-1, row_bytes), device.view(-1, row_bytes)
    in_order = np.arange(1, held.pages + 1, dtype=np.int32)
    random = np.random.default_rng(7)
    row_order = random.permutation(len(host_rows)).tolist()

    def in_rows(target: torch.Tensor, source: torch.Tensor) -> None:
        for number, place in enumerate(row_order):
            target[place].copy_(source[number], non_blocking=True)

    shuffled = (random.permutation(in_order), random.permutation(in_order))
    for order, (at, to) in (("contiguous", (in_order, in_order)), ("shuffled", shuffled)):
        calls: list[Callable[[], object]] = [
            partial(held.backup, at, to),
            partial(host.copy_, device, non_blocking=True),
            partial(in_rows, host_rows, device_rows),
            partial(held.memory.load, held.spec, to, at),
            partial(device.copy_, host, non_blocking=True),
            partial(in_rows, device_rows, host_rows),
        ]
        taken = interleaved([bench.settled(call) for call in calls], plan.effort.copy_rounds)
        rates = [Spread.of([total / ns for ns in values]) for values in taken]
        for direction, (ours, whole, rows) in (("D->H", rates[:3]), ("H->D", rates[3:])):
            against = tuple(
                Comparison(name, rate.median, ours.median / rate.median)
                for name, rate in (("one copy of all", whole), ("a copy for each row", rows))
            )
            yield Figure(
                "copies on the device",
                f"{direction}, {held.pages} pages of {page_kib} KiB in {layers_count} layers, {order}",
                "GB/s",
                ours,
                against,
            )
    within = bench.settled(lambda: held.memory.duplicate(held.spec, shuffled[0][::2], shuffled[0][1::2]))
    (taken_within,) = interleaved([within], plan.effort.copy_rounds)
    rate = Spread.of([len(shuffled[0][1::2]) * held.spec.page_bytes / ns for ns in taken_within])
    name = f"duplicate, pages of {page_kib} KiB in {layers_count} layers, shuffled"
    yield Figure("copies on the device", name, "GB/s", rate)


def _beside_figures(plan: BenchmarkPlan, bench: BenchedDevice) -> Iterator[Figure]:
    """Compute while pages come and go on the stream beside, and alone."""
    held = _DevicePages.of(plan, bench, *SHAPES[-1])
    slots = np.random.default_rng(7).permutation(np.arange(1, held.pages + 1, dtype=np.int32))
    width = PRODUCT_WIDTH[bench.device.type]
    matrix = torch.ones((width, width), dtype=torch.bfloat16, device=bench.device)
    result = torch.empty_like(matrix)

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=result)

    def load() -> None:
        held.memory.load(held.spec, slots, slots)

    def both() -> None:
        ordered = held.memory.ordered(Tier.DEVICE)  # after nothing that is given from here on
        compute()
        with ordered:
            for layer in range(held.memory.layers_count(held.spec)):
                held.memory.load_layer(held.spec, layer, slots, slots)

    taken = interleaved([bench.settled(call) for call in (compute, load, both)], plan.effort.copy_rounds)
    alone, loading, together = (Spread.of([ns / 1e6 for ns in values]) for values in taken)
    against = tuple(
        Comparison(name, reference, together.median / reference)
        for name, reference in (
            ("the longer of the two alone", max(alone.median, loading.median)),
            ("one after the other", alone.median + loading.median),
        )
    )
    products = f"{PRODUCTS} products of {width} x {width}"
    yield Figure("copies on the device", products, "ms", alone)
    yield Figure("copies on the device", f"{products}, and a load beside them", "ms", together, against)


def _metadata_figures(plan: BenchmarkPlan, bench: BenchedDevice) -> Iterator[Figure]:
    """Bring the map up to date, fill the buffers of a graph, and build what a forward without a graph reads."""
    held = GpuMap.of(GpuSizes(bench.device))

    def after_a_load() -> None:
        held.change()
        held.translation.refresh()

    def refill() -> None:
        assert held.buffers.refill(held.batch)

    subjects: dict[str, Callable[[], object]] = {
        f"page map after a load of {CHANGED_PAGES} pages": after_a_load,
        "buffers of a graph, refilled": refill,
        "metadata of a forward without a graph": partial(init_metadata, held.batch, held.translation),
    }
    times = interleaved([bench.settled(call) for call in subjects.values()], plan.effort.match_rounds, warm=1)
    note = f"{FULL_SIZES.requests} requests of {FULL_SIZES.request_pages} pages, until the device has done it"
    for name, values in zip(subjects, times, strict=True):
        yield Figure("metadata on the device", name, "us", Spread.of([ns / 1e3 for ns in values]), note=note)
