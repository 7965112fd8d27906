"""Promises of the facade to an engine."""

import re
import threading

import numpy as np
import pytest
import torch

from tests.support.cache import ToyEngine, toy_layout
from tests.support.components import toy_components
from tests.support.operations import over, present, serve, tokens
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, OperationState
from unified_cache.controller.memory import DevicePool
from unified_cache.core.config import CacheConfig, GuardConfig
from unified_cache.core.errors import (
    ClosedError,
    ConfigError,
    LayoutError,
    OwnerThreadError,
    SlotError,
    StorageError,
)
from unified_cache.core.page import MediaItem
from unified_cache.core.pool import Identity, ModelLayout, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method


def engine(*, device: int = 8, host: int = 0, storage: Store | None = None, threads: bool = False) -> ToyEngine:
    workers = None if threads else InlineWorkers()
    return ToyEngine(toy_layout((SPAN_ALL,), 16), (device,), (host,), storage, workers)


def test_what_lies_behind_another_picture_comes_back_from_no_tier_and_the_text_before_it_does() -> None:
    stored = MemoryStorage()
    toy = engine(device=8, host=8, storage=stored)
    cache = toy.cache
    cat, dog = (cache.prompt([7] * 64, media=[MediaItem(20, 30, name)]) for name in ("cat", "dog"))
    over(cache, cache.backup(toy.run(cat)))
    assert [cache.match(prompt).device_end for prompt in (cat, dog)] == [4, 1]
    toy.forget(Tier.DEVICE)
    assert [cache.match(prompt).host_end for prompt in (cat, dog)] == [4, 1]
    toy.forget(Tier.HOST)
    for prompt, found in ((dog, 1), (cat, 4)):
        over(cache, cache.prefetch(prompt))
        assert cache.match(prompt).host_end == found
        toy.forget(Tier.HOST)
    assert over(cache, cache.prefetch(cat)).pages_count == 4
    over(cache, cache.load(cat))
    assert toy.read_back(cat) == 4


def test_what_leaves_a_window_while_its_request_runs_is_free_at_once_and_a_tombstone_later() -> None:
    toy = ToyEngine(toy_layout((SPAN_ALL, 2), 16), (6, 4), (0, 0), None, InlineWorkers())
    cache = toy.cache
    prompt = cache.prompt(tokens(4))
    lock = cache.lock(cache.match(prompt))
    pages = present(cache.allocate(cache.pages_to_allocate(0, 4, range(1, 5))))
    assert cache.stats().occupancy[1].free == 0
    cache.trim(pages, cache.pages_to_allocate(0, 4, [4]))
    assert cache.stats().occupancy[1].free == 2
    assert pages[1][:2].tolist() == [-1, -1]
    stray = [pages[0], np.array([1, 2, 4, 4], np.int32)]
    with pytest.raises(SlotError, match="free"):
        cache.trim(stray, cache.pages_to_allocate(0, 4, [4]))
    lock = cache.insert(prompt, pages, lock)
    assert cache.slots(lock, 1).tolist() == pages[1][2:].tolist()
    assert cache.match(cache.prompt(tokens(3))).device_end == 0, "page 1 has left the window"
    cache.check()
    cache.release(lock)


def test_a_store_that_answers_what_no_store_may_fails_the_operation_and_is_named() -> None:
    store = ScriptedStorage()
    toy = engine(device=4, host=4)
    toy.reopen(store, guard=GuardConfig())
    prompt = toy.cache.prompt(tokens(4))
    serve(toy, 4)
    over(toy.cache, toy.cache.backup(prompt))
    serve(toy, 4, first=1000)
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(4, 1000))))
    store.answers[Method.EXISTS] = True  # as stores of other systems answer
    prefetch = over(toy.cache, toy.cache.prefetch(prompt))
    assert prefetch
    assert prefetch.state is OperationState.FAILED
    assert isinstance(prefetch.error, StorageError)
    assert re.search(r"MemoryStorage\.exists must return a list of \d+ answers.* found \[True", str(prefetch.error))
    assert not prefetch.error.retryable
    toy.cache.check()
    assert toy.cache.close() == []


def test_another_thread_than_the_owners_is_refused() -> None:
    toy = engine()
    caught: list[BaseException] = []

    def call() -> None:
        try:
            toy.cache.match(toy.cache.prompt([1] * 16))
        except OwnerThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_closed_cache_says_so_and_may_be_closed_again() -> None:
    toy = engine()
    toy.cache.close()
    with pytest.raises(ClosedError):
        toy.cache.poll()
    assert toy.cache.close() == []


def test_pools_that_do_not_fit_the_layout_are_refused() -> None:
    layout = ModelLayout(16, toy_components((SPAN_ALL,), 64))
    spec = layout.pools[0]
    with pytest.raises(LayoutError, match="hold 60 bytes a page, not 64"):
        DevicePool(spec, [torch.zeros((3, 60), dtype=torch.uint8)])
    with pytest.raises(LayoutError, match="contiguous"):
        DevicePool(spec, [torch.zeros((64, 3), dtype=torch.uint8).t()])
    small = DevicePool(spec, [torch.zeros((2, 64), dtype=torch.uint8)])
    config = CacheConfig(device_pages=(2,), host_pages=(0,))
    with pytest.raises(ConfigError, match="needs 3 slots"):
        UnifiedCache.open(layout, config, [small], identity=Identity("toy"))
    with pytest.raises(ConfigError, match="needs a device pool"):
        UnifiedCache.open(layout, config, [], identity=Identity("toy"))
