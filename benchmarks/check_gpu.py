"""Bounds that a GPU has to keep: bytes per second, waits, memory, and right bytes while the device is busy.

Each check returns what it found and whether that is within its bound. ``python -m benchmarks.gpu`` has pytest run all
of them on a GPU, and the tests run the same code with small sizes on a device that is late, where figures mean nothing.
Rates are held against one ``cudaMemcpyAsync`` between pinned and device memory.
"""

import gc
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.machine import ROOT, calibrate
from tests.support.gpu import needs_gpu
from unified_cache.controller.copies.gpu import PinnedBytes, gpu_copies
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.errors import CopyError
from unified_cache.core.pool import PoolSpec, Slots, Tier
from unified_cache.core.slots import PairedAllocator, SlotAllocator
from unified_cache.forward import (
    ForwardBatch,
    ForwardMode,
    GraphBucket,
    HybridGraphBuffers,
    SwaTranslation,
    init_metadata,
)

SANITIZER = "compute-sanitizer"
SANITIZED_S = 200

CHANGED_PAGES = 64
"""Pages that change hands between two forwards at most: a load of 4,096 tokens."""
CYCLES_PER_MS = 1_700_000
"""Of the clock of an H100."""
KERNEL_SHARES = {1: 0.6, 16: 0.8, 64: 0.85}
"""By tokens of a page: the least share of the bus that copies by a kernel reach with many tokens."""
FEW_TOKENS_SHARE = 0.4
STAGED_SHARE = 0.08
"""The least share where there is no Triton and the processor moves every byte."""


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """Sizes of the checks; tests take small ones."""

    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    layers_count: int = 64
    token_bytes: int = 2048
    """Of one layer: 8 heads of 128 in bfloat16."""
    tokens: tuple[int, int] = (512, 8192)
    limit_bytes: int = 128 << 20
    busy_ms: int = 30
    requests: int = 256
    request_pages: int = 128
    width: int = 8192
    """Of matrices that a forward multiplies beside a copy."""
    products: int = 24
    slab_bytes: int = 5 << 30
    pinned_bytes: int = 64 << 30
    rounds: int = 5

    def busy(self) -> None:
        """Give the current stream ``busy_ms`` of work."""
        torch.cuda._sleep(self.busy_ms * CYCLES_PER_MS)  # type: ignore[no-untyped-call]  # torch says no types

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call until the device has done all it was given."""
        taken = []
        for _ in range(self.rounds + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])


FULL_SIZES = GpuSizes()


@dataclass(frozen=True, slots=True)
class Found:
    """Figure of a check, and its bound."""

    figure: str
    is_kept: bool
    """Whether the figure is within the bound."""


@dataclass(frozen=True, slots=True)
class GpuPages:
    """A pool on a GPU and in host memory, with slots in disorder."""

    spec: PoolSpec
    layers: list[torch.Tensor]
    memory: TieredMemory
    device_slots: Slots
    host_slots: Slots

    @classmethod
    def of(cls, sizes: GpuSizes, pages: int, row_bytes: int, layers_count: int = 1) -> "GpuPages":
        """Have ``pages`` pages copied, scattered over as many more."""
        spec = PoolSpec("kv", layers_count * row_bytes)
        shape = (2 * pages + 1, row_bytes)
        layers = [torch.zeros(shape, dtype=torch.uint8, device=sizes.device) for _ in range(layers_count)]
        memory = TieredMemory.allocate([DevicePool(spec, layers)], {spec.name: 2 * pages})
        random = np.random.default_rng(11)
        at, to = (random.permutation(np.arange(1, 2 * pages + 1, dtype=np.int32))[:pages] for _ in range(2))
        torch.cuda.synchronize()
        return cls(spec, layers, memory, at, to)

    @property
    def total_bytes(self) -> int:
        """Bytes that one copy moves."""
        return len(self.device_slots) * self.spec.page_bytes

    def backup(self) -> None:
        """Copy the pages to the host."""
        with self.memory.ordered(Tier.HOST):
            self.memory.backup(self.spec, self.device_slots, self.host_slots)

    def load(self) -> None:
        """Copy the pages to the device."""
        self.memory.load(self.spec, self.host_slots, self.device_slots)

    def fill(self, value: int) -> None:
        """Have every page of the device hold one value."""
        for layer in self.layers:
            layer.fill_(value)

    def on_host(self, value: int) -> bool:
        """Tell whether the pages on the host hold nothing else."""
        pages = (page for (page,) in self.memory.buffers(self.spec, self.host_slots.tolist()))
        return all(bytes(page[-self.spec.page_bytes :]) == bytes([value]) * self.spec.page_bytes for page in pages)


def _together(*calls: Callable[[], object]) -> None:
    """Run calls at once, each but the first on a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls[1:]]
    for thread in threads:
        thread.start()
    calls[0]()
    for thread in threads:
        thread.join()


