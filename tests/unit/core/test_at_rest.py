"""A cache at which nothing is under way remembers no transfer that is over."""

import pytest

from tests.support.cache import ToyEngine
from tests.support.components import COMPONENT_SETS
from tests.support.operations import over, present
from tests.support.tables import check_tables
from unified_cache.controller import InlineWorkers
from unified_cache.core.pool import ModelLayout, Tier
from unified_cache.storage_backends.memory import MemoryStorage

SLOTS = 40


@pytest.mark.parametrize("layout", [layouts[-1] for layouts in COMPONENT_SETS.values()], ids=COMPONENT_SETS)
def test_a_cache_at_rest_remembers_nothing_of_what_is_over(layout: ModelLayout) -> None:
    sizes = tuple(SLOTS for _ in layout.components)
    toy = ToyEngine(layout, sizes, sizes, MemoryStorage(), InlineWorkers())
    cache = toy.cache
    prompt = cache.prompt(range(6 * layout.page_size))
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
