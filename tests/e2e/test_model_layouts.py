"""Real models' layouts through all three tiers, every byte compared: sidecars, logical anchors, true page sizes."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from unified_cache.components.layouts import layout
from unified_cache.core.page import Prompt
from unified_cache.core.window import window
from unified_cache.storage_backends.url import open_storage

PROMPT_PAGES = 3
HOST_PAGES = 4


def bring(toy: ToyEngine, prompt: Prompt) -> None:
    """Bring a prompt up from wherever it lies."""
    for start in (toy.cache.prefetch, toy.cache.load):
        assert start(prompt) is not None
        assert all(operation.error is None for operation in toy.cache.wait_all(60))


def serve_and_back_up(toy: ToyEngine, prompt: Prompt) -> None:
    lock = toy.serve(prompt)
    assert lock is not None
    toy.cache.backup(prompt)
    assert all(operation.error is None for operation in toy.cache.wait_all(60))
    toy.cache.release(lock)


@pytest.mark.parametrize(
    ("preset", "page_size"),
    [
        ("deepseek-v4-flash", 256),
        ("deepseek-v4.1-flash", 256),
        ("gpt-oss-20b", 64),
        ("llama-3.1-8b", 16),
        ("nemotron-3-nano-30b-a3b", 64),
    ],
)
@pytest.mark.parametrize("url", ["memory:", "file:{}"])
def test_a_models_prefix_comes_back_whole_from_every_tier(
    preset: str, page_size: int, url: str, tmp_path: Path
) -> None:
    model = layout(preset, page_size=page_size)
    sizes = tuple(HOST_PAGES for _ in model.components)
    toy = ToyEngine(model, sizes, sizes, open_storage(url.format(tmp_path / "store")), None)
    prompts = [
        toy.cache.prompt(np.arange(PROMPT_PAGES * page_size, dtype=np.int32) + first * 100_000) for first in range(2)
    ]
    expected = sum(PROMPT_PAGES - window(PROMPT_PAGES, span) for span in toy.spans)
    for prompt in (*prompts, *prompts):
        bring(toy, prompt)
        serve_and_back_up(toy, prompt)
        lock = toy.cache.lock(toy.cache.match(prompt))
        assert lock.end == PROMPT_PAGES
        assert toy.verify(prompt, lock) == expected
        toy.cache.release(lock)
        toy.cache.check()
    traffic = {leg.value: moved.pages for leg, moved in toy.cache.stats().traffic.items()}
    assert min(traffic.values()) > 0, traffic
    assert toy.cache.close() == []
