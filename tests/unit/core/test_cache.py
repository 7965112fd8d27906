"""Promises of the facade to an engine."""

import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import unified_cache
from tests.support.cache import ToyEngine, toy_layout
from tests.support.components import toy_components
from tests.support.operations import over, present, serve, tokens
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, OperationState, TransferKind
from unified_cache.controller.memory import DevicePool
from unified_cache.core.config import CacheConfig
from unified_cache.core.errors import (
    ClosedError,
    ConfigError,
    LayoutError,
    OwnerThreadError,
    SlotError,
    StorageError,
)
from unified_cache.core.pool import Identity, ModelLayout, Tier
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StorageBackend
from unified_cache.storage_backends.url import open_storage


def engine(
    *, device: int = 8, host: int = 0, storage: StorageBackend | None = None, threads: bool = False
) -> ToyEngine:
    workers = None if threads else InlineWorkers()
    return ToyEngine(toy_layout((SPAN_ALL,), 16), (device,), (host,), storage, workers)


def test_a_prompt_served_twice_is_computed_once() -> None:
    toy = engine()
    serve(toy, 4)
    found = toy.cache.match(toy.cache.prompt(tokens(5)))
    assert found.device_end == 4
    lock = toy.cache.lock(found)
    assert toy.verify(toy.cache.prompt(tokens(4)), lock) == 4


def test_a_device_pool_of_n_pages_holds_n_pages() -> None:
    toy = engine(device=4)
    serve(toy, 4)
    assert toy.cache.match(toy.cache.prompt(tokens(4))).device_end == 4


def test_allocation_evicts_what_is_short_and_never_what_is_pinned() -> None:
    toy = engine(device=4)
    serve(toy, 2)
    lock = toy.cache.lock(toy.cache.match(toy.cache.prompt(tokens(2))))
    serve(toy, 2, first=1000)
    assert toy.cache.allocate(toy.cache.pages_to_allocate(0, 3, ())) is None
    slots = present(toy.cache.allocate(toy.cache.pages_to_allocate(0, 2, ())))
    assert toy.cache.match(toy.cache.prompt(tokens(2))).device_end == 2
    toy.cache.free(slots)
    toy.cache.release(lock)
    toy.cache.check()


@pytest.mark.parametrize("url", ["memory:", "file:{}"])
def test_a_page_comes_back_from_every_tier_byte_by_byte(url: str, tmp_path: Path) -> None:
    toy = engine(device=4, host=4, storage=open_storage(url.format(tmp_path / "store")), threads=True)
    cache = toy.cache
    prompt = cache.prompt(tokens(4))
    serve(toy, 4)
    over(cache, cache.backup(prompt))
    serve(toy, 4, first=1000)
    found = cache.match(prompt)
    assert (found.device_end, found.host_end) == (0, 4)
    over(cache, cache.backup(cache.prompt(tokens(4, 1000))))
    assert cache.match(prompt).host_end == 0
    over(cache, cache.prefetch(prompt))
    cache.load(prompt)
    (load,) = cache.wait_all(5)
    assert (load.kind, load.state, load.pages_count) == (TransferKind.LOAD, OperationState.DONE, 4)
    assert toy.read_back(prompt) == 4
    assert cache.close() == []


def test_a_new_process_finds_what_the_last_one_stored(tmp_path: Path) -> None:
    for expected in (0, 4):
        toy = engine(device=4, host=4, storage=open_storage(f"file:{tmp_path / 'store'}"), threads=True)
        prompt = toy.cache.prompt(tokens(4))
        over(toy.cache, toy.cache.prefetch(prompt))
        assert toy.cache.match(prompt).host_end == expected
        serve(toy, 4)
        toy.cache.backup(prompt, Level.DURABLE)
        (backup, *_) = toy.cache.wait_all(5)
        assert backup.error is None
        toy.cache.close()


