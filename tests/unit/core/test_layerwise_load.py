"""A load whose layers are read before the last has arrived: who waits for what, and whose the slots are."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.support.cache import ToyEngine, oracle
from tests.support.clock import ManualClock
from tests.support.operations import PAGE, Stepped, engine, out_pages, present, serve, started
from tests.support.ranks import ThreadRanks, digest_of, in_threads, same
from unified_cache.components import Full, SlidingWindow
from unified_cache.controller import LayerwiseLoad, Operation, ThreadWorkers
from unified_cache.controller.copies.gpu import AT_ONCE, Copied
from unified_cache.controller.jobs import LoadJob
from unified_cache.controller.memory import PageMemory, TieredMemory
from unified_cache.core.errors import CopyError, InputError, OperationTimeoutError, WaitTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec, Slots, Tier

WAIT_S = 20.0


class GatedMemory(TieredMemory):
    """Copies a layer when the test says so, and none after it was told to fail."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gates: dict[tuple[str, int], Event] = {}
        self.copied: list[tuple[str, int]] = []
        self.failing = False

    @staticmethod
    def of(toy: ToyEngine) -> "GatedMemory":
        memory = toy.cache._memory
        assert isinstance(memory, GatedMemory)
        return memory

    def gate(self, pool: str, layer: int) -> Event:
        return self.gates.setdefault((pool, layer), Event())

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        gate = self.gates.get((pool.name, layer))
        assert gate is None or gate.wait(WAIT_S)
        if self.failing:
            raise CopyError("the bus is gone")
        self.copied.append((pool.name, layer))
        return super().load_layer(pool, layer, source, target)


def on_host(toy: ToyEngine, pages: int = 4) -> Prompt:
    """Have a prompt lie on the host alone."""
    cache = toy.cache
    prompt = serve(toy, pages)
    started(cache.backup(prompt))
    if isinstance(toy.workers, Stepped):
        toy.workers.run()
    cache.wait_all(WAIT_S)
    toy.forget()
    assert (cache.match(prompt).device_end, cache.match(prompt).host_end) == (0, pages)
    return prompt


def stepped(clock: ManualClock | None = None) -> tuple[ToyEngine, Stepped, Prompt]:
    """Return an engine whose jobs run when the test says so, and a prompt that lies on its host alone."""
    workers = Stepped()
    toy = engine(workers=workers, memory=GatedMemory, clock=clock, operation_timeout_s=2.0)
    return toy, workers, on_host(toy)


def followed(toy: ToyEngine, prompt: Prompt) -> tuple[Operation, LayerwiseLoad]:
    operation = started(toy.cache.load(prompt))
    arrival = present(toy.cache.begin_layerwise(operation))
    return operation, arrival


def verify_layers(toy: ToyEngine, prompt: Prompt, arrival: LayerwiseLoad, layers: Sequence[int]) -> None:
    """Compare these layers of all that a load makes resumable with the oracle."""
    for component, slots in enumerate(arrival.slots):
        start = arrival.end - len(slots)
        for pool in toy.byte_pools(component):
            device = toy.pools[pool.name]
            for page, slot in enumerate(slots.tolist(), start):
                expected = np.frombuffer(oracle(prompt, page, pool), np.uint8)
                for layer in layers:
                    first, last = device.offsets[layer : layer + 2]
                    assert np.array_equal(device.layers[layer].numpy()[slot], expected[first:last])


def test_compute_starts_before_the_last_layer_has_arrived() -> None:
    toy = engine(workers=ThreadWorkers.start(), memory=GatedMemory)
    cache, prompt = toy.cache, on_host(toy)
    memory = GatedMemory.of(toy)
    names = [pool.name for pool in toy.layout.pools if pool.page_bytes]
    last = memory.gate(names[0], 2)
    operation, arrival = followed(toy, prompt)
    assert (arrival.end, [len(part) for part in arrival.parts]) == (4, [4, 2])
    for name in names:
        arrival.wait(name, 0, WAIT_S)
        arrival.wait(name, 1, WAIT_S)
        assert arrival.arrived(name, 1)
    verify_layers(toy, prompt, arrival, [0, 1])
    assert not arrival.arrived(names[0], 2)
    with pytest.raises(WaitTimeoutError, match=f"layer 2 of {names[0]}"):
        arrival.wait(names[0], 2, 0.01)
    assert (cache.poll(), cache.match(prompt).device_end) == ([], 0), "what has not arrived whole is not in the tree"
    cache.check()
    last.set()
    for name in names:
        arrival.wait(name, 2, WAIT_S)
    verify_layers(toy, prompt, arrival, [0, 1, 2])
    cache.end_layerwise(arrival)
    assert cache.wait_all(WAIT_S) == [operation]
    lock = cache.lock(cache.match(prompt.head(arrival.end)))
    assert [cache.slots(lock, number).tolist() for number in range(2)] == [slots.tolist() for slots in arrival.slots]
    toy.verify(prompt, lock)
    cache.release(lock)
    cache.check()
    assert cache.close() == []


def test_pools_are_loaded_side_by_side_by_depth_and_kv_before_sidecars() -> None:
    @dataclass
    class Counted(PageMemory):
        asked: list[tuple[str, int]] = field(default_factory=list)

        def layers_count(self, pool: PoolSpec) -> int:
            return pool.page_bytes

        def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
            self.asked.append((pool.name, layer))
            return AT_ONCE

    layout = ModelLayout(
        PAGE,
        (Full((PoolSpec("kv", 4), PoolSpec("index", 2))), SlidingWindow(PAGE, PAGE, (PoolSpec("swa", 2),))),
    )
    toy, _, prompt = stepped()
    with toy.cache._ledger.moving(toy.cache.match(prompt), 4, Tier.HOST, Tier.DEVICE) as moving:
        assert moving is not None
        memory = Counted()
        LoadJob(memory, layout, moving.parts).run()
    assert memory.asked == [
        *[("kv", 0), ("index", 0), ("swa", 0)],
        *[("kv", 1)],
        *[("kv", 2), ("index", 1), ("swa", 1)],
        *[("kv", 3)],
    ]