# ---- bytes per second ----------------------------------------------------------------------------------------------


def _plain_copies(sizes: GpuSizes) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return one copy of all bytes to the host, and one to the device, between memory of their own."""
    hosts = [torch.empty(sizes.limit_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(sizes.limit_bytes, dtype=torch.uint8, device=sizes.device) for _ in range(2)]
    down, up = (hosts[0], devices[0]), (devices[1], hosts[1])
    return partial(down[0].copy_, down[1], non_blocking=True), partial(up[0].copy_, up[1], non_blocking=True)


def rates(sizes: GpuSizes) -> Found:
    """Backups and loads of pages of 1, 16 and 64 tokens in 64 layers reach their share of one copy of all (A9)."""
    down, up = (sizes.limit_bytes / sizes.seconds(copy) / 1e9 for copy in _plain_copies(sizes))
    lines, is_kept = [f"one copy of all: D->H {down:.1f}, H->D {up:.1f} GB/s"], True
    for page_tokens, share in KERNEL_SHARES.items():
        for tokens in sizes.tokens:
            held = GpuPages.of(sizes, tokens // page_tokens, page_tokens * sizes.token_bytes, sizes.layers_count)
            found = [held.total_bytes / sizes.seconds(call) / 1e9 for call in (held.backup, held.load)]
            least = FEW_TOKENS_SHARE if tokens == sizes.tokens[0] else share
            least = least if gpu_copies().reaches_host else STAGED_SHARE
            is_kept = is_kept and found[0] >= least * down and found[1] >= least * up
            shares = f"D->H {found[0]:.1f} ({found[0] / down:.0%}), H->D {found[1]:.1f} ({found[1] / up:.0%})"
            lines.append(f"{tokens} tokens in pages of {page_tokens}: {shares}, least {least:.0%}")
            held.memory.close()
    return Found("; ".join(lines), is_kept)


def both_directions(sizes: GpuSizes) -> Found:
    """A backup and a load at once take 1.25 of the longer alone, or 1.1 of what plain copies do, at most (A11)."""
    plain = _plain_copies(sizes)
    alone_s = max(map(sizes.seconds, plain))
    streams = [torch.cuda.Stream(sizes.device) for _ in plain]  # type: ignore[no-untyped-call]  # torch says no types

    def plain_together() -> None:
        for stream, copy in zip(streams, plain, strict=True):
            with torch.cuda.stream(stream):
                copy()

    plain_ratio = sizes.seconds(plain_together) / alone_s
    held = GpuPages.of(sizes, sizes.tokens[1] // 64, 64 * sizes.token_bytes, sizes.layers_count)
    others = np.setdiff1d(np.arange(1, 2 * len(held.device_slots) + 1, dtype=np.int32), held.device_slots)
    load = partial(held.memory.load, held.spec, others, others)
    alone_s = max(sizes.seconds(held.backup), sizes.seconds(load))
    ratio = sizes.seconds(lambda: _together(held.backup, load)) / alone_s
    figure = f"{ratio:.2f} of the longer alone, plain copies {plain_ratio:.2f}"
    return Found(figure, ratio <= max(1.25, 1.1 * plain_ratio))


def overlap(sizes: GpuSizes) -> Found:
    """Products beside a copy take no more than 1.1 of those alone, and four fifths of the shorter is hidden (A12)."""
    held = GpuPages.of(sizes, sizes.tokens[1] // 64, 64 * sizes.token_bytes, sizes.layers_count)
    matrix = torch.ones((sizes.width, sizes.width), dtype=torch.bfloat16, device=sizes.device)
    computed_s: list[float] = []

    def compute() -> None:
        began = time.perf_counter()
        for _ in range(sizes.products):
            torch.matmul(matrix, matrix)
        torch.cuda.current_stream(sizes.device).synchronize()
        computed_s.append(time.perf_counter() - began)

    def load(ordered: AbstractContextManager[None]) -> None:
        with ordered:
            for layer in range(sizes.layers_count):
                held.memory.load_layer(held.spec, layer, held.host_slots, held.device_slots)

    def backup(ordered: AbstractContextManager[None]) -> None:
        with ordered:
            held.memory.backup(held.spec, held.device_slots, held.host_slots)

    def single(copy: Callable[[AbstractContextManager[None]], None], target: Tier) -> None:
        copy(held.memory.ordered(target))

    def both(copy: Callable[[AbstractContextManager[None]], None], target: Tier) -> None:
        _together(compute, partial(copy, held.memory.ordered(target)))  # after nothing that is computed from here on

    alone_s = sizes.seconds(compute)
    lines, is_kept = [], True
    for name, copy, target in (("load", load, Tier.DEVICE), ("backup", backup, Tier.HOST)):
        copy_s = sizes.seconds(partial(single, copy, target))
        computed_s.clear()
        together_s = sizes.seconds(partial(both, copy, target))
        slowed, hidden = median(computed_s) / alone_s, (alone_s + copy_s - together_s) / min(alone_s, copy_s)
        is_kept = is_kept and hidden >= 0.8 and slowed <= 1.1
        lines.append(f"{name}: {hidden:.0%} hidden, products {slowed:.2f} of alone")
    return Found("; ".join(lines), is_kept)


# ---- the owner's thread --------------------------------------------------------------------------------------------


def fork_beside_a_forward(sizes: GpuSizes) -> Found:
    """A fork of all layers returns in a millisecond while a forward is under way (A13)."""
    held = GpuPages.of(sizes, 32, 8 * sizes.token_bytes, sizes.layers_count)
    slots = np.arange(1, 33, dtype=np.int32)
    held.memory.duplicate(held.spec, slots, slots + 32)
    torch.cuda.synchronize()
    sizes.busy()
    began = time.perf_counter()
    held.memory.duplicate(held.spec, slots, slots + 32)
    taken_ms = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    return Found(f"{taken_ms:.2f} ms", taken_ms < 1)


@dataclass(frozen=True, slots=True)
class GpuMap:
    """A page map, its translation, the buffers of a graph, and a batch for them."""

    paired: PairedAllocator
    full: Slots
    peers: Slots
    translation: SwaTranslation
    buffers: HybridGraphBuffers
    batch: ForwardBatch

    @classmethod
    def of(cls, sizes: GpuSizes) -> "GpuMap":
        """Map as many pages as the batch has."""
        pages = sizes.requests * sizes.request_pages
        paired = PairedAllocator(SlotAllocator(pages), SlotAllocator(pages))
        full, peers = paired.full.allocate(pages), paired.peer.allocate(pages)
        assert full is not None
        assert peers is not None
        paired.map.bind(full, peers)
        translation = SwaTranslation.of(paired, 64, sizes.device)
        buffers = HybridGraphBuffers(GraphBucket.decode(sizes.requests, sizes.request_pages), translation)
        table = torch.from_numpy(full.reshape(sizes.requests, sizes.request_pages).copy()).to(sizes.device)
        lens = torch.full((sizes.requests,), sizes.request_pages * 64, dtype=torch.int32, device=sizes.device)
        locs = table[:, -1].to(torch.int64) * 64
        batch = ForwardBatch(ForwardMode.DECODE, locs, lens, table, (1,) * sizes.requests)
        return cls(paired, full, peers, translation, buffers, batch)

    def change(self) -> None:
        """Have pages change hands."""
        self.paired.map.bind(self.full[:CHANGED_PAGES], self.peers[:CHANGED_PAGES])


def refill_before_a_replay(sizes: GpuSizes) -> Found:
    """A changed map and a graph's buffers take 150 us of the reference host, 250 us until the device has them (A14)."""
    held = GpuMap.of(sizes)
    host_us, both_us = [], []
    for _ in range(20 * sizes.rounds):
        held.change()
        torch.cuda.synchronize()
        began = time.perf_counter()
        held.buffers.refill(held.batch)
        host_us.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
        both_us.append((time.perf_counter() - began) * 1e6)
    host, both, slowness = median(host_us), median(both_us), max(calibrate(1).scale, 1.0)
    figure = f"{host:.0f} us of the host, {both:.0f} us in all, on a host {slowness:.2f} x slower"
    return Found(figure, host < 150 * slowness and both < 250 * slowness)


