"""Adaptive eviction on ten kinds of made-up traffic: never much worse than lru."""

import pytest

from benchmarks.generated_traces import KINDS, REQUESTS, generated_trace
from benchmarks.policies import LOST_MAX, SHARES, ComparedHits, compared_hits
from benchmarks.policy_tiers import tiered_runs
from benchmarks.retention import POLICIES, TRACE, Kept, reuse_of
from unified_cache.sizing.replay.trace import TraceRequest, read_trace

SHORT_REQUESTS = 2_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_the_same_each_time_and_another_with_another_seed(kind: str) -> None:
    trace = generated_trace(kind, 200)
    assert trace == generated_trace(kind, 200)
    if kind != "loops":
        assert trace != generated_trace(kind, 200, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_keeps_lrus_hits_on_short_traces_and_wins_what_scans_and_loops_cost_lru(kind: str) -> None:
    found = compared_hits(kind, generated_trace(kind, SHORT_REQUESTS), 0.1)
    check(found)
    if kind == "scans":
        assert found.lost < -0.2
    if kind == "loops":
        assert found.lru == 0 < found.adaptive


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_adaptive_keeps_lrus_hits_although_sessions_flip_their_habits_early(seed: int) -> None:
    check(compared_hits("flips", generated_trace("flips", 1_200, seed), 0.1))


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_never_loses_more_than_half_a_percent_of_lrus_hits(kind: str, share: float) -> None:
    check(compared_hits(kind, generated_trace(kind, REQUESTS), share))


def test_where_documents_are_asked_for_alike_adaptive_is_lru() -> None:
    found = compared_hits("uniform", generated_trace("uniform", SHORT_REQUESTS), 0.2)
    assert 0 < found.lru == found.adaptive < found.clairvoyant


def check(found: ComparedHits) -> None:
    assert found.lost <= LOST_MAX, found
    assert found.adaptive <= found.clairvoyant, found


@pytest.mark.parametrize("kind", [pytest.param("zipf", marks=pytest.mark.long), "loops", "retrieval"])
def test_in_three_tiers_adaptive_keeps_lrus_hits_and_moves_no_more(kind: str) -> None:
    lru, adaptive = tiered_runs(kind, generated_trace(kind, 600))
    assert adaptive.hits >= (1 - LOST_MAX) * lru.hits
    assert adaptive.moved <= lru.moved


def test_in_three_tiers_windows_keep_lrus_hits_and_move_no_more() -> None:
    lru, adaptive = tiered_runs("zipf", generated_trace("zipf", 600), "gpt-oss-120b")
    assert adaptive.hits >= (1 - LOST_MAX) * lru.hits > 0
    assert adaptive.moved <= lru.moved


# ---- the worth of a tail of windows --------------------------------------------------------------------------------


FIRST = TraceRequest(0, 1300, 10, (1, 2, 3))
SECOND = TraceRequest(1, 1800, 10, (1, 2, 4, 5))


@pytest.mark.parametrize(
    ("exact", "tail_tokens", "full_tokens", "resumed_tokens"),
    [(False, 0, 1024, 0), (False, 512, 1024, 1024), (True, 0, 1280, 1280), (True, 512, 1280, 1280)],
)
def test_a_continuation_resumes_at_the_end_of_the_prompt_or_at_its_last_whole_block(
    exact: bool, tail_tokens: int, full_tokens: int, resumed_tokens: int
) -> None:
    found = reuse_of([FIRST, SECOND], 256, Kept(False, tail_tokens), exact=exact)
    assert (found.full_tokens, found.resumed_tokens) == (full_tokens, resumed_tokens)


def test_on_the_trace_ends_and_branches_suffice_where_prompts_continue_exactly() -> None:
    requests = read_trace(TRACE, limit=4_000)
    for page_size in (64, 256):
        traced, exact = (
            {name: reuse_of(requests, page_size, kept, exact=exact) for name, kept in POLICIES.items()}
            for exact in (False, True)
        )
        assert traced["all three"].share > traced["end, branches"].share + 0.1
        assert exact["all three"].share < exact["end, branches"].share + 0.03
        assert exact["end, branches"].share > 0.9
        assert exact["all three"].kept_pages > exact["end, branches"].kept_pages
