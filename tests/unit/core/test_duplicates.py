"""Pages that are computed again and compared with the held ones: a wrong page is counted, noise is not one."""

import logging
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.budget import one_in_every_run
from tests.support.cache import ToyEngine
from tests.support.exactness import FAMILIES, engine, prompt_of, serve
from tests.support.operations import FULL, over, present, prompt_of_pages
from tests.support.operations import engine as toy_engine
from unified_cache.controller.duplicates import DuplicateCounts
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.core.page import Prompt
from unified_cache.core.pool import PoolSpec
from unified_cache.observe.metrics import CacheCollector
from unified_cache.storage_backends.memory import MemoryStorage

PAGES = 5


def full_engine(storage: MemoryStorage | None = None, *, every: int = 1) -> ToyEngine:
    """An engine of full attention of whose inserts with duplicates one in so many is sampled."""
    return toy_engine(storage, layout=FULL, device=12, host=12, duplicates_every=every)


def compute_twice(toy: ToyEngine, pages: int = PAGES) -> None:
    """Let two requests compute one prompt at the same time, so that the second one's pages are duplicates."""
    cache, prompt = toy.cache, prompt_of_pages(toy.cache, pages)
    locks = [cache.lock(cache.match(prompt)) for _ in range(2)]
    slots = [present(cache.allocate(cache.pages_to_allocate(lock.end, pages, [pages]))) for lock in locks]
    for lock, given in zip(locks, slots, strict=True):
        for component, of_component in enumerate(given):
            toy.write_pages(component, of_component, prompt, lock.end)
    for lock, given in zip(locks, slots, strict=True):
        cache.release(cache.insert(prompt, given, lock))


def compute_the_last_page_again(toy: ToyEngine, prompt: Prompt) -> None:
    """Serve a prompt of whole pages as an engine does that needs a token to compute: its last page is a duplicate."""
    cache = toy.cache
    lock = cache.lock(cache.match(prompt.head(prompt.pages_count - 1)))
    slots = present(cache.allocate(cache.pages_to_allocate(lock.end, prompt.pages_count, [prompt.pages_count])))
    for component, of_component in enumerate(slots):
        toy.write_pages(component, of_component, prompt, lock.end)
    cache.release(cache.insert(prompt, slots, lock))


def test_pages_that_two_requests_compute_are_compared_and_equal() -> None:
    toy = full_engine()
    compute_twice(toy)
    assert toy.cache.stats().duplicates == DuplicateCounts(equal=1)
    toy.cache.check()


def test_a_page_damaged_on_the_device_of_one_of_two_caches_is_found_there(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStorage()
    first, second = full_engine(store), full_engine(store)
    prompt = first.run(prompt_of_pages(first.cache, PAGES))
    over(first.cache, first.cache.backup(prompt))
    over(second.cache, second.cache.prefetch(prompt))
    over(second.cache, second.cache.load(prompt))
    found = second.cache.lock(second.cache.match(prompt))
    last = int(second.cache.slots(found)[-1])
    second.cache.release(found)
    (pool,) = second.pools.values()
    pool.layers[1][last] ^= 1
    for toy in (first, second):
        compute_the_last_page_again(toy, prompt)
    assert first.cache.stats().duplicates == DuplicateCounts(equal=1)
    assert second.cache.stats().duplicates == DuplicateCounts(diverged=1)
    caplog.set_level(logging.INFO, "unified_cache")
    for toy in (first, second):
        toy.cache.close()
    levels = [record.levelno for record in caplog.records if record.name.endswith("duplicates")]
    assert levels == [logging.WARNING, logging.INFO, logging.WARNING]


@pytest.mark.parametrize(("every", "compared"), [(0, 0), (1, 4), (3, 2)])
def test_of_so_many_inserts_with_duplicates_one_is_sampled(every: int, compared: int) -> None:
    toy = full_engine(every=every)
    prompt = toy.run(prompt_of_pages(toy.cache, PAGES))
    for _ in range(4):
        compute_the_last_page_again(toy, prompt)
    assert toy.cache.stats().duplicates.compared == compared


def test_every_page_of_a_prompt_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    toy = full_engine()
    compare = TieredMemory.compare

    def watch(self: TieredMemory, pool: PoolSpec, left: int, right: int) -> object:
        seen.add(right)
        return compare(self, pool, left, right)

    monkeypatch.setattr(TieredMemory, "compare", watch)
    for _ in range(PAGES):
        compute_twice(toy)
        toy.cache.reset()
    assert len(seen) == PAGES


def noisy_rows(dtype: torch.dtype, share: float) -> Iterator[torch.Tensor]:
    """Yield two layers whose row 2 is row 1 with each element changed by a share of it, up or down."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        row, sign = torch.randn(2, 512, generator=generator)
        yield torch.stack((row, row, row * (1 + share * sign.sign()))).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "share", "outcome"),
    [
        (torch.float32, 1e-5, DuplicateCounts(within_noise=1)),
        (torch.float32, 1e-2, DuplicateCounts(diverged=1)),
        (torch.float16, 1e-2, DuplicateCounts(within_noise=1)),
        (torch.bfloat16, 3e-2, DuplicateCounts(within_noise=1)),
        (torch.bfloat16, 0.3, DuplicateCounts(diverged=1)),
        (torch.bfloat16, torch.nan, DuplicateCounts(diverged=1)),
        (torch.float8_e4m3fn, 0.1, DuplicateCounts(within_noise=1)),
    ],
)
def test_noise_reaches_half_the_digits_of_the_dtype(dtype: torch.dtype, share: float, outcome: DuplicateCounts) -> None:
    layers = list(noisy_rows(dtype, share))
    spec = PoolSpec("kv", 2 * 512 * dtype.itemsize)
    memory = TieredMemory.allocate([DevicePool(spec, layers)], {"kv": 1})
    excess = memory.compare(spec, 1, 2).excess
    found = DuplicateCounts(within_noise=1) if all(each <= 1 for each in excess) else DuplicateCounts(diverged=1)
    assert found == outcome
    assert any(excess)
    assert memory.compare(spec, 0, 1).excess == [0, 0]


def test_the_metric_says_the_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.cache.stats.STATS_EVERY_S", 0.0)
    toy = full_engine()
    compute_twice(toy)
    toy.cache.wait_all(1)
    registry = CollectorRegistry()
    registry.register(CacheCollector(toy.cache))
    text = generate_latest(registry).decode()
    assert 'unified_cache_duplicate_pages_total{cache="cache",outcome="equal"} 1.0' in text
    assert 'unified_cache_duplicate_pages_total{cache="cache",outcome="diverged"} 0.0' in text


@pytest.mark.parametrize("family", one_in_every_run(FAMILIES))
@pytest.mark.parametrize("chunk_pages", [1, 2])
def test_what_a_model_computes_again_after_a_restored_prefix_does_not_diverge(family: str, chunk_pages: int) -> None:
    tokens = prompt_of(family, 1, is_aligned=True)
    with engine(family) as ours:
        serve(ours, tokens)
        serve(ours, tokens)
        counts = ours.cache.stats().duplicates
        assert counts.compared
        assert counts.diverged == 0
