"""Random histories of a whole cache, on every kind of device, of model and of fault: no byte is not the oracle's."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.budget import examples, fresh_seeds
from tests.support.cache import ToyEngine, oracle, toy_layout
from tests.support.components import COMPONENT_SETS
from tests.support.files import DiskFault, FaultyDisk, temps
from tests.support.gpu import GPU, devices, needs_gpu
from tests.support.operations import PAGE, SPANS, Stepped, UnreturnedCall, started
from tests.support.store_calls import ScriptedStorage, SeededFaults, StorageFault
from tests.support.store_kinds import StoreKind
from unified_cache.cache.stats import Stats
from unified_cache.controller import OperationState, ThreadWorkers, Workers
from unified_cache.controller.copies.gpu import AT_ONCE, Copied
from unified_cache.controller.memory import TieredMemory
from unified_cache.core.errors import CacheError, CopyError, StorageTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec, Slots, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level, Store
from unified_cache.storage_backends.wrappers.layer import Method

WAIT_S = 60.0
CPU = torch.device("cpu")
STEPS = 60
HISTORIES = 4
CALLS = ("serve", "serve", "backup", "load", "evict", "resume", "wait", "fork", "reset")
FAULTY_CALLS = (*(call for call in CALLS if call != "wait"), "durable", "cancel")
"""Where a store hangs nobody waits for it."""
DEVICE_PAGES, WINDOW_PAGES = 12, 8
STORED_BYTES = 8000
"""Of a store that evicts."""
LIES = dict.fromkeys(
    (StorageFault.PARTIAL_WRITE, StorageFault.FLIPPED_BIT, StorageFault.MISDIRECTED_READ, StorageFault.TORN_WRITE), 0.2
)
FAULTY_SEEDS = examples(4, 400)
"""Of histories in which calls fail, as many again that no run has tried."""
DISK_CALLS_MAX = 4_000
CALL_FAILS, COPY_FAILS, STORE_HANGS = 0.03, 0.03, 0.05
"""Shares of the calls of a disk, of a memory and of a store."""
GPU_S = 60.0
"""As long as a run of all checks has for more histories on a GPU."""


def read_layers(toy: ToyEngine, prompt: Prompt) -> bool:
    """Load a prompt layer by layer and compare what each wait gives; False if nothing was loaded, or it failed."""
    operation = toy.cache.load(prompt)
    load = toy.cache.begin_layerwise(operation) if operation else None
    if not operation or load is None:
        return False
    read: dict[tuple[int, str], list[torch.Tensor]] = {}
    for layer in range(3):
        for component, slots in enumerate(load.slots):
            at = torch.from_numpy(slots.astype(np.int64)).to(toy.device)
            for pool in toy.byte_pools(component):
                load.wait(pool.name, layer, WAIT_S)
                read.setdefault((component, pool.name), []).append(
                    toy.pools[pool.name].layers[layer].index_select(0, at)
                )
    for (component, name), layers in read.items():
        start = load.end - len(load.slots[component])
        found = torch.cat(layers, dim=1).cpu().numpy()
        expected = [oracle(prompt, page, toy.pools[name].spec) for page in range(start, load.end)]
        assert [row.tobytes() for row in found] == expected
    toy.cache.end_layerwise(load)
    toy.cache.wait_all(WAIT_S)
    return operation.state is OperationState.DONE


def serve(toy: ToyEngine, prompt: Prompt, *, backs_up: bool) -> None:
    """Serve a prompt if there is room, and perhaps back up what has just been written."""
    lock = toy.serve(prompt)
    if lock is not None:
        if backs_up:
            toy.cache.backup(prompt)
        toy.cache.release(lock)


def resume(toy: ToyEngine, prompt: Prompt, dice: random.Random) -> None:
    """Forget what is in memory, bring a prompt up tier by tier, with more or less patience, and serve it."""
    toy.forget(*list(Tier)[: dice.randrange(1, 3)])
    for leg in (toy.cache.prefetch, toy.cache.load):
        leg(prompt)
        for _ in range(dice.randrange(4)):
            toy.cache.poll()
    serve(toy, prompt, backs_up=False)


def fork(toy: ToyEngine, prompt: Prompt) -> None:
    """Copy the state that a prompt ends in, if there is one, and give it back."""
    lock = toy.cache.lock(toy.cache.match(prompt))
    with suppress(CacheError, OSError):  # no state is held there, or it could not be copied
        copied = toy.cache.fork(lock)
        if copied is not None:
            toy.cache.free(copied)
    toy.cache.release(lock)


def opened(
    layout: ModelLayout,
    storage: Store,
    workers: Workers,
    device: torch.device = CPU,
    memory: type[TieredMemory] = TieredMemory,
) -> ToyEngine:
    pages = (DEVICE_PAGES, *(WINDOW_PAGES for _ in layout.components[1:]))
    return ToyEngine(layout, pages, pages, storage, workers, device=device, memory=memory)


def prompt_of(toy: ToyEngine, kinds: Sequence[int]) -> Prompt:
    """Make a prompt of pages of a few kinds, so that many begin alike and part somewhere."""
    return toy.cache.prompt(np.repeat(np.array(kinds, np.int32), toy.layout.page_size))


def run_history(seed: int, toy: ToyEngine, calls: Sequence[str] = CALLS) -> None:
    """Run random calls of a cache against the oracle's bytes."""
    dice = random.Random(seed)
    cache, layout = toy.cache, toy.layout

    def prompt() -> Prompt:
        return prompt_of(toy, [dice.randrange(2) for _ in range(dice.randint(1, 6))])

    def evict() -> None:
        toy.forget(dice.choice(list(Tier)), components=[dice.randrange(len(layout.components))])

    def cancel() -> None:
        operation = cache.load(prompt())
        if operation:
            cache.cancel(operation)

    acts: dict[str, Callable[[], object]] = {
        "serve": lambda: serve(toy, prompt(), backs_up=dice.random() < 0.5),
        "backup": lambda: cache.backup(prompt()),
        "durable": lambda: cache.backup(prompt(), Level.DURABLE),
        "load": lambda: cache.load(prompt()),
        "resume": lambda: resume(toy, prompt(), dice),
        "layers": lambda: read_layers(toy, prompt()),
        "evict": evict,
        "fork": lambda: fork(toy, prompt()),
        "cancel": cancel,
        "reset": lambda: None if cache.stats().operations_live else cache.reset(),
        "wait": lambda: cache.wait_all(WAIT_S),
    }
    for _ in range(STEPS):
        acts[dice.choice(calls)]()
        cache.poll()
        cache.check()


