"""Other policies than lru: each size of memory is replayed once, and storage adds what a replay with it adds."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.unit.plan.traces import conversations
from unified_cache.core.config import EvictionPolicy, WritePolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.hits import Hits
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.sizing.plan.tier_hits import LruHits, PolicyHits
from unified_cache.sizing.replay.plan import ReplayPlan, ReplayPolicies
from unified_cache.sizing.replay.runner import served_hits
from unified_cache.sizing.replay.settings import ReplaySettings
from unified_cache.sizing.replay.trace_pages import TracePages

REQUESTS = conversations(seed=5, count=90, sessions=14)
TRACE = TracePages.of(REQUESTS, 512, padded=True)
MEMORY = [(device, host) for device in (40, 80) for host in (0, 100, 140)]
SWEEP = [(device, host, stored) for device, host in MEMORY for stored in (0, 200) if host or not stored]


def plan_of(policy: EvictionPolicy, device: int, host: int, stored: int) -> ReplayPlan:
    return ReplaySettings(
        device_pages=device,
        host_pages=host,
        storage="memory:" if stored else None,
        storage_bytes=stored * (4096 + HEADER_BYTES) or None,
        with_bytes=False,
        policies=ReplayPolicies(policy, policy),
    ).plan


def serve(plan: ReplayPlan) -> Sequence[Hits]:
    return served_hits(plan, REQUESTS)


def test_lru_by_replays_is_lru_by_distances_request_by_request() -> None:
    hits, by_distance = PolicyHits(TRACE, serve), LruHits(TRACE)
    for sizes in SWEEP:
        plan = plan_of(EvictionPolicy.LRU, *sizes)
        replayed, exact = hits.ends(plan), by_distance.ends(plan)
        assert replayed.hits() == exact.hits()
        assert (replayed.storage == exact.storage).all()
        assert replayed.moved.written == exact.moved.written
        assert (replayed.moved.fetched == exact.moved.fetched).all()


def test_every_combination_hits_what_its_replay_hits_and_storage_takes_no_replay() -> None:
    hits = PolicyHits(TRACE, serve)
    for sizes in SWEEP:
        plan = plan_of(EvictionPolicy.PRIORITY, *sizes)
        replayed = np.array([hit.total for hit in serve(plan)])
        slack = 0.005 if sizes[2] else 0
        assert TRACE.token_ratio(hits.ends(plan).storage) == pytest.approx(TRACE.token_ratio(replayed), abs=slack)
    assert hits.replays_count == len(MEMORY)


def test_plans_that_no_replay_answers_for_are_refused() -> None:
    hits = PolicyHits(TRACE, serve)
    several = ReplaySettings(engines=2, with_bytes=False).plan
    early = ReplaySettings(policies=ReplayPolicies(write=WritePolicy.THROUGH), with_bytes=False).plan
    for plan, said in ((several, "one engine, found 2"), (early, "policy through")):
        with pytest.raises(ConfigError, match=said):
            hits.ends(plan)
