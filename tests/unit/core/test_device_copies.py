"""Pages of a device: what comes and goes, and in which order.

Without a GPU the same code runs on a device that does everything as late as it may, so that a wait that is missing
shows in the bytes.
"""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from tests.support.cache import ToyEngine, toy_layout
from tests.support.gpu import GPU, devices, keep_busy, stream_of, with_streams
from tests.support.late_device import LateDevice
from tests.support.operations import PAGE, SPANS, present
from tests.support.store_calls import ScriptedStorage
from unified_cache.controller import memory as memory_module
from unified_cache.controller.copies import gpu as gpu_copies_module
from unified_cache.controller.copies import gpu as gpu_module
from unified_cache.controller.copies.gpu import Copied, PinnedBytes, StagedCopies, gpu_copies
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.errors import ConfigError, CopyError, StorageError
from unified_cache.core.pool import PoolSpec, Slots, Tier
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method

WAIT_S = 60.0
ROW_BYTES = 48


# ---- order -------------------------------------------------------------------------------------------------------


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def pages_on(device: torch.device, page_bytes: int, count: int = 8) -> tuple[PoolSpec, torch.Tensor, TieredMemory]:
    spec = PoolSpec("kv", page_bytes)
    layer = torch.zeros((count + 1, spec.page_bytes), dtype=torch.uint8, device=device)
    return spec, layer, TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: count})


def payload_of(memory: TieredMemory, spec: PoolSpec, slot: int) -> bytes:
    ((page,),) = memory.buffers(spec, [slot])
    return bytes(page[-spec.page_bytes :])


@devices
def test_what_is_loaded_is_there_for_every_stream_when_the_copies_are_left(device: torch.device) -> None:
    spec, layer, memory = pages_on(device, 4 << 20)
    layer[1:] = 9
    everything = slots(*range(1, 9))
    with memory.ordered(Tier.HOST):
        memory.backup(spec, everything, everything)
    layer.zero_()
    ordered = memory.ordered(Tier.DEVICE)
    keep_busy(device)  # given after the copies may begin: they are not after it
    with ordered:
        memory.load_layer(spec, 0, everything, everything)
    with stream_beside(device):
        assert (layer[1:] == 9).all()


@contextmanager
def stream_beside(device: torch.device) -> Iterator[None]:
    """Give what follows to a stream that is ordered after nothing."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(stream_of(device)):
        yield


@devices
def test_pages_are_duplicated_on_the_device(device: torch.device) -> None:
    spec, layer, memory = pages_on(device, 64)
    layer.copy_(torch.arange(9, dtype=torch.uint8)[:, None].expand(9, 64))
    memory.duplicate(spec, slots(1, 2, 3), slots(8, 6, 7))
    assert layer[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 1]


@devices
def test_a_page_is_compared_as_it_is_and_nobody_waits_for_that(device: torch.device) -> None:
    spec = PoolSpec("kv", 2 * 256)
    layers = [torch.zeros((4, 64), dtype=torch.float32, device=device) for _ in range(2)]
    memory = TieredMemory.allocate([DevicePool(spec, layers)], {"kv": 1})
    keep_busy(device)
    layers[1][2] = 7
    distance = memory.compare(spec, 1, 2)
    layers[1][2] = 0
    if device.type != "cpu":
        assert not distance.is_ready
        torch.cuda.synchronize(device)
    assert distance.is_ready
    assert distance.excess[0] == 0
    assert distance.excess[1] > 1


# ---- pieces ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a buffer hold three rows."""
    monkeypatch.setattr(gpu_module, "STAGING_BYTES", 3 * ROW_BYTES + 1)


def several_layers(
    device: torch.device, count: int = 15, row_bytes: int = ROW_BYTES
) -> tuple[PoolSpec, list[torch.Tensor], TieredMemory]:
    """Three layers of one row each, and host memory full of random bytes."""
    spec = PoolSpec("kv", 3 * row_bytes)
    layers = [torch.zeros((count + 1, row_bytes), dtype=torch.uint8, device=device) for _ in range(3)]
    memory = TieredMemory.allocate([DevicePool(spec, layers)], {spec.name: count})
    payload = memory._host[spec.name].payload
    payload[:] = np.random.default_rng(5).integers(0, 256, payload.shape, np.uint8)
    return spec, layers, memory


