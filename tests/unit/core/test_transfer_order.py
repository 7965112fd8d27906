"""Every transfer moves KV before sidecars, page by page to and from storage, and asks storage for every pool."""

from collections.abc import Sequence

import pytest

from tests.support.components import every_layout
from tests.support.operations import engine, over, present, prompt_of_pages, serve
from tests.support.store_calls import ScriptedStorage, StoreCall
from tests.support.tables import check_tables
from unified_cache.controller.memory import TieredMemory
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec, Slots, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.wrappers.layer import Method

PAGES = 6
SLOTS = 40


def kv_before_sidecars(layout: ModelLayout) -> list[str]:
    """Return the names of the pools with bytes: Full's, the first of every other component, the others."""
    first, *others = [[pool.name for pool in part.pools if pool.page_bytes] for part in layout.components]
    return [*first, *(names[0] for names in others), *(name for names in others for name in names[1:])]


class WatchedCache:
    """A cache over a watched store, and a prompt of six pages that it has computed."""

    def __init__(self, layout: ModelLayout) -> None:
        self.store = ScriptedStorage()
        self.layout = layout
        self.toy = engine(self.store, layout=layout, device=SLOTS)
        self.cache = self.toy.cache
        self.prompt: Prompt = serve(self.toy, PAGES)

    def back_up(self) -> None:
        over(self.cache, self.cache.backup(self.prompt))

    def asked(self, method: Method) -> list[Label]:
        calls: Sequence[StoreCall] = self.store.take()
        return [label for call in calls if call.method is method for label in call.labels]

    def places(self, labels: Sequence[Label]) -> list[tuple[int, int]]:
        """Return page and rank of the pool of each label."""
        order = kv_before_sidecars(self.layout)
        return [(self.prompt.keys.index(label.key), order.index(label.pool)) for label in labels]

    def names(self) -> set[Label]:
        """Return the objects of all pages that the host holds."""
        ledger = self.cache._ledger
        held = [
            ledger.tree.match(self.prompt).slots(Tier.HOST, component, 0, PAGES)
            for component in range(len(self.layout.components))
        ]
        owners = self.toy.identity.owners(self.toy.layout)
        return {
            Label(owners[pool.name], self.prompt.keys[page], pool.name)
            for component, slots in enumerate(held)
            for page, slot in enumerate(slots.tolist())
            if slot > 0
            for pool in self.toy.byte_pools(component)
        }


@every_layout
def test_objects_are_put_page_by_page_kv_before_sidecars_and_none_is_left_out(layout: ModelLayout) -> None:
    watched = WatchedCache(layout)
    watched.store.take()
    watched.back_up()
    put = watched.asked(Method.PUT)
    assert watched.places(put) == sorted(watched.places(put))
    assert set(put) == watched.names(), "what the host holds, in every pool, is what the store holds"
    assert len(set(put)) == len(put)


@every_layout
def test_objects_are_looked_up_in_every_pool_and_got_kv_before_sidecars(layout: ModelLayout) -> None:
    watched = WatchedCache(layout)
    watched.back_up()
    stored = watched.names()
    watched.toy.forget(*Tier)
    watched.store.take()
    operation = over(watched.cache, watched.cache.prefetch(watched.prompt))
    assert operation.pages_count == PAGES
    calls = watched.store.take()
    looked_up = {label for call in calls if call.method is Method.EXISTS for label in call.labels}
    assert looked_up >= stored
    got = [label for call in calls if call.method is Method.GET for label in call.labels]
    assert watched.places(got) == sorted(watched.places(got))
    assert set(got) <= stored
    assert {label.pool for label in got} == set(kv_before_sidecars(layout))


@every_layout
def test_of_a_page_that_lacks_an_object_none_is_got(layout: ModelLayout) -> None:
    for pool in (pool for pool in layout.components[0].pools if pool.page_bytes):
        watched = WatchedCache(layout)
        watched.back_up()
        watched.toy.forget(*Tier)
        owner = watched.toy.identity.owners(watched.toy.layout)[pool.name]
        assert watched.store.remove([Label(owner, watched.prompt.keys[PAGES - 1], pool.name)]) == 1
        watched.store.take()
        over(watched.cache, watched.cache.prefetch(watched.prompt))
        got = watched.asked(Method.GET)
        assert watched.prompt.keys[PAGES - 1] not in {label.key for label in got}


@every_layout
def test_pools_are_copied_kv_before_sidecars_in_both_directions(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    backup, load_layer = TieredMemory.backup, TieredMemory.load_layer

    def watch_backup(memory: TieredMemory, pool: PoolSpec, source: Slots, target: Slots) -> None:
        copied.append(pool.name)
        backup(memory, pool, source, target)

    def watch_load(memory: TieredMemory, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> object:
        if not layer:
            copied.append(pool.name)
        return load_layer(memory, pool, layer, source, target)

    monkeypatch.setattr(TieredMemory, "backup", watch_backup)
    monkeypatch.setattr(TieredMemory, "load_layer", watch_load)
    watched = WatchedCache(layout)
    names = kv_before_sidecars(layout)
    watched.back_up()
    assert [name for name in copied if name in names] == names
    watched.toy.forget()
    copied.clear()
    over(watched.cache, watched.cache.load(watched.prompt))
    assert copied == names


# ---- at rest -------------------------------------------------------------------------------------------------------


@every_layout
def test_a_cache_at_rest_remembers_nothing_of_what_is_over(layout: ModelLayout) -> None:
    toy = engine(MemoryStorage(), layout=layout, device=SLOTS)
    cache = toy.cache
    prompt = prompt_of_pages(cache, PAGES)
    for _ in range(2):
        over(cache, cache.prefetch(prompt))
        over(cache, cache.load(prompt))
        lock = present(toy.serve(prompt))
        over(cache, cache.backup(prompt))
        check_tables(cache, [lock])
        cache.release(lock)
        toy.forget(*Tier)
        check_tables(cache, [])
    over(cache, cache.clear_storage())
    check_tables(cache, [])
