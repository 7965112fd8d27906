"""Calls that cannot be served: a typed error that says why, and a cache that is what it was before."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sources import ROOT
from tests.support.cache import ToyEngine
from tests.support.operations import numbered_pages, present
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller import InlineWorkers, NotStarted
from unified_cache.controller.memory import DevicePool, PageMemory
from unified_cache.core.config import CacheConfig, EvictionConfig, EvictionPolicy, GuardConfig, Prefetching, Retention
from unified_cache.core.errors import (
    CacheError,
    ConfigError,
)
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, Slots
from unified_cache.core.shards import Extent, Shard
from unified_cache.storage_backends.directory.front import parse_address
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.url import open_storage
from unified_cache.tree import Lock, RadixTree
from unified_cache.tree.check import check

PAGE = 16
FULL = Full((PoolSpec("kv", 64),))
WINDOW = SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 32),))
STATE = RecurrentState((PoolSpec("mamba", 48),))
LAYOUT = ModelLayout(PAGE, (FULL, WINDOW, STATE))


class Used:
    """A cache in use: a request that holds a lock and slots, a prefix, and a lock that was given back."""

    def __init__(self) -> None:
        self.toy = ToyEngine(LAYOUT, (12, 8, 4), (12, 8, 4), None, InlineWorkers())
        self.cache = self.toy.cache
        lock = present(self.toy.serve(self.cache.prompt(numbered_pages(1, 2, 3))))
        self.lock: Lock = lock
        self.released = self.cache.lock(self.cache.match(self.cache.prompt(numbered_pages(1, 2, 3))))
        self.cache.release(self.released)
        mine = present(self.cache.allocate(self.cache.pages_to_allocate(3, 5, [5])))
        self.mine = mine
        self.longer = self.cache.prompt(numbered_pages(1, 2, 3, 4, 5))

    def snapshot(self) -> object:
        ledger = self.cache._ledger
        self.cache.check()
        assert ledger.paired is not None
        return (
            [slots.tolist() for slots in check(ledger.tree, list(self.cache._locks))],
            ledger.paired.map.table.tolist(),
            self.cache.stats(),
            [slots.tolist() for slots in self.mine],
            self.toy.verify(self.longer, self.lock),
        )

    def with_slot(self, component: int, page: int, slot: int) -> list[Slots]:
        """Return the request's slots with one replaced."""
        slots = [given.copy() for given in self.mine]
        slots[component][page] = slot
        return slots


def foreign_lock(used: Used) -> None:
    other = Used()
    used.cache.release(other.lock)


def insert_over_a_foreign_lock(used: Used) -> None:
    other = Used()
    used.cache.insert(used.longer, used.mine, other.lock)


def allocate_masks_of(kind: str) -> Callable[[Used], object]:
    return lambda used: used.cache.allocate([np.ones(2, kind)] * 3)


def prefetch_by(time_s: object) -> Callable[[Used], object]:
    return lambda used: used.cache.prefetch(used.longer, time_s)  # type: ignore[arg-type]


EXPECTED = dict(
    line.split(": ", 1) for line in (ROOT / "tests/fixtures/bad_calls.txt").read_text(encoding="utf-8").splitlines()
)
"""Class and text of every error, by call."""


