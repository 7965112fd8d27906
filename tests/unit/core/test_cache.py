"""Promises of the facade to an engine."""

import re
import threading

import pytest
import torch

from tests.support.cache import ToyEngine, toy_layout
from tests.support.components import toy_components
from tests.support.operations import over, serve, tokens
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
    StorageError,
)
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method


def engine(*, device: int = 8, host: int = 0, storage: Store | None = None, threads: bool = False) -> ToyEngine:
    workers = None if threads else InlineWorkers()
    return ToyEngine(toy_layout((SPAN_ALL,), 16), (device,), (host,), storage, workers)


def test_a_store_that_answers_what_no_store_may_fails_the_operation_and_is_named() -> None:
    store = ScriptedStorage()
    toy = engine(device=4, host=4)
    toy.reopen(store, guard=GuardConfig())
    prompt = toy.cache.prompt(tokens(4))
    serve(toy, 4)
    over(toy.cache, toy.cache.backup(prompt))
    serve(toy, 4, first=1000)
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(4, 1000))))
    store.answers[Method.EXISTS] = [True] * 4  # as stores of other systems answer
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
