"""``unified-cache plan``: its table, its JSON, its page, and how it ends when it is interrupted."""

import json
import re
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.sizing.plan.hardware import HARDWARE
from unified_cache.sizing.plan.planner import Planner
from unified_cache.sizing.plan.report import page_of
from unified_cache.sizing.plan.sweep import PlannedModel, TierBytes
from unified_cache.sizing.replay.trace import read_trace

GIB = 1 << 30
BUNDLED = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
ONE = ("--sweep", "device=8GiB", "--sweep", "host=0,32GiB", "--sweep", "storage=0")
SWEEP = ("--sweep", "device=4GiB,8GiB", "--sweep", "host=0..32GiB:3", "--sweep", "storage=0,64GiB")
MODEL = PlannedModel("deepseek-v4-flash", size_preset("deepseek-v4-flash", page_size=256), Retention(), devices=8)


def test_a_plan_recommends_shows_and_writes_what_it_found(tmp_path: Path) -> None:
    report = tmp_path / "report"
    said = ask(
        *("plan", BUNDLED, "--limit", "150", "--model", "deepseek-v4-flash", "--devices", "8", *SWEEP),
        *("--check", "1", "--json", "--report", report),
    )
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert found["complete"]
    assert len(found["combinations"]) == 10
    assert all(each["token_hit_ratio"] <= found["seen_token_ratio"] + 1e-9 for each in found["combinations"])
    (checked,) = found["checked"]
    assert checked["planned"] == pytest.approx(checked["replayed"], abs=0.005)
    html = (report / "index.html").read_text(encoding="utf-8")
    assert found["sentence"].split(":")[0] in html
    drawn = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html, re.DOTALL)
    assert drawn is not None
    curves = [chart for chart in json.loads(drawn[1]) if chart["kind"] == "bands"]
    assert [chart["position_name"] for chart in curves] == ["each device", "host memory", "storage"]
    for chart, tier in zip(curves, ("device", "host", "storage"), strict=True):
        assert len(chart["position_labels"]) == len(chart["positions"])
        circles = {round(chart["positions"][number] * GIB) for number in chart["marked"]}
        assert circles == {found["knees"][tier], found["best"][f"{tier}_bytes"]}


@pytest.mark.parametrize(
    "arguments", [("plan", "--model", "deepseek-v4-flash"), ("replay", "--model", "gpt-oss-120b", "--no-bytes")]
)
def test_what_is_printed_fits_80_columns_and_keeps_numbers_with_their_units(arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    said = ask(command, BUNDLED, "--limit", "150", *options)
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if re.search(r"[0-9] ?$", line.rstrip()) and "±" in line] == []
    assert [line for line in lines if re.match(r" *([KMGT]?i?B|s)\b", line)] == []
    assert "…" not in said.out


def test_a_recording_is_planned_for_as_a_trace_of_the_same_blocks_is(tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    requests = read_trace(BUNDLED, 50)
    lines = [
        {
            "timestamp": request.timestamp,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": [(1 << 62) + 3 * block for block in request.hash_ids],
            "page_size": 512,
        }
        for request in requests
    ]
    recording.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    asked = ("--model", "llama-3.1-8b", "--limit", "50", *ONE, "--check", "1", "--json")
    found, recorded = (json.loads(ask("plan", trace, *asked).out) for trace in (BUNDLED, recording))
    assert recorded["combinations"] == found["combinations"]
    assert recorded["checked"] == found["checked"]


def test_a_plan_of_several_engines_is_what_replays_of_them_say() -> None:
    said = ask(
        *("plan", BUNDLED, "--limit", "200", "--model", "llama-3.1-8b", "--engines", "3", "--check", "2", "--json"),
        *("--sweep", "device=8GiB,16GiB", "--sweep", "host=0,32GiB", "--sweep", "storage=0,64GiB"),
    )
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert found["engines"] == 3
    for checked in found["checked"]:
        assert checked["planned"] == pytest.approx(checked["replayed"], abs=1e-9)
    alone, several = (
        {each["host_bytes"]: each["price_per_hour"] for each in json.loads(shown)["combinations"]}
        for shown in (
            ask("plan", BUNDLED, "--limit", "50", "--model", "llama-3.1-8b", *ONE, "--json").out,
            ask("plan", BUNDLED, "--limit", "50", "--model", "llama-3.1-8b", *ONE, "--engines", "3", "--json").out,
        )
    )
    assert {host: 3 * price for host, price in alone.items()} == pytest.approx(several)


def test_sizes_that_nobody_named_and_that_a_model_does_not_fit_into_are_left_out() -> None:
    said = ask("plan", BUNDLED, "--limit", "20", "--model", "qwen3-8b", "--sweep", "storage=0", "--json")
    assert said.status == 0, said.err
    hosts = {point["host_bytes"] for point in json.loads(said.out)["combinations"]}
    assert 0 in hosts
    assert min(hosts - {0}) > 4 << 30, "4 GiB hold no four prompts of this model"
    sizes = ("--sweep", "device=16GiB", "--sweep", "host=4GiB", "--sweep", "storage=0")
    refused = ask("plan", BUNDLED, "--limit", "20", "--model", "qwen3-8b", *sizes)
    assert refused.status == 2
    assert "host_bytes must be at least" in refused.err


def test_an_interrupted_plan_shows_what_it_had() -> None:
    def interrupt(done: int, _note: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    sweep = [TierBytes(4 * GIB, host * GIB, 0) for host in (0, 8, 32)]
    result = Planner(BUNDLED.name, read_trace(BUNDLED, 60), MODEL, HARDWARE["h100"]).plan(sweep, interrupt)
    assert (len(result.points), result.is_complete) == (2, False)
    assert "interrupted: not all combinations" in page_of(result).alarm
