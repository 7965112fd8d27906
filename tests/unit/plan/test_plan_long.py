"""Plans held against full replays of the bundled trace: twenty combinations, a minute each."""

import random

import pytest

from tests.sources import ROOT
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.sizing.plan.sweep import PlannedModel, combinations, parse_sweeps
from unified_cache.sizing.plan.tier_hits import LruHits
from unified_cache.sizing.plan.trace_pages import TracePages
from unified_cache.sizing.replay.runner import replay
from unified_cache.sizing.replay.trace import read_trace

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
POINTS_MAX = 0.005
"""Half a point of the tokens."""

SAMPLED = random.Random(17).sample(range(404), 20)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", SAMPLED)
def test_a_combination_is_within_half_a_point_of_its_replay(number: int) -> None:
    sized = size_preset("deepseek-v4-flash", page_size=256)
    model = PlannedModel("deepseek-v4-flash", sized, Retention())
    sizes = combinations(parse_sweeps(()))[number]
    requests = read_trace(TRACE)
    trace = TracePages.of(requests, sized.layout.page_size, padded=False)
    plan = model.plan(sizes)
    told = trace.token_ratio(LruHits(trace).ends(plan).storage)
    result = replay("bundled", requests, plan)
    assert told == pytest.approx(result.served.token_hit_ratio, abs=POINTS_MAX)