def check_refused(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(CacheError) as refused:
        call()
    assert f"{type(refused.value).__name__}: {refused.value}" == EXPECTED[name]


CALLS: dict[str, Callable[[Used], object]] = {
    "a lock given back twice": lambda u: u.cache.release(u.released),
    "another cache's lock": foreign_lock,
    "pages after a lock given back": lambda u: u.cache.insert(u.longer, u.mine, u.released),
    "pages after another cache's lock": insert_over_a_foreign_lock,
    "slots of the tree": lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, int(u.cache.slots(u.lock)[0])), u.lock),
    "slots that are free": lambda u: u.cache.insert(u.longer, u.with_slot(2, 1, 4), u.lock),
    "a slot named twice": lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, int(u.mine[0][1])), u.lock),
    "slots that no pool has": lambda u: u.cache.insert(u.longer, u.with_slot(2, 1, 99), u.lock),
    "a page without a Full slot": lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, -1), u.lock),
    "windows of other Full pages": lambda u: u.cache.insert(
        u.longer, [u.mine[0], u.mine[1][::-1].copy(), u.mine[2]], u.lock
    ),
    "too few slots": lambda u: u.cache.insert(u.longer, [given[:1] for given in u.mine], u.lock),
    "a floor that is not where pages are": lambda u: u.cache.trim(
        u.mine, [mask[:-1] for mask in u.cache.pages_to_allocate(3, 5, [5])]
    ),
    "a floor that would take Full pages": lambda u: u.cache.trim(u.mine, [np.zeros(2, np.bool_) for _ in range(3)]),
    "trimming slots that are free": lambda u: u.cache.trim(
        u.with_slot(2, 1, 4), [np.ones(2, np.bool_), *(np.zeros(2, np.bool_) for _ in range(2))]
    ),
    "giving back what the tree has": lambda u: u.cache.free(u.with_slot(0, 0, int(u.cache.slots(u.lock)[0]))),
    "giving back nothing of no component": lambda u: u.cache.free([]),
    "slots of too few components": lambda u: u.cache.insert(u.longer, u.mine[:2], u.lock),
    "pages in the wrong order": lambda u: u.cache.pages_to_allocate(5, 3, [5]),
    "masks for other components": lambda u: u.cache.allocate(u.cache.pages_to_allocate(3, 5, [5])[:2]),
    "a prompt of other pages": lambda u: u.cache.match(Prompt.of(numbered_pages(1), 8)),
    "tokens that are none": lambda u: u.cache.prompt([1.5] * PAGE),
    "a namespace that is a name": lambda u: u.cache.prompt(numbered_pages(1), "tenant"),  # type: ignore[arg-type]
    "a text for a level": lambda u: u.cache.backup(u.longer, "durable"),  # type: ignore[arg-type]
    "slots of a lock given back": lambda u: u.cache.slots(u.released),
    "slots of a component that there is not": lambda u: u.cache.slots(u.lock, 3),
    "slots of a component from the end": lambda u: u.cache.slots(u.lock, -1),
    "room of a component that there is not": lambda u: u.cache.available(3),
    **{f"a deadline of {time_s}": prefetch_by(time_s) for time_s in (0, -1.0, math.nan, "soon")},
    **{f"masks of {kind}": allocate_masks_of(kind) for kind in ("int64", "uint8", "float32")},
    "masks of numbers to trim": lambda u: u.cache.trim(u.mine, [np.ones(2, np.int64)] * 3),
    "masks with a side of their own": lambda u: u.cache.allocate([np.ones((2, 1), np.bool_)] * 3),
    "slots that are fractions": lambda u: u.cache.insert(
        u.longer, [given.astype(np.float64) for given in u.mine], u.lock
    ),
    "a priority that is a fraction": lambda u: u.cache.insert(u.longer, u.mine, u.lock, 1.5),  # type: ignore[arg-type]
    "a fraction as a match's priority": lambda u: u.cache.match(u.longer, priority=1.0),  # type: ignore[arg-type]
}


FOREIGN: tuple[object, ...] = ("x", b"x", None, 1.5, object(), [1, 2], ["x"], {}, np.zeros(3))