def waits_of_the_owner(sizes: GpuSizes) -> Found:
    """Nothing on the owner's thread waits for the device (A19)."""
    pages, maps = GpuPages.of(sizes, 32, sizes.token_bytes, 4), GpuMap.of(sizes)
    slots = np.arange(1, 33, dtype=np.int32)
    calls: dict[str, Callable[[], object]] = {
        "ordered": partial(pages.memory.ordered, Tier.HOST),
        "fork": partial(pages.memory.duplicate, pages.spec, slots, slots + 32),
        "refresh": maps.translation.refresh,
        "refill": partial(maps.buffers.refill, maps.batch),
        "metadata": partial(init_metadata, maps.batch, maps.translation),
    }
    waiting = []
    for name, call in calls.items():
        maps.change()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            waiting.append(name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Found(f"waiting: {', '.join(waiting) or 'none'}", not waiting)


def operations_of_a_load(sizes: GpuSizes) -> Found:
    """A load of 128 pages is one operation a layer at most, and one for their slots (A20)."""
    held = GpuPages.of(sizes, 128, 16 * sizes.token_bytes, sizes.layers_count)
    held.load()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        held.load()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
    most = (1 if gpu_copies().reaches_host else 2) * sizes.layers_count + 1
    return Found(f"{len(names)} operations, at most {most}", 0 < len(names) <= most)


# ---- memory --------------------------------------------------------------------------------------------------------


def _available_bytes() -> int:
    """Return the memory that this machine has left; what a driver pins is no process's own."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10


def pinned_memory(sizes: GpuSizes) -> Found:
    """A slab takes 1.02 of its size, and none of it after close (A15)."""
    torch.empty(1, device=sizes.device)
    before = _available_bytes()
    pinned = PinnedBytes.allocate(sizes.slab_bytes)
    taken = (before - _available_bytes()) / sizes.slab_bytes
    pinned.close()
    del pinned
    gc.collect()
    left = (before - _available_bytes()) / sizes.slab_bytes
    return Found(f"{taken:.3f} of its size, {left:.3f} after close", 0.9 < taken <= 1.03 and left < 0.05)


def time_to_pin(sizes: GpuSizes) -> Found:
    """64 GiB, or half of what the machine has left, in two slabs, are pinned in half a second a GiB (A16)."""
    size = min(sizes.pinned_bytes, _available_bytes() // 2) // 2
    began = time.perf_counter()
    slabs = [PinnedBytes.allocate(size) for _ in range(2)]
    taken_s = time.perf_counter() - began
    for slab in slabs:
        slab.close()
    per_gib_s = taken_s / (2 * size / (1 << 30))
    return Found(f"{2 * size >> 30} GiB in {taken_s:.1f} s", per_gib_s <= 30 / 64)


def full_device(sizes: GpuSizes) -> Found:
    """With 16 MiB of the device left, copies are made or fail as such, and the next ones are right (A17)."""
    held = GpuPages.of(sizes, 2048, 32 * sizes.token_bytes)
    held.fill(3)
    torch.cuda.empty_cache()
    rest = torch.cuda.mem_get_info()[0] - (16 << 20)
    filling = torch.empty(max(rest, 1), dtype=torch.uint8, device=sizes.device)
    outcomes = []
    for call in (held.backup, held.load):
        try:
            call()
            outcomes.append("made")
        except (CopyError, torch.cuda.OutOfMemoryError) as error:
            outcomes.append(type(error).__name__)
    del filling
    torch.cuda.empty_cache()
    held.fill(4)
    held.backup()
    return Found(f"{', '.join(outcomes)}; then right", held.on_host(4))


# ---- right bytes ---------------------------------------------------------------------------------------------------


def layers_on_another_thread(sizes: GpuSizes) -> Found:
    """A thread that waits for each layer reads it whole, while the copies are held up (A7, A8)."""
    held = GpuPages.of(sizes, 64, 4 * sizes.token_bytes, 8)
    for number, layer in enumerate(held.layers):
        layer.fill_(number + 1)
    held.backup()
    held.fill(0)
    seen: list[torch.Tensor] = []
    with held.memory.ordered(Tier.DEVICE):
        sizes.busy()
        ends = [held.memory.load_layer(held.spec, layer, held.host_slots, held.device_slots) for layer in range(8)]

        def read() -> None:
            for end, layer in zip(ends, held.layers, strict=True):
                end.wait()
                seen.append(layer.clone())

        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
    torch.cuda.synchronize()
    at = torch.from_numpy(held.device_slots.astype(np.int64))
    wrong = [number for number, layer in enumerate(seen, 1) if not bool((layer.cpu()[at] == number).all())]
    return Found(f"{len(seen)} layers, {len(wrong)} wrong", len(seen) == 8 and not wrong)


def captures_beside_backups(sizes: GpuSizes) -> Found:
    """Graphs are captured, in thread_local mode, while backups go on in a worker (A18)."""
    held = GpuPages.of(sizes, 512, 8 * sizes.token_bytes)
    held.fill(7)
    torch.cuda.synchronize()
    ended = threading.Event()

    def back_up() -> None:
        while not ended.is_set():
            held.backup()

    right = 0
    worker = threading.Thread(target=back_up)
    worker.start()
    try:
        for _ in range(4 * sizes.rounds):
            graph, total = torch.cuda.CUDAGraph(), torch.zeros(1024, dtype=torch.int64, device=sizes.device)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(50):
                    total.add_(1)
            graph.replay()
            right += total.tolist() == [50] * 1024
    finally:
        ended.set()
        worker.join()
    held.backup()
    return Found(f"{right} of {4 * sizes.rounds} captured", right == 4 * sizes.rounds and held.on_host(7))


def replays_of_every_mode(sizes: GpuSizes) -> Found:
    """Replays of all four kinds of forward write where the map leads now, and take no more memory (A3)."""
    random, wrong, grown_bytes, replays = np.random.default_rng(3), 0, 0, 0
    for make in (
        partial(GraphBucket.decode, 8, 16),
        partial(GraphBucket.target_verify, 8, 4, 16),
        partial(GraphBucket.draft_extend, 8, 4, 16),
        partial(GraphBucket.prefill, 8, 64, 16),
    ):
        bucket = make()
        largest = bucket.tokens_max if bucket.is_prefill else bucket.requests_max
        for size in (1, largest // 2, largest):
            case = ReplayedForward.of(bucket, size, sizes.device, random)
            torch.cuda.synchronize()
            held_bytes = torch.cuda.memory_allocated()
            outcomes = [case.replay(random) for _ in range(4 * sizes.rounds)]
            wrong, replays = wrong + outcomes.count(False), replays + len(outcomes)
            grown_bytes = max(grown_bytes, torch.cuda.memory_allocated() - held_bytes)
    figure = f"{wrong} of {replays} replays wrong, {grown_bytes} bytes more"
    return Found(figure, not wrong and grown_bytes < 1 << 20)


@dataclass(frozen=True, slots=True)
class ReplayedForward:
    """A captured write to the window pool's tokens."""

    bucket: GraphBucket
    size: int
    map: GpuMap
    tokens: torch.Tensor
    graph: torch.cuda.CUDAGraph

    @classmethod
    def of(cls, bucket: GraphBucket, size: int, device: torch.device, random: np.random.Generator) -> "ReplayedForward":
        """Capture it over buffers that are all padding."""
        maps = GpuMap.of(GpuSizes(device=device, requests=32, request_pages=16))
        buffers = HybridGraphBuffers(bucket, maps.translation)
        maps.translation.refresh()
        buffers.clear()
        _, metadata = buffers.views(size)
        tokens = torch.zeros(513 * 64, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            tokens.index_fill_(0, metadata.swa_out_cache_loc.to(torch.int64), 1)
        return cls(bucket, size, replace(maps, buffers=buffers), tokens, graph)

    def replay(self, random: np.random.Generator) -> bool:
        """Change the map, refill and replay; tell whether all was written where the map leads, and nothing else."""
        maps, bucket, device = self.map, self.bucket, self.tokens.device
        maps.paired.map.bind(maps.full[:64], random.permutation(maps.peers[:64]))
        requests = min(self.size, bucket.requests_max)
        lens = [self.size // requests] * requests if bucket.is_prefill else [bucket.query_len] * requests
        locs = random.choice(maps.full, sum(lens)).astype(np.int64) * 64 + random.integers(0, 64, sum(lens))
        table = torch.from_numpy(random.choice(maps.full, (requests, 16))).to(device)
        seq_lens = torch.full((requests,), 9, dtype=torch.int32, device=device)
        batch = ForwardBatch(bucket.mode, torch.from_numpy(locs).to(device), seq_lens, table, tuple(lens))
        self.tokens.zero_()
        assert maps.buffers.refill(batch)
        self.graph.replay()
        written = np.flatnonzero(self.tokens[64:].cpu().numpy()) + 64
        peers: npt.NDArray[np.int64] = maps.paired.map.peers((locs // 64).astype(np.int32)).astype(np.int64)
        return np.array_equal(written, np.unique(peers * 64 + locs % 64))


CHECKS: Sequence[Callable[[GpuSizes], Found]] = (
    replays_of_every_mode,
    layers_on_another_thread,
    captures_beside_backups,
    fork_beside_a_forward,
    waits_of_the_owner,
    refill_before_a_replay,
    rates,
    both_directions,
    overlap,
    operations_of_a_load,
    pinned_memory,
    time_to_pin,
    full_device,
)
"""Those first that decide whether bytes are right; last what may leave a device worse than it was."""


@needs_gpu
@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def check_gpu(check: Callable[[GpuSizes], Found], record_property: Callable[[str, object], None]) -> None:
    found = check(FULL_SIZES)
    record_property("figure", found.figure)
    assert found.is_kept, f"{check.__doc__} Found: {found.figure}"


@needs_gpu
@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}")
def check_that_copies_touch_no_memory_but_their_own() -> None:
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-W", "default", "-m", "gpu", "-k", "pieces or duplicated"]
    command.append("tests/unit/core/test_device_copies.py")
    done = subprocess.run(command, cwd=ROOT, timeout=SANITIZED_S, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout[-2000:]
