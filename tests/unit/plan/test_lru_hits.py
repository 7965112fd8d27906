"""Hits told from distances in the stack are those of a replay, request by request."""

import dataclasses
import math
import random
from itertools import count, islice
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.replays import conversations
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError, TraceError
from unified_cache.core.pool import Hits
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.sizing.plan.sweep import PlannedModel, combinations, parse_sweeps
from unified_cache.sizing.plan.tier_hits import LruHits
from unified_cache.sizing.plan.trace_pages import TracePages
from unified_cache.sizing.replay.plan import PAGE_BYTES, ReplayPlan
from unified_cache.sizing.replay.runner import replay
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace

GIB = 1 << 30
BUNDLED = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
WHOLE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"


def replayed(requests: list[TraceRequest], plan: ReplayPlan) -> Hits:
    return replay("made up", requests, plan).served.hits


def plan_of(
    page_size: int, device_pages: int, host_pages: int, stored_pages: int | None, engines: int = 1
) -> ReplayPlan:
    storage_bytes = None if stored_pages is None else stored_pages * (PAGE_BYTES + HEADER_BYTES)
    storage = None if stored_pages is None else "memory:"
    plan = ReplayPlan.of_pages(page_size, device_pages, host_pages, storage, storage_bytes)
    return dataclasses.replace(plan, with_bytes=False, engines=engines)


SIZES = [(40, 0, None), (60, 200, None), (200, 60, None), (60, 120, 400), (30, 100, 150), (20, 12, 90), (9, 40, 300)]
"""Pages of device, host and storage."""
SHARED_SIZES = [
    *((512, *sizes) for sizes in (SIZES[0], SIZES[3], SIZES[5], SIZES[6])),
    *((128, *sizes) for sizes in (SIZES[4], (60, 200, 700))),
]
"""The same after the page size."""


@pytest.mark.parametrize(
    ("engines", "page_size", "device_pages", "host_pages", "stored_pages"),
    [
        *((1, 512, *sizes) for sizes in SIZES),
        *((1, page_size, *SIZES[4]) for page_size in (128, 1024)),
        *(pytest.param(1, size, *sizes, marks=pytest.mark.long) for size in (128, 1024) for sizes in SIZES),
        *((engines, *sizes) for engines in (2, 3) for sizes in SHARED_SIZES),
        (200, *SHARED_SIZES[-1]),
        *(pytest.param(200, *sizes, marks=pytest.mark.long) for sizes in SHARED_SIZES[:-1]),
    ],
)
def test_full_attention_is_exact_on_every_tier_also_of_several_engines_over_one_store(
    engines: int, page_size: int, device_pages: int, host_pages: int, stored_pages: int | None
) -> None:
    requests = conversations(80 if engines == 1 else 120, page_size + device_pages)
    plan = plan_of(page_size, device_pages, host_pages, stored_pages, engines)
    told = LruHits(TracePages.of(requests, page_size, padded=True)).ends(plan).hits()
    assert told == replayed(requests, plan)


@pytest.mark.parametrize(("block_tokens", "page_size"), [(64, 64), (64, 256), (48, 32)])
def test_full_attention_in_the_blocks_of_a_recording_is_exact(block_tokens: int, page_size: int) -> None:
    requests = [
        dataclasses.replace(
            request,
            input_length=math.ceil(request.input_length * block_tokens / BLOCK_TOKENS),
            block_tokens=block_tokens,
        )
        for request in conversations(80, page_size)
    ]
    plan = plan_of(page_size, 40, 60, 150)
    told = LruHits(TracePages.of(requests, page_size, padded=True)).ends(plan).hits()
    assert told == replayed(requests, plan)


def test_tokens_are_counted_as_a_replay_counts_them() -> None:
    requests = conversations(60, 3)
    plan = plan_of(128, 100, 400, None)
    trace = TracePages.of(requests, 128, padded=True)
    result = replay("made up", requests, plan)
    ends = LruHits(trace).ends(plan)
    assert trace.token_ratio(ends.storage) == pytest.approx(result.served.token_hit_ratio)
    device, host, total = (int(trace.tokens_of(each).sum()) for each in (ends.device, ends.host, ends.storage))
    assert result.served.hit_tokens == Hits(device, host - device, total - host)
    assert result.served.seen_tokens == int(trace.tokens_of(trace.seen_ends()).sum())


def model_plan(model: str, device_gib: int, host_gib: int, storage_gib: int) -> ReplayPlan:
    sized = size_preset(model, page_size=256)
    tiers_bytes = (device_gib * GIB, host_gib * GIB, "memory:" if storage_gib else None, storage_gib * GIB or None)
    return dataclasses.replace(ReplayPlan.of_model(model, sized, Retention(), *tiers_bytes), with_bytes=False)


SAMPLED = random.Random(17).sample(range(404), 20)
"""Some of the combinations that a plan tries, for replays of the whole trace."""


def sampled_plan(number: int) -> ReplayPlan:
    sized = size_preset("deepseek-v4-flash", page_size=256)
    return PlannedModel("deepseek-v4-flash", sized, Retention()).plan(combinations(parse_sweeps(()))[number])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("trace", "limit", "plan"),
    [
        *(
            (BUNDLED, 250, model_plan(*sizes))
            for sizes in (
                ("deepseek-v4-flash", 2, 0, 0),
                ("deepseek-v4-flash", 1, 4, 16),
                ("gpt-oss-120b", 4, 8, 64),
                ("mistral-7b-v0.1", 4, 8, 64),
            )
        ),
        *(pytest.param(WHOLE, None, sampled_plan(number), marks=pytest.mark.long) for number in SAMPLED),
    ],
)
def test_windows_are_within_half_a_point_of_a_replay(trace: Path, limit: int | None, plan: ReplayPlan) -> None:
    requests = read_trace(trace, limit)
    pages = TracePages.of(requests, 256, padded=False)
    told = pages.token_ratio(LruHits(pages).ends(plan).storage)
    result = replay("bundled", requests, plan)
    assert told == pytest.approx(result.served.token_hit_ratio, abs=0.005)


def test_a_place_that_only_storage_remembers_gets_no_window_when_a_prompt_branches_off_there() -> None:
    new_ids = count(1000)

    def others(prompts: int) -> list[tuple[int, ...]]:
        return [tuple(islice(new_ids, 16)) for _ in range(prompts)]

    first, branch = tuple(range(20)), tuple(range(14))
    prompts = [first, *others(20), (*branch, *islice(new_ids, 6)), *others(20), (*branch, *islice(new_ids, 6)), first]
    requests = [TraceRequest(float(at), len(ids) * BLOCK_TOKENS, 1, ids) for at, ids in enumerate(prompts)]
    plan = model_plan("gpt-oss-120b", 4, 4, 256)
    assert sum(plan.config.host_pages) < 20 * 32, "the others push out what came before them"
    told = LruHits(TracePages.of(requests, 256, padded=False)).ends(plan).hits()
    assert told == replayed(requests, plan) == Hits(storage=40)


def test_what_has_no_stack_is_refused() -> None:
    hits = LruHits(TracePages.of(conversations(3), 256, padded=True))
    with pytest.raises(ConfigError, match="found 4"):
        hits.ends(dataclasses.replace(model_plan("gpt-oss-120b", 2, 0, 0), engines=4))
    with pytest.raises(ConfigError, match="found 64"):
        hits.ends(plan_of(64, 100, 0, None))


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(TraceError, match="found none"):
        TracePages.of([], 512, padded=True)
