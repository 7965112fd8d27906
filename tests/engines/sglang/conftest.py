"""The engine, imported once for all checks, and stores for each of them."""

from collections.abc import Iterator

import pytest

from tests.engines.sglang.runner import CORES, STACKS, STACKS_BY_TURNS, STORES, EngineRunner


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the kinds of stores, where this directory is named on the command line."""
    parser.addoption("--stores", default=",".join(STORES), help="kinds of stores, a comma list of %(default)s")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check of a stack and a core on every stack, the cores by turns; on both cores where it is marked so."""
    if {"stack", "core"} <= {*metafunc.fixturenames}:
        is_on_both = metafunc.definition.get_closest_marker("both_cores") is not None
        pairs = [(stack, core) for stack in STACKS for core in CORES] if is_on_both else STACKS_BY_TURNS
        metafunc.parametrize(("stack", "core"), pairs)


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker."""
    config.addinivalue_line("markers", "both_cores: runs on both cores of the tree of every stack")


@pytest.fixture(scope="session")
def shared_runner(request: pytest.FixtureRequest) -> Iterator[EngineRunner]:
    """Run the process that imports the engine."""
    with EngineRunner.running(request.config.getoption("--stores").split(",")) as running:
        yield running


@pytest.fixture
def runner(shared_runner: EngineRunner) -> Iterator[EngineRunner]:
    """Lend the engine to a check, and remove its stores."""
    yield shared_runner
    shared_runner.clear()
