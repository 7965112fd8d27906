"""Real models' layouts through all three tiers, every byte compared: sidecars, logical anchors, true page sizes."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.offline import back_up, read_back
from unified_cache.components.layouts import layout
from unified_cache.core.window import window
from unified_cache.storage_backends.url import open_storage

PROMPT_PAGES = 3
HOST_PAGES = 4


@pytest.mark.parametrize(
    ("preset", "page_size"),
    [
        ("deepseek-v4-flash", 256),
        ("nemotron-3-nano-30b-a3b", 64),
        pytest.param("deepseek-v4.1-flash", 256, marks=pytest.mark.long),
        pytest.param("gpt-oss-20b", 64, marks=pytest.mark.long),
        pytest.param("llama-3.1-8b", 16, marks=pytest.mark.long),
    ],
)
def test_a_models_prefix_comes_back_whole_from_every_tier(preset: str, page_size: int, tmp_path: Path) -> None:
    model = layout(preset, page_size=page_size)
    sizes = tuple(HOST_PAGES for _ in model.components)
    toy = ToyEngine(model, sizes, sizes, open_storage(f"file:{tmp_path / 'store'}"), None)
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
