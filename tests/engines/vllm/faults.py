"""Parts of the checks of faults: an engine that must leave nothing behind, and answers that must be right in time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.engines.vllm.engine import EngineAnswer, VllmEngine, prompt_of, running_engine

PROMPT = prompt_of(803, 5)
OTHER = prompt_of(803, 6)

CHUNKS = 803 // 32
"""Chunks of such a prompt."""

CACHED = CHUNKS * 32
"""Tokens in them."""

DEADLINE_S = 20.0
"""Of a store that is well: a busy machine may take its time."""

SHORT_S = 1.0
"""Deadline where the store hangs: it is waited for."""

BOUND_S = 30.0
"""Of what a store that hangs for ten minutes may cost anybody here: a few deadlines, and the engine's own time."""

LIFE_S = 300.0
"""Of a whole engine, from its start to its end."""

ModelPath = Callable[[str], Path]
LogPath = Callable[[str], Path]
Right = Callable[[Sequence[int]], EngineAnswer]
"""Answers as an engine without a store does."""


@contextmanager
def engine_with(url: str, model_path: ModelPath, log: Path, *, deadline_s: float = DEADLINE_S) -> Iterator[VllmEngine]:
    """Run an engine, and see that its start and its shut-down are bounded and that nothing is left of it."""
    settings = {"on_reset": "keep", "deadline_s": deadline_s, "close_timeout_s": 3 * deadline_s}
    started_s = time.monotonic()
    with running_engine(model_path("llama"), "llama", url, log, settings=settings) as engine:
        assert time.monotonic() - started_s < LIFE_S
        yield engine
        left = engine.close()
        assert left.seconds < BOUND_S
        assert not left.threads
        assert not left.regions
        assert not left.slab_bytes


def answered_rightly(engine: VllmEngine, right: Right, prompt: Sequence[int] = PROMPT) -> EngineAnswer:
    """Complete a prompt, in bounded time, as an engine without a store does; return the completion."""
    expected = right(prompt)
    started_s = time.monotonic()
    found = engine.completion(prompt)
    assert time.monotonic() - started_s < BOUND_S
    assert found.tokens == expected.tokens
    if found.cached == 0:
        assert found.difference(expected) == 0.0
    return found


def store_and_forget(engine: VllmEngine, right: Right, prompt: Sequence[int] = PROMPT) -> None:
    """Have a prompt computed and stored; the engine itself has nothing of it afterwards."""
    answered_rightly(engine, right, prompt)
    engine.settle()
    engine.reset()