@devices
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("count", "row_bytes"), [(0, 48), (1, 48), (3, 48), (4, 48), (11, 48), (11, 24_576), (11, 65_552)]
)
def test_rows_move_in_pieces_where_many_are_short_and_by_the_copy_engines_of_a_gpu_where_they_are_long(
    count: int, row_bytes: int, device: torch.device
) -> None:
    spec, layers, memory = several_layers(device, row_bytes=row_bytes)
    payload = memory._host[spec.name].payload
    kept = payload.copy()
    random = np.random.default_rng(count)
    source, target = (random.permutation(np.arange(1, 16, dtype=np.int32))[:count] for _ in range(2))
    seen = []
    with memory.ordered(Tier.DEVICE):
        keep_busy(device)  # on the stream of the copies: all pieces are queued before the first one moves
        for number, layer in enumerate(layers):
            copied = memory.load_layer(spec, number, source, target)
            with stream_beside(device):
                copied.wait()
                seen.append(layer.cpu())
    expected = np.zeros_like(kept)
    expected[target] = kept[source]
    for found in (seen, layers):
        assert np.array_equal(torch.cat([layer.cpu() for layer in found], dim=1).numpy(), expected)
    payload[:] = 0
    with memory.ordered(Tier.HOST):
        keep_busy(device)
        memory.backup(spec, target, source)
    expected = np.zeros_like(kept)
    expected[source] = kept[source]
    assert np.array_equal(payload, expected)


@devices
def test_slots_that_do_not_pair_up_are_refused_and_copies_go_on(device: torch.device) -> None:
    spec, layers, memory = several_layers(device, 3)
    memory._host[spec.name].payload[:] = 1
    with pytest.raises(CopyError, match="2 source slots for 1 target"), memory.ordered(Tier.HOST):
        memory.backup(spec, slots(1, 2), slots(1))
    for copy in (memory.load, memory.duplicate):
        with pytest.raises(CopyError, match="2 source slots for 1 target"):
            copy(spec, slots(1, 2), slots(1))
    memory.load(spec, slots(1, 2), slots(3, 1))
    assert [layer[:, 0].tolist() for layer in layers] == [[0, 1, 0, 1]] * 3


