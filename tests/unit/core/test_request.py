"""One request from ``bring`` to ``close``: what comes from which tier, and what is given back however it ends."""

import gc
import math
from collections.abc import Callable
from threading import Event, Thread

import numpy as np
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.components import COMPONENT_SETS
from tests.support.operations import engine as toy_engine
from tests.support.operations import over, present, prompt_of_pages
from tests.support.ranks import ThreadRanks, in_threads
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.request import Request
from unified_cache.controller import TransferKind
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.errors import InputError, StateError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Hits, ModelLayout, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.wrappers.layer import Method

LAYOUTS = {name: layouts[0] for name, layouts in COMPONENT_SETS.items() if layouts[0].page_size == 1}
PAGES = 8


def engine(layout: ModelLayout = toy_layout((SPAN_ALL, 3), 1), pages: int = 24) -> ToyEngine:
    return toy_engine(MemoryStorage(), layout=layout, device=pages)


def prompt_of(toy: ToyEngine, pages: int = PAGES, first: int = 0) -> Prompt:
    return prompt_of_pages(toy.cache, pages, first)


def compute(toy: ToyEngine, request: Request) -> None:
    """Compute the rest of the prompt and hand it over."""
    request.wait(timeout_s=5)
    start = request.lock.end
    for component, slots in enumerate(present(request.allocate())):
        toy.write_pages(component, slots, request.prompt, start)
    request.insert()


def served(toy: ToyEngine, prompt: Prompt) -> Hits:
    """Serve a prompt, every byte that came compared; return what came from where."""
    with toy.cache.bring(prompt) as request:
        request.wait(timeout_s=5)
        toy.verify(prompt, request.lock)
        compute(toy, request)
        toy.verify(prompt, request.lock)
        assert request.lock.end == prompt.pages_count
    toy.cache.check()
    return request.hits


def is_all_free(toy: ToyEngine) -> bool:
    """Tell whether no request holds a slot: all are free or evictable."""
    toy.cache.check()
    counts = [toy.cache.available(number) for number in range(len(toy.layout.components))]
    return counts == list(toy.device_pages)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_request_brings_its_prefix_from_the_slowest_tier_that_has_it(layout: ModelLayout) -> None:
    toy = engine(layout)
    prompt = prompt_of(toy)
    assert served(toy, prompt) == Hits()
    toy.cache.backup(prompt)
    toy.cache.wait_all(5)
    assert served(toy, prompt) == Hits(device=PAGES)
    toy.forget(Tier.DEVICE)
    assert served(toy, prompt) == Hits(host=PAGES)
    toy.forget(Tier.DEVICE, Tier.HOST)
    assert served(toy, prompt) == Hits(storage=PAGES)
    assert toy.cache.stats().lookups.count == 4, "a request counts once"
    assert is_all_free(toy)


def test_a_prefix_on_the_device_is_pinned_at_once() -> None:
    toy = engine()
    prompt = prompt_of(toy)
    served(toy, prompt)
    with toy.cache.bring(prompt) as request:
        assert request.lock.end == PAGES
        assert request.moving is None


def test_an_engine_that_polls_sees_what_moves() -> None:
    toy = engine()
    prompt = prompt_of(toy)
    served(toy, prompt)
    toy.cache.backup(prompt)
    toy.cache.wait_all(5)
    toy.forget(Tier.DEVICE, Tier.HOST)
    request = toy.cache.bring(prompt)
    seen = []
    while not request.advance():
        if request.moving not in seen:
            seen.append(request.moving)
        toy.cache.poll()
    assert seen == [TransferKind.PREFETCH, TransferKind.LOAD]
    request.close()
    assert is_all_free(toy)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("polls", range(6))
def test_leaving_at_any_moment_gives_all_back(layout: ModelLayout, polls: int) -> None:
    toy = engine(layout)
    prompt = prompt_of(toy)
    served(toy, prompt)
    toy.cache.backup(prompt)
    toy.cache.wait_all(5)
    toy.forget(Tier.DEVICE, Tier.HOST)
    longer = prompt_of(toy, PAGES + 3)

    def fail_midway() -> None:
        with toy.cache.bring(longer) as request:
            for _ in range(polls):
                toy.cache.poll()
                if request.advance():
                    request.allocate()
                    break
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_midway()
    toy.cache.wait_all(5)
    assert is_all_free(toy)


def test_an_answer_adds_pages_that_a_longer_prompt_hits() -> None:
    toy = engine()
    longer = prompt_of(toy, PAGES + 6)
    with toy.cache.bring(longer.head(PAGES)) as request:
        compute(toy, request)
        for end in range(PAGES, PAGES + 6):
            request.trim(end)
            for component, slots in enumerate(present(request.allocate(end + 1, [end + 1]))):
                toy.write_pages(component, slots, longer, end)
        kept = [int((slots >= 0).sum()) for slots in request.own]
        assert kept[0] == 6
        assert all(count < 6 for count in kept[1:]), "what lies behind the window is free again"
        request.insert(longer)
        assert request.lock.end == request.own_end == PAGES + 6
    assert served(toy, longer) == Hits(device=PAGES + 6)


def test_a_request_without_room_is_computed_and_not_kept() -> None:
    toy = engine(pages=10)
    with toy.cache.bring(prompt_of(toy)) as first, toy.cache.bring(prompt_of(toy, first=100)) as second:
        compute(toy, first)
        second.wait(timeout_s=5)
        assert second.allocate() is None
        second.insert()
        assert second.own_end == 0
    assert is_all_free(toy)


