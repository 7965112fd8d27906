"""Pages of a device: what comes and goes, and in which order. On a CUDA device the same tests show streams and events.

Without one the copies of a GPU are held against plain indexing with stand-ins for streams and events, which keep the
order because everything happens at once: that pieces, buffers and slots are right, and nothing of the order.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.cache import ToyEngine, oracle, toy_layout
from tests.support.gpu import devices
from tests.support.operations import PAGE, SPANS, serve, started
from unified_cache import memory as memory_module
from unified_cache.controller import OperationState, ThreadWorkers
from unified_cache.errors import CopyError
from unified_cache.memory import DevicePool, GpuCopies, TieredMemory
from unified_cache.page import Prompt
from unified_cache.pool import PoolSpec, Slots, Tier
from unified_cache.storage_backends.memory import MemoryStorage

WAIT_S = 60.0
ROW_BYTES = 48
PRODUCTS = 12
WIDTH = {"cuda": 8192, "cpu": 64}
"""Side of the matrices that keep a device busy: 1e12 operations each on a GPU, 20 ms and more."""


def opened(device: torch.device, store: MemoryStorage) -> ToyEngine:
    return ToyEngine(toy_layout(SPANS, PAGE), (12, 8), (12, 8), store, ThreadWorkers.start(), device=device)


def forget(toy: ToyEngine) -> None:
    """Evict all that the device holds."""
    ledger = toy.cache._ledger
    for component in (1, 0):
        ledger._take_back(ledger.tree.evict(Tier.DEVICE, component, 99))


def read_back(toy: ToyEngine, prompt: Prompt) -> int:
    """Compare all that the device can resume of a prompt with the oracle; return how many pages."""
    lock = toy.cache.lock(toy.cache.match(prompt))
    toy.verify(prompt, lock)
    toy.cache.release(lock)
    toy.cache.check()
    return lock.end


@devices
def test_pages_come_back_from_host_memory_and_from_a_store_as_they_were(device: torch.device) -> None:
    store = MemoryStorage()
    toy, other = opened(device, store), opened(device, store)
    prompt = serve(toy, 4)
    toy.cache.backup(prompt)
    toy.cache.wait_all(WAIT_S)
    forget(toy)
    assert read_back(toy, prompt) == 0
    for pool in toy.pools.values():
        for layer in pool.layers:
            layer.zero_()
    toy.cache.load(prompt)
    toy.cache.wait_all(WAIT_S)
    assert read_back(toy, prompt) == 4
    other.cache.prefetch(prompt)
    other.cache.wait_all(WAIT_S)
    other.cache.load(prompt)
    other.cache.wait_all(WAIT_S)
    assert read_back(other, prompt) == 4
    assert (toy.cache.close(), other.cache.close()) == ([], [])


@devices
def test_a_layer_may_be_read_once_it_was_waited_for_and_the_next_may_still_be_on_its_way(device: torch.device) -> None:
    toy = opened(device, MemoryStorage())
    prompt = serve(toy, 4)
    toy.cache.backup(prompt)
    toy.cache.wait_all(WAIT_S)
    forget(toy)
    operation = started(toy.cache.load(prompt))
    load = toy.cache.begin_layerwise(operation)
    assert load is not None
    read: dict[tuple[int, str], list[torch.Tensor]] = {}
    for layer in range(3):
        for component, slots in enumerate(load.slots):
            at = torch.from_numpy(slots.astype(np.int64)).to(device)
            for pool in toy.byte_pools(component):
                load.wait(pool.name, layer, WAIT_S)
                rows = toy.pools[pool.name].layers[layer].index_select(0, at)
                read.setdefault((component, pool.name), []).append(rows)
    toy.cache.end_layerwise(load)
    toy.cache.wait_all(WAIT_S)
    assert operation.state is OperationState.DONE
    for (component, name), layers in read.items():
        start = load.end - len(load.slots[component])
        found = torch.cat(layers, dim=1).cpu().numpy()
        expected = [oracle(prompt, page, toy.pools[name].spec) for page in range(start, load.end)]
        assert [row.tobytes() for row in found] == expected
    assert toy.cache.close() == []


# ---- order -------------------------------------------------------------------------------------------------------


def keep_busy(device: torch.device) -> None:
    """Give a device work that takes it a while; on a GPU the call returns before."""
    width = WIDTH[device.type]
    factor = torch.full((width, width), 1e-3, device=device)
    product = factor
    for _ in range(PRODUCTS):
        product = product @ factor


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


def pages_on(device: torch.device, spec: PoolSpec, count: int = 8) -> tuple[torch.Tensor, TieredMemory]:
    layer = torch.zeros((count + 1, spec.page_bytes), dtype=torch.uint8, device=device)
    return layer, TieredMemory.allocate([DevicePool(spec, [layer])], {spec.name: count})


def payload_of(memory: TieredMemory, spec: PoolSpec, slot: int) -> bytes:
    (page,) = memory.buffers(spec, slot)
    return bytes(page[-spec.page_bytes :])


@devices
def test_a_page_that_a_forward_still_writes_is_backed_up_as_written(device: torch.device) -> None:
    spec = PoolSpec("kv", 4096)
    layer, memory = pages_on(device, spec)
    keep_busy(device)
    layer[1:5] = 7
    with memory.ordered():
        memory.backup(spec, slots(1, 2, 3, 4), slots(4, 3, 2, 1))
    assert [payload_of(memory, spec, slot) for slot in (1, 2, 3, 4)] == [b"\7" * 4096] * 4


@devices
def test_a_page_that_a_forward_still_reads_is_not_overwritten_before(device: torch.device) -> None:
    spec = PoolSpec("kv", 4096)
    layer, memory = pages_on(device, spec)
    layer[1:5] = 7
    with memory.ordered():
        memory.backup(spec, slots(5, 6, 7, 8), slots(1, 2, 3, 4))  # zeros
    keep_busy(device)
    seen = layer[1:5] + 0
    memory.load(spec, slots(1, 2, 3, 4), slots(1, 2, 3, 4))
    assert torch.equal(seen, torch.full_like(seen, 7))
    assert layer[1:5].count_nonzero() == 0


@devices
def test_what_is_loaded_is_there_for_every_stream_when_the_copies_are_left(device: torch.device) -> None:
    spec = PoolSpec("kv", 4 << 20)
    layer, memory = pages_on(device, spec)
    layer[1:] = 9
    everything = slots(*range(1, 9))
    with memory.ordered():
        memory.backup(spec, everything, everything)
    layer.zero_()
    ordered = memory.ordered()
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
    beside: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch says no types
    with torch.cuda.stream(beside):
        yield


@devices
def test_pages_are_duplicated_on_the_device(device: torch.device) -> None:
    spec = PoolSpec("kv", 64)
    layer, memory = pages_on(device, spec)
    layer.copy_(torch.arange(9, dtype=torch.uint8)[:, None].expand(9, 64))
    memory.duplicate(spec, slots(1, 2, 3), slots(8, 6, 7))
    assert layer[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 1]


# ---- pieces ------------------------------------------------------------------------------------------------------


class StandInStream:
    """A stream on which everything has happened when a call returns; notes what it was told."""

    def __init__(self, device: torch.device) -> None:
        self.waited_for: list[object] = []
        self.synchronized_count = 0

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)

    def synchronize(self) -> None:
        self.synchronized_count += 1


@contextmanager
def copies_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCopies]:
    """Make the copies of a GPU; on the CPU over stand-ins, so that the same code runs."""
    monkeypatch.setattr(memory_module, "STAGING_BYTES", 3 * ROW_BYTES + 1)
    if device.type == "cpu":
        stream = StandInStream(device)
        event = SimpleNamespace(record=lambda *at: None, synchronize=lambda: None, wait=lambda: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda on: stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda on: stream)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(memory_module, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    copies = GpuCopies(device, ROW_BYTES)
    yield copies
    if device.type == "cpu":
        assert stream.synchronized_count == len(stream.waited_for) > 0
        assert set(map(id, stream.waited_for)) == {id(event)}


@devices
@pytest.mark.parametrize("count", [0, 1, 3, 4, 11])
def test_more_pages_than_a_buffer_holds_go_in_pieces(
    count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(count)
    host = torch.from_numpy(random.integers(0, 256, (16, 2 * ROW_BYTES), np.uint8))[:, ROW_BYTES // 2 :][:, :ROW_BYTES]
    kept = host.clone()
    on_device = torch.zeros((16, ROW_BYTES), dtype=torch.uint8, device=device)
    source, target = (random.permutation(np.arange(1, 16, dtype=np.int32))[:count] for _ in range(2))
    with copies_on(device, monkeypatch) as copies:
        with copies.ordered():
            copies.load(host, source, on_device, target).wait()
        expected = torch.zeros_like(kept)
        expected[target] = kept[source]
        assert torch.equal(on_device.cpu(), expected)
        host.zero_()
        with copies.ordered():
            copies.backup(on_device, target, host, source)
        expected = torch.zeros_like(kept)
        expected[source] = kept[source]
        assert torch.equal(host, expected)


@devices
def test_slots_that_do_not_pair_up_are_refused_and_copies_go_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = torch.ones((4, ROW_BYTES), dtype=torch.uint8)
    on_device = torch.zeros((4, ROW_BYTES), dtype=torch.uint8, device=device)
    with copies_on(device, monkeypatch) as copies:
        with pytest.raises(CopyError, match="2 source slots for 1 target"), copies.ordered():
            copies.load(host, slots(1, 2), on_device, slots(1))
        with copies.ordered():
            copies.load(host, slots(1, 2), on_device, slots(3, 1))
        assert on_device[:, 0].tolist() == [0, 1, 0, 1]
