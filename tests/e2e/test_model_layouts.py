"""Real models' layouts through all three tiers, every byte compared: sidecars, logical anchors, true page sizes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.mooncake import LocalCluster
from tests.support.mooncake_needed import needs_mooncake
from tests.support.offline import back_up, read_back
from unified_cache.components.layouts import layout
from unified_cache.core.window import window
from unified_cache.storage_backends.url import open_storage

PROMPT_PAGES = 3
HOST_PAGES = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running(nodes=3, segment_bytes=256 << 20) as cluster:
        yield cluster


PAGE_SIZES = {
    "deepseek-v4-flash": 256,
    "deepseek-v4.1-flash": 256,
    "gpt-oss-20b": 64,
    "llama-3.1-8b": 16,
    "nemotron-3-nano-30b-a3b": 64,
}
SHORT = {"memory": PAGE_SIZES.keys(), "file": {"deepseek-v4-flash"}, "mooncake": {"nemotron-3-nano-30b-a3b"}}
"""Those of every run: each layout in memory, and one over each other kind of store."""


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        pytest.param(
            kind,
            preset,
            marks=[*([] if preset in short else [pytest.mark.long]), *([needs_mooncake] if kind == "mooncake" else [])],
        )
        for kind, short in SHORT.items()
        for preset in PAGE_SIZES
    ],
)
def test_a_models_prefix_comes_back_whole_from_every_tier(
    kind: str, preset: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    urls = {"memory": "memory:", "file": f"file:{tmp_path / 'store'}"}
    url = urls[kind] if kind in urls else request.getfixturevalue("cluster").url
    page_size = PAGE_SIZES[preset]
    model = layout(preset, page_size=page_size)
    sizes = tuple(HOST_PAGES for _ in model.components)
    toy = ToyEngine(model, sizes, sizes, open_storage(url), None)
    prompts = [
        toy.cache.prompt(np.arange(PROMPT_PAGES * page_size, dtype=np.int32) + first * 100_000) for first in range(2)
    ]
    expected = sum(PROMPT_PAGES - window(PROMPT_PAGES, span) for span in toy.spans)
    for prompt in (*prompts, *prompts):
        read_back(toy, prompt)
        back_up(toy, prompt)
        assert read_back(toy, prompt) == (PROMPT_PAGES, expected)
    traffic = {leg.value: moved.pages for leg, moved in toy.cache.stats().traffic.items()}
    assert min(traffic.values()) > 0, traffic
    assert toy.cache.close() == []
