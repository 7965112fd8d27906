"""Whatever a store does, an engine answers as it would without one: it computes what it cannot trust or cannot get."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines.stores import FaultSwitch, faulty_url, without_room
from tests.engines.vllm.engine import VllmEngine, prompt_of, running_engine
from tests.engines.vllm.faults import (
    BOUND_S,
    CACHED,
    CHUNKS,
    OTHER,
    PROMPT,
    SHORT_S,
    LogPath,
    ModelPath,
    Right,
    answered_rightly,
    engine_with,
    store_and_forget,
)
from tests.support.store_calls import StorageFault


@pytest.fixture(scope="module")
def stored(
    model_path: ModelPath, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmEngine, Path]]:
    """Yield an engine over a ``file:`` store, and the directory of the store; what it holds, a check may damage."""
    directory = tmp_path_factory.mktemp("stored") / "store"
    with engine_with(f"file:{directory}", model_path, logs / "stored.log") as engine:
        yield engine, directory


def page_files(directory: Path) -> list[Path]:
    """Return the files of a ``file:`` store's pages."""
    found = [path for path in directory.rglob("*.g0") if path.is_file()]
    assert len(found) >= CHUNKS
    return sorted(found)


def flip(files: Sequence[Path]) -> None:
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def swap(files: Sequence[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


def truncate(files: Sequence[Path]) -> None:
    for path in files:
        path.write_bytes(path.read_bytes()[:-100])


def remove(files: Sequence[Path]) -> None:
    for path in files:
        path.unlink()


@pytest.mark.parametrize("damage", [flip, swap, truncate, remove])
def check_pages_that_were_damaged_behind_our_back_are_computed_again(
    damage: Callable[[Sequence[Path]], None], stored: tuple[VllmEngine, Path], right: Right
) -> None:
    engine, directory = stored
    store_and_forget(engine, right)
    assert answered_rightly(engine, right).cached == CACHED
    loaded = engine.loaded()
    engine.reset()
    damage(page_files(directory))
    assert answered_rightly(engine, right).cached == 0
    assert engine.loaded() == loaded
    # And what was computed again is stored again.
    engine.settle()
    engine.reset()
    assert answered_rightly(engine, right).cached == CACHED
    engine.reset()


def check_one_damaged_page_costs_no_more_than_what_follows_it(stored: tuple[VllmEngine, Path], right: Right) -> None:
    engine, directory = stored
    store_and_forget(engine, right)
    flawed = engine.counted("flawed_chunks", flaw="payload")
    flip(page_files(directory)[:1])
    assert answered_rightly(engine, right).cached < CACHED
    assert engine.counted("flawed_chunks", flaw="payload") == flawed + 1
    engine.reset()


@pytest.mark.parametrize("method", ["exists", "get", "put"])
@pytest.mark.parametrize("fault", [StorageFault.HANG, StorageFault.FAIL])
def check_a_store_that_hangs_or_fails_costs_a_few_deadlines(
    method: str, fault: StorageFault, right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url, switch = faulty_url(tmp_path), FaultSwitch(tmp_path)
    with engine_with(url, model_path, log_path("engine"), deadline_s=SHORT_S) as engine:
        if method != "put":
            store_and_forget(engine, right)
        switch.set(**{method: fault})
        answered_rightly(engine, right)
        engine.settle()
        assert engine.loaded() == 0
        started_s = time.monotonic()
        engine.reset()
        assert time.monotonic() - started_s < BOUND_S
        answered_rightly(engine, right, OTHER)


def check_what_was_computed_while_the_store_failed_is_stored_when_it_is_asked_for_again(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url, switch = faulty_url(tmp_path), FaultSwitch(tmp_path)
    with engine_with(url, model_path, log_path("engine")) as engine:
        switch.set(put=StorageFault.FAIL)
        answered_rightly(engine, right)
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") == 0
        switch.set()
        # The device has it, and so has vLLM's host memory, which offers it again.
        assert answered_rightly(engine, right).cached == CACHED
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") == CHUNKS
        # And then no more.
        answered_rightly(engine, right)
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") == CHUNKS
        engine.reset()
        assert answered_rightly(engine, right).cached == CACHED
        assert engine.loaded() == CHUNKS


def check_a_store_that_returns_wrong_bytes_is_found_out(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url, switch = faulty_url(tmp_path), FaultSwitch(tmp_path)
    with engine_with(url, model_path, log_path("engine")) as engine:
        for fault in (StorageFault.FLIPPED_BIT, StorageFault.SHORT_READ, StorageFault.MISDIRECTED_READ):
            store_and_forget(engine, right)
            switch.set(get=fault)
            assert answered_rightly(engine, right).cached < CACHED
            switch.set()


def check_a_store_that_stores_wrong_bytes_or_none_is_found_out(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url, switch = faulty_url(tmp_path), FaultSwitch(tmp_path)
    with engine_with(url, model_path, log_path("engine")) as engine:
        for seed, fault in enumerate((StorageFault.TORN_WRITE, StorageFault.LOST_WRITE, StorageFault.PARTIAL_WRITE)):
            prompt = prompt_of(803, 50 + seed)
            switch.set(put=fault)
            store_and_forget(engine, right, prompt)
            switch.set()
            assert answered_rightly(engine, right, prompt).cached < CACHED
            # Computed again, and stored by a store that is well.
            engine.settle()
            engine.reset()
            assert answered_rightly(engine, right, prompt).cached == CACHED
            engine.reset()


def check_a_store_without_room_serves_what_it_has_and_takes_nothing(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'store'}"
    with engine_with(url, model_path, log_path("before")) as engine:
        store_and_forget(engine, right)
    with engine_with(without_room(url), model_path, log_path("engine")) as engine:
        for _ in range(2):
            assert answered_rightly(engine, right, OTHER).cached == 0
            assert answered_rightly(engine, right).cached == CACHED
            engine.settle()
            engine.reset()
        assert engine.loaded() == 2 * CHUNKS
        assert engine.counted("store_chunks", answer="declined") > 0


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