def test_a_layer_that_the_pool_does_not_have_is_refused_and_one_that_was_there_before_needs_no_wait() -> None:
    toy, workers, prompt = stepped()
    cache = toy.cache
    _, arrival = followed(toy, prompt)
    full, window = (toy.byte_pools(number)[0].name for number in range(2))
    for pool, layer in ((full, 3), (full, -1), ("nothing", 0)):
        with pytest.raises(InputError, match=f"layer {layer} of {pool}"):
            arrival.wait(pool, layer, 0)
    cache.end_layerwise(arrival)
    workers.run()
    cache.poll()
    cache._ledger._take_back(cache._ledger.tree.evict(Tier.DEVICE, 1, 99))
    _, arrival = followed(toy, prompt)
    assert [part.component for part in arrival.parts] == [1]
    arrival.wait(full, 2, 0)
    assert not arrival.arrived(window, 0)
    cache.end_layerwise(arrival)
    workers.run()
    cache.close()


def test_a_copy_that_fails_ends_every_wait_for_what_was_to_come() -> None:
    toy, workers, prompt = stepped()
    memory = GatedMemory.of(toy)
    name = toy.byte_pools(0)[0].name
    gate = memory.gate(name, 1)
    _, arrival = followed(toy, prompt)
    raised: list[CopyError] = []

    def engine_thread() -> None:
        try:
            arrival.wait(name, 2, WAIT_S)
        except CopyError as error:
            raised.append(error)

    waiting = threading.Thread(target=engine_thread)
    waiting.start()
    memory.failing = True
    gate.set()
    workers.run()
    waiting.join(WAIT_S)
    assert "the bus is gone" in str(raised[0])
    assert memory.copied == []
    with pytest.raises(CopyError):
        arrival.wait(name, 0, 0)


# ---- whose the slots are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["done", "failed", "cancelled", "late"])
def test_until_the_engine_leaves_a_load_keeps_its_slots_however_it_ends(ending: str) -> None:
    clock = ManualClock()
    toy, workers, prompt = stepped(clock)
    cache = toy.cache
    memory = GatedMemory.of(toy)
    memory.failing = ending == "failed"
    operation, arrival = followed(toy, prompt)
    if ending == "cancelled":
        assert cache.cancel(operation)
    if ending == "late":
        clock.now_s = 3.0
    told = cache.poll()
    workers.run()
    told += cache.poll()
    assert told == ([] if ending == "done" else [operation])
    assert not operation.is_released
    assert out_pages(cache) == 6
    assert cache.match(prompt).device_end == 0
    assert cache.allocate(cache.pages_to_allocate(0, 9, [9])) is None, "nobody gets slots that an engine reads"
    with pytest.raises(WaitTimeoutError):
        cache.wait_all(0)
    if ending != "failed":
        verify_layers(toy, prompt, arrival, [0, 1, 2])
    cache.check()
    cache.end_layerwise(arrival)
    cache.end_layerwise(arrival)
    assert cache.poll() == ([operation] if ending == "done" else [])
    assert (operation.is_released, out_pages(cache)) == (True, 0)
    assert cache.match(prompt).device_end == (4 if ending == "done" else 0)
    expected = {
        "done": None,
        "failed": "CopyError",
        "cancelled": "CancelledError",
        "late": OperationTimeoutError.__name__,
    }
    assert (operation.error and type(operation.error).__name__) == expected[ending]
    cache.check()
    assert cache.close() == []


def test_only_a_load_under_way_that_brings_all_that_is_missing_can_be_followed() -> None:
    workers = Stepped()
    toy = engine(workers=workers)
    cache = toy.cache
    shorter = on_host(toy, 4)
    longer = on_host(toy, 6)
    first = started(cache.load(shorter))
    second = started(cache.load(longer))
    arrival = present(cache.begin_layerwise(first))
    assert cache.begin_layerwise(second) is None, "the first pages are the other load's"
    cache.end_layerwise(arrival)
    workers.run(2)
    cache.poll()
    assert cache.begin_layerwise(first) is None, "it is over"
    backup = started(cache.backup(serve(toy, 2, first=1000)))
    assert cache.begin_layerwise(backup) is None, "it is no load"
    workers.run()
    cache.poll()
    cache.check()


@pytest.mark.parametrize("ending", ["done", "cancelled"])
def test_ranks_wait_for_the_last_engine_that_follows(ending: str) -> None:
    def live(ranks: ThreadRanks) -> list[object]:
        toy = engine(ranks=ranks)
        cache, prompt = toy.cache, on_host(toy)
        operation = started(cache.load(prompt))
        arrival = cache.begin_layerwise(operation) if ranks.rank == 1 else None
        if ending == "cancelled":
            cache.cancel(operation)
        seen: list[object] = []
        for _ in range(3):
            cache.poll()
            seen += [operation.is_released, cache.match(prompt).device_end, digest_of(cache)]
        if arrival is not None:
            verify_layers(toy, prompt, arrival, [0, 1, 2])
            cache.end_layerwise(arrival)
        cache.wait_all(WAIT_S)
        seen += [operation.is_released, cache.match(prompt).device_end, digest_of(cache), out_pages(cache)]
        cache.check()
        return seen

    seen = same(in_threads(3, live))
    assert seen[6:8] == [False, 0]
    assert seen[9:11] + seen[12:] == [True, 4 if ending == "done" else 0, 0]
