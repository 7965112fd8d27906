"""Checkpoints: the ends at which requests leave windows and recurrent states, and states of a request's own."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cache import ToyEngine, oracle
from tests.support.operations import numbered_pages, over, present
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller import InlineWorkers, TransferKind
from unified_cache.core.config import CacheConfig, Retention
from unified_cache.core.errors import InputError, SlotError
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.window import SPAN_ALL, needed_pages, restorable_ends, window
from unified_cache.storage_backends.memory import MemoryStorage

PAGE = 16
FULL = Full((PoolSpec("kv", 64),))
WINDOW = SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 32), PoolSpec("swa_sidecar", 24)))
STATE = RecurrentState((PoolSpec("mamba", 48),))


def engine(*components: Component, pages: int = 32, states: int = 8) -> ToyEngine:
    sizes = (pages, *(states for _ in components))
    return ToyEngine(ModelLayout(PAGE, (FULL, *components)), sizes, tuple(0 for _ in sizes), None, InlineWorkers())


def serve(toy: ToyEngine, *contents: int) -> int:
    """Serve a prompt and let it go; return how many pages were resumed."""
    prompt = toy.cache.prompt(numbered_pages(*contents))
    resumed = toy.cache.match(prompt).device_end
    toy.run(prompt)
    toy.cache.check()
    return resumed


@pytest.mark.parametrize(
    ("retention", "pages_count", "branch_end", "ends"),
    [
        (Retention(), 10, 0, (10,)),
        (Retention(), 10, 4, (4, 10)),
        (Retention(branches=False), 10, 4, (10,)),
        (Retention(tail_tokens=512), 10, 4, (4, 9, 10)),
        (Retention(tail_tokens=513), 10, 0, (8, 9, 10)),
        (Retention(tail_tokens=256), 10, 0, (10,)),
        (Retention(tail_tokens=10**9), 3, 2, (1, 2, 3)),
        (Retention(tail_tokens=512), 1, 0, (1,)),
        (Retention(tail_tokens=512), 0, 0, ()),
    ],
)
def test_a_request_keeps_its_end_its_branch_and_the_boundaries_of_its_tail(
    retention: Retention, pages_count: int, branch_end: int, ends: tuple[int, ...]
) -> None:
    assert retention.ends(pages_count, branch_end, 256) == ends


@pytest.mark.parametrize("span", [1, 2, SPAN_ALL])
def test_needed_pages_are_the_windows_before_the_ends(span: int) -> None:
    for start in range(6):
        for ends in ([6], [2, 6], [3], [1, 2, 3, 4, 5, 6, 7], [4, 7, 30], []):
            needed = needed_pages(ends, span, start, 6)
            pages = {page for end in ends for page in range(window(end, span), end)}
            assert needed.tolist() == [page in pages for page in range(start, 6)]


def test_a_state_or_a_window_is_left_where_a_prompt_ends_and_where_the_next_one_branches_off() -> None:
    toy = engine(STATE)
    assert serve(toy, 1, 2, 3, 4) == 0
    assert serve(toy, 1, 2, 3, 4, 5) == 4, "continued from where it ended"
    assert serve(toy, 1, 2, 8, 8) == 0, "nobody has left a state in the middle"
    assert serve(toy, 1, 2, 9, 9) == 2, "the first to branch off there has"
    assert serve(toy, 1, 2, 8, 8, 8) == 4
    windows = engine(WINDOW)
    assert [serve(windows, 1, 2, 3, *rest) for rest in ((4, 5), (8,), (9,))] == [0, 0, 3]


@pytest.mark.parametrize("window_pages", [2, 4])
def test_one_page_evicted_of_the_windows_of_a_tail_leaves_an_end_to_resume_from(window_pages: int) -> None:
    toy = engine(SlidingWindow(window_pages * PAGE, PAGE, (PoolSpec("swa", 32),)))
    toy.cache.config = CacheConfig((32, 8), (0, 0), retention=Retention(tail_tokens=PAGE + 1))
    contents = range(1, 17)
    assert serve(toy, *contents) == 0
    assert toy.cache.stats().occupancy[1].evictable == window_pages + 1
    assert toy.cache.allocate([np.ones(8 - window_pages, np.bool_)] * 2) is not None, "one page more than are free"
    assert toy.cache.stats().occupancy[1].evictable == window_pages
    assert toy.cache.match(toy.cache.prompt(numbered_pages(*contents))).device_end == 16


def test_without_branches_every_visitor_pays_again() -> None:
    toy = engine(STATE)
    toy.cache.config = CacheConfig((32, 8), (0, 0), retention=Retention(branches=False))
    for content in (3, 4, 5):
        assert serve(toy, 1, 2, content, content) == 0


def test_a_fork_is_the_requests_own_copy_and_the_trees_state_stays_as_it_was() -> None:
    toy = engine(WINDOW, STATE)
    serve(toy, 1, 2, 3)
    prompt = toy.cache.prompt(numbered_pages(1, 2, 3))
    lock = toy.cache.lock(toy.cache.match(prompt))
    fork = present(toy.cache.fork(lock))
    assert [len(slots) for slots in fork] == [0, 0, 1], "full and window pages are never written again"
    (mine,), (theirs,) = fork[2].tolist(), toy.cache.slots(lock, 2).tolist()
    assert mine != theirs
    assert toy.read(2, mine) == toy.read(2, theirs) == [oracle(prompt, 2, STATE.pools[0])]
    longer = toy.cache.prompt(numbered_pages(1, 2, 3, 4))
    toy.write(2, mine, longer, 3)
    assert toy.verify(prompt, lock) == 3 + 2 + 1
    # The copy becomes the checkpoint at the end of the continuation.
    pages = present(toy.cache.allocate(toy.cache.pages_to_allocate(3, 4, [])))
    toy.write(0, int(pages[0][0]), longer, 3)
    pages[2][-1] = mine
    lock = toy.cache.insert(longer, pages, lock)
    assert toy.cache.slots(lock, 2).tolist() == [mine]
    with pytest.raises(SlotError, match=r"slot \d+ is the tree's, not out"):
        toy.cache.free(fork)
    toy.cache.release(lock)
    toy.cache.check()


def test_a_fork_that_lacks_room_for_one_state_takes_none_of_another() -> None:
    other = Component("conv", 1, (PoolSpec("conv", 32),))
    toy = engine(STATE, other)
    serve(toy, 1, 2)
    lock = toy.cache.lock(toy.cache.match(toy.cache.prompt(numbered_pages(1, 2))))
    rooms = [toy.cache.available(component) for component in range(3)]
    every = np.ones(rooms[2], np.bool_)
    others = present(toy.cache.allocate([every, ~every, every]))
    assert toy.cache.fork(lock) is None
    assert toy.cache.available(1) == rooms[1]
    toy.cache.free(others)
    toy.cache.release(lock)
    toy.cache.check()


def test_where_no_state_is_held_there_is_nothing_to_fork() -> None:
    toy = engine(STATE)
    prompt = toy.cache.prompt(numbered_pages(1, 2))
    lock = toy.cache.lock(toy.cache.match(prompt))
    assert toy.cache.fork(lock) is None
    pages = present(toy.cache.allocate(toy.cache.pages_to_allocate(0, 2, [])))
    lock = toy.cache.insert(prompt, pages, lock)
    with pytest.raises(InputError, match="mamba: no state is held after 2 pages"):
        toy.cache.fork(lock)
    toy.cache.release(lock)
    toy.cache.check()


def test_every_end_that_was_kept_is_backed_up_and_comes_back() -> None:
    sizes = (32, 16, 8)
    toy = ToyEngine(ModelLayout(PAGE, (FULL, WINDOW, STATE)), sizes, sizes, MemoryStorage(), InlineWorkers())
    cache = toy.cache
    cache.config = replace(cache.config, retention=Retention(tail_tokens=2 * PAGE))
    serve(toy, 1, 2, 3, 4, 5)
    serve(toy, 1, 2, 8, 8, 8)
    over(cache, cache.backup(toy.run(cache.prompt(numbered_pages(1, 2, 9, 9, 9, 9)))))
    cache.check()
    assert cache.stats().traffic[TransferKind.BACKUP].component_pages == [6, 2 + 3, 1 + 2], "ends 2, 5 and 6"
    assert cache.stats().traffic[TransferKind.STORE].component_pages == [6, 5, 3]
    cache.reset()
    for contents, end in (((1, 2), 2), ((1, 2, 9, 9, 9), 5), ((1, 2, 9, 9, 9, 9), 6), ((1, 2, 9, 9), 2)):
        prompt = cache.prompt(numbered_pages(*contents))
        for leg in (cache.prefetch, cache.load):
            leg(prompt)
            cache.wait_all(1)
        lock = cache.lock(cache.match(prompt))
        assert lock.end == end
        toy.verify(prompt, lock)
        cache.release(lock)
        cache.check()
        cache.reset()


# ---- windows -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([1, 2, 5, SPAN_ALL]), st.lists(st.booleans(), min_size=9, max_size=9))))
def test_an_end_is_restorable_where_every_window_before_it_is_whole(components: list[tuple[int, list[bool]]]) -> None:
    spans, lacks = [span for span, _ in components], [np.array(missing, np.bool_) for _, missing in components]
    ends = restorable_ends(spans, [missing if missing.any() else None for missing in lacks], 9)
    assert ends.tolist() == [
        not any(missing[window(end, span) : end].any() for span, missing in zip(spans, lacks, strict=True))
        for end in range(1, 10)
    ]
