"""Whatever objects of a prefetch come, and whatever memory had: what is kept is what a naive model keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import PHASES, examples
from tests.support.components import COMPONENT_SETS
from tests.support.conversations import ROOM, HostModel, pages_on, store_turns
from tests.support.operations import Stepped, engine, prompt_of_pages, serve, started
from tests.support.store_calls import ScriptedStorage, at, raising
from unified_cache.controller import OperationState
from unified_cache.controller.prefetch import READS_MAX
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.protocol import BATCH_OBJECTS
from unified_cache.storage_backends.wrappers.layer import Method

PAGES_MAX = 10


@dataclass(frozen=True)
class Trial:
    """A prefetch of a conversation of which storage, the device and the host's room have something."""

    layout: ModelLayout
    turns: Sequence[int]
    on_device: int
    has_lost_windows: bool
    """Whether the device holds of these pages Full alone."""
    vanishing: Sequence[int]
    room: tuple[int, int]
    """Host pages of Full, and of each other component."""

    def run(self, ends_before: int | None, end: str) -> None:
        """Run it; before the get of that number it is concluded, or fails."""
        layout, store, workers = self.layout, ScriptedStorage(), Stepped()
        store_turns(layout, store, self.turns)
        objects = sorted(store.pages)
        store.vanishing = {objects[number % len(objects)] for number in self.vanishing}
        rooms = (self.room[0], *(self.room[1] for _ in layout.components[1:]))
        toy = engine(store, layout=layout, device=ROOM, host=rooms, workers=workers)
        cache = toy.cache
        prompt = prompt_of_pages(cache, PAGES_MAX)
        if self.on_device:
            serve(toy, self.on_device)
        if self.has_lost_windows:
            toy.forget(components=range(1, len(layout.components)))
        in_memory = pages_on(cache, prompt, *Tier)
        known_end = cache.match(prompt).host_end
        operation = started(cache.prefetch(prompt))

        if ends_before is not None:
            fail = raising(StorageError("gone", retryable=False))
            act = fail if end == "failed" else lambda: cache.finish_early(operation)
            store.before[Method.GET] = at(ends_before, act)
        reads_count = 0
        while workers.waiting:
            noted_count = len(store.noted)
            workers.run()
            reads_count += Method.GET in store.calls[noted_count:]
            cache.poll()
            cache.check()
        model = HostModel.of(layout, prompt, store.came, in_memory)
        asked = self.pages_of(prompt, store.asked)
        is_short = False
        for held, came, wanted, room in zip(pages_on(cache, prompt, *Tier), model.pages, asked, rooms, strict=True):
            # A window that came for an end which then proved too long makes room for the window of a shorter one, which
            # may not come either; components that stand on it go with it.
            is_short |= len(came | wanted) > room
            assert held == came or (held < came and is_short)
        assert cache.match(prompt).host_end == model.end
        assert len(store.came) == len(set(store.came)), "no page is read twice"
        assert not self.read_of(in_memory, prompt, store.came), "memory had it"
        if operation.state in (OperationState.DONE, OperationState.PARTIAL):
            assert operation.pages_count == model.end - known_end
            if not operation.is_stopping and reads_count < READS_MAX:
                assert model.end >= self.best_end(prompt, set(objects) - store.vanishing, in_memory), "there was more"
        else:
            assert end == "failed"
        started(cache.load(prompt))
        workers.run(len(workers.waiting))
        cache.poll()
        lock = cache.lock(cache.match(prompt))
        assert lock.end == model.end
        toy.verify(prompt, lock)
        cache.release(lock)
        cache.check()

    def best_end(self, prompt: Prompt, objects: set[Label], in_memory: list[set[int]]) -> int:
        """Return the longest end that storage and memory together have, as far as the host surely has room."""
        model = HostModel.of(self.layout, prompt, objects, in_memory)
        full_room, window_room = self.room
        fitting = [
            end
            for end in range(1, prompt.pages_count + 1)
            if model.resumable(end)
            and end <= full_room
            and all(
                min(component.span, end) + (component.span if self.on_device else 0) <= window_room
                for component in self.layout.components[1:]
            )
        ]
        return max(fitting, default=0)

    def pages_of(self, prompt: Prompt, objects: Sequence[Label]) -> list[set[int]]:
        """Return by component the pages that objects are of."""
        return [
            {prompt.keys.index(label.key) for label in objects if label.pool in {pool.name for pool in component.pools}}
            for component in self.layout.components
        ]

    def read_of(self, pages: list[set[int]], prompt: Prompt, came: Sequence[Label]) -> set[tuple[int, str]]:
        """Return those of the pages, by component, of which an object was read."""
        read = {(prompt.keys.index(label.key), label.pool) for label in came}
        return {
            (page, pool.name)
            for component, held in zip(self.layout.components, pages, strict=True)
            for page in held
            for pool in component.pools
        } & read


@pytest.mark.parametrize("component_set", COMPONENT_SETS)
def test_what_came_of_a_prefetch_is_used_to_the_longest_end_that_it_allows(component_set: str) -> None:
    trials = st.builds(
        Trial,
        layout=st.sampled_from(COMPONENT_SETS[component_set]),
        turns=st.sets(st.integers(1, PAGES_MAX), min_size=1, max_size=4).map(sorted),
        on_device=st.integers(0, PAGES_MAX),
        has_lost_windows=st.booleans(),
        vanishing=st.lists(st.integers(0, 2**16), max_size=6),
        room=st.one_of(st.just((ROOM, ROOM)), st.tuples(st.integers(1, PAGES_MAX), st.integers(1, 6))),
    )

    @settings(max_examples=examples(60, 2000), deadline=None, phases=PHASES, database=None)
    @given(
        trial=trials,
        batch_objects=st.sampled_from([1, 3, BATCH_OBJECTS]),
        ends_before=st.integers(0, 200),
        end=st.sampled_from(["well", "concluded", "failed"]),
    )
    def prefetch(trial: Trial, batch_objects: int, ends_before: int, end: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unified_cache.controller.jobs.BATCH_OBJECTS", batch_objects)
            trial.run(None if end == "well" else ends_before, end)

    prefetch()
