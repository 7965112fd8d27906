"""A recording of a replay, replayed, hits the same pages: request by request, tier by tier, component by component."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import ask
from tests.support.live import plan_of_a_small_replay, trace_of
from tests.support.operations import present
from unified_cache.cache.recording import TraceRecorder
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Hits, ModelLayout, PoolSpec
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import KeysOnlyStorage

REQUESTS = 300
SESSIONS = 40
TURNS = 8


def conversations() -> list[TraceRequest]:
    """Return sessions that take turns: soon repeated on the device, then on the host, and in the end in storage.

    Some leave another's prompt in its middle, where no window was kept.
    """
    requests: list[TraceRequest] = []
    for turn in range(1, TURNS + 1):
        for session in range(SESSIONS):
            blocks = tuple(100 * session + number for number in range(4 * turn))
            requests.append(TraceRequest(len(requests), 512 * len(blocks), 0, blocks))
            if turn == 1 and session % 4 == 0:
                branch = (*blocks[:3], 10_000 + session)
                requests.append(TraceRequest(len(requests), 512 * len(branch), 0, branch))
    return requests


def plan_of(page_size: int, *, windowed: bool) -> ReplayPlan:
    """Return the plan of a small replay in pages of this size, with a sliding window or without."""
    plan = plan_of_a_small_replay()
    full = Full((PoolSpec("kv", 512),))
    parts = (full, SlidingWindow(1_024, page_size, (PoolSpec("swa", 512),))) if windowed else (full,)
    layout = ModelLayout(page_size, parts)
    scale = 512 // page_size
    device, host = (250 * scale, 120 * scale)[: len(parts)], (600 * scale, 200 * scale)[: len(parts)]
    config = replace(plan.config, device_pages=device, host_pages=host)
    return replace(plan, layout=layout, true_layout=layout, config=config)


def served(plan: ReplayPlan, requests: list[TraceRequest], recording: Path) -> tuple[list[Hits], list[Hits]]:
    """Serve requests and record them; return the hits of each, and those of each component."""
    with Player.open(plan, KeysOnlyStorage(plan.storage_bytes, plan.objects())) as player:
        with TraceRecorder.open(recording) as recorder:
            player.cache.record_to(recorder.requests_of(plan.layout))
            hits = [player.serve(request) for request in requests]
            player.wait_all()
            player.cache.record_to(None)
        counts = recorder.counts()
        assert (counts.written, counts.dropped, counts.failed) == (len(requests), 0, 0)
        return hits, list(player.component_hits)


@pytest.mark.parametrize(
    ("page_size", "windowed"), [(512, False), pytest.param(512, True, marks=pytest.mark.long), (256, True)]
)
def test_a_replay_of_a_recording_hits_the_same_pages(tmp_path: Path, page_size: int, windowed: bool) -> None:
    plan = plan_of(page_size, windowed=windowed)
    first = served(plan, conversations(), tmp_path / "first.jsonl")
    requests = read_trace(tmp_path / "first.jsonl")
    assert {request.block_tokens for request in requests} == {page_size}
    again = served(plan, requests, tmp_path / "again.jsonl")
    assert again == first
    assert sum(hit.storage for hit in first[0]) > 0, "all tiers take part"
    assert sum(hit.host for hit in first[0]) > 0
    lines = [
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_bytes().splitlines()]
        for name in ("first", "again")
    ]
    assert [line["hit_pages"] for line in lines[0]] == [hit.by_tier() for hit in first[0]], (
        "the recording says them too"
    )
    assert [line["bound_by"] for line in lines[1]] == [line["bound_by"] for line in lines[0]]
    assert [line["output_length"] for line in lines[0]] == [0] * len(requests)
    named = {name for line in lines[0] for name in line["bound_by"]}
    assert named == ({"full", "swa"} if windowed else {"full"})


def test_the_command_replays_a_recording_with_the_same_hits(tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    plan = plan_of_a_small_replay()
    hits, _ = served(plan, trace_of(REQUESTS), recording)
    sizes = ("--device-pages", "250", "--host-pages", "600", "--storage", "memory:", "--storage-bytes", "30000000")
    said = ask("replay", recording, *sizes, "--no-bytes", "--json")
    assert said.status == 0, said.err
    assert json.loads(said.out)["hit_blocks"] == sum(hits, Hits()).by_tier()


def test_what_a_request_computes_beyond_its_prompt_is_its_output(tmp_path: Path) -> None:
    plan = plan_of_a_small_replay()
    path = tmp_path / "trace.jsonl"
    with Player.open(plan, None if plan.storage is None else KeysOnlyStorage(None, plan.objects())) as player:
        cache = player.cache
        with TraceRecorder.open(path) as recorder:
            cache.record_to(recorder.requests_of(plan.layout))
            size = plan.layout.page_size
            prompt, whole = (Prompt.of(list(range(count * size)), size) for count in (2, 5))
            lock = cache.lock(cache.match(prompt))
            for end in (prompt, whole):
                slots = present(cache.allocate(cache.pages_to_allocate(lock.end, end.pages_count, [end.pages_count])))
                lock = cache.insert(end, slots, lock)
            cache.release(lock)
            cache.wait_all(10)
    (request,) = read_trace(path)
    assert (request.input_length, request.output_length) == (2 * size, 3 * size)
