"""One call of an engine costs one deadline over a store that freezes, however many calls to the store it is made of.

The store counts what it is waited for: where it is frozen, a call takes all the time that it is given.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from threading import Event
from typing import TypeVar

import numpy as np
import pytest

from tests.support.clock import ManualClock
from tests.support.sglang_names import TensorPool, adapter_class
from tests.support.vllm_tier import TIMEOUT_S, HostMemory, offload_key, tier_over
from tests.unit.integrations.engine_store.test_pools import chain, name_of
from tests.unit.integrations.test_sglang_storage import Engine
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore, EngineStoreConfig
from unified_cache.integrations.engine_store.pools import AffineRows, BundlePages, EnginePools, PoolNeed
from unified_cache.integrations.sglang.linker_tier import LinkerHostTier
from unified_cache.integrations.sglang.tier_storage import ComponentBundles, TierStorage
from unified_cache.integrations.vllm import lookups
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.common.bounded_call import time_left_s
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

SOON_S = 0.3
"""Deadline of what is waited for by the machine's clock."""
Result = TypeVar("Result")

DEADLINE_S = 8.0
"""A power of two: times of a manual clock add up exactly."""
PAGES = 400
"""More than a look-up asks for at first, and than one call moves."""
POOLS = ("kv", "swa", "state")
END: dict[bytes, int] = {}
"""Where each chunk ends in its prompt: nowhere in particular."""

NEEDS = [PoolNeed(("kv",), SPAN_ALL), PoolNeed(("swa",), 4), PoolNeed(("state",), 1)]


class FreezingStorage(StorageLayer):
    """Answers some calls, then takes all the time of each, and says nothing, or nothing of the last page."""

    def __init__(self, clock: ManualClock | None, *, is_bounded: bool, is_partial: bool = False) -> None:
        """Without a clock it takes the machine's time."""
        super().__init__(MemoryStorage())
        self.clock = clock
        self._is_bounded, self._is_partial = is_bounded, is_partial
        self.answered_max = math.inf
        """Calls that it still answers."""
        self.waited_s = 0.0

    def capability(self) -> Capability:
        return replace(self._backend.capability(), bounded=self._is_bounded, call_s_max=0.1, exists_costs_io=True)

    def _call(self, method: Method, work: Callable[[], Result], asked_count: int | None = None) -> Result:
        if method is Method.CLOSE or self.answered_max > 0:
            self.answered_max -= 1
            return work()
        left_s = time_left_s()
        self.waited_s += left_s
        Event().wait(left_s) if self.clock is None else self.clock.sleep(left_s)
        answers = work() if self._is_partial else None
        if not isinstance(answers, list):
            raise StorageError("frozen", retryable=True)
        answers[-1] = Answer.UNAVAILABLE
        return answers