def test_calls_out_of_turn_are_refused() -> None:
    toy = engine()
    served(toy, prompt_of(toy))  # so that nothing is read, whatever the deadline
    for bad in (0, -1, math.nan):
        with pytest.raises(InputError):
            toy.cache.bring(prompt_of(toy), deadline_s=bad)
    with toy.cache.bring(prompt_of(toy)) as request:
        pass
    for call in (request.slots, request.allocate, request.insert, lambda: request.trim(1)):
        with pytest.raises(StateError):
            call()
    request.close()
    assert not request.advance()
    with pytest.raises(StateError):
        request.wait(timeout_s=5)


def test_a_prompt_that_is_inserted_in_parts_stays_whole() -> None:
    toy = engine()
    prompt = prompt_of(toy)
    with toy.cache.bring(prompt) as request:
        request.wait(timeout_s=5)
        for end in (3, 5, None):
            start = request.own_end
            for component, slots in enumerate(present(request.allocate(end))):
                toy.write_pages(component, slots, prompt, start)
            request.insert()
            assert request.prompt is prompt
    assert served(toy, prompt) == Hits(device=PAGES)


@pytest.mark.parametrize("deadline_s", [math.inf, 0.01])
def test_a_request_waits_for_nothing_but_what_it_needs(deadline_s: float) -> None:
    """For no backup of others; and for no store that is still in its call at the deadline."""
    store, returns = ScriptedStorage(), Event()
    toy = ToyEngine(toy_layout((SPAN_ALL, 3), 1), (24, 24), (24, 24), store, None)
    prompt, other = prompt_of(toy), prompt_of(toy, first=100)
    served(toy, prompt)
    over(toy.cache, toy.cache.backup(prompt))
    toy.forget(Tier.DEVICE, *([] if deadline_s == math.inf else [Tier.HOST]))
    served(toy, other)
    store.before = {method: lambda: returns.wait(60) for method in (Method.PUT, Method.GET)}
    toy.cache.backup(other)
    with toy.cache.bring(prompt, deadline_s) as request:
        request.wait(timeout_s=5)
        assert request.hits.host == (PAGES if deadline_s == math.inf else 0)
    returns.set()
    toy.cache.wait_all(5)
    assert is_all_free(toy)
    toy.cache.close()


def test_what_a_request_computes_has_its_priority() -> None:
    eviction = EvictionConfig(device=(EvictionPolicy.PRIORITY,))
    toy = toy_engine(layout=toy_layout((SPAN_ALL, 3), 1), device=2 * PAGES, eviction=eviction)
    for first, priority in ((0, 9), (100, 1), (200, 1)):
        with toy.cache.bring(prompt_of(toy, first=first), priority=priority) as request:
            compute(toy, request)
    assert served(toy, prompt_of(toy)) == Hits(device=PAGES)


def test_a_request_ends_quietly_after_its_cache() -> None:
    toy = engine()
    with toy.cache.bring(prompt_of(toy)) as request:
        request.wait(timeout_s=5)
        request.allocate()
        toy.cache.close()


def test_pages_are_filed_under_no_other_prompt_than_they_were_computed_for() -> None:
    toy = engine()
    prompt, stranger = prompt_of(toy), prompt_of(toy, PAGES + 2, first=100)
    salted = toy.cache.prompt(np.arange(PAGES + 2), Namespace(tenant="other"), whole=True)
    with toy.cache.bring(prompt) as request:
        request.wait(timeout_s=5)
        for component, slots in enumerate(present(request.allocate())):
            toy.write_pages(component, slots, prompt, 0)
        for other in (stranger, salted):
            with pytest.raises(InputError):
                request.insert(other)
        request.insert()
    for other in (stranger, salted):
        assert toy.cache.match(other).device_end == 0
    assert toy.read_back(prompt) == PAGES


@pytest.mark.parametrize("moves", [False, True])
def test_a_request_that_is_dropped_unclosed_gives_all_back_at_the_next_look(moves: bool) -> None:
    toy = engine()
    prompt = prompt_of(toy)
    served(toy, prompt)
    toy.cache.backup(prompt)
    toy.cache.wait_all(5)
    if moves:
        toy.forget(Tier.DEVICE, Tier.HOST)
    request = toy.cache.bring(prompt)
    assert request.advance() is not moves
    if not moves:
        request.prompt = prompt_of(toy, 2 * PAGES)
        present(request.allocate())
    del request
    collector = Thread(target=gc.collect)
    collector.start()
    collector.join()
    toy.cache.poll()
    toy.cache.wait_all(5)
    assert is_all_free(toy)
    assert all(occupancy.out == occupancy.protected == 0 for occupancy in toy.cache.stats().occupancy)


def test_ranks_keep_the_pages_of_a_dropped_request_until_they_are_reset() -> None:
    def live(ranks: ThreadRanks) -> None:
        toy = toy_engine(layout=toy_layout((SPAN_ALL, 3), 1), device=24, ranks=ranks)
        served(toy, prompt_of(toy))
        request = toy.cache.bring(prompt_of(toy))
        request.wait(timeout_s=5)
        del request
        gc.collect()
        toy.cache.poll()
        assert not is_all_free(toy)
        toy.cache.reset()
        assert is_all_free(toy)

    in_threads(2, live)


REFUSED: tuple[Callable[[Request], object], ...] = (
    lambda request: request.wait("x"),  # type: ignore[arg-type]
    lambda request: request.allocate("x"),  # type: ignore[arg-type]
    lambda request: request.trim("x"),  # type: ignore[arg-type]
    lambda request: request.insert("x"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("call", REFUSED)
def test_a_request_refuses_values_of_another_kind(call: Callable[[Request], object]) -> None:
    toy = engine()
    served(toy, prompt_of(toy))
    with toy.cache.bring(prompt_of(toy)) as request, pytest.raises(InputError):
        call(request)
    assert is_all_free(toy)
