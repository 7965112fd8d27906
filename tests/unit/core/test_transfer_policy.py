"""Load or recompute: what a cache brings up under each policy, by the time that its store, copies and engine take."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.sources import ROOT
from tests.support.clock import ManualClock
from tests.support.components import LAYOUTS, every_layout
from tests.support.conversations import ROOM, store_turns
from tests.support.documents import code_blocks
from tests.support.operations import over, present, prompt_of_pages, started
from tests.support.ranks import ThreadRanks, head_of, in_threads
from tests.support.tables import check_tables
from tests.support.timed_engine import PacedStorage, PrefillSpeed, TimedEngine
from unified_cache.controller import NotStarted, OperationState, RecomputeDecision
from unified_cache.controller.cost_model import TRIAL_EVERY
from unified_cache.controller.ranks import LocalRanks, RankGroup
from unified_cache.core.config import CacheConfig, TransferPolicy, WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout
from unified_cache.observe.metrics import CacheCollector

TURNS = (2, 4, 6, 8, 12, 16)
"""Pages of the conversation after each turn: where windows and states are kept."""

PREFILL = PrefillSpeed(pass_s=0.002, token_s=0.5e-3, pair_s=0.5e-6)
WARM = (2, 4, 6, 8, 16, 12)
"""Pages of the prompts that are served before anything is held against anything."""


def config_of(layout: ModelLayout, transfer: TransferPolicy) -> CacheConfig:
    sizes = tuple(ROOM for _ in layout.components)
    return CacheConfig(sizes, sizes, write=WritePolicy.ON_CALL, guard=None, transfer=transfer)


def paced(layout: ModelLayout, byte_s: float, latency_s: float = 0.0) -> PacedStorage:
    store = PacedStorage(ManualClock(), byte_s, latency_s)
    store_turns(layout, store, TURNS)
    return store


def engine_of(
    layout: ModelLayout,
    transfer: TransferPolicy,
    store: PacedStorage,
    ranks: RankGroup = LocalRanks(),
) -> TimedEngine:
    return TimedEngine(layout, config_of(layout, transfer), store, PREFILL, ranks=ranks)


def learned(engine: TimedEngine, rounds: int = 2) -> TimedEngine:
    """Have an engine serve some prompts, each from storage, and some that nobody has."""
    for number in range(rounds * len(WARM)):
        engine.first_token_s(prompt_of_pages(engine.cache, WARM[number % len(WARM)]))
        engine.forget()
        engine.compute(stranger(engine, WARM[number % len(WARM)]))
        engine.forget()
    return engine


def stranger(engine: TimedEngine, pages: int, first: int = 10**6) -> Prompt:
    """Return a prompt that nobody has."""
    return engine.cache.prompt(np.arange(first, first + pages * engine.cache.layout.page_size, dtype=np.int32))


def served_s(layout: ModelLayout, transfer: TransferPolicy, byte_s: float, latency_s: float = 0.0) -> float:
    """Return the time to the first token of the longest prompt, which storage has but for its last page."""
    engine = engine_of(layout, transfer, paced(layout, byte_s, latency_s))
    if transfer is TransferPolicy.FASTEST:
        learned(engine)
    return engine.first_token_s(prompt_of_pages(engine.cache, 17))


def break_even(layout: ModelLayout) -> float:
    """Return the seconds for a byte at which reading the conversation takes as long as computing it."""
    store = paced(layout, 0.0)
    store.byte_s = 1e-6
    always = engine_of(layout, TransferPolicy.ALWAYS, store)
    began_s = store.clock.now_s
    always.wait(always.cache.prefetch(prompt_of_pages(always.cache, 16)))
    read_bytes = (store.clock.now_s - began_s) * 1e6
    tokens = 16 * layout.page_size
    return PREFILL.seconds(0, tokens) / read_bytes


@every_layout
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0, 3.0])
def test_the_first_token_comes_as_soon_as_by_the_better_of_always_and_never(layout: ModelLayout, share: float) -> None:
    byte_s = break_even(layout) / share
    always, never, fastest = (
        served_s(layout, transfer, byte_s)
        for transfer in (TransferPolicy.ALWAYS, TransferPolicy.NEVER, TransferPolicy.FASTEST)
    )
    assert fastest <= 1.05 * min(always, never)


@every_layout
def test_a_latency_of_the_store_counts(layout: ModelLayout) -> None:
    latency_s = 3 * PREFILL.seconds(0, 16 * layout.page_size)
    assert served_s(layout, TransferPolicy.FASTEST, 0.0, latency_s) <= 1.05 * served_s(
        layout, TransferPolicy.NEVER, 0.0, latency_s
    )


def slow_engine(share: float = 0.1, layout: ModelLayout | None = None) -> TimedEngine:
    layout = LAYOUTS["full"] if layout is None else layout
    return engine_of(layout, TransferPolicy.FASTEST, paced(layout, break_even(layout) / share))


def test_the_answer_says_what_was_left_alone_and_why() -> None:
    engine = learned(slow_engine())
    before = engine.cache.stats().recomputed_tokens
    operation = engine.wait(started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16))))
    assert (operation.state, operation.pages_count) == (OperationState.DONE, 0)
    left = operation.recompute
    assert isinstance(left, RecomputeDecision)
    assert (left.start, left.end) == (0, 16)
    tokens = 16 * engine.cache.layout.page_size
    assert left.compute_s == pytest.approx(PREFILL.seconds(0, tokens), rel=0.15)
    assert left.load_s == pytest.approx(10 * PREFILL.seconds(0, tokens), rel=0.1)
    assert left.text.startswith(f"storage has {tokens:,} tokens, not worth loading: that takes ")
    assert engine.cache.stats().recomputed_tokens == before + tokens


def test_what_is_worth_loading_leaves_nothing_alone() -> None:
    engine = learned(slow_engine(3.0))
    operation = engine.wait(started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16))))
    assert (operation.pages_count, operation.recompute) == (16, None)
    assert engine.cache.stats().recomputed_tokens == 0


def test_what_the_host_holds_is_loaded_however_fast_the_engine_computes() -> None:
    engine = learned(slow_engine())
    prompt = prompt_of_pages(engine.cache, 16)
    engine.compute(prompt)
    over(engine.cache, engine.cache.backup(prompt))
    engine.toy.forget()
    engine.wait(started(engine.cache.load(prompt)))
    assert engine.cache.match(prompt).device_end == 16


def test_before_enough_is_measured_everything_is_loaded() -> None:
    engine = slow_engine(0.01)
    for _ in range(3):
        operation = engine.wait(started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16))))
        assert (operation.pages_count, operation.recompute) == (16, None)
        engine.forget()


def test_never_brings_nothing_up_and_still_backs_up() -> None:
    layout = LAYOUTS["full"]
    engine = engine_of(layout, TransferPolicy.NEVER, paced(layout, 0.0))
    prompt = prompt_of_pages(engine.cache, 16)
    assert engine.cache.prefetch(prompt) is engine.cache.load(prompt) is NotStarted.POLICY
    engine.compute(prompt)
    operation = over(engine.cache, engine.cache.backup(prompt))
    assert operation.tally.stored == 16


def test_a_store_that_becomes_fast_again_is_read_again() -> None:
    engine = learned(slow_engine())
    prompt = prompt_of_pages(engine.cache, 16)
    engine.store.byte_s = break_even(engine.cache.layout) / 10
    brought: list[int] = []
    while len(brought) < 4 * TRIAL_EVERY and 16 not in brought:
        operation = engine.wait(started(engine.cache.prefetch(prompt)))
        brought.append(operation.pages_count)
        engine.forget()
    assert brought[-1] == 16
    assert brought[:TRIAL_EVERY] == [0] * TRIAL_EVERY, "not before something was learned"


def test_nobody_waits_for_the_little_that_is_read_for_its_time() -> None:
    engine = learned(slow_engine())
    store = engine.store
    prompt = prompt_of_pages(engine.cache, 16)
    trials = 0
    for _ in range(2 * TRIAL_EVERY):
        gets = store.gets_count
        operation = started(engine.cache.prefetch(prompt))
        engine.wait(operation)
        assert operation.recompute is not None
        trials += store.gets_count > gets
        engine.forget()
    assert trials == 2
    check_tables(engine.cache, [])


@pytest.mark.parametrize("jump_s", [0.0, -1e6, 1e6])
def test_under_a_clock_that_stands_still_or_jumps_all_is_loaded(jump_s: float) -> None:
    layout = LAYOUTS["full"]
    store = paced(layout, 0.0)
    engine = engine_of(layout, TransferPolicy.FASTEST, store)
    for _ in range(3 * len(WARM)):
        engine.wait(engine.cache.prefetch(prompt_of_pages(engine.cache, 8)))
        engine.wait(engine.cache.load(prompt_of_pages(engine.cache, 8)))
        engine.clock.now_s += jump_s
        engine.forget()
    operation = engine.wait(started(engine.cache.prefetch(prompt_of_pages(engine.cache, 16))))
    assert (operation.pages_count, operation.recompute) == (16, None)


def test_ranks_choose_alike_by_the_slowest_of_them() -> None:
    layout = LAYOUTS["full"]
    pace_s = break_even(layout)

    def live(group: ThreadRanks) -> tuple[int, RecomputeDecision | None, int]:
        store = PacedStorage(ManualClock(), pace_s / (5.0 if group.rank == 0 else 0.1))
        store_turns(layout, store, TURNS, head_of(group))
        engine = engine_of(layout, TransferPolicy.FASTEST, store, ranks=group)
        for pages in (*WARM, *WARM):
            drive(engine, prompt_of_pages(engine.cache, pages))
            engine.compute(stranger(engine, pages))
            engine.forget()
        return drive(engine, prompt_of_pages(engine.cache, 16))

    def drive(engine: TimedEngine, prompt: Prompt) -> tuple[int, RecomputeDecision | None, int]:
        operation = over(engine.cache, engine.cache.prefetch(prompt))
        over(engine.cache, engine.cache.load(prompt))
        return operation.pages_count, operation.recompute, engine.cache.match(prompt).host_end

    first, second = in_threads(2, live)
    assert first == second
    assert first[1] is not None
    assert first[1].load_s > 5 * first[1].compute_s, "by the figures of the slow one"


def test_an_explanation_says_what_is_not_worth_loading_and_changes_nothing() -> None:
    engine = learned(slow_engine())
    prompt = prompt_of_pages(engine.cache, 16)
    tokens = 16 * engine.cache.layout.page_size
    before = engine.cache.stats().recomputed_tokens
    explanation = engine.cache.explain(prompt)
    left = present(explanation.recompute)
    assert (left.start, left.end) == (0, 16)
    assert f"storage has {tokens:,} tokens, not worth loading: that takes" in str(explanation)
    assert explanation.as_json()["recompute"] == left.as_json()
    assert engine.cache.stats().recomputed_tokens == before
    assert learned(slow_engine(3.0)).cache.explain(prompt).recompute is None


def test_a_scrape_finds_what_was_left_alone() -> None:
    engine = learned(slow_engine())
    engine.cache.wait_all(5)
    registry = CollectorRegistry()
    registry.register(CacheCollector(engine.cache))
    text = generate_latest(registry).decode()
    left = float(engine.cache.published_stats().recomputed_tokens)
    assert left > 0
    assert f'unified_cache_recomputed_tokens_total{{cache="cache"}} {left}' in text


def test_the_blocks_of_the_document_on_policies_run(capsys: pytest.CaptureFixture[str]) -> None:
    engine = learned(slow_engine())
    named: dict[str, object] = {"cache": engine.cache, "prompt": prompt_of_pages(engine.cache, 16)}
    text = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    blocks = [block.text for block in code_blocks(text) if block.language == "python" and "recompute" in block.text]
    blocks.insert(0, next(block.text for block in code_blocks(text) if "TransferPolicy.FASTEST," in block.text))
    assert len(blocks) == 2
    for block in blocks:
        exec(block, named)
    assert isinstance(named["config"], CacheConfig)
    assert capsys.readouterr().out.startswith("storage has 256 tokens, not worth loading: that takes ")
