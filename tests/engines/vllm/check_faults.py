"""Whatever a store does, an engine answers as it would without one: it computes what it cannot trust or cannot get."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.vllm.engine import EngineAnswer, VllmEngine, prompt_of, running_engine
from tests.engines.vllm.stores import FaultSwitch, faulty_url
from tests.support.service_process import ServerProcess
from unified_cache.testing.faulty_storage import StorageFault

PROMPT = prompt_of(803, 5)
OTHER = prompt_of(803, 6)

DEADLINE_S = 1.0

BOUND_S = 30.0
"""Of what a store that hangs for ten minutes may cost anybody here: a few deadlines, and the engine's own time."""

SETTINGS = {"on_reset": "keep", "deadline_s": DEADLINE_S, "close_timeout_s": 3.0}

ModelPath = Callable[[str], Path]
LogPath = Callable[[str], Path]


@pytest.fixture(scope="module")
def expected(alone: Callable[[str], VllmEngine]) -> list[EngineAnswer]:
    """Return what an engine without a store answers."""
    alone("llama").reset(connector=False)
    return [alone("llama").completion(prompt) for prompt in (PROMPT, OTHER)]


@contextmanager
def engine_with(url: str, model_path: ModelPath, log_path: LogPath) -> Iterator[VllmEngine]:
    """Run an engine, and see that nothing is left of it and that its shut-down is bounded."""
    started_s = time.monotonic()
    with running_engine(model_path("llama"), "llama", url, log_path("engine"), settings=SETTINGS) as engine:
        yield engine
        left = engine.close()
        assert left.seconds < BOUND_S
        assert not left.threads
        assert not left.regions
    assert time.monotonic() - started_s < 300.0


def page_files(directory: Path) -> list[Path]:
    """Return the files of a ``file:`` store's pages."""
    found = [path for path in directory.rglob("*.g0") if path.is_file()]
    assert len(found) > 20
    return sorted(found)


def flip(files: list[Path]) -> None:
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def swap(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


def truncate(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(path.read_bytes()[:-100])


def remove(files: list[Path]) -> None:
    for path in files:
        path.unlink()


def answered_rightly(engine: VllmEngine, expected: EngineAnswer) -> EngineAnswer:
    """Complete the prompt, in bounded time, as an engine without a store does; return the completion."""
    started_s = time.monotonic()
    found = engine.completion(PROMPT)
    assert time.monotonic() - started_s < BOUND_S
    assert found.tokens == expected.tokens
    if found.cached == 0:
        assert found.difference(expected) == 0.0
    return found


@pytest.mark.parametrize("damage", [flip, swap, truncate, remove])
def check_pages_that_were_damaged_behind_our_back_are_computed_again(
    damage: Callable[[list[Path]], None],
    expected: list[EngineAnswer],
    model_path: ModelPath,
    log_path: LogPath,
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    with engine_with(f"file:{store}", model_path, log_path) as engine:
        engine.completion(PROMPT)
        engine.settle()
        engine.reset()
        assert answered_rightly(engine, expected[0]).cached == 800
        loaded = engine.loaded()
        engine.reset()
        damage(page_files(store))
        assert answered_rightly(engine, expected[0]).cached == 0
        assert engine.loaded() == loaded
        # And what was computed again is stored again.
        engine.settle()
        engine.reset()
        assert answered_rightly(engine, expected[0]).cached == 800


def check_one_damaged_page_costs_no_more_than_what_follows_it(
    expected: list[EngineAnswer], model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with engine_with(f"file:{store}", model_path, log_path) as engine:
        engine.completion(PROMPT)
        engine.settle()
        engine.reset()
        flip(page_files(store)[:1])
        assert answered_rightly(engine, expected[0]).cached < 800
        assert engine.counted("flawed_chunks", flaw="payload") == 1


@pytest.mark.parametrize("method", ["exists", "get", "put"])
@pytest.mark.parametrize("fault", [StorageFault.HANG, StorageFault.FAIL])
def check_a_store_that_hangs_or_fails_costs_a_few_deadlines(
    method: str,
    fault: StorageFault,
    expected: list[EngineAnswer],
    model_path: ModelPath,
    log_path: LogPath,
    tmp_path: Path,
) -> None:
    switch = FaultSwitch(tmp_path / "faults")
    with engine_with(faulty_url(tmp_path), model_path, log_path) as engine:
        if method != "put":
            engine.completion(PROMPT)
            engine.settle()
            engine.reset()
        switch.set(**{method: fault})
        answered_rightly(engine, expected[0])
        engine.settle()
        assert engine.loaded() == 0
        started_s = time.monotonic()
        engine.reset()
        assert time.monotonic() - started_s < BOUND_S
        assert engine.completion(OTHER).tokens == expected[1].tokens


@pytest.mark.parametrize("fault", [StorageFault.FLIPPED_BIT, StorageFault.SHORT_READ, StorageFault.MISDIRECTED_READ])
def check_a_store_that_returns_wrong_bytes_is_found_out(
    fault: StorageFault, expected: list[EngineAnswer], model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    switch = FaultSwitch(tmp_path / "faults")
    with engine_with(faulty_url(tmp_path), model_path, log_path) as engine:
        engine.completion(PROMPT)
        engine.settle()
        engine.reset()
        switch.set(get=fault)
        assert answered_rightly(engine, expected[0]).cached < 800


def check_a_store_that_is_full_stores_nothing_and_costs_nothing(
    expected: list[EngineAnswer], model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    with engine_with(f"file:{tmp_path / 'store'}?free=900TiB", model_path, log_path) as engine:
        for _ in range(2):
            assert answered_rightly(engine, expected[0]).cached == 0
            engine.settle()
            engine.reset()
        assert engine.counted("store_chunks", answer="stored") == 0


def check_a_directory_that_vanishes_is_a_store_without_pages(
    expected: list[EngineAnswer], model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with engine_with(f"file:{store}", model_path, log_path) as engine:
        engine.completion(PROMPT)
        engine.settle()
        engine.reset()
        shutil.rmtree(store)
        assert answered_rightly(engine, expected[0]).cached == 0
        engine.settle()


def check_a_server_that_is_killed_is_used_again_when_it_is_back(
    expected: list[EngineAnswer], model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    server = ServerProcess(str(tmp_path / "store"))
    try:
        with engine_with(f"grpc://{server.address}", model_path, log_path) as engine:
            engine.completion(PROMPT)
            engine.settle()
            engine.reset()
            server.kill()
            assert answered_rightly(engine, expected[0]).cached == 0
            engine.settle()
            engine.reset()
            server.start()
            until_s = time.monotonic() + BOUND_S
            while (found := answered_rightly(engine, expected[0])).cached == 0:
                assert time.monotonic() < until_s
                engine.settle()
                engine.reset()
            assert found.cached == 800
    finally:
        server.kill()


def check_an_engine_starts_while_its_store_is_away(
    expected: list[EngineAnswer], model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    server = ServerProcess(str(tmp_path / "store"))
    server.kill()
    with engine_with(f"grpc://{server.address}", model_path, log_path) as engine:
        assert answered_rightly(engine, expected[0]).cached == 0
        engine.settle()


def check_a_reset_forgets_the_pages_of_the_weights_before(
    model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'store'}"
    with running_engine(model_path("llama"), "llama", url, log_path("engine")) as engine:
        engine.completion(PROMPT)
        engine.settle()
        engine.reset()
        assert engine.completion(PROMPT).cached == 0
        assert engine.loaded() == 0
