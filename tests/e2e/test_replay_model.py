"""Replays of models: true pools, tiers in bytes, every component verified; and what keeping windows brings."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.test_replay import TRACE, run
from tests.support.replays import conversations
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import Retention
from unified_cache.core.sizes import SizedTiers
from unified_cache.sizing.replay.engine import OracleEngine
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import MemoryStorage

TAIL_TOKENS = 512
"""Both page boundaries of the trace's last block, at 256 tokens a page."""

MODELS = ("deepseek-v4-flash", "gpt-oss-120b", "gemma-3-27b", "qwen3-next", "llama-3.1-8b")
VARIED = ("deepseek-v4-flash", "qwen3-next")
"""One with sidecars, and one with recurrent state; full attention alone is in ``test_replay``."""


def small(model: str, storage: str | None = "memory:") -> ReplayPlan:
    """Make tiers that hold a few prompts: four on the device, three times that in host memory."""
    sized = size_preset(model)
    retention = Retention(TAIL_TOKENS)
    sizes = SizedTiers.of(sized.layout, retention, sized.window_tokens)
    prompts_bytes = 4 * sized.layout.prompt_bytes(sizes.typical_pages, sealed=False)
    return ReplayPlan.of_model(model, sized, retention, prompts_bytes, int(3.2 * prompts_bytes), storage)


@pytest.mark.parametrize("model", MODELS)
def test_every_component_comes_back_right_from_every_tier(model: str, memory_path: Path) -> None:
    requests = conversations(100)
    result = run([*requests, *requests], small(model, storage=f"file:{memory_path}/store"))
    assert (result.wrong_pages, result.leaked_slots, result.flawed_pages) == (0, 0, 0)
    for component in result.components:
        hits = component.hits.by_tier()
        assert min(hits.values()) > 0, hits
        assert component.moved_pages["store"] > 0
    assert result.pages_verified == sum(component.hits.total for component in result.components)
    full = result.components[0].hits
    assert full.total == result.served.hits.total, "of full attention, all that is resumed is handed back"
    # A prefix counts for the tier from which all of it could be resumed; a page for the tier it lay on.
    assert full.device >= result.served.hits.device
    assert full.storage <= result.served.hits.storage
    assert len(result.components) > 1 or full == result.served.hits


@pytest.mark.parametrize(
    "model", [each if each in VARIED else pytest.param(each, marks=pytest.mark.long) for each in MODELS]
)
def test_names_alone_hit_what_a_models_bytes_hit(model: str) -> None:
    settings = small(model)
    with_bytes = run(conversations(120), settings)
    names = run(conversations(120), dataclasses.replace(settings, with_bytes=False))
    assert names.served.hits == with_bytes.served.hits
    assert names.components == with_bytes.components


def test_bytes_are_those_of_the_model_and_not_the_scaled_ones() -> None:
    sized = size_preset("deepseek-v4-flash")
    result = run(conversations(40), small("deepseek-v4-flash", storage=None))
    assert [component.page_bytes for component in result.components] == [998_208, 8_160_000]
    full, swa = result.components
    assert result.bytes_moved["backup"] == full.moved_pages["backup"] * 998_208 + swa.moved_pages["backup"] * 8_160_000
    run_pools = result.plan.layout.pools
    for scaled, true in zip(run_pools, sized.layout.pools, strict=True):
        assert scaled.page_bytes == (max(64, round(true.page_bytes / 1024)) if true.page_bytes else 0)


def test_a_byte_that_changes_in_a_sidecar_of_a_window_is_noticed() -> None:
    request = TraceRequest(0, 512 * 4, 1, (1, 2, 3, 4))
    with Player.open(small("deepseek-v4-flash"), MemoryStorage()) as player:
        player.serve(request)
        assert isinstance(player._engine, OracleEngine)
        (state,) = (pool for pool in player._engine.pools if pool.spec.name == "deepseek_v4_c4_indexer_state")
        state.layers[1][:, 5] ^= 1
        player.serve(request)
        assert (player.wrong_pages, player.pages_verified) == (1, 9)


# ---- what keeping windows brings ---------------------------------------------------------------------------------


@cache
def hit_tokens(model: str, page_size: int, retention: Retention, requests: int | None) -> int:
    """Replay the first requests of the trace, or all, by a cache that never evicts."""
    sized = size_preset(model, page_size=page_size)
    plan = ReplayPlan.of_model(model, sized, retention, host_bytes=0)
    pages = tuple(200_000 * 512 // page_size for _ in sized.layout.components)
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, device_pages=pages), with_bytes=False)
    with Player.open(plan, None) as player:
        return sum(player.serve(request).total for request in read_trace(TRACE, requests)) * page_size


@pytest.mark.parametrize("requests", [1_000, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("page_size", "retention", "preserved"),
    [
        (512, Retention(branches=False), {1_000: 0.911, None: 0.937}),
        (256, Retention(branches=False), {1_000: 0.363, None: 0.590}),
        (256, Retention(), {1_000: 0.609, None: 0.778}),
        (256, Retention(TAIL_TOKENS, branches=False), {1_000: 0.911, None: 0.937}),
        (256, Retention(TAIL_TOKENS), {1_000: 0.919, None: 0.960}),
    ],
)
def test_of_what_full_attention_could_reuse_windows_that_were_kept_preserve(
    page_size: int, retention: Retention, preserved: Mapping[int | None, float], requests: int | None
) -> None:
    full = hit_tokens("llama-3.1-8b", page_size, Retention(), requests)
    found = hit_tokens("deepseek-v4-flash", page_size, retention, requests)
    assert found / full == pytest.approx(preserved[requests], abs=0.001)
