"""References of a replay: lru's are what lru hands back, nobody passes the best, and regret has a miss's reasons."""

import dataclasses
import json

import pytest

from benchmarks.generated_traces import generated_trace
from tests.unit.replay.test_missed import ROOMY, SIZES, run, sessions
from unified_cache.config import EvictionPolicy
from unified_cache.miss_reason import MissReason
from unified_cache.replay import references
from unified_cache.replay.references import References
from unified_cache.replay.report import page_of
from unified_cache.replay.result import ReplayResult
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.summary import reference_lines, regret_table
from unified_cache.report.charts import BandChart

COMPARED = {name: settings for name, settings in SIZES.items() if name != "engines"}
ALONE = dataclasses.replace(ROOMY, device_pages=40)


def references_in(result: ReplayResult) -> References:
    assert result.references is not None
    return result.references


def under(settings: ReplaySettings, policy: EvictionPolicy) -> ReplaySettings:
    return dataclasses.replace(settings, policies=dataclasses.replace(settings.policies, device=policy, host=policy))


@pytest.mark.parametrize("settings", COMPARED.values(), ids=COMPARED)
@pytest.mark.parametrize("policy", [EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE])
def test_regret_and_gains_make_up_the_difference_and_nobody_passes_the_best(
    settings: ReplaySettings, policy: EvictionPolicy
) -> None:
    result = run(sessions(12, 4), under(settings, policy))
    both = references_in(result)
    assert result.missed is not None
    for reference in (both.lru, both.clairvoyant):
        assert reference.regret_tokens - reference.gained_tokens == reference.hit_tokens - result.tokens.hits.total
        assert sum(reference.series) == reference.hit_pages
        assert len(reference.series) == len(result.series)
        for reason, tokens in reference.regret.items():
            assert 0 < tokens <= result.missed.by_reason[reason]
    assert both.clairvoyant.hit_pages >= max(result.hits.total, both.lru.hit_pages)


@pytest.mark.parametrize("name", ["device", "host", "small pages", "large pages", "short device"])
def test_what_lru_would_have_is_what_lru_has(name: str) -> None:
    settings = under(dataclasses.replace(SIZES[name], storage=None, storage_bytes=None), EvictionPolicy.LRU)
    result = run(sessions(12, 4), settings)
    lru = references_in(result).lru
    assert list(lru.series) == [point.hits.total for point in result.series]
    assert (lru.hit_tokens, lru.regret, lru.gained_tokens) == (result.tokens.hits.total, {}, 0)


def test_the_engines_of_a_replay_are_held_against_one_cache_each() -> None:
    result = run(sessions(12, 4), dataclasses.replace(ALONE, engines=3))
    lru = references_in(result).lru
    assert (lru.hit_tokens, lru.regret) == (result.tokens.hits.total, {})
    assert all("of each engine" in line for line in reference_lines(result))


def test_regret_names_what_the_policy_has_evicted() -> None:
    result = run(generated_trace("flips", 400), under(ALONE, EvictionPolicy.ADAPTIVE))
    lru = references_in(result).lru
    assert {reason.why for reason in lru.regret} == {MissReason.EVICTED}
    assert lru.regret_tokens > 0
    regret = regret_table(result)
    assert regret is not None
    *rows, total = regret.rows
    assert rows[0][:3] == ("evicted", "full", f"{lru.regret_tokens:,}")
    assert total[2] == f"{lru.regret_tokens:,}"


def test_a_recording_is_compared_as_a_trace_is() -> None:
    requests = [
        dataclasses.replace(request, input_length=len(request.hash_ids) * 128, block_tokens=128)
        for request in sessions(12, 3)
    ]
    result = run(requests, dataclasses.replace(ALONE, page_size=128))
    assert references_in(result).lru.hit_tokens == result.tokens.hits.total


def test_what_cannot_be_compared_has_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = sessions(6, 3)
    assert run(requests, SIZES["engines"]).references is None, "engines that share a store"
    assert run(requests, dataclasses.replace(ALONE, explains=False)).references is None, "nobody asked"
    monkeypatch.setattr(references, "PAGES_MAX", 10)
    result = run(requests, ALONE)
    assert result.references is None, "too long a trace"
    assert (regret_table(result), reference_lines(result)) == (None, [])


def test_requests_are_compared_in_the_order_in_which_they_were_served() -> None:
    requests = [dataclasses.replace(request, timestamp=-number) for number, request in enumerate(sessions(12, 3))]
    result = run(requests, ALONE)
    assert references_in(result).lru.hit_tokens == result.tokens.hits.total


def test_the_page_shows_lru_and_the_best_over_the_run_and_the_regret() -> None:
    result = run(sessions(12, 4), under(SIZES["host"], EvictionPolicy.ADAPTIVE))
    page = page_of(result)
    chart = page.charts[1]
    assert isinstance(chart, BandChart)
    assert [line.name for line in chart.lines] == ["lru with 90 pages"]
    assert chart.bound.name == "best possible with 120 pages"
    assert all(best >= 0 for best in chart.bound.values)
    assert "Missed tokens that lru and the best policy would have had" in [table.title for table in page.tables]
    assert any(note.startswith("lru with 90 pages (the largest tier): ") for note in page.notes)
    assert any(note.startswith("at best with 120 pages (all tiers): ") for note in page.notes)
    said = json.loads(json.dumps(result.as_json()))["references"]
    assert said.keys() == {"lru", "clairvoyant"}
    assert said["lru"]["capacity_pages"] == 90
    assert said["lru"]["regret_tokens"] == sum(each["tokens"] for each in said["lru"]["regret"])
