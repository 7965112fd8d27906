"""Whatever objects of a prefetch come, and whatever memory had: what is kept is what a naive model keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import PHASES, examples
from tests.support.components import COMPONENT_SETS
from tests.support.conversations import (
    HostModel,
    VanishingStorage,
    compute,
    conversation,
    pages_on,
    remembered,
    store_turns,
)
from tests.support.operations import Stepped, started
from unified_cache.controller import OperationState
from unified_cache.controller.jobs import STORAGE_BATCH_OBJECTS
from unified_cache.errors import StorageError
from unified_cache.pool import ModelLayout, Tier
from unified_cache.prefetches import READS_MAX

PAGES_MAX = 10


@pytest.mark.parametrize("component_set", COMPONENT_SETS)
def test_what_came_of_a_prefetch_is_used_to_the_longest_end_that_it_allows(component_set: str) -> None:
    @settings(max_examples=examples(60, 2000), deadline=None, phases=PHASES, database=None)
    @given(
        layout=st.sampled_from(COMPONENT_SETS[component_set]),
        turns=st.sets(st.integers(1, PAGES_MAX), min_size=1, max_size=4),
        on_device=st.integers(0, PAGES_MAX),
        vanishing=st.lists(st.integers(0, 2**16), max_size=6),
        batch_objects=st.sampled_from([1, 3, STORAGE_BATCH_OBJECTS]),
        ends_before=st.integers(0, 200),
        end=st.sampled_from(["well", "concluded", "failed"]),
    )
    def prefetch(
        layout: ModelLayout,
        turns: set[int],
        on_device: int,
        vanishing: list[int],
        batch_objects: int,
        ends_before: int,
        end: str,
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unified_cache.controller.jobs.STORAGE_BATCH_OBJECTS", batch_objects)
            _prefetch(layout, sorted(turns), on_device, vanishing, {"well": None}.get(end, ends_before), end)

    prefetch()


def _prefetch(
    layout: ModelLayout, turns: list[int], on_device: int, vanishing: list[int], ends_before: int | None, end: str
) -> None:
    store = VanishingStorage()
    store_turns(layout, store, turns)
    objects = sorted(store._pages)
    store.vanishing = {objects[number % len(objects)] for number in vanishing}
    workers = Stepped()
    toy = remembered(layout, store, workers)
    cache = toy.cache
    prompt = conversation(cache, PAGES_MAX)
    if on_device:
        compute(toy, on_device)
    in_memory = pages_on(cache, prompt, *Tier)
    known_end = cache.match(prompt).host_end
    operation = started(cache.prefetch(prompt))

    def end_early(number: int) -> None:
        if number == ends_before and end == "concluded":
            cache.finish_early(operation)
        if number == ends_before and end == "failed":
            raise StorageError("gone", retryable=False)

    store.before_get = end_early
    gets = 0
    while workers.waiting:
        calls_count = store.calls_count
        workers.run()
        gets += store.calls_count > calls_count
        cache.poll()
        cache.check()
    model = HostModel.of(layout, prompt, store.came, in_memory)
    assert pages_on(cache, prompt, *Tier) == model.pages
    assert cache.match(prompt).host_end == model.end
    assert len(store.came) == len(set(store.came)), "no page is read twice"
    if operation.state is OperationState.DONE:
        assert operation.pages_count == model.end - known_end
    else:
        assert end == "failed"
    if not operation.is_stopping and operation.state is OperationState.DONE and gets < READS_MAX:
        best = HostModel.of(layout, prompt, set(objects) - store.vanishing, in_memory)
        assert model.end == best.end, "storage had more"
    names = {(prompt.keys.index(label.key), label.pool) for label in store.came}
    for component, pages in zip(layout.components, in_memory, strict=True):
        assert not {(page, pool.name) for page in pages for pool in component.pools} & names, "memory had it"
    started(cache.load(prompt))
    workers.run(len(workers.waiting))
    cache.poll()
    lock = cache.lock(cache.match(prompt))
    assert lock.end == model.end
    toy.verify(prompt, lock)
    cache.release(lock)
    cache.check()