# ---- streams of an engine ------------------------------------------------------------------------------------------


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have copies pass through pinned buffers, also where there is Triton."""
    monkeypatch.setattr(memory_module, "gpu_copies", lambda: StagedCopies)


def late_layers(late: LateDevice, count: int, row_bytes: int = 4096, pages: int = 8) -> tuple[PoolSpec, TieredMemory]:
    spec = PoolSpec("kv", count * row_bytes)
    layers = [torch.zeros((pages + 1, row_bytes), dtype=torch.uint8, device=GPU) for _ in range(count)]
    memory = TieredMemory.allocate([DevicePool(spec, layers)], {spec.name: pages})
    late.synchronize()
    late.take_counts()
    return spec, memory


@with_streams
@pytest.mark.parametrize("streams_count", [1, 2])
def test_copies_come_after_every_stream_that_the_engine_names(device: torch.device, streams_count: int) -> None:
    spec = PoolSpec("kv", 4096)
    streams = [stream_of(device) for _ in range(streams_count)]
    layer = torch.zeros((9, 4096), dtype=torch.uint8, device=device)
    memory = TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: 8}, lambda: streams)
    torch.cuda.synchronize()
    for slot, stream in enumerate(streams, 1):
        with torch.cuda.stream(stream):
            keep_busy(device)
            layer[slot] = 7
    with memory.ordered(Tier.HOST):
        memory.backup(spec, slots(1, 2), slots(1, 2))
    written = [b"\7" * 4096] * streams_count
    assert [payload_of(memory, spec, slot) for slot in range(1, streams_count + 1)] == written
    seen = []
    for stream in streams:
        with torch.cuda.stream(stream):
            keep_busy(device)
            seen.append(layer[1:3] + 0)
    memory.load(spec, slots(5, 6), slots(1, 2))  # zeros
    torch.cuda.synchronize()
    assert [found[:streams_count].tolist() for found in seen] == [[[7] * 4096] * streams_count] * streams_count


@with_streams
@pytest.mark.parametrize("is_second_first", [False, True])
def test_a_fork_copies_what_one_stream_has_written_and_has_not_overwritten_yet(
    device: torch.device, is_second_first: bool
) -> None:
    spec = PoolSpec("state", 64)
    first, second = streams = [stream_of(device) for _ in range(2)]
    layer = torch.zeros((9, 64), dtype=torch.uint8, device=device)
    memory = TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: 8}, lambda: streams)
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        keep_busy(device)
        layer[1] = 7
    memory.duplicate(spec, slots(1), slots(2))
    with torch.cuda.stream(second):
        layer[1] = 8
    if is_second_first:
        second.synchronize()
    with torch.cuda.stream(first):
        found = layer[2].cpu()
    torch.cuda.synchronize()
    assert (found.tolist(), layer[:3, 0].tolist()) == ([7] * 64, [0, 8, 7])


@pytest.mark.parametrize("is_set", [True, False])
def test_a_layer_is_waited_for_on_its_device_by_a_thread_that_has_another_one(is_set: bool) -> None:
    device = torch.device("cuda", 1)
    with LateDevice():
        torch.cuda.set_device(device)
        spec, layer, memory = pages_on(device, 64)
        memory._host[spec.name].payload[:] = 7
        seen = []

        def read(copied: Copied) -> None:
            if is_set:
                torch.cuda.set_device(device)
            copied.wait()
            seen.append(layer.cpu())

        with memory.ordered(Tier.DEVICE):
            copied = memory.load_layer(spec, 0, slots(1, 2), slots(1, 2))
            reader = Thread(target=read, args=(copied,))
            reader.start()
            reader.join(WAIT_S)
        assert seen[0][1:3].tolist() == [[7] * 64] * 2


@with_streams
def test_a_graph_is_captured_while_pages_come_and_go_if_the_capture_watches_its_own_thread(
    device: torch.device,
) -> None:
    spec, layer, memory = pages_on(device, 4096)
    layer[1:5] = 7
    numbers = torch.zeros(8, dtype=torch.int64, device=device)
    torch.cuda.synchronize()

    def move() -> None:
        with memory.ordered(Tier.HOST):
            memory.backup(spec, slots(1, 2), slots(1, 2))
        memory.load(spec, slots(1, 2), slots(7, 8))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        numbers.add_(1)
        moving = Thread(target=move)
        moving.start()
        moving.join(WAIT_S)
        numbers.add_(1)
    assert numbers.tolist() == [0] * 8
    graph.replay()
    assert numbers.tolist() == [2] * 8
    assert payload_of(memory, spec, 1) == b"\7" * 4096
    assert layer[:, 0].tolist() == [0, 7, 7, 7, 7, 0, 0, 7, 7]


# ---- what a transfer asks of a device ------------------------------------------------------------------------------


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("pages", [1, 8, 128])
def test_slots_are_sent_once_for_all_layers_and_nothing_waits_for_the_device_on_the_owners_thread(pages: int) -> None:
    with LateDevice() as late:
        spec, memory = late_layers(late, 64, 512, 2 * pages)
        everything = np.arange(1, pages + 1, dtype=np.int32)
        allocated = late.allocated_bytes
        ordered = memory.ordered(Tier.HOST)
        assert late.take_counts() == (0, 0, 0)
        with ordered:
            memory.backup(spec, everything, everything)
        # Of waits, once a layer, of which the next moves while the last is put away, and at the end.
        assert late.take_counts() == (1 + 2 * 64, 1, 64 + 1)
        memory.load(spec, everything, everything)
        operations, snapshots, _ = late.take_counts()
        assert (operations, snapshots) == (1 + 2 * 64, 1)
        assert late.allocated_bytes - allocated == 2 * 8 * pages, "the numbers of the slots, each way"
        memory.duplicate(spec, everything, everything + pages)
        assert late.take_counts() == (1 + 2 * 64, 1, 0)


@pytest.mark.usefixtures("staged")
def test_rows_move_by_their_widest_elements() -> None:
    with LateDevice() as late:
        spec, memory = late_layers(late, 1, 64)
        with memory.ordered(Tier.HOST):
            memory.backup(spec, slots(1, 2), slots(1, 2))
        memory.load(spec, slots(1, 2), slots(1, 2))
        assert (late.elements["index_select"], late.elements["index_copy_"]) == (2 * 64 // 16, 2 * 64 // 16)


@devices
def test_a_load_does_not_wait_for_a_backup(device: torch.device) -> None:
    spec, layer, memory = pages_on(device, 64)
    memory._host[spec.name].payload[:] = 5
    with memory.ordered(Tier.HOST):
        loading = Thread(target=memory.load, args=(spec, slots(1), slots(1)))
        loading.start()
        loading.join(WAIT_S / 10)
        assert not loading.is_alive()
        memory.backup(spec, slots(2), slots(2))
    assert layer[1].tolist() == [5] * 64


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("meta", "meta")])
def test_pools_that_no_copy_reaches_are_refused_at_the_opening(names: tuple[str, str]) -> None:
    spec = PoolSpec("kv", 128)
    with LateDevice():
        layers = [torch.zeros((9, 64), dtype=torch.uint8, device=torch.device(name)) for name in names]
        with pytest.raises(ConfigError, match=f"found .*{names[1]}"):
            TieredMemory.allocate([DevicePool(spec, layers)], {spec.name: 8})


def test_an_engine_that_names_no_stream_is_refused_at_the_opening() -> None:
    spec = PoolSpec("kv", 64)
    with LateDevice():
        layer = torch.zeros((9, 64), dtype=torch.uint8, device=GPU)
        with pytest.raises(ConfigError, match="one at least"):
            TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: 8}, list)


# ---- host memory that a GPU reaches where it lies --------------------------------------------------------------------


KIB = 1024


class ReachingCopies(StagedCopies):
    """Copies for which slabs are pinned."""

    __slots__ = ()

    reaches_host = True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    monkeypatch.setattr(memory_module, "gpu_copies", lambda: ReachingCopies)
    with LateDevice() as device:
        yield device


def opened(pages: int, page_bytes: int = 16 * KIB) -> tuple[PoolSpec, TieredMemory]:
    spec = PoolSpec("kv", page_bytes)
    layer = torch.zeros((9, page_bytes), dtype=torch.uint8, device=GPU)
    return spec, TieredMemory.allocate([DevicePool(spec, [layer])], {"kv": pages})


def engine(storage: Store | None = None) -> ToyEngine:
    return ToyEngine(toy_layout(SPANS, PAGE), (12, 8), (12, 8), storage, None, device=GPU)


def test_a_slab_takes_its_own_size_and_goes_back_when_it_is_closed(late: LateDevice) -> None:
    _, memory = opened(5 * 64 + 1)  # a power of two would be 1.6 times as much
    assert 0 < sum(late.runtime.registered.values()) <= 1.02 * (5 * 64 + 2) * 16 * KIB
    memory.close()
    assert late.runtime.registered == {}
    memory.close()


def test_a_large_slab_is_registered_in_parts_that_the_driver_takes(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_copies_module, "REGISTERED_BYTES_MAX", 64 * KIB)
    late.runtime.bytes_max = 64 * KIB
    pinned = PinnedBytes.allocate(200 * KIB)
    address = pinned.bytes.ctypes.data
    assert late.runtime.registered == {
        address: 64 * KIB,
        address + 64 * KIB: 64 * KIB,
        address + 128 * KIB: 64 * KIB,
        address + 192 * KIB: 8 * KIB,
    }
    pinned.close()
    assert late.runtime.registered == {}


def test_a_slab_begins_with_a_page_of_the_system_and_no_forked_child_has_it(late: LateDevice) -> None:
    pinned = PinnedBytes.allocate(64 * KIB)
    address = pinned.bytes.ctypes.data
    assert address % 4096 == 0
    areas = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = present(re.search(rf"^{address:x}-.*?^VmFlags:(.*?)$", areas, re.MULTILINE | re.DOTALL))
    assert "dc" in found.group(1).split()


def test_memory_that_the_driver_does_not_pin_is_an_error_of_the_opening_and_none_stays_pinned(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_copies_module, "REGISTERED_BYTES_MAX", 64 * KIB)
    late.runtime.registrations_max = 2
    with pytest.raises(ConfigError, match=r"pool kv: .*cudaHostRegister"):
        opened(20)
    assert late.runtime.registered == {}


def test_memory_that_nobody_closes_is_unpinned_when_it_goes(late: LateDevice) -> None:
    pinned = PinnedBytes.allocate(64 * KIB)
    assert len(late.runtime.registered) == 1
    del pinned
    gc.collect()
    assert late.runtime.registered == {}


def test_a_cache_gives_its_slabs_back_at_close_and_where_it_cannot_be_opened(late: LateDevice) -> None:
    toy = engine()
    assert late.runtime.registered
    assert toy.cache.close() == []
    assert late.runtime.registered == {}
    layoutless = ScriptedStorage()
    layoutless.failing = {Method.REGISTER}
    with pytest.raises(StorageError):
        engine(layoutless)
    assert late.runtime.registered == {}


# ---- the kernel that moves rows; without a GPU it is interpreted ---------------------------------------------------


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: torch for CUDA brings it")

if find_spec("triton") is not None:
    import triton
    from triton.backends.compiler import GPUTarget

    from unified_cache.controller.copies import kernel
    from unified_cache.controller.copies.kernel import WORDS, move_rows

LAYERS = 64


@pytest.mark.skipif(find_spec("triton") is not None, reason="has Triton: rows are moved by the kernel")
def test_without_triton_copies_pass_through_pinned_buffers_and_slabs_are_not_pinned() -> None:
    assert gpu_copies() is StagedCopies
    assert not StagedCopies.reaches_host


@needs_triton
@pytest.mark.parametrize("pages", [1, 8, 128])
def test_a_backup_is_one_launch_and_so_is_a_fork_and_a_load_is_one_for_as_many_layers_as_are_worth_it(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "SUBMITTED_BYTES_MIN", 8 * 64)
    launches = {1: LAYERS // 8, 8: LAYERS, 128: LAYERS}[pages]
    spec = PoolSpec("kv", LAYERS * 64)
    everything = np.arange(1, pages + 1, dtype=np.int32)
    with LateDevice() as late:
        layers = [torch.zeros((pages + 1, 64), dtype=torch.uint8, device=GPU) for _ in range(LAYERS)]
        memory = TieredMemory.allocate([DevicePool(spec, layers)], {"kv": pages})
        late.take_counts()
        allocated = late.allocated_bytes
        with memory.ordered(Tier.HOST):
            memory.backup(spec, everything, everything)
        assert late.take_counts() == (1 + 1, 1, 2)
        memory.load(spec, everything, everything)
        assert late.take_counts() == (1 + launches, 1, 1)
        assert late.allocated_bytes - allocated == 2 * 2 * 8 * pages
        memory.duplicate(spec, everything[:1], everything[:1] - 1)
        assert late.take_counts() == (1 + 1, 1, 0)
        memory.close()


@needs_triton
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize(("align_bytes", "moves"), [(16, "v2.b64"), (8, "b64"), (4, "b32"), (2, "b16"), (1, "b8")])
def test_the_kernel_is_compiled_for_a_gpu_and_moves_words_as_wide_as_they_are_aligned(
    align_bytes: int, moves: str, to_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"table": "*i64", "slots": "*i64", "pages_count": "i32", "layers_count": "i32", "row_blocks": "i32"}
    word_bytes = min(align_bytes, 8)
    constants = {"to_host": to_host, "word": WORDS[word_bytes], "align_bytes": align_bytes}
    constants |= {"block_rows": 4, "block_words": 4096 // word_bytes}
    source = triton.compiler.ASTSource(
        fn=move_rows, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    found = set(re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"]))
    assert found == {moves}
