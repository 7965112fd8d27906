"""Prompts that fill their pages: one token is left to compute, and the last page with it; and pages of bigrams."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.components import COMPONENT_SETS, LAYOUTS, every_layout
from tests.support.operations import engine, present
from unified_cache.cache import recording
from unified_cache.cache.cache import UnifiedCache
from unified_cache.cache.recording import RequestRecord, RequestWatcher
from unified_cache.controller import NotStarted, Operation
from unified_cache.core.config import EvictionConfig, EvictionPolicy, Prefetching, Retention, WritePolicy
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import ModelLayout, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage

SMALL_LAYOUTS = {name: layouts[0] for name, layouts in COMPONENT_SETS.items() if layouts[0].page_size == 1}
FULL = LAYOUTS["full"]
PAGES = 8


def prompt_of(cache: UnifiedCache, pages: int = PAGES, first: int = 0, more: int = 0) -> Prompt:
    """Return the prompt of an engine: so many whole pages, and a few tokens more."""
    count = pages * cache.layout.page_size + more
    return cache.prompt(np.arange(first, first + count, dtype=np.int32), whole=False)


def serve(toy: ToyEngine, prompt: Prompt) -> int:
    """Serve a prompt by the calls of the documents, every byte compared; return the pages that it reused."""
    reused = toy.cache.match(prompt).device_end
    lock = present(toy.serve(prompt))
    assert lock.end == prompt.pages_count
    toy.cache.release(lock)
    toy.cache.check()
    return reused


def move(toy: ToyEngine, *starts: Callable[[Prompt], Operation | NotStarted], prompt: Prompt) -> None:
    for start in starts:
        start(prompt)
        assert all(operation.error is None for operation in toy.cache.wait_all(5))


def held_windows(cache: UnifiedCache, prompt: Prompt, tier: Tier) -> list[bool]:
    """Tell of each end of a prompt whether a tier alone can resume there."""
    tree = cache._ledger.tree
    held = [tree.peek(prompt).held_pages(tier, component).tolist() for component in range(len(cache.layout.components))]
    spans = [component.span for component in cache.layout.components]
    return [
        all(all(pages[max(0, end - span) : end]) for pages, span in zip(held, spans, strict=True))
        for end in range(1, prompt.pages_count + 1)
    ]


# ---- the prompt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "pages", "reusable"), [(0, 0, 0), (1, 0, 0), (3, 0, 0), (4, 1, 0), (5, 1, 1), (8, 2, 1), (9, 2, 2)]
)
def test_the_pages_that_can_be_reused_leave_a_token(tokens: int, pages: int, reusable: int) -> None:
    prompt = Prompt.of(range(tokens), 4)
    assert (prompt.tokens_count, prompt.pages_count, prompt.reusable_pages) == (tokens, pages, reusable)
    assert prompt.reusable.keys == prompt.keys[:reusable]
    assert Prompt.of(range(tokens), 4, whole=True).reusable_pages == pages
    assert prompt.head(reusable).reusable_pages == reusable, "the rest of a head's prompt is left to compute"


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_of_bigrams_knows_the_token_after_it_and_so_leaves_one(page_size: int) -> None:
    for tokens in range(12):
        prompt = Prompt.of(range(tokens), page_size, Namespace(bigrams=True))
        assert prompt.reusable_pages == prompt.pages_count == len(prompt.keys) == max(0, tokens - 1) // page_size


# ---- from each tier --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), *SMALL_LAYOUTS.values()], ids=[*LAYOUTS, *SMALL_LAYOUTS])
def test_a_prompt_that_fills_its_pages_is_reused_up_to_the_last_one(layout: ModelLayout) -> None:
    toy = engine(layout=layout, device=24)
    assert [serve(toy, prompt_of(toy.cache)) for _ in range(4)] == [0, 7, 7, 7]
    assert serve(toy, prompt_of(toy.cache, PAGES + 1)) == 8, "continued, all pages are reused"
    assert serve(toy, prompt_of(toy.cache)) == 7


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_windows_are_kept_at_the_end_and_a_page_before_it_once() -> None:
    cache = engine(layout=LAYOUTS["full-swa-mamba"], device=24).cache
    for prompt, ends in (
        (prompt_of(cache), (7, 8)),
        (prompt_of(cache, more=1), (8,)),
        (prompt_of(cache, 1), (1,)),
        (prompt_of(cache, 0), ()),
        (prompt_of(cache).head(6), (6,)),
    ):
        assert cache.checkpoint_ends(cache.match(prompt)) == ends
    cache.config = replace(cache.config, retention=Retention(tail_tokens=3 * cache.layout.page_size))
    assert cache.checkpoint_ends(cache.match(prompt_of(cache))) == (6, 7, 8)


@every_layout
@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.SELECTIVE, WritePolicy.BACK])
@pytest.mark.parametrize("pages", [1, PAGES])
def test_write_policies_copy_the_last_page_too_and_the_windows_at_both_ends(
    layout: ModelLayout, policy: WritePolicy, pages: int
) -> None:
    toy = engine(layout=layout, device=24, write=policy)
    cache = toy.cache
    prompt = prompt_of(cache, pages)
    for _ in range(1 if policy is WritePolicy.BACK else 2):
        serve(toy, prompt)
        cache.wait_all(5)
    if policy is WritePolicy.BACK:
        assert not any(held_windows(cache, prompt, Tier.HOST))
        toy.forget()
    assert all(held_windows(cache, prompt, Tier.HOST)[-2:])


# ---- what goes first -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EvictionPolicy)
@pytest.mark.parametrize("spans", [(SPAN_ALL,), (SPAN_ALL, 2, 1)], ids=str)
def test_a_prompt_asked_again_and_again_stays_whole_while_others_go(
    spans: tuple[int, ...], policy: EvictionPolicy
) -> None:
    eviction = EvictionConfig((policy,) * len(spans))
    toy = engine(layout=toy_layout(spans, 4), device=3 * PAGES, host=0, eviction=eviction)
    cache = toy.cache
    prompt = prompt_of(cache)
    for number in range(1, 12):
        serve(toy, prompt)
        serve(toy, prompt_of(cache, PAGES, first=1_000 * number, more=1))
    assert cache._ledger.tree.peek(prompt).device_end == PAGES
    assert serve(toy, prompt) == 7


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_a_page_that_no_request_can_reuse_is_no_miss() -> None:
    toy = engine(MemoryStorage(), layout=LAYOUTS["full-mamba"], device=24)
    cache = toy.cache
    records: list[RequestRecord] = []
    cache.record_to(RequestWatcher(["full", "mamba"], records.append))
    prompt = prompt_of(cache)
    assert serve(toy, prompt) == 0
    before = cache.stats().lookups.missed_pages
    assert before % 7 == 0
    assert serve(toy, prompt_of(cache)) == 7
    assert cache.stats().lookups.missed_pages == before
    assert [(record.found.device, record.bound_by) for record in records] == [(0, ("full",)), (7, ())]
    assert cache.explain(prompt).end == 7
    assert not cache.explain(prompt).losses


def test_of_more_requests_than_are_watched_the_first_counts_as_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "RUNNING_MAX", 2)
    toy = engine(layout=FULL, device=24)
    records: list[RequestRecord] = []
    toy.cache.record_to(RequestWatcher(["full"], records.append))
    prompts = [prompt_of(toy.cache, 1, first=1_000 * number, more=1) for number in range(3)]
    with ExitStack() as requests:
        for prompt in prompts:
            requests.enter_context(toy.cache.bring(prompt)).wait(5)
        assert [record.prompt for record in records] == prompts[:1]
    assert {record.prompt for record in records} == set(prompts)
    assert len(records) == 3


def test_a_prefetch_is_worth_what_a_request_can_reuse() -> None:
    toy = engine(MemoryStorage(), layout=FULL, device=24)
    cache, size = toy.cache, FULL.page_size
    prompt = prompt_of(cache)
    serve(toy, prompt)
    move(toy, cache.backup, prompt=prompt)
    cache.config = replace(cache.config, prefetching=Prefetching(threshold_tokens=1))
    assert cache.prefetch(prompt) is NotStarted.BELOW_THRESHOLD
    cache.reset()
    cache.config = replace(cache.config, prefetching=Prefetching(threshold_tokens=7 * size + 1))
    assert cache.prefetch(prompt) is NotStarted.BELOW_THRESHOLD
    cache.config = replace(cache.config, prefetching=Prefetching(threshold_tokens=7 * size))
    assert cache.prefetch(prompt)
    cache.wait_all(5)


# ---- pages of bigrams, beside prompts of the same tokens that are not ----------------------------------------------


THREE = toy_layout((SPAN_ALL, 2, 1), 4)
BIGRAMS = Namespace(bigrams=True)
TOKENS = np.arange(100, 125, dtype=np.int32)


def test_a_prompt_resumes_from_the_pages_whose_pairs_it_shares() -> None:
    toy = engine(layout=THREE, device=16)
    assert serve(toy, toy.cache.prompt(TOKENS, BIGRAMS)) == 0
    # 24 of the 25 tokens begin a pair that is known. One token less, and the last pair of the last page is not.
    for count, pages in ((25, 6), (24, 5), (9, 2), (8, 1), (5, 1), (4, 0)):
        prompt = toy.cache.prompt(TOKENS[:count], BIGRAMS)
        assert (prompt.pages_count, toy.cache.match(prompt).tree_end) == (pages, pages)
    branched = TOKENS.copy()
    branched[8] = 7  # the second token of the last pair of page 1
    assert toy.cache.match(toy.cache.prompt(branched, BIGRAMS)).tree_end == 1
    # Served, it hangs below the node that it cuts.
    serve(toy, toy.cache.prompt(branched, BIGRAMS))
    assert toy.cache.match(toy.cache.prompt(TOKENS, BIGRAMS)).tree_end == 6