BY_ARGUMENT: dict[str, Callable[[UnifiedCache, Used, object], object]] = {
    "match": lambda c, _, x: c.match(x),  # type: ignore[arg-type]
    "lock": lambda c, _, x: c.lock(x),  # type: ignore[arg-type]
    "slots": lambda c, _, x: c.slots(x),  # type: ignore[arg-type]
    "slots of a component": lambda c, u, x: c.slots(u.lock, x),  # type: ignore[arg-type]
    "release": lambda c, _, x: c.release(x),  # type: ignore[arg-type]
    "release windows": lambda c, _, x: c.release_windows(x),  # type: ignore[arg-type]
    "fork": lambda c, _, x: c.fork(x),  # type: ignore[arg-type]
    "checkpoint ends": lambda c, _, x: c.checkpoint_ends(x),  # type: ignore[arg-type]
    "pages from": lambda c, _, x: c.pages_to_allocate(x, 5, [5]),  # type: ignore[arg-type]
    "pages to": lambda c, _, x: c.pages_to_allocate(3, x, [5]),  # type: ignore[arg-type]
    "pages for ends": lambda c, _, x: c.pages_to_allocate(3, 5, [x]),  # type: ignore[list-item]
    "available": lambda c, _, x: c.available(x),  # type: ignore[arg-type]
    "allocate": lambda c, _, x: c.allocate(x),  # type: ignore[arg-type]
    "free": lambda c, _, x: c.free(x),  # type: ignore[arg-type]
    "trim": lambda c, _, x: c.trim(x, c.pages_to_allocate(3, 5, [5])),  # type: ignore[arg-type]
    "trim to": lambda c, u, x: c.trim(u.mine, x),  # type: ignore[arg-type]
    "insert": lambda c, u, x: c.insert(x, u.mine, u.lock),  # type: ignore[arg-type]
    "insert slots": lambda c, u, x: c.insert(u.longer, x, u.lock),  # type: ignore[arg-type]
    "insert after": lambda c, u, x: c.insert(u.longer, u.mine, x),  # type: ignore[arg-type]
    "load": lambda c, _, x: c.load(x),  # type: ignore[arg-type]
    "back up": lambda c, _, x: c.backup(x),  # type: ignore[arg-type]
    "prefetch": lambda c, _, x: c.prefetch(x),  # type: ignore[arg-type]
    "bring": lambda c, _, x: c.bring(x),  # type: ignore[arg-type]
    "explain": lambda c, _, x: c.explain(x),  # type: ignore[arg-type]
    "begin layer-wise": lambda c, _, x: c.begin_layerwise(x),  # type: ignore[arg-type]
    "end layer-wise": lambda c, _, x: c.end_layerwise(x),  # type: ignore[arg-type]
    "finish early": lambda c, _, x: c.finish_early(x),  # type: ignore[arg-type]
    "cancel": lambda c, _, x: c.cancel(x),  # type: ignore[arg-type]
    "wait until": lambda c, _, x: c.wait_all(1.0, until="x" if x is None else x),  # type: ignore[arg-type]
    "record to": lambda c, _, x: c.record_to("x" if x is None else x),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", BY_ARGUMENT.values(), ids=BY_ARGUMENT)
def test_a_value_of_another_kind_is_refused_by_every_call_and_changes_nothing(
    call: Callable[[UnifiedCache, Used, object], object],
) -> None:
    used = Used()
    before = used.snapshot()
    for value in FOREIGN:
        with pytest.raises(CacheError):
            call(used.cache, used, value)
    assert used.snapshot() == before


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_a_typed_error_and_changes_nothing(name: str) -> None:
    used = Used()
    before = used.snapshot()
    check_refused(name, lambda: CALLS[name](used))
    assert used.snapshot() == before
    lock = used.cache.insert(used.longer, used.mine, used.lock)
    used.cache.release(lock)
    used.cache.check()


KV = PoolSpec("kv", 64)
LAYERS = torch.zeros((5, 64), dtype=torch.uint8)
CONFIG = CacheConfig((4,), (4,))
TWO_POLICIES = EvictionConfig(host=(EvictionPolicy.PRIORITY,) * 2)


def opened(
    layout: object = ModelLayout(PAGE, (Full((KV,)),)),
    config: object = CONFIG,
    pools: object = (DevicePool(KV, [LAYERS]),),
    identity: object = Identity("m"),
    storage: object = None,
) -> UnifiedCache:
    """Open a cache of anything."""
    return UnifiedCache.open(layout, config, pools, identity=identity, storage=storage)  # type: ignore[arg-type]


def assemble(layout: ModelLayout, host_pages: int) -> UnifiedCache:
    sizes = tuple(8 for _ in layout.components)
    config = CacheConfig(sizes, tuple(host_pages for _ in sizes))
    return UnifiedCache.assemble(layout, config, PageMemory(), InlineWorkers(), Identity("m"), MemoryStorage())


PARTS: dict[str, Callable[[], object]] = {
    "a count in place of counts": lambda: CacheConfig(100, (4,)),  # type: ignore[arg-type]
    "counts that are none": lambda: CacheConfig((4,), ("4",)),  # type: ignore[arg-type]
    "a text for a write policy": lambda: CacheConfig((4,), (4,), write="through"),  # type: ignore[arg-type]
    "a policy for policies": lambda: EvictionConfig(device=EvictionPolicy.PRIORITY),  # type: ignore[arg-type]
    "a deadline for a guard": lambda: CacheConfig((4,), (4,), guard=5.0),  # type: ignore[arg-type]
    "one count for two components": lambda: opened(ModelLayout(PAGE, (Full((KV,)), STATE))),
    "a number for an identity": lambda: opened(identity=7),
    "no name for an identity": lambda: opened(identity=""),
    "a URL of no store": lambda: opened(storage="fil:x"),
    "a count for a layout": lambda: opened(layout=16),
    "a count for a configuration": lambda: opened(config=100),
    "a tensor for a pool's layers": lambda: DevicePool(KV, LAYERS),  # type: ignore[arg-type]
    "tensors for pools": lambda: opened(pools=[LAYERS]),
    "a pool for pools": lambda: Full(KV),  # type: ignore[arg-type]
    "names for pools": lambda: RecurrentState(("state",)),  # type: ignore[arg-type]
    "a component for components": lambda: ModelLayout(PAGE, Full((KV,))),  # type: ignore[arg-type]
    "a window first": lambda: opened(layout=ModelLayout(PAGE, (Component("swa", 2, (KV,)),))),
    "a page size that is a fraction": lambda: ModelLayout(16.0, (FULL,)),  # type: ignore[arg-type]
    "page bytes that are a fraction": lambda: PoolSpec("kv", 64.0),  # type: ignore[arg-type]
    "an identity without a model": lambda: Identity(""),
    "a text for a shard": lambda: Identity("m", shard="rank 0"),  # type: ignore[arg-type]
    "a number of layers for the layers of a stage": lambda: Shard.of_rank(0, 2, 8, 32),  # type: ignore[arg-type]
    "half a layer": lambda: Extent(0, 0.5, 1),  # type: ignore[arg-type]
    "a text for a unit of heads": lambda: PoolSpec("kv_h0", 64, unit="heads 0-2/8"),  # type: ignore[arg-type]
    "a stage for a generation": lambda: Identity("m", generation="layers 0-16/32"),  # type: ignore[arg-type]
    "a path for a model": lambda: Identity(Path("m")),  # type: ignore[arg-type]
    "a model that no text can hold": lambda: Identity("m\ud800"),
    "a salt that no text can hold": lambda: Namespace(cache_salt="\udcff"),
    "a number for a tenant": lambda: Namespace(tenant=5),  # type: ignore[arg-type]
    "a window counted in other pages": lambda: ModelLayout(64, (FULL, WINDOW)).check_resumable(),
    "host pages for some components": lambda: CacheConfig((4, 4), (4, 0)),
    "storage without host pages": lambda: assemble(LAYOUT, 0),
    "no device pages": lambda: CacheConfig((0,), (1,)),
    "fewer host pages than none": lambda: CacheConfig((1,), (-1,)),
    "no operations": lambda: CacheConfig((1,), (1,), operations_max=0),
    "counts for different components": lambda: CacheConfig((1, 2), (1,)),
    "a threshold below none": lambda: Prefetching(threshold_tokens=-1),
    "a patience below none": lambda: Prefetching(patience_s=-1.0),
    "no share of the host": lambda: Prefetching(host_share=0.0),
    "more than all of the host": lambda: Prefetching(host_share=1.5),
    "more policies than components": lambda: CacheConfig((1,), (1,), eviction=TWO_POLICIES),
    "more policies than components of a tree": lambda: RadixTree((FULL,), 1, TWO_POLICIES),
    "a tail below none": lambda: Retention(tail_tokens=-1),
    "a generation below none": lambda: Identity("m", generation=-1),
    "a host in a store's path": lambda: open_storage("file://tmp/x"),
    "a host in a packed store's path": lambda: open_storage("packed://tmp/x"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_fits_nowhere_is_refused_by_name(name: str) -> None:
    check_refused(name, PARTS[name])


def test_every_error_that_is_expected_is_of_a_call() -> None:
    assert EXPECTED.keys() == CALLS.keys() | PARTS.keys()


def test_three_slashes_name_a_path_from_the_root() -> None:
    assert parse_address("///var/cache").path == Path("/var/cache")


PRIORITIES: tuple[int, ...] = (np.int64(3), 1, np.int32(2), 4)  # type: ignore[assignment]  # of no type, but integers


def test_numpys_integers_are_priorities_like_others() -> None:
    sizes = (4,)
    eviction = EvictionConfig(device=(EvictionPolicy.PRIORITY,))
    layout = ModelLayout(PAGE, (Full((KV,)),))
    cache = UnifiedCache.assemble(
        layout, CacheConfig(sizes, (0,), eviction=eviction), PageMemory(), InlineWorkers(), Identity("m"), None
    )
    for content, priority in enumerate(PRIORITIES):
        prompt = cache.prompt(numbered_pages(content), whole=True)
        slots = present(cache.allocate(cache.pages_to_allocate(0, 1, [1])))
        cache.release(cache.insert(prompt, slots, cache.lock(cache.match(prompt)), priority))
    gone: list[int] = []
    for _ in range(4):
        assert cache.allocate(cache.pages_to_allocate(0, 1, [1])) is not None
        prompts = [cache.prompt(numbered_pages(content), whole=True) for content in range(4)]
        held = {content for content, prompt in enumerate(prompts) if cache.match(prompt).device_end}
        gone += [content for content in range(4) if content not in held and content not in gone]
    assert gone == [1, 2, 0, 3]


def test_to_a_host_that_has_no_pages_no_backup_is_taken_and_no_load_is_started() -> None:
    toy = ToyEngine(LAYOUT, (4, 4, 4), (0, 0, 0), None, InlineWorkers())
    prompt = toy.cache.prompt(numbered_pages(1, 2))
    lock = present(toy.serve(prompt))
    before = toy.cache.stats()
    with pytest.raises(ConfigError, match="host pages are needed"):
        toy.cache.backup(prompt)
    assert toy.cache.load(prompt) is NotStarted.NO_HOST
    assert toy.cache.stats() == before
    toy.cache.release(lock)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CacheConfig((4,), (0,), dirty_share=1.5), r"dirty_share must be in \(0, 1\], found 1.5"),
        (lambda: CacheConfig((4,), (0,), duplicates_every=-1), "duplicates_every must not be negative, found -1"),
        (lambda: GuardConfig(deadline_s=math.inf), "deadline_s must be positive and finite, found inf"),
        (lambda: GuardConfig(retry_rounds_max=10**6), "retry_rounds_max must be at most"),
        (lambda: GuardConfig(breaker_pause_s=9.0), "breaker_pause_s must be at most breaker_pause_s_max"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_model_by_name_and_a_store_by_url_are_opened() -> None:
    with opened(identity="m", storage="memory:") as cache:
        assert cache.identity == Identity("m")
        assert cache.stats().storage_answers is not None
        cache.detach()
        cache.attach("memory:")


@pytest.mark.parametrize("storage", [5, True, b"memory:", Path("kv"), {"url": "memory:"}])
def test_what_is_no_store_and_no_url_is_refused_by_the_arguments_name(storage: object) -> None:
    with pytest.raises(ConfigError, match="expected storage as a Store, or the URL of a store"):
        opened(storage=storage)
    with opened(identity="m", storage=None) as cache, pytest.raises(ConfigError, match="expected storage as a Store"):
        cache.attach(storage)  # type: ignore[arg-type]


def test_a_store_that_was_opened_by_url_is_closed_where_the_cache_cannot_be_opened(tmp_path: Path) -> None:
    url = f"packed:{tmp_path}"  # for one process, and in it for one store at a time
    with pytest.raises(ConfigError, match="identity"):
        opened(identity=7, storage=url)
    with pytest.raises(ConfigError, match="host pages are needed"):
        opened(config=CacheConfig((4,), (0,)), storage=url)
    open_storage(url).close()
