"""Random histories of a whole cache, with its threads, on every kind of device: no byte differs from the oracle's."""

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.cache import ToyEngine, oracle, toy_layout
from tests.support.gpu import GPU, devices, needs_gpu
from tests.support.operations import PAGE, SPANS, tokens
from unified_cache.controller import OperationState, ThreadWorkers
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.storage_backends.memory import MemoryStorage

WAIT_S = 60.0
STEPS = 60
HISTORIES = 4
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


def run_history(seed: int, device: torch.device) -> None:
    """Run random calls of a cache against the oracle's bytes."""
    dice = random.Random(seed)
    toy = ToyEngine(toy_layout(SPANS, PAGE), (12, 8), (12, 8), MemoryStorage(), ThreadWorkers.start(), device=device)
    cache = toy.cache
    for _ in range(STEPS):
        prompt = cache.prompt(tokens(dice.randint(1, 5), dice.choice((0, 0, 1, 2))))
        match dice.choice(("serve", "serve", "backup", "load", "layers", "evict", "prefetch", "wait")):
            case "serve":
                lock = toy.serve(prompt)
                if lock is not None:
                    if dice.random() < 0.5:
                        cache.backup(prompt)  # of what has just been written
                    cache.release(lock)
            case "backup":
                cache.backup(prompt)
            case "load":
                cache.load(prompt)
            case "prefetch":
                cache.prefetch(prompt)
            case "layers":
                read_layers(toy, prompt)
            case "evict":
                ledger = cache._ledger
                for component in (1, 0):
                    ledger._take_back(ledger.tree.evict(Tier.DEVICE, component, dice.randint(1, 12)))
            case _:
                cache.wait_all(WAIT_S)
        cache.poll()
    cache.wait_all(WAIT_S)
    cache.check()
    assert cache.close() == []


@devices
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_no_byte_differs_however_requests_and_transfers_interleave(seed: int, device: torch.device) -> None:
    run_history(seed, device)


@needs_gpu
def test_no_byte_differs_on_a_gpu_for_a_while(record_property: Callable[[str, object], None]) -> None:
    end_s = time.monotonic() + GPU_S
    histories = 0
    while time.monotonic() < end_s:
        run_history(HISTORIES + histories, GPU)
        histories += 1
    record_property("figure", f"{histories} histories in {GPU_S:.0f} s")
