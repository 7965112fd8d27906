"""Record what engines ask of the tier: ``python -m tests.engines.vllm.record``, after the tier or vLLM has changed.

Records the families that are named, all if none is.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engines.vllm.engine import prompt_of, running_engine
from tests.engines.vllm.models import checkpoint
from tests.support.vllm_recording import DIRECTORY

RECORD_VARIABLE = "UNIFIED_CACHE_VLLM_RECORD"

SHARED: Mapping[str, int] = {"llama": 120, "gemma3": 120, "deepseek_v4": 520}
"""Families that are recorded, and how many tokens a branch shares: more than a block of the family."""


def record(name: str, root: Path) -> None:
    """Record an engine of a family: cold, from the store, a branch of a prompt, and two requests at once."""
    model = checkpoint(root / name, name)
    os.environ[RECORD_VARIABLE] = str(DIRECTORY / f"{name}.txt")
    settings = {"on_reset": "keep"}
    shared = SHARED[name]
    prompt = prompt_of(shared * 7 // 4, 1)
    with running_engine(model, name, f"file:{root / 'store'}", root / "log", settings=settings) as engine:
        for asked in (
            [prompt],
            [prompt],
            [[*prompt[:shared], *prompt_of(shared // 2, 2)], prompt_of(shared * 3 // 4, 3)],
        ):
            engine.generate(*asked)
            engine.settle()
            engine.reset()
        engine.close()


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for family in sys.argv[1:] or SHARED:
        with TemporaryDirectory() as directory:
            record(family, Path(directory))
