"""Choices of a replay beyond sizes: policies, pages of any size, and no store."""

import json

import pytest

from tests.e2e.test_replay import TRACE, run
from tests.support.cluster import ask
from tests.support.replays import PageSettings, conversations
from unified_cache.core.config import CacheConfig, EvictionPolicy, WritePolicy
from unified_cache.sizing.replay.report import headline, tier_table, verdict
from unified_cache.sizing.replay.result import ReplayResult

REQUESTS = conversations(150)


def result_of(**fields: object) -> ReplayResult:
    sizes = {"device_pages": 60, "host_pages": 150, "storage": "memory:", "page_bytes": 64, **fields}
    result = run([*REQUESTS, *REQUESTS], PageSettings(**sizes))  # type: ignore[arg-type]  # fields by name
    assert (result.wrong_pages, result.leaked_slots, result.flawed_pages) == (0, 0, 0)
    return result


@pytest.mark.parametrize("page_size", [48, 100, 500, 1024, 3000])
def test_pages_of_any_size_share_what_whole_pages_share(page_size: int) -> None:
    settings = PageSettings(page_size=page_size, device_pages=50_000, host_pages=0, page_bytes=64, with_bytes=False)
    result = run(REQUESTS, settings)
    assert result.leaked_slots == 0
    served = result.served
    assert 0 < served.hits.total == served.seen_pages, "a device that never evicts hands back all that was seen"
    assert served.pages == sum(len(request.hash_ids) * 512 // page_size for request in REQUESTS)


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_every_eviction_policy_hands_back_right_bytes(policy: EvictionPolicy) -> None:
    result = result_of(evicts=policy)
    assert result.served.hits.total > 0


def test_write_policies_move_what_they_say() -> None:
    stored = {
        policy: result_of(write=policy).components[0].moved_pages["store"]
        for policy in (WritePolicy.ON_CALL, WritePolicy.THROUGH, WritePolicy.SELECTIVE, WritePolicy.BACK)
    }
    assert 0 < stored[WritePolicy.SELECTIVE] < stored[WritePolicy.THROUGH]
    assert stored[WritePolicy.BACK] <= stored[WritePolicy.THROUGH] == stored[WritePolicy.ON_CALL]


def test_what_is_too_short_to_fetch_stays_in_storage() -> None:
    assert result_of().served.hits.storage > 0 == result_of(prefetch_min_tokens=1 << 30).served.hits.storage


def test_a_model_keeps_by_default_what_a_cache_keeps() -> None:
    found = ask("replay", TRACE, "--model", "qwen3-next", "--limit", "20", "--no-bytes", "--json")
    kept = json.loads(found.out)["settings"]["retention"]
    assert kept["tail_tokens"] == CacheConfig((1,), (0,)).retention.tail_tokens


def test_the_first_line_says_what_was_found_and_what_brought_nothing() -> None:
    roomy = result_of(device_pages=20_000, host_pages=20_000)
    assert headline(roomy).endswith("; all that had been asked for before; host and storage brought nothing.")
    assert any(line.startswith("device was never full: ") for line in verdict(roomy))
    tight = result_of(host_pages=0, storage=None, device_pages=40)
    assert " had been asked for before." in headline(tight)
    assert "brought nothing" not in headline(tight)
    assert not any("was never full" in line for line in verdict(tight))
    assert [row[0] for row in tier_table(tight).rows] == ["device", "all"]
