"""Host memory that a GPU reaches where it lies: how much it takes, in which parts, and when it is given back."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cache import ToyEngine, toy_layout
from tests.support.gpu import GPU
from tests.support.late_device import LateDevice
from tests.support.operations import PAGE, SPANS, present
from unified_cache.controller import memory as memory_module
from unified_cache.controller.copies import PinnedBytes, StagedCopies
from unified_cache.controller.copies import gpu as gpu_copies_module
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.pool import PoolSpec
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
