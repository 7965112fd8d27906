"""Other policies than lru: what was replayed is told as it was, what lies between two replays is between their hits."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources import ROOT
from tests.unit.plan.traces import conversations
from unified_cache.components.layouts import size_preset
from unified_cache.config import EvictionPolicy, Retention, WritePolicy
from unified_cache.errors import ConfigError
from unified_cache.plan.policy_hits import REPLAYS_MAX, Brackets, PolicyHits
from unified_cache.plan.sweep import PlannedModel, combinations, parse_sweeps
from unified_cache.plan.tier_hits import LruHits
from unified_cache.replay.fleet import served_hits
from unified_cache.replay.plan import ReplayPlan
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.replay.result import Hits
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.trace import read_trace
from unified_cache.replay.trace_pages import TracePages
from unified_cache.seal import HEADER_BYTES

BUNDLED = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
REQUESTS = conversations(seed=5, count=90, sessions=14)
TRACE = TracePages.of(REQUESTS, 512, padded=True)
SWEEP = [
    (device, host, stored)
    for device in (40, 42, 80)
    for host in (0, 100, 103, 106, 140)
    for stored in (0, 200)
    if host or not stored
]
WIDE = 0.1
"""Share of the tokens that is left open here, so that there is something to tell."""

A_PROMPT = int(TRACE.input_tokens.max()) / int(TRACE.input_tokens.sum())
"""Share of the longest prompt: with more memory a policy may keep another prompt, and lose by it."""


def plan_of(policy: EvictionPolicy, device: int, host: int, stored: int) -> ReplayPlan:
    return ReplaySettings(
        device_pages=device,
        host_pages=host,
        storage="memory:" if stored else None,
        storage_bytes=stored * (4096 + HEADER_BYTES) or None,
        with_bytes=False,
        policies=ReplayPolicies(policy, policy),
    ).plan


def serve(plan: ReplayPlan) -> list[Hits]:
    return served_hits(plan, REQUESTS)


def prepared(policy: EvictionPolicy, gap_max: float) -> PolicyHits:
    hits = PolicyHits(LruHits(TRACE), serve, gap_max)
    hits.prepare((plan_of(policy, *sizes) for sizes in SWEEP), lambda _note: None)
    return hits


def replayed_ratio(plan: ReplayPlan) -> float:
    return TRACE.token_ratio(np.array([hit.total for hit in serve(plan)]))


def test_lru_by_replays_is_lru_by_distances_request_by_request() -> None:
    hits, by_distance = prepared(EvictionPolicy.LRU, 0.0), LruHits(TRACE)
    for sizes in SWEEP:
        plan = plan_of(EvictionPolicy.LRU, *sizes)
        told, exact = hits.ends(plan), by_distance.ends(plan)
        assert told.hits() == exact.hits()
        assert (told.storage == exact.storage).all()
        assert (told.at_most == exact.storage).all()
        assert told.moved.written == exact.moved.written
        assert (told.moved.fetched == exact.moved.fetched).all()


@pytest.mark.parametrize("policy", [EvictionPolicy.PRIORITY, EvictionPolicy.ADAPTIVE])
def test_every_combination_replays_within_what_is_told_and_left_open_but_for_a_prompt(policy: EvictionPolicy) -> None:
    hits = prepared(policy, WIDE)
    assert 4 <= hits.replays_count < len({sizes[:2] for sizes in SWEEP})
    told = [hits.ends(plan_of(policy, *sizes)) for sizes in SWEEP]
    for sizes, ends in zip(SWEEP, told, strict=True):
        least, most = TRACE.token_ratio(ends.storage), TRACE.token_ratio(ends.at_most)
        true = replayed_ratio(plan_of(policy, *sizes))
        assert least - A_PROMPT <= true <= most + A_PROMPT, sizes
        assert most - least <= WIDE


@pytest.mark.long
@pytest.mark.timeout(900)
def test_combinations_of_a_recorded_trace_replay_within_half_a_point_of_what_is_told() -> None:
    policy = EvictionPolicy.ADAPTIVE
    requests = read_trace(BUNDLED)
    model = PlannedModel(
        "deepseek-v4-flash",
        size_preset("deepseek-v4-flash", page_size=256),
        Retention(),
        ReplayPolicies(policy, policy),
    )
    trace = TracePages.of(requests, 256, padded=False)
    sweep = combinations(parse_sweeps(["device=2GiB..8GiB:3", "host=0..64GiB:5", "storage=0,128GiB"]))
    hits = PolicyHits(LruHits(trace), lambda plan: served_hits(plan, requests))
    hits.prepare((model.settings(sizes).plan for sizes in sweep), lambda _note: None)
    for sizes in random.Random(17).sample(sweep, 10):
        plan = model.settings(sizes).plan
        ends, true = hits.ends(plan), [hit.total for hit in served_hits(plan, requests)]
        least, most = trace.token_ratio(ends.storage), trace.token_ratio(ends.at_most)
        assert least - hits.disorder - 0.005 <= trace.token_ratio(np.array(true)) <= most + hits.disorder + 0.005


def test_a_size_that_nobody_prepared_is_replayed_where_its_neighbours_do_not_tell_it() -> None:
    policy = EvictionPolicy.ADAPTIVE
    hits = prepared(policy, 0.0)
    before = hits.replays_count
    for sizes in ((65, 0, 0), (400, 0, 0), (65, 170, 300)):
        plan = plan_of(policy, *sizes)
        assert TRACE.token_ratio(hits.ends(plan).storage) == pytest.approx(replayed_ratio(plan), abs=0.005)
    assert hits.replays_count == before + 3
    hits.ends(plan_of(policy, 65, 170, 150))
    assert hits.replays_count == before + 3, "storage needs no replay"


def test_what_is_left_when_replays_run_out_is_replayed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.plan.policy_hits.REPLAYS_MAX", 3)
    hits = prepared(EvictionPolicy.ADAPTIVE, 0.0)
    assert hits.replays_count == 3
    plan = plan_of(EvictionPolicy.ADAPTIVE, 80, 0, 0)
    assert TRACE.token_ratio(hits.ends(plan).storage) == replayed_ratio(plan)


def test_what_no_replay_tells_is_refused() -> None:
    hits = PolicyHits(LruHits(TRACE), serve)
    several = ReplaySettings(engines=2, with_bytes=False).plan
    early = ReplaySettings(policies=ReplayPolicies(write=WritePolicy.THROUGH), with_bytes=False).plan
    for plan, said in ((several, "one engine, found 2"), (early, "policy through")):
        with pytest.raises(ConfigError, match=said):
            hits.prepare([plan], lambda _note: None)


def looked_at(places: Sequence[tuple[int, ...]], ratio: Callable[[tuple[int, ...]], float], gap_max: float) -> Brackets:
    brackets = Brackets(np.array(places), gap_max)
    while (number := brackets.next_place()) is not None:
        assert brackets.known_count < len(places), "each size is looked at once"
        brackets.know(number, (ratio(places[number]), ratio(places[number])))
    return brackets


@settings(deadline=None)
@given(
    rises=st.lists(st.integers(0, 9), min_size=2, max_size=12),
    others=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    gap_max=st.sampled_from([0.0, 0.01, 0.05, 0.3]),
)
def test_what_lies_between_sizes_looked_at_is_no_wider_than_asked_for(
    rises: list[int], others: list[int], gap_max: float
) -> None:
    heights = np.cumsum(rises)[:, None] + np.cumsum(others)[None, :]
    ratios = heights / heights.max(initial=1)
    places = [(row, column) for row in range(len(rises)) for column in range(len(others))]
    brackets = looked_at(places, lambda place: float(ratios[place]), gap_max)
    assert brackets.widest <= gap_max
    for number, place in enumerate(places):
        least, most = brackets.between(number)
        assert least <= ratios[place] <= most


def test_a_flat_curve_is_told_from_its_two_ends() -> None:
    places = [(row, column) for row in range(30) for column in range(30)]
    assert looked_at(places, lambda _place: 0.3, 0.005).known_count == 2


def test_a_rise_in_one_place_is_found_by_halving() -> None:
    brackets = looked_at([(at,) for at in range(1000)], lambda place: float(place[0] >= 700), 0.005)
    assert brackets.known_count < 15 < REPLAYS_MAX
