"""Random histories of a whole cache, on every kind of device and of model: no byte differs from the oracle's."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.support.budget import examples
from tests.support.cache import ToyEngine, oracle, toy_layout
from tests.support.components import COMPONENT_SETS
from tests.support.gpu import GPU, devices, needs_gpu
from tests.support.operations import PAGE, SPANS, Stepped
from tests.support.store_calls import ScriptedStorage, SeededFaults, StorageFault
from unified_cache.cache.stats import Stats
from unified_cache.controller import OperationState, ThreadWorkers, Workers
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, Tier
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Store

WAIT_S = 60.0
STEPS = 60
HISTORIES = 4
CALLS = ("serve", "serve", "backup", "load", "evict", "resume", "wait")
DEVICE_PAGES, WINDOW_PAGES = 12, 8
STORED_BYTES = 8000
"""Of a store that evicts."""
LIES = dict.fromkeys(
    (StorageFault.PARTIAL_WRITE, StorageFault.FLIPPED_BIT, StorageFault.MISDIRECTED_READ, StorageFault.TORN_WRITE), 0.2
)
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
    """Bring a prompt up tier by tier, with more or less patience, and serve it."""
    for leg in (toy.cache.prefetch, toy.cache.load):
        leg(prompt)
        for _ in range(dice.randrange(4)):
            toy.cache.poll()
    serve(toy, prompt, backs_up=False)


def run_history(
    seed: int,
    device: torch.device,
    layout: ModelLayout,
    storage: Store,
    workers: Workers,
    calls: Sequence[str] = CALLS,
) -> Stats:
    """Run random calls of a cache against the oracle's bytes; return what it has counted."""
    dice = random.Random(seed)
    pages = (DEVICE_PAGES, *(WINDOW_PAGES for _ in layout.components[1:]))
    toy = ToyEngine(layout, pages, pages, storage, workers, device=device)
    cache = toy.cache

    def prompt() -> Prompt:
        """Make a prompt of pages of two kinds, so that many begin alike and part somewhere."""
        kinds = [dice.randrange(2) for _ in range(dice.randint(1, 6))]
        return cache.prompt(np.repeat(np.array(kinds, np.int32), layout.page_size))

    for _ in range(STEPS):
        match dice.choice(calls):
            case "serve":
                serve(toy, prompt(), backs_up=dice.random() < 0.5)
            case "backup":
                cache.backup(prompt())
            case "load":
                cache.load(prompt())
            case "resume":
                toy.forget(*list(Tier)[: dice.randrange(1, 3)])
                resume(toy, prompt(), dice)
            case "layers":
                read_layers(toy, prompt())
            case "evict":
                toy.forget(dice.choice(list(Tier)), components=[dice.randrange(len(pages))])
            case _:
                cache.wait_all(WAIT_S)
        cache.poll()
        cache.check()
    cache.wait_all(WAIT_S)
    stats = cache.stats()
    assert all(occupancy.out == 0 for occupancy in stats.occupancy), "slots are lost"
    assert cache.close() == []
    return stats


def run_on(seed: int, device: torch.device) -> None:
    run_history(seed, device, toy_layout(SPANS, PAGE), MemoryStorage(), ThreadWorkers.start(), (*CALLS, "layers"))


@devices
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_no_byte_differs_however_requests_and_transfers_interleave(seed: int, device: torch.device) -> None:
    run_on(seed, device)


@pytest.mark.parametrize("component_set", COMPONENT_SETS)
def test_no_byte_differs_whatever_a_model_keeps_and_a_store_answers(component_set: str) -> None:
    layouts, happened = COMPONENT_SETS[component_set], Counter[str]()
    for seed in range(examples(36, 720)):
        rng = random.Random(seed)
        storage: Store = MemoryStorage(rng.choice([None, STORED_BYTES]))
        if lies := seed % 2 == 1:
            storage = ScriptedStorage(storage, SeededFaults(LIES, rng), rng)
        layout = layouts[seed % len(layouts)]
        stats = run_history(seed, torch.device("cpu"), layout, storage, Stepped(dice=rng))
        happened.update({leg.value: moved.pages for leg, moved in stats.traffic.items()})
        assert lies or not (stats.flawed_pages or stats.operations_failed)
        happened.update(flawed=stats.flawed_pages, failed=stats.operations_failed)
    assert all(happened.values()), happened


@needs_gpu
def test_no_byte_differs_on_a_gpu_for_a_while(record_property: Callable[[str, object], None]) -> None:
    end_s = time.monotonic() + GPU_S
    histories = 0
    while time.monotonic() < end_s:
        run_on(HISTORIES + histories, GPU)
        histories += 1
    record_property("figure", f"{histories} histories in {GPU_S:.0f} s")