def test_a_damaged_page_in_storage_is_a_miss_and_is_counted() -> None:
    storage = MemoryStorage()
    toy = engine(device=4, host=4, storage=storage)
    cache = toy.cache
    serve(toy, 4)
    prompt = cache.prompt(tokens(4))
    over(cache, cache.backup(prompt))
    label = Label(Identity("toy").digest(toy.layout), prompt.keys[2], toy.layout.pools[0].name)
    page = bytearray(HEADER_BYTES + toy.layout.pools[0].page_bytes)
    stored = PageIO(label, prompt.keys[1], (memoryview(page),))
    assert storage.get([stored]) == [Answer.HIT]
    page[-1] ^= 1
    assert storage.remove([label]) == 1
    assert storage.put([stored], Level.CACHED) == [Answer.STORED]
    serve(toy, 4, first=1000)
    over(cache, cache.backup(cache.prompt(tokens(4, 1000))))
    over(cache, cache.prefetch(prompt))
    assert cache.match(prompt).host_end == 2
    assert cache.stats().flawed_pages == 1
    assert storage.exists([label]) == [Answer.MISS]


def test_a_second_component_needs_no_change_in_tree_or_controller() -> None:
    """A windowed toy with a sidecar goes through all tiers; the rooms that carry it know no component by name."""
    toy = ToyEngine(toy_layout((SPAN_ALL, 2), 16), (6, 4), (6, 4), MemoryStorage(), InlineWorkers())
    cache = toy.cache
    prompt = cache.prompt(tokens(5))
    for first in (0, 1000):
        serve(toy, 5, first)
        over(cache, cache.backup(cache.prompt(tokens(5, first))))
    assert cache.match(prompt).host_end == 0
    cache.prefetch(prompt)
    over(cache, cache.load(prompt))
    over(cache, cache.load(prompt))
    lock = cache.lock(cache.match(prompt))
    assert toy.verify(prompt, lock) == 5 + 2
    for room in ("tree", "controller"):
        for source in Path(unified_cache.__file__).parent.joinpath(room).glob("*.py"):
            assert "unified_cache.components" not in source.read_text()


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


class SaysTrue(MemoryStorage):
    """Says True for a page that it has, as stores of other systems do."""

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return [answer is Answer.HIT for answer in super().exists(labels)]  # type: ignore[misc]


def test_a_store_that_answers_what_no_store_may_fails_the_operation_and_is_named() -> None:
    toy = engine(device=4, host=4, storage=SaysTrue())
    prompt = toy.cache.prompt(tokens(4))
    serve(toy, 4)
    over(toy.cache, toy.cache.backup(prompt))
    serve(toy, 4, first=1000)
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(4, 1000))))
    prefetch = over(toy.cache, toy.cache.prefetch(prompt))
    assert prefetch
    assert prefetch.state is OperationState.FAILED
    assert isinstance(prefetch.error, StorageError)
    assert re.search(r"SaysTrue\.exists must return a list of \d+ answers.* found True", str(prefetch.error))
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


def test_reset_forgets_everything_and_leaves_requests_their_slots() -> None:
    toy = engine()
    serve(toy, 4)
    lock = toy.cache.lock(toy.cache.match(toy.cache.prompt(tokens(4))))
    mine = present(toy.cache.allocate(toy.cache.pages_to_allocate(0, 2, ())))
    toy.cache.reset()
    assert toy.cache.match(toy.cache.prompt(tokens(4))).host_end == 0
    toy.cache.release(lock)
    toy.cache.free(mine)
    toy.cache.check()
    assert toy.cache.stats().occupancy[0].free == 8


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


def test_pinned_prompts_go_last_and_pins_are_bounded() -> None:
    toy = engine(device=8)
    cache = toy.cache
    serve(toy, 2)
    serve(toy, 4, first=1000)
    preference = present(cache.prefer(cache.prompt(tokens(2)), Tier.DEVICE))
    assert cache.prefer(cache.prompt(tokens(4, 1000)), Tier.DEVICE) is None, "a quarter of the pages at most"
    serve(toy, 6, first=2000)
    assert cache.match(cache.prompt(tokens(2))).device_end == 2
    cache.unprefer(preference)
    serve(toy, 8, first=3000)
    assert cache.match(cache.prompt(tokens(2))).device_end == 0
    cache.check()
