"""Models for the checks, written once, and a directory of logs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.vllm.engine import EngineAnswer, VllmEngine, running_engine
from tests.engines.vllm.installation import engine_python, home
from tests.engines.vllm.models import checkpoint


@pytest.fixture(scope="session", autouse=True)
def engine_is_installed() -> Path:
    """Install the engine before any check counts its time."""
    return engine_python()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return where the checkpoint of a family lies."""
    written: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in written:
            written[name] = checkpoint(tmp_path_factory.mktemp("models") / name, name)
        return written[name]

    return path_of


@pytest.fixture(scope="session")
def logs() -> Path:
    """Return where engines write their logs."""
    directory = home() / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture
def log_path(request: pytest.FixtureRequest, logs: Path) -> Callable[[str], Path]:
    """Return where an engine of this check may write its log."""
    directory = logs / request.node.name.replace("/", "_")
    directory.mkdir(parents=True, exist_ok=True)
    return lambda name: directory / f"{name}.log"


@pytest.fixture(scope="session")
def alone(model_path: Callable[[str], Path], logs: Path) -> Iterator[Callable[[str], VllmEngine]]:
    """Return an engine of a family without a store: what it answers is right."""
    with ExitStack() as stack:
        engines: dict[str, VllmEngine] = {}

        def engine_of(name: str) -> VllmEngine:
            if name not in engines:
                running = running_engine(model_path(name), name, None, logs / f"alone_{name}.log")
                engines[name] = stack.enter_context(running)
            return engines[name]

        yield engine_of


@pytest.fixture(scope="session")
def right(alone: Callable[[str], VllmEngine]) -> Callable[[Sequence[int]], EngineAnswer]:
    """Return what an engine without a store computes of a prompt."""
    known: dict[tuple[int, ...], EngineAnswer] = {}

    def answer_of(prompt: Sequence[int]) -> EngineAnswer:
        found = known.get(tuple(prompt))
        if found is None:
            alone("llama").reset(connector=False)
            found = known[tuple(prompt)] = alone("llama").completion(prompt)
        return found

    return answer_of
