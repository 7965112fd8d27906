"""An engine whose store serves nothing says so once in its own log."""

import time
from pathlib import Path

from tests.engines.vllm.engine import VllmEngine, prompt_of, running_engine
from tests.engines.vllm.faults import LIFE_S, LogPath, ModelPath
from unified_cache.integrations.engine_store.interface import REQUESTS_MIN
from unified_cache.integrations.vllm.chunks import DOCUMENT

BLOCK_TOKENS = 32


def said(engine: VllmEngine, length: int) -> str:
    """Ask for many prompts of a length; return the one line that says that none was restored."""
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


def check_prompts_without_a_whole_block_are_not_looked_up(
    model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'store'}"
    with running_engine(model_path("llama"), "llama", url, log_path("engine")) as engine:
        line = said(engine, BLOCK_TOKENS - 2)
        assert "0 of 0 pages looked up were found" in line
