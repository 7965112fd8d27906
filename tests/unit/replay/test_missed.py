"""Missed tokens of a replay: each is counted once, for the reason that planted sizes and policies give it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import pytest

from tests.support.operations import present
from tests.support.replays import PageSettings
from unified_cache.cache.explain import MissReason
from unified_cache.core.config import WritePolicy
from unified_cache.sizing.replay.missed import ComponentMiss
from unified_cache.sizing.replay.report import miss_table, page_of
from unified_cache.sizing.replay.result import ReplayResult
from unified_cache.sizing.replay.runner import replay
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest

ROOMY = PageSettings(device_pages=60, host_pages=0, page_bytes=64, with_bytes=False, explains=True)


def asking(*blocks: int, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(0, BLOCK_TOKENS * len(blocks) if tokens is None else tokens, 1, blocks)


def sessions(count: int, turns: int) -> list[TraceRequest]:
    """Return sessions that take turns, below one of two common beginnings; last blocks are not full."""
    requests: list[TraceRequest] = []
    for turn in range(1, turns + 1):
        for session in range(count):
            own = [1_000 + 100 * session + number for number in range(3 * turn)]
            blocks = (session % 2, 2 + session % 2, *own)
            requests.append(TraceRequest(len(requests), BLOCK_TOKENS * len(blocks) - 100, 1, blocks))
    return requests


def run(requests: Sequence[TraceRequest], settings: PageSettings) -> ReplayResult:
    return replay("test", requests, settings.plan)


def missed_of(result: ReplayResult) -> Mapping[ComponentMiss, int]:
    assert result.missed is not None
    return result.missed


def by_why(result: ReplayResult) -> dict[MissReason, int]:
    return {reason.why: tokens for reason, tokens in missed_of(result).items()}


STORED = dataclasses.replace(ROOMY, device_pages=40, host_pages=80, storage="memory:")
SIZES = {
    "device": dataclasses.replace(ROOMY, device_pages=40),
    "host": dataclasses.replace(ROOMY, device_pages=30, host_pages=90),
    "storage": dataclasses.replace(STORED, storage_bytes=100 * 128),
    "small pages": dataclasses.replace(STORED, page_size=128, device_pages=120, host_pages=300),
    "large pages": dataclasses.replace(ROOMY, page_size=1_024, device_pages=25),
    "short device": dataclasses.replace(ROOMY, device_pages=9),
    "engines": dataclasses.replace(STORED, engines=3, storage_bytes=100 * 128),
    "selective": dataclasses.replace(ROOMY, device_pages=40, host_pages=80, write=WritePolicy.SELECTIVE),
}


@pytest.mark.parametrize("settings", SIZES.values(), ids=SIZES)
def test_every_missed_token_is_counted_once_and_hits_stay_as_they_are(settings: PageSettings) -> None:
    requests = sessions(12, 4)
    result = run(requests, settings)
    missed = missed_of(result)
    assert sum(missed.values()) == result.served.tokens - result.served.hit_tokens.total
    assert min(missed.values()) > 0
    assert run(requests, dataclasses.replace(settings, explains=False)).served.hits == result.served.hits


def test_a_prompt_that_comes_first_is_in_no_tier() -> None:
    result = run([asking(1, 2, 3, tokens=1_300), asking(4, 5)], ROOMY)
    assert by_why(result) == {MissReason.IN_NO_TIER: 1_300 + 2 * BLOCK_TOKENS}


def test_what_no_tier_could_keep_is_in_no_tier() -> None:
    settings = dataclasses.replace(ROOMY, device_pages=20, host_pages=20, storage="memory:", storage_bytes=30 * 128)
    requests = [asking(*range(100 * number, 100 * number + 18)) for number in range(4)]
    assert by_why(run([*requests, requests[0]], settings)) == {MissReason.IN_NO_TIER: 5 * 18 * BLOCK_TOKENS}


def test_a_prompt_longer_than_the_device_is_missed_for_that() -> None:
    settings = dataclasses.replace(ROOMY, device_pages=4)
    assert by_why(run([asking(*range(6))] * 2, settings)) == {
        MissReason.IN_NO_TIER: 4 * BLOCK_TOKENS,
        MissReason.TOO_LONG: 4 * BLOCK_TOKENS,
    }


def test_what_fills_no_page_is_missed_for_that() -> None:
    settings = dataclasses.replace(ROOMY, page_size=2 * BLOCK_TOKENS)
    assert by_why(run([asking(*range(5))] * 2, settings)) == {
        MissReason.IN_NO_TIER: 4 * BLOCK_TOKENS,
        MissReason.PART_OF_PAGE: 2 * BLOCK_TOKENS,
    }


def test_table_page_and_json_say_the_same_tokens() -> None:
    result = run(sessions(12, 4), SIZES["device"])
    total = sum(missed_of(result).values())
    said = json.loads(json.dumps(result.as_json()))["missed"]
    assert said["tokens"] == total == sum(each["tokens"] for each in said["by_reason"])
    reasons = present(miss_table(result))
    assert reasons.rows[-1][:3] == ("all", "", f"{total:,}")
    assert reasons in page_of(result).tables


def test_a_replay_that_nobody_asks_for_reasons_counts_none() -> None:
    result = run(sessions(2, 2), dataclasses.replace(ROOMY, explains=False))
    assert (result.missed, miss_table(result)) == (None, None)
