"""Calls that cannot be served: a typed error that says why, and a cache that is what it was before."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.cache import ToyEngine
from tests.support.operations import present
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.components.deepseek_v4 import DeepSeekV4
from unified_cache.controller import InlineWorkers
from unified_cache.controller.memory import DevicePool, NoBytes
from unified_cache.core.config import CacheConfig, EvictionConfig, EvictionPolicy
from unified_cache.core.errors import (
    ConfigError,
    InputError,
    LayoutError,
    LockError,
    SlotError,
    StaleMatchError,
    TokenError,
)
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, Slots, Tier
from unified_cache.core.shards import Extent, Shard
from unified_cache.storage_backends.directory.front import parse_address
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.url import open_storage
from unified_cache.tree import Lock

PAGE = 16
FULL = Full((PoolSpec("kv", 64),))
WINDOW = SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 32),))
STATE = RecurrentState((PoolSpec("mamba", 48),))
LAYOUT = ModelLayout(PAGE, (FULL, WINDOW, STATE))


def tokens(*contents: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([np.arange(PAGE, dtype=np.int32) + 1000 * content for content in contents])


class Used:
    """A cache in use: a request that holds a lock and slots, a prefix, and a lock that was given back."""

    def __init__(self) -> None:
        self.toy = ToyEngine(LAYOUT, (12, 8, 4), (12, 8, 4), None, InlineWorkers())
        self.cache = self.toy.cache
        lock = present(self.toy.serve(self.cache.prompt(tokens(1, 2, 3))))
        self.lock: Lock = lock
        self.released = self.cache.lock(self.cache.match(self.cache.prompt(tokens(1, 2, 3))))
        self.cache.release(self.released)
        mine = present(self.cache.allocate(self.cache.pages_to_allocate(3, 5, [5])))
        self.mine = mine
        self.longer = self.cache.prompt(tokens(1, 2, 3, 4, 5))

    def snapshot(self) -> object:
        ledger = self.cache._ledger
        self.cache.check()
        assert ledger.paired is not None
        return (
            [slots.tolist() for slots in ledger.tree.check(list(self.cache._locks))],
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


TREES = "is the tree's, not out"
CALLS: dict[str, tuple[Callable[[Used], object], type[Exception], str]] = {
    "a lock given back twice": (lambda u: u.cache.release(u.released), LockError, "released already"),
    "another cache's lock": (foreign_lock, LockError, "another tree"),
    "pages after a lock given back": (
        lambda u: u.cache.insert(u.longer, u.mine, u.released),
        LockError,
        "released already",
    ),
    "pages after another cache's lock": (insert_over_a_foreign_lock, LockError, "another tree"),
    "slots of the tree": (
        lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, int(u.cache.slots(u.lock)[0])), u.lock),
        SlotError,
        f"full: slot 1 {TREES}",
    ),
    "slots that are free": (
        lambda u: u.cache.insert(u.longer, u.with_slot(2, 1, 4), u.lock),
        SlotError,
        "mamba: slot 4 is free, not out",
    ),
    "a slot named twice": (
        lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, int(u.mine[0][1])), u.lock),
        SlotError,
        "full: a slot is named twice",
    ),
    "slots that no pool has": (
        lambda u: u.cache.insert(u.longer, u.with_slot(2, 1, 99), u.lock),
        SlotError,
        r"mamba: slots must be in \[1, 4\]",
    ),
    "a page without a Full slot": (
        lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, -1), u.lock),
        SlotError,
        "needs a slot for every page|not reached through",
    ),
    "windows of other Full pages": (
        lambda u: u.cache.insert(u.longer, [u.mine[0], u.mine[1][::-1].copy(), u.mine[2]], u.lock),
        SlotError,
        "not reached through the Full slots of the same pages",
    ),
    "too few slots": (
        lambda u: u.cache.insert(u.longer, [given[:1] for given in u.mine], u.lock),
        InputError,
        "expected 2 slots",
    ),
    "a floor that is not where pages are": (
        lambda u: u.cache.trim(u.mine, [mask[:-1] for mask in u.cache.pages_to_allocate(3, 5, [5])]),
        InputError,
        "expected slots for 1 pages",
    ),
    "a floor that would take Full pages": (
        lambda u: u.cache.trim(u.mine, [np.zeros(2, np.bool_) for _ in range(3)]),
        InputError,
        "the first all True",
    ),
    "giving back what the tree has": (
        lambda u: u.cache.free(u.with_slot(0, 0, int(u.cache.slots(u.lock)[0]))),
        SlotError,
        TREES,
    ),
    "giving back nothing of no component": (lambda u: u.cache.free([]), InputError, "slots for 3 components, found 0"),
    "slots of too few components": (
        lambda u: u.cache.insert(u.longer, u.mine[:2], u.lock),
        InputError,
        "slots for 3 components, found 2",
    ),
    "pages in the wrong order": (lambda u: u.cache.pages_to_allocate(5, 3, [5]), InputError, "0 <= start <= end"),
    "masks for other components": (
        lambda u: u.cache.allocate(u.cache.pages_to_allocate(3, 5, [5])[:2]),
        InputError,
        "one array for each of full, swa, mamba, of bool",
    ),
    "a prompt of other pages": (
        lambda u: u.cache.match(Prompt.of(tokens(1), 8)),
        InputError,
        "expected a prompt of 16-token pages, found 8",
    ),
    "tokens that are none": (lambda u: u.cache.prompt([1.5] * PAGE), TokenError, "integers"),
    "a namespace that is a name": (
        lambda u: u.cache.prompt(tokens(1), "tenant"),  # type: ignore[arg-type]
        InputError,
        "expected a Namespace, found 'tenant'",
    ),
    "tokens without a prompt": (
        lambda u: u.cache.match([1, 2, 3]),  # type: ignore[arg-type]
        InputError,
        "expected a prompt, such as UnifiedCache.prompt makes of token ids, found list",
    ),
    **{
        f"no prompt to {name}": (call, InputError, "expected a prompt, .*, found list")
        for name, call in {
            "load": lambda u: u.cache.load([1]),
            "back up": lambda u: u.cache.backup([1]),
            "prefetch": lambda u: u.cache.prefetch([1]),
            "prefer": lambda u: u.cache.prefer([1], Tier.DEVICE),
            "insert": lambda u: u.cache.insert([1], u.mine, u.lock),
        }.items()
    },
    "a prompt in place of its match": (
        lambda u: u.cache.lock(u.longer),  # type: ignore[arg-type]
        InputError,
        "expected a match, found Prompt",
    ),
    "a text for a level": (
        lambda u: u.cache.backup(u.longer, "durable"),  # type: ignore[arg-type]
        InputError,
        "expected a level, such as Level.DURABLE, found 'durable'",
    ),
    "no lock": (lambda u: u.cache.release(None), LockError, "expected a lock, found None"),  # type: ignore[arg-type]
    "slots of a lock given back": (lambda u: u.cache.slots(u.released), LockError, "released already"),
    "slots of a component that there is not": (
        lambda u: u.cache.slots(u.lock, 3),
        InputError,
        r"a component is a number in \[0, 3\), for full, swa, mamba, found 3",
    ),
    "slots of a component from the end": (lambda u: u.cache.slots(u.lock, -1), InputError, "found -1"),
    "room of a component that there is not": (lambda u: u.cache.available(3), InputError, "found 3"),
    "a number of pages": (
        lambda u: u.cache.allocate(4),  # type: ignore[arg-type]
        InputError,
        "expected one array of bool for each of full, swa, mamba, found 4",
    ),
    "masks that are lists": (
        lambda u: u.cache.allocate([[True]] * 3),  # type: ignore[list-item]
        InputError,
        "expected one array of bool for each of full, swa, mamba, found list",
    ),
    **{
        f"masks of {kind}": (allocate_masks_of(kind), InputError, f"of bool and .*, found {kind}")
        for kind in ("int64", "uint8", "float32")
    },
    "masks of numbers to trim": (
        lambda u: u.cache.trim(u.mine, [np.ones(2, np.int64)] * 3),
        InputError,
        "of bool and .*, found int64",
    ),
    "masks with a side of their own": (
        lambda u: u.cache.allocate([np.ones((2, 1), np.bool_)] * 3),
        InputError,
        r"found bool \(2, 1\)",
    ),
    "slots that are lists": (
        lambda u: u.cache.free([given.tolist() for given in u.mine]),
        InputError,
        "an array of slots for each component, found list",
    ),
    "slots that are fractions": (
        lambda u: u.cache.insert(u.longer, [given.astype(np.float64) for given in u.mine], u.lock),
        InputError,
        "flat arrays of int32, found float64",
    ),
    "a priority that is a fraction": (
        lambda u: u.cache.insert(u.longer, u.mine, u.lock, priority=1.5),  # type: ignore[arg-type]
        InputError,
        "a priority must be a whole number, found 1.5",
    ),
    "a fraction as a match's priority": (
        lambda u: u.cache.match(u.longer, priority=1.0),  # type: ignore[arg-type]
        InputError,
        "a priority must be a whole number, found 1.0",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_a_typed_error_and_changes_nothing(name: str) -> None:
    call, error, message = CALLS[name]
    used = Used()
    before = used.snapshot()
    with pytest.raises(error, match=message):
        call(used)
    assert used.snapshot() == before
    lock = used.cache.insert(used.longer, used.mine, used.lock)
    used.cache.release(lock)
    used.cache.check()


KV = PoolSpec("kv", 64)
LAYERS = torch.zeros((5, 64), dtype=torch.uint8)
CONFIG = CacheConfig((4,), (4,))


def opened(
    layout: object = ModelLayout(PAGE, (Full((KV,)),)),
    config: object = CONFIG,
    pools: object = (DevicePool(KV, [LAYERS]),),
    identity: object = Identity("m"),
    storage: object = None,
) -> UnifiedCache:
    """Open a cache of anything."""
    return UnifiedCache.open(layout, config, pools, identity=identity, storage=storage)  # type: ignore[arg-type]


PARTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a count in place of counts": (
        lambda: CacheConfig(100, (4,)),  # type: ignore[arg-type]
        ConfigError,
        r"device_pages as a number of pages for each component, such as \(100,\), found 100",
    ),
    "counts that are none": (
        lambda: CacheConfig((4,), ("4",)),  # type: ignore[arg-type]
        ConfigError,
        "host_pages as a number of pages for each component, .* found '4'",
    ),
    "a text for a write policy": (
        lambda: CacheConfig((4,), (4,), write="through"),  # type: ignore[arg-type]
        ConfigError,
        "write as a WritePolicy, such as WritePolicy.THROUGH, found 'through'",
    ),
    "a policy for policies": (
        lambda: EvictionConfig(device=EvictionPolicy.ADAPTIVE),  # type: ignore[arg-type]
        ConfigError,
        "the policies of device as a tuple of EvictionPolicy, found EvictionPolicy",
    ),
    "a deadline for a guard": (
        lambda: CacheConfig((4,), (4,), guard=5.0),  # type: ignore[arg-type]
        ConfigError,
        "guard as a GuardConfig or None, found 5.0",
    ),
    "one count for two components": (
        lambda: opened(ModelLayout(PAGE, (Full((KV,)), STATE))),
        ConfigError,
        r"an entry for each of full, mamba, found \(4,\)",
    ),
    "a number for an identity": (
        lambda: opened(identity=7),
        ConfigError,
        'expected identity as an Identity, or the name of a model, such as "my-model", found 7',
    ),
    "no name for an identity": (lambda: opened(identity=""), InputError, "needs the name of a model, found none"),
    "a URL of no store": (lambda: opened(storage="fil:x"), ConfigError, "'fil:x' must begin with one of file:"),
    "a count for a layout": (lambda: opened(layout=16), ConfigError, "expected layout as a ModelLayout, found 16"),
    "a count for a configuration": (
        lambda: opened(config=100),
        ConfigError,
        r"config as a CacheConfig, such as CacheConfig\(device_pages=\(100,\)\), found 100",
    ),
    "a tensor for a pool's layers": (
        lambda: DevicePool(KV, LAYERS),  # type: ignore[arg-type]
        LayoutError,
        "the layers of pool kv as a list, a tensor for each, found Tensor",
    ),
    "tensors for pools": (lambda: opened(pools=[LAYERS]), ConfigError, "a DevicePool for each pool, found Tensor"),
    "a pool for pools": (
        lambda: Full(KV),  # type: ignore[arg-type]
        LayoutError,
        r"the pools of full as a tuple, such as \(PoolSpec\(...\),\), found PoolSpec",
    ),
    "names for pools": (
        lambda: RecurrentState(("state",)),  # type: ignore[arg-type]
        LayoutError,
        "the pools of mamba as a tuple, .*, found 'state'",
    ),
    "a component for components": (
        lambda: ModelLayout(PAGE, Full((KV,))),  # type: ignore[arg-type]
        LayoutError,
        r"components as a tuple, such as \(Full\(...\),\), found Component",
    ),
    "a window first": (
        lambda: opened(layout=ModelLayout(PAGE, (Component("swa", 2, (KV,)),))),
        LayoutError,
        "must need all pages, as Full does, found swa, which needs the last 2; put Full before it",
    ),
    "a page size that is a fraction": (
        lambda: ModelLayout(16.0, (FULL,)),  # type: ignore[arg-type]
        LayoutError,
        "page_size as a whole number of tokens, found 16.0",
    ),
    "page bytes that are a fraction": (
        lambda: PoolSpec("kv", 64.0),  # type: ignore[arg-type]
        LayoutError,
        "page_bytes of pool kv as a whole number, found 64.0",
    ),
    "an identity without a model": (lambda: Identity(""), InputError, "needs the name of a model, found none"),
    "a text for a shard": (
        lambda: Identity("m", shard="rank 0"),  # type: ignore[arg-type]
        InputError,
        "as a Shard, such as Shard.of_rank makes, found 'rank 0'",
    ),
    "a number of layers for the layers of a stage": (
        lambda: Shard.of_rank(0, 2, 8, 32),  # type: ignore[arg-type]
        LayoutError,
        r"the layers of a shard as an Extent, such as Extent\(0, 16, 32\), found 32",
    ),
    "half a layer": (
        lambda: Extent(0, 0.5, 1),  # type: ignore[arg-type]
        LayoutError,
        "whole numbers of heads or layers, found 0.5",
    ),
    "a text for a unit of heads": (
        lambda: PoolSpec("kv_h0", 64, unit="heads 0-2/8"),  # type: ignore[arg-type]
        LayoutError,
        "the unit of heads of pool kv_h0 as a Shard, found 'heads 0-2/8'",
    ),
    "a stage for a generation": (
        lambda: Identity("m", generation="layers 0-16/32"),  # type: ignore[arg-type]
        InputError,
        "the generation of an identity as a whole number, found 'layers 0-16/32'",
    ),
    "a path for a model": (
        lambda: Identity(Path("m")),  # type: ignore[arg-type]
        InputError,
        "model of an identity as text, found PosixPath",
    ),
    "a model that no text can hold": (
        lambda: Identity("m\ud800"),
        InputError,
        r"that UTF-8 can encode, found 'm\\ud800'",
    ),
    "a salt that no text can hold": (
        lambda: Namespace(cache_salt="\udcff"),
        InputError,
        r"cache_salt of a namespace must be text that UTF-8 can encode, found '\\udcff'",
    ),
    "a number for a tenant": (
        lambda: Namespace(tenant=5),  # type: ignore[arg-type]
        InputError,
        "tenant of a namespace as text, found 5",
    ),
    "a host in a store's path": (
        lambda: open_storage("file://tmp/x"),
        ConfigError,
        "expected file:tmp/x or, from the root, file:/tmp/x, found file://tmp/x",
    ),
    "a host in a packed store's path": (
        lambda: open_storage("packed://tmp/x"),
        ConfigError,
        "or, from the root, packed:/",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_fits_nowhere_is_refused_by_name(name: str) -> None:
    make, error, message = PARTS[name]
    with pytest.raises(error, match=message):
        make()


def test_three_slashes_name_a_path_from_the_root() -> None:
    assert parse_address("///var/cache").path == Path("/var/cache")


PRIORITIES: tuple[int, ...] = (np.int64(3), 1, np.int32(2), 4)  # type: ignore[assignment]  # of no type, but integers


def test_numpys_integers_are_priorities_like_others() -> None:
    sizes = (4,)
    eviction = EvictionConfig(device=(EvictionPolicy.PRIORITY,))
    layout = ModelLayout(PAGE, (Full((KV,)),))
    cache = UnifiedCache.assemble(
        layout, CacheConfig(sizes, (0,), eviction=eviction), NoBytes(), InlineWorkers(), Identity("m"), None
    )
    for content, priority in enumerate(PRIORITIES):
        prompt = cache.prompt(tokens(content), whole=True)
        slots = present(cache.allocate(cache.pages_to_allocate(0, 1, [1])))
        cache.release(cache.insert(prompt, slots, cache.lock(cache.match(prompt)), priority))
    gone: list[int] = []
    for _ in range(4):
        assert cache.allocate(cache.pages_to_allocate(0, 1, [1])) is not None
        held = {content for content in range(4) if cache.match(cache.prompt(tokens(content), whole=True)).device_end}
        gone += [content for content in range(4) if content not in held and content not in gone]
    assert gone == [1, 2, 0, 3]


def test_a_match_that_the_tree_has_outlived_locks_nothing() -> None:
    used = Used()
    found = used.cache.match(used.longer)
    assert used.toy.serve(used.cache.prompt(tokens(7)))
    before = used.snapshot()
    with pytest.raises(StaleMatchError, match="match again"):
        used.cache.lock(found)
    assert used.snapshot() == before


@pytest.mark.parametrize("window_tokens", [0, -1, True])
def test_a_window_without_tokens_is_refused(window_tokens: int) -> None:
    with pytest.raises(LayoutError, match="window_tokens of a sliding window must be a positive integer"):
        SlidingWindow(window_tokens, PAGE, (PoolSpec("swa", 8),))


def test_a_window_counted_in_other_pages_is_refused() -> None:
    with pytest.raises(LayoutError, match="swa: a window counted in pages of 16 tokens, found 64"):
        ModelLayout(64, (FULL, WINDOW)).check_resumable()


def test_a_window_that_does_not_divide_deepseeks_page_is_refused() -> None:
    with pytest.raises(LayoutError, match="window 100"):
        DeepSeekV4((4, 128), window_tokens=100).layout()


def test_host_pages_for_some_components_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero for all components or for none"):
        CacheConfig((4, 4), (4, 0))


@pytest.mark.parametrize("leg", ["backup", "load"])
def test_moving_to_a_host_that_has_no_pages_is_refused(leg: str) -> None:
    toy = ToyEngine(LAYOUT, (4, 4, 4), (0, 0, 0), None, InlineWorkers())
    prompt = toy.cache.prompt(tokens(1, 2))
    lock = present(toy.serve(prompt))
    before = toy.cache.stats()
    moving = {"backup": toy.cache.backup, "load": toy.cache.load}[leg]
    with pytest.raises(ConfigError, match="host pages are needed"):
        moving(prompt)
    assert toy.cache.stats() == before
    toy.cache.release(lock)


def assemble(layout: ModelLayout, host_pages: int) -> UnifiedCache:
    sizes = tuple(8 for _ in layout.components)
    config = CacheConfig(sizes, tuple(host_pages for _ in sizes))
    return UnifiedCache.assemble(layout, config, NoBytes(), InlineWorkers(), Identity("m"), MemoryStorage())


def test_storage_without_host_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="host pages are needed"):
        assemble(LAYOUT, 0)


def test_storage_of_a_model_whose_every_layer_slides_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage needs a pool with bytes in full"):
        assemble(ModelLayout(PAGE, (Full((PoolSpec("kv", 0),)), WINDOW)), 8)


def test_a_model_by_name_and_a_store_by_url_are_opened() -> None:
    with opened(identity="m", storage="memory:") as cache:
        assert cache.identity == Identity("m")
        assert cache.stats().storage_answers is not None
        cache.detach()
        cache.attach("memory:")


@pytest.mark.parametrize("storage", [5, True, b"memory:", Path("kv"), {"url": "memory:"}])
def test_what_is_no_store_and_no_url_is_refused_by_the_arguments_name(storage: object) -> None:
    with pytest.raises(ConfigError, match="expected storage as a StorageBackend, or the URL of a store"):
        opened(storage=storage)
    with opened(identity="m", storage=None) as cache, pytest.raises(ConfigError, match="expected storage as a Storage"):
        cache.attach(storage)  # type: ignore[arg-type]


def test_a_store_that_was_opened_by_url_is_closed_where_the_cache_cannot_be_opened(tmp_path: Path) -> None:
    url = f"packed:{tmp_path}"  # for one process, and in it for one store at a time
    with pytest.raises(ConfigError, match="identity"):
        opened(identity=7, storage=url)
    with pytest.raises(ConfigError, match="host pages are needed"):
        opened(config=CacheConfig((4,), (0,)), storage=url)
    open_storage(url).close()
