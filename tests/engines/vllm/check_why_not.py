"""An engine whose store serves nothing says why, once, in its own log."""

import time
from pathlib import Path

import pytest

from tests.engines.vllm.engine import VllmEngine, prompt_of, running_engine
from tests.engines.vllm.faults import LIFE_S, LogPath, ModelPath
from unified_cache.integrations.engine_store.hit_watch import REQUESTS_MIN, WhyNoHit
from unified_cache.integrations.vllm.chunks import DOCUMENT

BLOCK_TOKENS = 32


def said(engine: VllmEngine, length: int) -> str:
    """Ask for many prompts of a length; return the one line that says why none was restored."""
    until_s = time.monotonic() + LIFE_S
    lines: list[str] = []
    while not lines:
        assert time.monotonic() < until_s, engine.tail()
        engine.generate(*(prompt_of(length, seed) for seed in range(REQUESTS_MIN)), tokens=1)
        engine.settle()
        lines = [line for line in engine.log.read_text(errors="replace").splitlines() if "nothing was restored" in line]
    (line,) = lines
    assert "WARNING" in line
    assert line.endswith(f"See {DOCUMENT}")
    return line


def check_prompts_without_a_whole_block_are_named(model_path: ModelPath, log_path: LogPath, tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'store'}"
    with running_engine(model_path("llama"), "llama", url, log_path("engine")) as engine:
        line = said(engine, BLOCK_TOKENS - 2)
        assert WhyNoHit.SHORT.value in line
        assert f"{BLOCK_TOKENS} tokens" in line


def check_another_hash_seed_is_named_and_so_is_another_revision(
    model_path: ModelPath, log_path: LogPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, url = model_path("llama"), f"file:{tmp_path / 'store'}"
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    with running_engine(model, "llama", url, log_path("first")) as engine:
        engine.completion(prompt_of(BLOCK_TOKENS + 1, 0))
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") == 1
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    with running_engine(model, "llama", url, log_path("seed")) as engine:
        line = said(engine, BLOCK_TOKENS + 1)
        assert WhyNoHit.OTHER_KEYS.value in line
        assert "PYTHONHASHSEED (2 here)" in line
    settings = {"revision": "another", "model": "llama"}
    with running_engine(model, "llama", url, log_path("same"), settings={**settings, "revision": "one"}) as engine:
        engine.completion(prompt_of(BLOCK_TOKENS + 1, 0))
        engine.settle()
    with running_engine(model, "llama", url, log_path("revision"), settings=settings) as engine:
        line = said(engine, BLOCK_TOKENS + 1)
        assert WhyNoHit.OTHER_IDENTITY.value in line
        assert "revision (one there, another here)" in line
