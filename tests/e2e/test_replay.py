"""The replay as a library: what it counts, and that it would notice a cache that is wrong."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.sources import ROOT
from tests.support.replays import PageSettings, conversations
from tests.support.store_calls import ScriptedStorage, raising
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.pool import Hits
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.sizing.replay.engine import OracleEngine
from unified_cache.sizing.replay.plan import SEAL_BYTES, ReplayPlan
from unified_cache.sizing.replay.player import Player
from unified_cache.sizing.replay.result import ReplayResult, ServedRequests
from unified_cache.sizing.replay.runner import replay
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.wrappers import Method

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"

LRU_RATIOS = {1_000: 0.0445, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637, 200_000: 0.3664}
"""Block hit ratios of an LRU over the bundled trace; 200,000 pages hold all of it."""

QUICK_PAGES = 30_000
"""Where the curve bends; ``seen_ratio`` is that of 200,000 pages in every run."""


@pytest.fixture(scope="module")
def conversation() -> list[TraceRequest]:
    return read_trace(TRACE)


def run(requests: list[TraceRequest], settings: PageSettings | ReplayPlan) -> ReplayResult:
    return replay("made up", requests, settings.plan if isinstance(settings, PageSettings) else settings)


SMALL = PageSettings(device_pages=40, host_pages=90, page_bytes=256)


@pytest.mark.parametrize(
    "pages", [pages if pages == QUICK_PAGES else pytest.param(pages, marks=pytest.mark.long) for pages in LRU_RATIOS]
)
def test_the_hit_ratio_over_the_bundled_trace_is_that_of_an_lru(conversation: list[TraceRequest], pages: int) -> None:
    result = run(conversation, PageSettings(device_pages=pages, host_pages=0, with_bytes=False))
    assert result.served.requests == 12_031
    assert result.blocks == 288_500
    assert result.served.block_hit_ratio == pytest.approx(LRU_RATIOS[pages], abs=0.002)
    assert result.served.seen_block_ratio == pytest.approx(LRU_RATIOS[200_000], abs=0.0001)
    assert result.leaked_slots == 0


def test_three_tiers_reach_the_hit_ratio_of_the_largest(conversation: list[TraceRequest], tmp_path: Path) -> None:
    some = conversation[:700]
    three = PageSettings(device_pages=400, host_pages=1500, storage=f"file:{tmp_path}/store")
    result = run(some, three)
    assert result.served.hits.total == result.served.seen_pages
    assert min(result.served.hits.by_tier().values()) > 0
    assert (result.wrong_pages, result.leaked_slots, result.flawed_pages) == (0, 0, 0)
    assert result.pages_verified == result.served.hits.total
    device_only = run(some, PageSettings(device_pages=400, host_pages=0, with_bytes=False))
    assert device_only.served.block_hit_ratio < result.served.block_hit_ratio / 2
    assert result.served.hits.device == device_only.served.hits.device


def test_a_store_left_by_one_run_serves_the_next(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, storage=f"file:{tmp_path}/store")
    requests = conversations(120)
    run(requests, settings)
    again = run(requests, settings)
    assert again.served.hits.total == again.served.pages
    assert again.wrong_pages == 0


@pytest.mark.parametrize("storage", [None, "memory:"])
@pytest.mark.parametrize("host_pages", [60, 300])
def test_names_alone_hit_what_bytes_hit(host_pages: int, storage: str | None) -> None:
    requests = conversations(250)
    object_bytes = SMALL.page_bytes + HEADER_BYTES
    cap = None if storage is None else 400 * object_bytes
    settings = dataclasses.replace(SMALL, host_pages=host_pages, storage=storage, storage_bytes=cap)
    bytes_moved = run(requests, settings)
    names = run(requests, dataclasses.replace(settings, with_bytes=False))
    assert names.served.hits == bytes_moved.served.hits
    assert names.bytes_moved == bytes_moved.bytes_moved
    assert (names.pages_verified, names.flawed_pages, bytes_moved.wrong_pages) == (0, 0, 0)


@pytest.mark.parametrize("page_size", [64, 128, 256])
def test_smaller_pages_change_nothing_but_their_number(page_size: int) -> None:
    requests = conversations(120)
    per_block = 512 // page_size
    small = PageSettings(page_size=page_size, device_pages=40 * per_block, host_pages=1000 * per_block, page_bytes=64)
    whole = dataclasses.replace(small, page_size=512, device_pages=40, host_pages=1000)
    found, expected = run(requests, small), run(requests, whole)
    assert found.blocks == expected.blocks
    assert found.served.block_hit_ratio == pytest.approx(expected.served.block_hit_ratio)
    assert found.served.token_hit_ratio == pytest.approx(expected.served.token_hit_ratio)
    assert found.wrong_pages == 0


@pytest.mark.parametrize("page_bytes", [1, 3, 4096, 5001])
def test_any_page_bytes_are_split_over_two_layers_and_verified(page_bytes: int) -> None:
    result = run(conversations(60), dataclasses.replace(SMALL, page_bytes=page_bytes, storage="memory:"))
    assert result.pages_verified == result.served.hits.total == result.served.seen_pages
    assert result.wrong_pages == 0


def test_requests_longer_than_a_tier_are_served_as_far_as_they_fit() -> None:
    requests = [TraceRequest(0, 512 * 50, 1, tuple(range(50)))] * 3
    settings = PageSettings(device_pages=12, host_pages=5, storage="memory:", page_bytes=64)
    result = run(requests, settings)
    assert result.served.pages == 150
    assert result.served.hits == Hits(device=24)
    assert (result.wrong_pages, result.leaked_slots) == (0, 0)


def test_a_run_is_a_function_of_trace_and_settings() -> None:
    settings = dataclasses.replace(SMALL, storage="memory:", storage_bytes=100 * 384)
    first, second = (run(conversations(150), settings) for _ in range(2))
    assert dataclasses.replace(first, seconds=second.seconds) == second


def test_token_hits_count_tails_at_their_true_length() -> None:
    requests = [TraceRequest(0, 600, 1, (1, 2))] * 2
    result = run(requests, SMALL)
    assert result.served.block_hit_ratio == 0.5
    assert result.served.hit_tokens.total == 600
    assert result.served.token_hit_ratio == 0.5


def test_the_time_series_adds_up_to_the_whole() -> None:
    result = run(conversations(250), dataclasses.replace(SMALL, storage="memory:"))
    assert sum(result.series, ServedRequests()) == result.served
    assert len(result.series) == 36, "seven requests each"


def test_an_empty_prompt_asks_for_nothing() -> None:
    result = run([TraceRequest(0, 0, 5, ())], SMALL)
    assert (result.blocks, result.served.block_hit_ratio, result.served.token_hit_ratio) == (0, 0.0, 0.0)


# ---- several engines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory:", "file:{}/store"])
@pytest.mark.parametrize("engines", [2, 3])
def test_engines_over_one_store_hit_what_others_computed(tmp_path: Path, engines: int, url: str) -> None:
    requests = conversations(120)
    settings = dataclasses.replace(SMALL, storage=url.format(tmp_path), storage_bytes=300_000)
    result = run(requests, dataclasses.replace(settings, engines=engines))
    assert (result.wrong_pages, result.leaked_slots) == (0, 0)
    assert result.pages_verified == result.served.hits.total
    alone = dataclasses.replace(settings, storage="memory:", storage_bytes=300_000 // engines)
    assert result.served.hits.total > sum(
        run(requests[number::engines], alone).served.hits.total for number in range(engines)
    )
    if url == "memory:":
        without_bytes = dataclasses.replace(settings, engines=engines, with_bytes=False)
        assert run(requests, without_bytes).served.hits == result.served.hits


def test_a_replay_has_an_engine() -> None:
    with pytest.raises(ConfigError, match="engines must be at least 1, found 0"):
        _ = dataclasses.replace(SMALL, engines=0).plan


# ---- it would notice -----------------------------------------------------------------------------------------


def flip_a_byte(layers: Sequence[torch.Tensor]) -> None:
    layers[1][2, 17] ^= 1


def swap_two_pages(layers: Sequence[torch.Tensor]) -> None:
    for layer in layers:
        layer[[1, 3]] = layer[[3, 1]]


@pytest.mark.parametrize(("harm", "wrong_pages"), [(flip_a_byte, 1), (swap_two_pages, 2)])
def test_what_changes_on_the_device_is_noticed(
    harm: Callable[[Sequence[torch.Tensor]], None], wrong_pages: int
) -> None:
    request = TraceRequest(0, 512 * 4, 1, (1, 2, 3, 4))
    with Player.open(SMALL.plan, None) as player:
        player.serve(request)
        assert isinstance(player._engine, OracleEngine)
        harm(player._engine.pools[0].layers)
        assert player.serve(request) == Hits(device=4)
        assert (player.wrong_pages, player.pages_verified) == (wrong_pages, 4)


def stored_pages(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size == 256 + HEADER_BYTES)


def rotten(directory: Path) -> tuple[PageSettings, list[TraceRequest], Path, bytearray]:
    """Run once and read a page back, one bit of it flipped; return also what ran and where the page lies."""
    settings = dataclasses.replace(SMALL, storage=f"file:{directory}/store")
    requests = [TraceRequest(0, 512 * 4, 1, (1, 2, 3, 4))]
    run(requests, settings)
    path = stored_pages(directory)[0]
    page = bytearray(path.read_bytes())
    page[-1] ^= 1
    return settings, requests, path, page


def test_a_stored_page_forged_with_a_valid_seal_is_noticed(tmp_path: Path) -> None:
    settings, requests, path, page = rotten(tmp_path)
    seal_buffers((memoryview(page),), Label(bytes(page[16:48]), bytes(page[48:80]), "kv"))
    path.write_bytes(page)
    result = run(requests, settings)
    assert result.served.hits == Hits(storage=4)
    assert (result.wrong_pages, result.pages_verified, result.flawed_pages) == (1, 4, 0)


def test_a_stored_page_that_rots_is_refused_and_computed_again(tmp_path: Path) -> None:
    settings, requests, path, page = rotten(tmp_path)
    path.write_bytes(page)
    result = run(requests, settings)
    assert (result.wrong_pages, result.flawed_pages) == (0, 1)
    assert result.served.hits.total < 4
    assert run(requests, settings).served.hits == Hits(storage=4)


# ---- what cannot be ------------------------------------------------------------------------------------------


def test_a_sealed_page_takes_no_more_than_is_reckoned_with() -> None:
    assert SEAL_BYTES >= HEADER_BYTES + 63


@pytest.mark.parametrize(
    "url", ["grpc://127.0.0.1:1", "grpcs://127.0.0.1:1", "unified_cache.storage_backends.file.store:open_url:x"]
)
def test_without_bytes_no_store_is_opened_and_every_url_does_that_could_be(url: str) -> None:
    requests = conversations(30)
    names = dataclasses.replace(SMALL, with_bytes=False)
    named, kept = (run(requests, dataclasses.replace(names, storage=each)).served.hits for each in (url, "memory:"))
    assert named == kept


def test_a_store_that_fails_on_the_way_ends_the_run() -> None:
    store = ScriptedStorage()
    requests = conversations(5)
    with Player.open(dataclasses.replace(SMALL, storage="memory:").plan, store) as player:
        player.serve(requests[0])
        player.wait_all()
        store.before[Method.PUT] = raising(StorageError("the disk cannot be written", retryable=False))
        with pytest.raises(StorageError, match="cannot"):  # noqa: PT012  # whichever request meets it
            for request in requests[1:]:
                player.serve(request)
            player.wait_all()
