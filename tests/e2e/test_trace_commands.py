"""``unified-cache trace info``: figures that can be counted by hand, and sessions."""

from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.sizing.replay.trace_figures import PROGRESS_BLOCKS, TraceFigures
from unified_cache.sizing.replay.trace_sessions import sessions_of

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"


def request_of(at: int, *blocks: int, tail_tokens: int = 512) -> TraceRequest:
    return TraceRequest(at, 512 * (len(blocks) - 1) + tail_tokens, 10, blocks)


TURNS = [
    request_of(0, 1, 2, 3),
    request_of(1000, 7, 8, tail_tokens=200),
    request_of(2000, 1, 2, 4, 5),  # goes on after the first one's whole blocks, 1 and 2
    request_of(3000, 1, 2, 4, 6),
    request_of(4000, 9),
    request_of(5000, 7, 10),
]


def test_a_request_that_begins_with_an_earlier_prompt_continues_its_session() -> None:
    assert sessions_of(TURNS) == [0, 1, 0, 0, 2, 1]


SYSTEM = (1, 2)


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([(3, 4, 5), (6, 7), (8, 9, 10)], id="different whole blocks follow"),
        pytest.param([(3,), (4, 5), (6, 7, 8)], id="a short question came first"),
        pytest.param([(4, 5), (6, 7, 8), (3,)], id="a short question came last"),
    ],
)
def test_requests_that_share_a_system_prompt_alone_are_sessions_of_their_own(prompts: list[tuple[int, ...]]) -> None:
    first = [request_of(at, *SYSTEM, *prompt) for at, prompt in enumerate(prompts)]
    assert sessions_of(first) == [0, 1, 2]
    turns = [request_of(10 + at, *SYSTEM, *prompt[:-1], 50 + at, 60 + at) for at, prompt in enumerate(prompts)]
    followed = [at for at, prompt in enumerate(prompts) if len(prompt) > 1]
    assert [sessions_of([*first, *turns])[3 + at] for at in followed] == followed


def test_short_questions_after_a_system_prompt_are_sessions_of_their_own() -> None:
    questions = [request_of(at, *SYSTEM, 3 + at, tail_tokens=tokens) for at, tokens in enumerate((300, 200, 400, 250))]
    assert sessions_of(questions) == [0, 1, 2, 3]


def test_turns_within_one_block_are_one_session() -> None:
    turns = [request_of(at, *SYSTEM, 3 + at, tail_tokens=tokens) for at, tokens in enumerate((100, 250, 400))]
    asked_twice = [turns[0], *turns, request_of(9, *SYSTEM, 8, 9)]
    assert sessions_of(asked_twice) == [0, 0, 0, 0, 0]


def test_the_sessions_of_a_trace_under_one_system_prompt_are_distinguished() -> None:
    requests = read_trace(TRACE)
    assert {request.hash_ids[0] for request in requests} == {0}, "all of them begin alike"
    by_session: dict[int, list[TraceRequest]] = {}
    for session, request in zip(sessions_of(requests), requests, strict=True):
        by_session.setdefault(session, []).append(request)
    assert max(map(len, by_session.values())) < len(requests) // 20
    for turns in by_session.values():
        assert len(turns) == 1 or len({turn.hash_ids[:2] for turn in turns}) == 1


def test_the_figures_of_a_trace_are_those_counted_by_hand() -> None:
    figures = TraceFigures.of(TURNS)
    assert (figures.requests, figures.seconds, figures.sessions) == (6, 5.0, 3)
    assert (figures.blocks, figures.different_blocks) == (16, 10)
    # 1 and 2 with 3, 7, 8: 5 blocks; again, and 4, with 5: 4 blocks; 7 with 8, 1, 2, 4, 5, 6, 9: 8 blocks.
    assert figures.reuse_distances == (0, 0, 5, 1)
    assert figures.popularity == (6, 10)
    assert figures.session_requests == (1, 2)


def test_reuse_distances_say_what_an_lru_cache_hits() -> None:
    requests = read_trace(TRACE, 300)
    figures = TraceFigures.of(requests)
    for power in (8, 11):
        held: dict[int, None] = {}
        hits = 0
        for block in (block for request in requests for block in request.hash_ids):
            hits += block in held
            held.pop(block, None)
            held[block] = None
            if len(held) > (1 << power) - 1:
                del held[next(iter(held))]
        assert hits == sum(figures.reuse_distances[:power])


def test_a_watcher_is_given_how_many_blocks_are_counted() -> None:
    request = request_of(0, *range(1_000))
    told: list[int] = []
    TraceFigures.of([request] * 140, lambda count, _: told.append(count))
    assert told == [PROGRESS_BLOCKS, 2 * PROGRESS_BLOCKS]


def test_info_writes_a_page_of_its_figures(tmp_path: Path) -> None:
    said = ask("trace", "info", TRACE, "--report", tmp_path)
    assert said.status == 0, said.err
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all(title in page for title in ("reuse distance", "popularity", "Sessions, by their requests"))