@pytest.fixture(params=["on a thread", "on the caller's thread"])
def is_bounded(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "on the caller's thread"


@pytest.fixture(params=["nothing", "all but a page"])
def is_partial(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "all but a page"


Opened = tuple[EngineStore, FreezingStorage]
Open = Callable[..., Opened]


@pytest.fixture
def opened(is_bounded: bool, is_partial: bool) -> Iterator[Open]:
    """Open stores that are waited for by a clock of their own."""
    with ExitStack() as stack:

        def open_one(backend: FreezingStorage | None = None) -> Opened:
            backend = backend or FreezingStorage(ManualClock(), is_bounded=is_bounded, is_partial=is_partial)
            assert backend.clock is not None
            guard = GuardConfig(deadline_s=DEADLINE_S, breaker_failures_max=1000)
            config = EngineStoreConfig(guard, piece_bytes=32 << 10, bounce_bytes=1 << 20, call_timeout_s=1000.0)
            return stack.enter_context(EngineStore.opened_by(lambda: backend, config, clock=backend.clock)), backend

        yield open_one


def pools_over(
    store: EngineStore, memory: Mapping[str, "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"]
) -> EnginePools:
    pools = EnginePools(store, name_of)
    for name, rows in memory.items():
        count, page_bytes = rows.shape
        pools.add(name, AffineRows([rows.ctypes.data], [page_bytes], [page_bytes], count))
    return pools


BATCH = [BundlePages((pool,), chain(PAGES), range(PAGES)) for pool in POOLS]
OTHERS = [BundlePages((pool,), chain(PAGES, "other"), range(PAGES)) for pool in POOLS]

CALLS: dict[str, Callable[[EnginePools], object]] = {
    "restorable": lambda pools: pools.restorable(chain(PAGES), NEEDS),
    "restorable behind pages held": lambda pools: pools.restorable(chain(PAGES), NEEDS, 100),
    "get": lambda pools: pools.get(BATCH),
    "put": lambda pools: pools.put(OTHERS),
    "clear": lambda pools: pools.clear(),
}


@pytest.mark.parametrize("is_known", [True, False], ids=["pools known", "pools new"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_for_several_pools_waits_for_one_deadline_wherever_the_store_freezes(
    name: str, is_known: bool, opened: Open
) -> None:
    memory = {pool: np.zeros((PAGES, 64), np.uint8) for pool in POOLS}
    for answered_max in count():
        store, backend = opened()
        pools = pools_over(store, memory)
        pools.put(BATCH)
        if not is_known:
            store, _ = opened(backend)
            pools = pools_over(store, memory)
        backend.answered_max = answered_max
        CALLS[name](pools)
        pools.close()
        assert backend.waited_s <= DEADLINE_S, answered_max
        if not backend.waited_s:
            break
    assert answered_max > 1 or (name, is_known) == ("clear", False)


@pytest.mark.parametrize("name", ["look-up", "load", "store"])
def test_a_step_of_vllm_waits_for_one_deadline_however_many_pieces_it_asks_for(
    name: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "NAMES_MAX", 4)
    keys = [offload_key(number) for number in range(32)]
    settings = TierSettings(url="memory:", store_share=1.0)
    for answered_max in range(0, 16, 3):
        store, backend = opened()
        memory = HostMemory(32)
        tier = tier_over(store, memory, settings)
        if name != "store":
            tier.store(0, keys, range(32), END.get)
            assert tier.wait(TIMEOUT_S)
        backend.answered_max = answered_max
        if name == "look-up":
            for key in keys:
                tier.look_up(key, "request")
            tier.step_ended()
        elif name == "load":
            tier.load(1, keys, range(32))
        else:
            tier.store(1, keys, range(32), END.get)
        assert tier.wait(TIMEOUT_S)
        assert backend.waited_s <= DEADLINE_S, answered_max
        assert tier.close()
        memory.close()


def test_a_write_of_several_components_behind_a_linker_waits_for_one_deadline(opened: Open) -> None:
    keys = [key.hex() for key in chain(32)]
    store, backend = opened()
    pages_max = dict.fromkeys(POOLS, 64)
    tier = LinkerHostTier(pages_max)
    pools = pools_over(store, {pool: np.zeros((65, 64), np.uint8) for pool in POOLS})
    bundles = {pool: ComponentBundles(((pool,),), ((pool,),)) for pool in POOLS}
    storage = TierStorage(tier, store, pools, bundles, pages_max)
    held = dict.fromkeys(POOLS, keys)
    slots = tier.reserve(dict.fromkeys(POOLS, len(keys)))
    assert slots is not None
    tier.publish(held, slots, tier.clears_count)
    backend.answered_max = 0
    storage.store(held)
    storage.close(TIMEOUT_S)
    assert storage.backlog == 0
    assert 0 < backend.waited_s <= DEADLINE_S
    pools.close()


FROZEN: list[FreezingStorage] = []


def open_frozen(rest: str, bytes_max: int | None) -> Store:
    FROZEN.append(FreezingStorage(None, is_bounded=rest == "bounded"))
    return FROZEN[-1]


@pytest.mark.parametrize("name", ["batch_exists", "batch_exists_v2", "batch_get_v2", "batch_set_v2", "clear"])
def test_a_call_of_sglang_waits_for_one_deadline(name: str, is_bounded: bool) -> None:
    keys, pools = [key.hex() for key in chain(24)], {pool: TensorPool(32) for pool in ("kv", "swa", "mamba")}
    url = f"{__name__}:open_frozen:{'bounded' if is_bounded else ''}"
    with adapter_class({"kv_cache_dtype": "auto"}) as cls:
        engine = Engine(cls, url, pools, extra={"deadline_s": SOON_S})
        storage, transfers = engine.storage, engine.transfers(keys, range(24), kv="kv", swa="swa", mamba="mamba")
        for transfer in transfers[1:]:
            storage.batch_set_v2([transfer])
        calls: dict[str, Callable[[], object]] = {
            "batch_exists": lambda: storage.batch_exists(keys),
            "batch_exists_v2": lambda: storage.batch_exists_v2(keys, transfers[1:]),
            "batch_get_v2": lambda: storage.batch_get_v2(transfers),
            "batch_set_v2": lambda: storage.batch_set_v2(transfers),
            "clear": storage.clear,
        }
        FROZEN[-1].answered_max = 0
        calls[name]()
        assert 0 < FROZEN[-1].waited_s <= SOON_S
        storage.close()
