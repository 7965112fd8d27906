"""The kernel that moves rows: what it is compiled to, and how often it is launched. Without a GPU it is interpreted."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.gpu import GPU
from tests.support.late_device import LateDevice
from unified_cache.controller.copies import StagedCopies, gpu_copies
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.pool import PoolSpec, Tier

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
    types = {"table": "*i64", "slots": "*i64", "pages_count": "i32", "layers_count": "i32"}
    constants = {"to_host": to_host, "word": WORDS[min(align_bytes, 8)], "align_bytes": align_bytes}
    source = triton.compiler.ASTSource(
        fn=move_rows, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    found = set(re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"]))
    assert found == {moves}