def at_rest(toy: ToyEngine) -> Stats:
    """Wait until nothing is under way; return what a cache has counted, which has lost no slot."""
    toy.cache.wait_all(WAIT_S)
    toy.cache.check()
    stats = toy.cache.stats()
    assert all(occupancy.out == 0 for occupancy in stats.occupancy), "slots are lost"
    return stats


def run_on(seed: int, device: torch.device) -> None:
    toy = opened(toy_layout(SPANS, PAGE), MemoryStorage(), ThreadWorkers.start(), device)
    run_history(seed, toy, (*CALLS, "layers"))
    at_rest(toy)
    assert toy.cache.close() == []


@devices
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_no_byte_differs_however_requests_and_transfers_interleave(seed: int, device: torch.device) -> None:
    run_on(seed, device)


@pytest.mark.parametrize("component_set", COMPONENT_SETS)
def test_no_byte_differs_whatever_a_model_keeps_and_a_store_answers(component_set: str) -> None:
    layouts, happened = COMPONENT_SETS[component_set], Counter[str]()
    for seed in (*range(examples(18, 360)), *fresh_seeds(examples(18, 360))):
        rng = random.Random(seed)
        storage: Store = MemoryStorage(rng.choice([None, STORED_BYTES]))
        if lies := seed % 2 == 1:
            storage = ScriptedStorage(storage, SeededFaults(LIES, rng), rng)
        layout = layouts[seed % len(layouts)]
        toy = opened(layout, storage, Stepped(dice=rng))
        run_history(seed, toy)
        stats = at_rest(toy)
        assert toy.cache.close() == []
        happened.update({leg.value: moved.pages for leg, moved in stats.traffic.items()})
        assert lies or not (stats.flawed_pages or stats.operations_failed)
        happened.update(flawed=stats.flawed_pages, failed=stats.operations_failed)
    assert all(happened.values()), happened


