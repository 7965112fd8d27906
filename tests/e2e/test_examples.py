"""The examples run as they stand, and show what they say: each rung, over a store that is given."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.exactness import L3

TIMEOUT_S = 240


def example(name: str, *options: str) -> list[str]:
    """Run an example to its end; return what it printed."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    return subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    ).stdout.splitlines()


def is_shared_by_two_engines(l3: L3) -> None:
    """Rung 3: two processes at a time."""
    lines = example("two_engines", "--storage", l3.url)
    assert lines[0].startswith("engine 1: 0 tokens from storage")
    assert [line.split(" tokens")[0] for line in lines[2:]] == ["engine 2: 240", "engine 2: 240"]


@pytest.fixture
def l3(tmp_path: Path) -> L3:
    return L3(f"file:{tmp_path}", is_shared=True)


def test_memory_only_computes_what_is_new() -> None:
    assert example("memory_only") == ["0 tokens reused, 82 computed", "96 tokens reused, 31 computed"]


def test_host_and_file_survives_a_restart(l3: L3) -> None:
    """Rung 2: an engine with three tiers, and another one after it."""
    lines = example("host_and_file", "--storage", l3.url)
    assert "host_tokens=192" in lines[-2]
    assert "storage_tokens=192" in lines[-1]


def test_two_engines_share_one_store(l3: L3) -> None:
    is_shared_by_two_engines(l3)


def test_kv_events_show_the_pages_of_each_tier() -> None:
    assert example("kv_events") == ["GPU: 6 pages, CPU: 6 pages, STORAGE: 6 pages", "STORAGE: 6 pages"]


def test_hybrid_engine_resumes_three_kinds_of_state_from_every_tier() -> None:
    assert example("hybrid_engine") == [
        "cold: 0 of 10 pages reused",
        "another prompt: 0 of 10",
        "continued, from host memory: 10 of 11",
        "restarted, from storage: 9 of 10",
    ]


def test_every_example_is_executed_here() -> None:
    executed = {"memory_only", "host_and_file", "two_engines", "kv_events", "hybrid_engine"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == executed
