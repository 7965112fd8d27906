"""Stores that are lost in the middle of a call, or that never were there: recomputed, bounded, and used again after."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.stores import FaultSwitch, faulty_url, hanging_url
from tests.engines.vllm.engine import VllmEngine, prompt_of
from tests.engines.vllm.faults import (
    BOUND_S,
    CACHED,
    SHORT_S,
    LogPath,
    ModelPath,
    Right,
    answered_rightly,
    engine_with,
    store_and_forget,
)
from tests.support.cluster import ServeProcess
from tests.support.store_calls import StorageFault
from unified_cache.storage_backends.wrappers import Method

Strike = Callable[[Method], None]


def struck_in(engine: VllmEngine, switch: FaultSwitch, strike: Strike, method: Method, right: Right) -> int:
    """Have the store lost in the middle of a call of this method, which the engine makes for a prompt.

    Return how many tokens of the prompt were not computed.
    """
    prompt = prompt_of(803, 60)
    if method is not Method.PUT:
        store_and_forget(engine, right, prompt)
    strike(method)
    found = answered_rightly(engine, right, prompt)
    engine.settle()
    assert switch.is_struck
    started_s = time.monotonic()
    engine.reset()
    assert time.monotonic() - started_s < BOUND_S
    return found.cached


def check_a_directory_that_is_removed_in_the_middle_of_a_call_is_filled_again(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    url, switch = faulty_url(tmp_path / "faults", f"file:{store}"), FaultSwitch(tmp_path / "faults")
    with engine_with(url, model_path, log_path("engine")) as engine:
        for method in (Method.EXISTS, Method.GET, Method.PUT):
            cached = struck_in(engine, switch, lambda method: switch.remove_directory_in(method, store), method, right)
            assert cached < CACHED
            store_and_forget(engine, right)
            assert answered_rightly(engine, right).cached == CACHED
            engine.reset()
            # Nothing of it is there when the next one is struck.
            for path in store.rglob("*.g0"):
                path.unlink()


def check_a_server_that_is_killed_in_the_middle_of_a_call_is_used_again_when_it_is_back(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    server = ServeProcess(variables={"STORAGE": f"file:{tmp_path / 'store'}"})
    switch = FaultSwitch(tmp_path / "faults")
    try:
        url = faulty_url(tmp_path / "faults", f"grpc://{server.address}")
        with engine_with(url, model_path, log_path("engine"), deadline_s=5 * SHORT_S) as engine:
            for method in (Method.EXISTS, Method.GET, Method.PUT):
                cached = struck_in(
                    engine, switch, lambda method: switch.kill_process_in(method, server.child.pid), method, right
                )
                assert cached < CACHED
                server.kill()
                server.start()
                until_s = time.monotonic() + BOUND_S
                while answered_rightly(engine, right).cached < CACHED:
                    assert time.monotonic() < until_s
                    engine.settle()
                    engine.reset()
                engine.reset()
                for path in (tmp_path / "store").rglob("*.g0"):
                    path.unlink()
    finally:
        server.kill()


@pytest.mark.parametrize("is_there", [True, False])
def check_a_server_that_is_away_at_the_end_does_not_hold_the_engine(
    is_there: bool, right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    server = ServeProcess(variables={"STORAGE": f"file:{tmp_path / 'store'}"})
    try:
        if not is_there:
            server.kill()
        with engine_with(f"grpc://{server.address}", model_path, log_path("engine"), deadline_s=SHORT_S) as engine:
            answered_rightly(engine, right)
            if is_there:
                # What was computed is on its way when the server goes, and the engine with it.
                server.kill()
            else:
                engine.settle()
    finally:
        server.kill()


@pytest.mark.parametrize("trouble", ["hangs", "hangs when asked", "is another's"])
def check_a_store_that_does_not_open_costs_the_start_a_deadline_and_the_log_a_line(
    trouble: str, right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    log = log_path("engine")
    match trouble:
        case "hangs":
            url = hanging_url()
        case "hangs when asked":
            url = faulty_url(tmp_path)
            FaultSwitch(tmp_path).set(register=StorageFault.HANG)
        case _:
            (tmp_path / "store").mkdir()
            (tmp_path / "store" / "notes").touch()
            url = f"file:{tmp_path / 'store'}"
    with engine_with(url, model_path, log, deadline_s=SHORT_S) as engine:
        for _ in range(2):
            assert answered_rightly(engine, right).cached == 0
            engine.settle()
            engine.reset()
        assert engine.counted("store_chunks", answer="stored") == 0
    if trouble == "is another's":
        said = [line for line in log.read_text(errors="replace").splitlines() if "must be empty or a" in line]
        assert len(said) == 1
        assert [path.name for path in (tmp_path / "store").iterdir()] == ["notes"]
