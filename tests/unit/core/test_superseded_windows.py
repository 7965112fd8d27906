"""Conversations that go on turn by turn: windows from which nobody resumes any more keep no needed page out.

Every tier is given little more than what the conversations need to be resumed where they end: all pages of full
attention, and the windows of the latest ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.budget import one_in_every_run
from tests.support.operations import needed_labels
from tests.support.service import LoopbackServer
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full, SlidingWindow
from unified_cache.components.layouts.presets import PRESETS, layout
from unified_cache.controller import InlineWorkers
from unified_cache.controller.memory import PageMemory
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec, Tier
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.window import window
from unified_cache.sizing.replay.engine import OracleEngine
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import open_storage

IDENTITY = Identity("chat")
CONVERSATIONS, TURNS = 20, 8
OF_SPAN = {layout(name).components[1].span: name for name in sorted(PRESETS) if len(layout(name).components) > 1}
"""A model of each window's pages, which are what the tree knows of it."""
HYBRIDS = [
    name if name in OF_SPAN.values() else pytest.param(name, marks=pytest.mark.long)
    for name in sorted(PRESETS)
    if len(layout(name).components) > 1
]
STORE_CAPS = (2.0, 1.3, 1.05)
"""Bytes that a store may hold, by what is needed of it."""
MEMORY_CAP = 1.05
BLOCK_BYTES = 4096
SETTLE_S = 30


def pages_per_turn(model: ModelLayout) -> int:
    """Return the pages that a turn adds: more than the shorter windows have, so that few of them overlap."""
    return 6 if all(component.span <= 2 for component in model.components[1:]) else 20


def needed_pages(model: ModelLayout) -> list[int]:
    """Return by component the pages that all conversations need to be resumed at their ends."""
    end = TURNS * pages_per_turn(model)
    return [CONVERSATIONS * (end - window(end, component.span)) for component in model.components]


def opened(
    model: ModelLayout, store: Store | None, *, device: Sequence[int] = (), host: Sequence[int] = ()
) -> UnifiedCache:
    """Return a cache over a store; memory that is not given has room for four conversations, and none on the host."""
    few = tuple(4 * pages // CONVERSATIONS for pages in needed_pages(model))
    none = tuple(0 for _ in model.components)
    write = WritePolicy.THROUGH if host else WritePolicy.ON_CALL
    config = CacheConfig(tuple(device or few), tuple(host or none), write=write, guard=None, duplicates_every=0)
    if isinstance(store, KeysOnlyStorage) or store is None:
        return UnifiedCache.assemble(model, config, PageMemory(), InlineWorkers(), IDENTITY, store)
    pools = OracleEngine.allocate(model, config.device_pages).pools
    return UnifiedCache.open(model, config, pools, identity=IDENTITY, storage=store, workers=InlineWorkers())


def talk(cache: UnifiedCache) -> list[Prompt]:
    """Serve all conversations turn by turn, one after the other; return what each has said in the end."""
    pages, page_size = pages_per_turn(cache.layout), cache.layout.page_size
    said: list[Prompt] = []
    for turn in range(1, TURNS + 1):
        said = []
        for number in range(CONVERSATIONS):
            tokens = np.arange(turn * pages * page_size, dtype=np.int32) + number * 10_000_000
            prompt = cache.prompt(tokens, whole=True)
            cache.prefetch(prompt)
            cache.wait_all(SETTLE_S)
            if any(cache.config.host_pages):
                cache.load(prompt)
                cache.wait_all(SETTLE_S)
            found = cache.match(prompt)
            ends = cache.checkpoint_ends(found)
            lock = cache.lock(found)
            slots = cache.allocate(cache.pages_to_allocate(lock.end, prompt.pages_count, ends))
            assert slots is not None
            cache.release(cache.insert(prompt, slots, lock))
            cache.wait_all(SETTLE_S)
            said.append(prompt)
    return said


def restorable(cache: UnifiedCache, store: Store, said: Sequence[Prompt]) -> float:
    """Return the share of conversations that a store alone could resume where they end."""
    return sum(all(store.exists(needed_labels(cache, prompt))) for prompt in said) / len(said)


def held(cache: UnifiedCache, tier: Tier, said: Sequence[Prompt]) -> float:
    """Return the share of conversations that a tier of memory alone could resume where they end."""
    tree, count = cache._ledger.tree, 0
    for prompt in said:
        found = tree.peek(prompt)
        starts = cache._ledger.windows(prompt.pages_count)
        pages = [found.held_pages(tier, number)[start:] for number, start in enumerate(starts)]
        count += all(mask.all() for mask in pages)
    return count / len(said)


def within(needed: Sequence[int], factor: float) -> tuple[int, ...]:
    return tuple(int(pages * factor) for pages in needed)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("factor", one_in_every_run(STORE_CAPS))
def test_a_store_little_larger_than_what_is_needed_can_resume_every_conversation(name: str, factor: float) -> None:
    model = layout(name)
    objects = {pool.name: pool.page_bytes + HEADER_BYTES for pool in model.pools if pool.page_bytes}
    needed = needed_pages(model)
    store = KeysOnlyStorage(int(model.prompt_bytes(needed, sealed=True) * factor), objects)
    cache = opened(model, store, host=within(needed, MEMORY_CAP))
    assert restorable(cache, store, talk(cache)) == 1.0
    cache.close()


@pytest.mark.parametrize("name", HYBRIDS)
def test_memory_little_larger_than_what_is_needed_can_resume_every_conversation(name: str) -> None:
    model = layout(name)
    room = within(needed_pages(model), MEMORY_CAP)
    shares = []
    for tier, cache in ((Tier.DEVICE, opened(model, None, device=room)), (Tier.HOST, opened(model, None, host=room))):
        shares.append(held(cache, tier, talk(cache)))
        cache.close()
    assert shares == [1.0, 1.0]


@contextmanager
def small_store(kind: str, path: Path, bytes_max: int) -> Iterator[Store]:
    """Open a store with a cap."""
    if kind != "service":
        yield open_storage(f"{kind}:{path if kind != 'memory' else ''}", bytes_max=bytes_max)
        return
    running = LoopbackServer.start(MemoryStorage(bytes_max))
    yield running.client()
    running.stop()


@pytest.mark.parametrize("kind", ["memory", "file", "packed", "service"])
def test_every_kind_of_store_keeps_what_is_needed(kind: str, tmp_path: Path) -> None:
    # By bytes as DeepSeek-V4: a window of one page that weighs as much as eight pages of full attention.
    full, swa = (PoolSpec(name, blocks * BLOCK_BYTES - HEADER_BYTES) for name, blocks in (("full", 1), ("swa", 8)))
    model = ModelLayout(16, (Full((full,)), SlidingWindow(16, 16, (swa,))))
    needed = needed_pages(model)
    cap_bytes = int(model.prompt_bytes(needed, sealed=True) * MEMORY_CAP)
    with small_store(kind, tmp_path / "store", cap_bytes) as store:
        cache = opened(model, store, host=within(needed, MEMORY_CAP))
        assert restorable(cache, store, talk(cache)) == 1.0
        cache.close()