class FailingMemory(TieredMemory):
    """Memory of which copies go wrong while there are dice, with nothing moved or half of it."""

    dice: random.Random | None = None

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        self._copy(partial(super().backup, pool), source, target)

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        self._copy(partial(super().load_layer, pool, layer), source, target)
        return AT_ONCE

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        self._copy(lambda *_: super(FailingMemory, self).seal(pool, slots, labels), slots[:0], slots[:0])

    def duplicate(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        self._copy(partial(super().duplicate, pool), source, target)

    def _copy(self, copy: Callable[[Slots, Slots], object], source: Slots, target: Slots) -> None:
        if self.dice is not None and self.dice.random() < COPY_FAILS:
            half = len(source) // self.dice.choice((2, len(source) + 1))
            copy(source[:half], target[:half])
            raise self.dice.choice((CopyError, OSError))("a copy fails on purpose")
        copy(source, target)


def check_normal_service(toy: ToyEngine) -> None:
    """Serve prompts as those before, back each of them up, lose it and get it back."""
    for kinds in product(range(2), repeat=3):
        prompt = prompt_of(toy, kinds)
        lock = toy.serve(prompt)
        assert lock is not None
        assert lock.end == prompt.pages_count
        toy.verify(prompt, lock)
        backup = started(toy.cache.backup(prompt))
        toy.cache.wait_all(WAIT_S)
        assert backup.error is None
        toy.cache.release(lock)
        toy.cache.reset()
        toy.cache.prefetch(prompt)
        toy.cache.wait_all(WAIT_S)
        assert toy.cache.match(prompt).host_end == prompt.pages_count


@pytest.mark.parametrize("component_set", COMPONENT_SETS)
@pytest.mark.parametrize("kind", StoreKind)
def test_whatever_calls_fail_no_byte_differs_no_slot_is_lost_and_service_is_normal_afterwards(
    kind: StoreKind, component_set: str, memory_path: Path
) -> None:
    """Calls of the file system and copies fail, and calls of the store do not return in time."""
    layouts, failed_count = COMPONENT_SETS[component_set], 0
    for seed in (*range(FAULTY_SEEDS), *fresh_seeds(FAULTY_SEEDS)):
        dice = random.Random(seed)
        disk = FaultyDisk(dice.choice(list(DiskFault)))
        root = memory_path / str(seed)
        store = ScriptedStorage(kind.open(root, disk=disk))
        toy = opened(dice.choice(layouts), store, Stepped(dice=dice), memory=FailingMemory)
        memory, unreturned = toy.cache._memory, list[UnreturnedCall]()
        assert isinstance(memory, FailingMemory)

        def hang(dice: random.Random = dice, calls: list[UnreturnedCall] = unreturned) -> None:
            if dice.random() < STORE_HANGS:
                calls.append(UnreturnedCall("store"))
                raise StorageTimeoutError("the store hangs", calls[-1])

        memory.dice = dice
        first = len(disk.calls)
        disk.failing = {first + at for at in range(DISK_CALLS_MAX) if dice.random() < CALL_FAILS}
        store.before = dict.fromkeys((Method.GET, Method.PUT, Method.EXISTS), hang)
        run_history(seed, toy, FAULTY_CALLS)
        memory.dice, disk.failing, store.before = None, (), {}
        for call in unreturned:
            call.returned = True
        failed_count += at_rest(toy).operations_failed
        check_normal_service(toy)
        assert toy.cache.close() == []
        assert not [name for name in temps(root) if name.endswith(".part")]
    assert failed_count


@needs_gpu
def test_no_byte_differs_on_a_gpu_for_a_while(record_property: Callable[[str, object], None]) -> None:
    end_s = time.monotonic() + GPU_S
    histories = 0
    while time.monotonic() < end_s:
        run_on(HISTORIES + histories, GPU)
        histories += 1
    record_property("figure", f"{histories} histories in {GPU_S:.0f} s")
