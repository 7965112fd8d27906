"""References of a replay: lru's are what lru hands back, and nobody passes the best."""

import dataclasses

import pytest

from tests.unit.replay.test_missed import ROOMY, SIZES, run, sessions
from unified_cache.core.config import EvictionPolicy
from unified_cache.sizing.replay import references
from unified_cache.sizing.replay.references import ReferenceHits
from unified_cache.sizing.replay.report import page_of
from unified_cache.sizing.replay.result import ReplayResult
from unified_cache.sizing.replay.settings import ReplaySettings

COMPARED = {name: settings for name, settings in SIZES.items() if name != "engines"}
ALONE = dataclasses.replace(ROOMY, device_pages=40)


def reference_in(result: ReplayResult, name: str) -> ReferenceHits:
    assert result.references is not None
    return result.references[name]


def under(settings: ReplaySettings, policy: EvictionPolicy) -> ReplaySettings:
    return dataclasses.replace(settings, policies=dataclasses.replace(settings.policies, device=policy, host=policy))


@pytest.mark.parametrize("settings", COMPARED.values(), ids=COMPARED)
@pytest.mark.parametrize("policy", EvictionPolicy)
def test_nobody_passes_the_best(settings: ReplaySettings, policy: EvictionPolicy) -> None:
    result = run(sessions(12, 4), under(settings, policy))
    lru, best = (reference_in(result, name).hit_pages for name in ("lru", "clairvoyant"))
    assert best >= max(result.hits.total, lru)


@pytest.mark.parametrize("name", ["device", "host", "small pages", "large pages", "short device"])
def test_what_lru_would_have_is_what_lru_has(name: str) -> None:
    settings = under(dataclasses.replace(SIZES[name], storage=None, storage_bytes=None), EvictionPolicy.LRU)
    result = run(sessions(12, 4), settings)
    lru = reference_in(result, "lru")
    assert (lru.hit_pages, lru.hit_tokens) == (result.hits.total, result.tokens.hits.total)


def test_the_engines_of_a_replay_are_held_against_one_cache_each() -> None:
    result = run(sessions(12, 4), dataclasses.replace(ALONE, engines=3))
    assert reference_in(result, "lru").hit_tokens == result.tokens.hits.total
    assert any("the largest tier of each engine" in note for note in page_of(result).notes)


def test_a_recording_is_compared_as_a_trace_is() -> None:
    requests = [
        dataclasses.replace(request, input_length=len(request.hash_ids) * 128, block_tokens=128)
        for request in sessions(12, 3)
    ]
    result = run(requests, dataclasses.replace(ALONE, page_size=128))
    assert reference_in(result, "lru").hit_tokens == result.tokens.hits.total


def test_what_cannot_be_compared_has_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = sessions(6, 3)
    assert run(requests, SIZES["engines"]).references is None, "engines that share a store"
    assert run(requests, dataclasses.replace(ALONE, explains=False)).references is None, "nobody asked"
    monkeypatch.setattr(references, "PAGES_MAX", 10)
    assert run(requests, ALONE).references is None, "too long a trace"


def test_requests_are_compared_in_the_order_in_which_they_were_served() -> None:
    requests = [dataclasses.replace(request, timestamp=-number) for number, request in enumerate(sessions(12, 3))]
    result = run(requests, ALONE)
    assert reference_in(result, "lru").hit_tokens == result.tokens.hits.total


def test_page_and_json_say_what_lru_and_the_best_would_hit() -> None:
    result = run(sessions(12, 4), under(SIZES["host"], EvictionPolicy.PRIORITY))
    notes = page_of(result).notes
    assert any(note.startswith("lru with 90 pages (the largest tier): ") for note in notes)
    assert any(note.startswith("at best with 120 pages (all tiers): ") for note in notes)
    said = result.as_json()["references"]
    assert isinstance(said, dict)
    assert said["lru"]["capacity_pages"] == 90
    assert said["clairvoyant"]["hit_tokens"] >= said["lru"]["hit_tokens"]
