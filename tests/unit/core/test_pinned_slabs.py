"""Host memory that a GPU reaches where it lies: how much it takes, in which parts, and when it is given back."""

import gc
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.cache import ToyEngine, toy_layout
from tests.support.gpu import GPU
from tests.support.late_device import LateDevice
from tests.support.operations import PAGE, SPANS, present
from unified_cache.controller import memory as memory_module
from unified_cache.controller.copies import PinnedBytes, StagedCopies, gpu_copies
from unified_cache.controller.copies import gpu as gpu_copies_module
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.pool import PoolSpec, Tier
from unified_cache.storage_backends.memory import MemoryStorage

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


def engine(storage: MemoryStorage | None = None) -> ToyEngine:
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
    with pytest.raises(StorageError):
        engine(LayoutlessStorage())
    assert late.runtime.registered == {}


class LayoutlessStorage(MemoryStorage):
    """A store that takes no layout."""

    def register(self, *args: object) -> None:
        raise StorageError("no room", retryable=False)


# ---- the kernel that moves rows; without a GPU it is interpreted ---------------------------------------------------


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: torch for CUDA brings it")

if find_spec("triton") is not None:
    import triton
    from triton.backends.compiler import GPUTarget

    from unified_cache.controller.copies.kernel import WORDS, move_rows

LAYERS = 64


@pytest.mark.skipif(find_spec("triton") is not None, reason="has Triton: rows are moved by the kernel")
def test_without_triton_copies_pass_through_pinned_buffers_and_slabs_are_not_pinned() -> None:
    assert gpu_copies() is StagedCopies
    assert not StagedCopies.reaches_host


@needs_triton
@pytest.mark.parametrize("pages", [1, 8, 128])
def test_a_backup_is_one_launch_and_so_is_a_fork_and_a_load_is_one_for_each_layer(pages: int) -> None:
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
        assert late.take_counts() == (1 + LAYERS, 1, 1)
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
