"""Sweeps, hardware files, queues, and what is recommended."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.replays import conversations
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError
from unified_cache.sizing.plan.costs import Costs, PricedSystem, queue_ends
from unified_cache.sizing.plan.hardware import HARDWARE, hardware_named, read_hardware
from unified_cache.sizing.plan.planner import Evaluator, knee, recommended
from unified_cache.sizing.plan.sweep import PlannedModel, TierBytes, combinations, parse_sweeps
from unified_cache.sizing.plan.tier_hits import LruHits
from unified_cache.sizing.plan.trace_pages import TracePages

GIB = 1 << 30
LLAMA = PlannedModel("llama", size_preset("llama-3.1-8b", page_size=64), Retention(), devices=2)
ONCE = conversations(100, seed=9)
TWICE = [*ONCE, *(replace(request, timestamp=request.timestamp + 100_000) for request in ONCE)]
"""Conversations that come back when others have pushed them out of what is small."""


def test_a_sweep_is_a_range_of_equal_ratios_or_a_list() -> None:
    sizes = parse_sweeps(["device=16GiB..64GiB:3", "host=0,1GiB", "storage=0..8GiB:5"])
    assert sizes["device"] == (16 * GIB, 32 * GIB, 64 * GIB)
    assert sizes["host"] == (0, GIB)
    assert sizes["storage"] == (0, GIB, 2 * GIB, 4 * GIB, 8 * GIB)


def test_storage_is_not_combined_with_no_host_memory() -> None:
    found = combinations({"device": (1,), "host": (0, 2), "storage": (0, 3)})
    assert found == [TierBytes(1, 0, 0), TierBytes(1, 2, 0), TierBytes(1, 2, 3)]


def test_the_default_sweep_has_some_four_hundred_combinations() -> None:
    sizes = parse_sweeps([])
    assert [len(each) for each in sizes.values()] == [4, 11, 10]
    assert len(combinations(sizes)) == 4 * (1 + 10 * 10)


@pytest.mark.parametrize(
    "text", ["disk=1..2", "host", "host=2GiB..1GiB", "host=1GiB..2GiB:1", "device=0..1GiB", "host=x..1GiB"]
)
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sweep"):
        parse_sweeps([text])


def test_a_tier_is_swept_once() -> None:
    with pytest.raises(ConfigError, match="host twice"):
        parse_sweeps(["host=0..1GiB", "host=0..2GiB"])


def test_a_hardware_file_goes_on_from_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'base = "b200"\ndevice_price_per_hour = 4\nstorage_read_bytes_per_s = "7GB"\n'
        "[prefill_tokens_per_s]\n1024 = 20000\n8192 = 10000\n",
        encoding="utf-8",
    )
    ours = read_hardware(path)
    assert (ours.name, ours.device_price_per_hour, ours.storage_read_bytes_per_s) == ("ours", 4.0, 7e9)
    assert ours.device_bytes_per_s == HARDWARE["b200"].device_bytes_per_s
    assert ours.prefill_s(np.array([1024, 8192, 16384])).tolist() == pytest.approx([0.0512, 0.8192, 1.6384])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device_price_per_hours = 4", "did you mean device_price_per_hour"),
        ("drive_years = 'five'", "must be a valid number"),
        ("storage_read_bytes_per_s = -1", "must be greater than 0"),
        ("base = 'h10'", "did you mean h100"),
        ("[prefill_tokens_per_s]\nlong = 3", "must be a valid integer, found 'long'"),
        ("device_price_per_hour =", "must be TOML"),
        (f"prefill_tokens_per_s = {{{'9' * 400} = 1.0}}", "prefill_tokens_per_s"),
        ("prefill_tokens_per_s = {0 = 1.0}", "prefill_tokens_per_s"),
        ("\n" * (1 << 21), "at most 1048576 bytes"),
    ],
)
def test_a_hardware_file_that_cannot_be_used_says_why(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_hardware(path)


def test_a_model_of_twice_the_active_parameters_takes_twice_the_prefill() -> None:
    tokens = np.array([4096])
    assert hardware_named("h100", 26e9).prefill_s(tokens) == pytest.approx(2 * HARDWARE["h100"].prefill_s(tokens))


def test_a_queue_serves_in_the_order_of_coming_and_lets_pass_who_has_no_work() -> None:
    ends = queue_ends(np.array([5.0, 0.0, 1.0, 1.5]), np.array([1.0, 2.0, 3.0, 0.0]))
    assert ends.tolist() == [6.0, 2.0, 5.0, 1.5]


def test_the_knee_lies_where_a_curve_flattens() -> None:
    assert knee([0, 1, 2, 3, 4], [0.0, 0.3, 0.5, 0.51, 0.52]) == 2
    assert knee([3, 4], [0.2, 0.2]) == 3


def test_more_memory_hits_more_and_the_cheapest_that_keeps_up_is_recommended() -> None:
    trace = TracePages.of(TWICE, 64, padded=False)
    evaluator = Evaluator(LLAMA, LruHits(trace), PricedSystem(LLAMA, HARDWARE["h100"]))
    sizes = [
        TierBytes(4 * GIB, host * GIB, store * GIB) for host in (0, 16, 64) for store in (0, 256) if host or not store
    ]
    points = [evaluator.point(each) for each in sizes]
    ratios = [point.hit_ratio for point in points]
    assert ratios[0] < ratios[1] < ratios[3]
    assert all(point.hit_ratio <= evaluator.seen_ratio + 1e-9 for point in points)
    assert points[-1].hit_ratio == pytest.approx(evaluator.seen_ratio, abs=0.02)
    best = recommended(points)
    assert best.costs.cost_per_million_tokens == min(point.costs.cost_per_million_tokens for point in points)
    cold, warm = points[0].costs, points[-1].costs
    assert warm.prefill_hours_saved > cold.prefill_hours_saved
    assert warm.ttft_p50_s <= cold.ttft_p50_s
    assert warm.written_bytes > 0
    assert cold.drive_life_years is None


def test_memory_and_storage_are_paid_by_the_month_and_devices_by_the_hour() -> None:
    hardware = HARDWARE["h100"].model_copy(
        update={
            "device_price_per_hour": 2.0,
            "host_price_per_gib_month": 1.0,
            "storage_price_per_gib_month": 0.5,
        }
    )
    month_gib = 730
    price = PricedSystem(LLAMA, hardware).price_per_hour(TierBytes(GIB, 2 * month_gib * GIB, 8 * month_gib * GIB))
    assert price == pytest.approx(2 * 2.0 + 2 * 1.0 + 8 * 0.5)


def test_drives_that_wear_out_early_cost_as_much_more() -> None:
    system, sizes = PricedSystem(LLAMA, HARDWARE["h100"]), TierBytes(GIB, 0, 1000 * GIB)
    without = system.price_per_hour(TierBytes(GIB, 0, 0))
    lasting, worn = (system.price_per_hour(sizes, years) - without for years in (5.0, 0.5))
    assert worn == pytest.approx(6 * lasting)
    assert lasting == pytest.approx(system.price_per_hour(sizes) - without)


def test_compressed_pages_in_a_bucket_are_more_for_the_same_bytes_and_their_requests_are_paid_for() -> None:
    bucket = HARDWARE["h100"].model_copy(
        update={
            "storage_put_price_per_million": 5.0,
            "storage_get_price_per_million": 0.4,
            "drive_writes_per_day": 0.0,
        }
    )
    trace = TracePages.of(TWICE, 64, padded=False)
    half = replace(LLAMA, storage_ratio=0.5)
    sizes = TierBytes(4 * GIB, 8 * GIB, 32 * GIB)

    def costs(model: PlannedModel, sizes: TierBytes) -> Costs:
        return Evaluator(model, LruHits(trace), PricedSystem(model, bucket)).point(sizes).costs

    as_it_is, twice, compressed = (
        costs(LLAMA, sizes),
        costs(LLAMA, replace(sizes, storage=64 * GIB)),
        costs(half, sizes),
    )
    assert compressed.written_bytes == twice.written_bytes // 2 < as_it_is.written_bytes
    assert compressed.prefill_hours_saved == pytest.approx(twice.prefill_hours_saved, rel=0.02)
    assert compressed.drive_life_years is None
    page_bytes = LLAMA.sized.layout.page_bytes
    hours = (trace.times_s[-1] - trace.times_s[0]) / 3600
    requests_price = (5.0 * as_it_is.written_bytes + 0.4 * as_it_is.fetched_bytes) / page_bytes / 1e6 / hours
    assert as_it_is.requests_price_per_hour == pytest.approx(requests_price, rel=1e-6)
    without = PricedSystem(LLAMA, bucket).price_per_hour(sizes)
    assert as_it_is.price_per_hour == pytest.approx(without + requests_price)
