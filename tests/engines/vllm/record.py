"""Record what engines ask of the tier: ``python -m tests.engines.vllm.record``, after the tier or vLLM has changed."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engines.vllm.engine import prompt_of, running_engine
from tests.engines.vllm.models import checkpoint
from tests.support.vllm_recording import DIRECTORY

__all__ = ["record"]

RECORD_VARIABLE = "UNIFIED_CACHE_VLLM_RECORD"


def record(name: str, root: Path) -> None:
    """Record an engine of a family: cold, from the store, a branch of a prompt, and two requests at once."""
    model = checkpoint(root / name, name)
    os.environ[RECORD_VARIABLE] = str(DIRECTORY / f"{name}.txt")
    settings = {"on_reset": "keep"}
    prompt = prompt_of(211, 1)
    with running_engine(model, name, f"file:{root / 'store'}", root / "log", settings=settings) as engine:
        for asked in ([prompt], [prompt], [[*prompt[:120], *prompt_of(60, 2)], prompt_of(90, 3)]):
            engine.generate(*asked)
            engine.settle()
            engine.reset()
        engine.close()


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for family in ("llama", "gemma3"):
        with TemporaryDirectory() as directory:
            record(family, Path(directory))
