"""``make gpu``: what it finds, what it says where it finds nothing, and that its benchmarks run, on the CPU."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.check_gpu import CHECKS, Found, GpuSizes, operations_of_a_load
from benchmarks.gpu import CHECKS as CHECKS_FILE
from benchmarks.gpu import OTHERS, STALENESS, absent, read_outcomes, run_tests
from benchmarks.machine import Calibration
from benchmarks.measure import Spread
from benchmarks.on_device import SHAPES, device_figures
from benchmarks.plan import QUICK, BenchmarkPlan
from tests.sources import ROOT, python_sources
from tests.support.late_device import LateDevice
from unified_cache.controller import memory
from unified_cache.controller.copies.gpu import StagedCopies

ONE = Spread.of([1.0])


@pytest.mark.parametrize(("has_driver", "status", "words"), [(False, 0, "no CUDA device"), (True, 1, "install")])
def test_why_no_device_can_be_used_is_said_in_one_line_and_is_a_failure_where_there_is_one(
    has_driver: bool, status: int, words: str
) -> None:
    why = absent(is_usable=False, has_driver=has_driver)
    assert why is not None
    line, found = why
    assert (line.count("\n"), found) == (0, status)
    assert words in line
    assert torch.__version__ in line
    assert absent(is_usable=True, has_driver=True) is None


def test_whether_there_is_a_device_is_asked_in_one_place_so_that_no_test_is_forgotten() -> None:
    asking = {source.path for source in python_sources() if "cuda.is_available()" in source.text}
    asking -= {"tests/unit/repository/test_gpu_runs.py"}
    # The first marks tests, the second says on the terminal which of two ways it shows, the third is the command.
    assert asking == {"tests/support/gpu.py", "tests/unit/forward/test_graph.py", "benchmarks/gpu.py"}


def test_what_runs_before_all_else_are_tests_of_captured_graphs() -> None:
    for path in STALENESS:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert any(f"@{mark}\ndef test_" in text for mark in ("needs_gpu", "with_streams"))


def test_every_file_with_tests_that_need_a_device_is_named() -> None:
    marked = re.compile(r"^@(needs_gpu|devices|with_streams)$", re.MULTILINE)
    tests = [source for source in python_sources() if source.path.startswith("tests/") and "/test_" in source.path]
    assert {source.path for source in tests if marked.search(source.text)} == {*STALENESS, *OTHERS}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device: its tests would run here a second time")
def test_tests_that_need_a_device_are_found_and_skipped_where_none_is_without_packages_they_do_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgspec", "zmq", "pydantic", "grpc"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('without {name}', name='{name}')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_tests([*STALENESS, *OTHERS, CHECKS_FILE])
    assert len(found) >= 60
    assert {test.outcome for test in found} == {"skipped"}
    assert all(re.search("no CUDA device|Triton|compute-sanitizer", test.message) for test in found)
    assert sum(".check_gpu[" in test.name for test in found) == len(CHECKS)


SMALL = GpuSizes(
    layers_count=2,
    token_bytes=16,
    tokens=(64, 128),
    limit_bytes=1 << 10,
    requests=4,
    request_pages=16,
    width=4,
    products=2,
    slab_bytes=1 << 16,
    pinned_bytes=1 << 20,
    rounds=1,
)


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not operations_of_a_load])
def test_checks_of_a_device_run_on_one_that_is_late_and_say_what_they_found(
    check: Callable[[GpuSizes], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "gpu_copies", lambda: StagedCopies)
    with LateDevice():
        found = check(SMALL)
    assert found.figure
    if check.__name__ in RIGHT_BYTES:
        assert found.is_kept, found.figure


RIGHT_BYTES = {
    "replays_of_every_mode",
    "layers_on_another_thread",
    "captures_beside_backups",
    "waits_of_the_owner",
    "full_device",
}
"""Checks whose bound is no figure of time or memory."""


def test_outcomes_are_read_with_the_first_line_of_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a.b" name="holds" time="0.5"><properties><property name="figure" value="55 GB/s"/>'
        "</properties></testcase>"
        '<testcase classname="a.b" name="breaks" time="1.5">'
        '<failure message="assert 1 == 2&#10;more">...</failure></testcase>'
        '<testcase classname="" name="a.c" time="0"><error message="collection failure">...</error></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    found = [(test.name, test.outcome, test.seconds, test.message, test.figure) for test in read_outcomes(report)]
    assert found == [
        ("a.b.holds", "passed", 0.5, "", "55 GB/s"),
        ("a.b.breaks", "failed", 1.5, "assert 1 == 2", ""),
        ("a.c", "failed", 0.0, "collection failure", ""),
    ]


def test_the_benchmarks_of_a_device_run_on_the_cpu_and_hold_every_copy_against_its_references() -> None:
    effort = replace(QUICK, copy_bytes=1 << 18, copy_rounds=1, match_rounds=1)
    figures = list(device_figures(BenchmarkPlan(effort, Calibration(ONE, ONE, ONE), None), torch.device("cpu")))
    copies = [figure for figure in figures if figure.name.startswith(("D->H", "H->D"))]
    assert len(copies) == 4 * len(SHAPES)
    for figure in copies:
        assert [held.against for held in figure.comparisons] == ["one copy of all", "a copy for each row"]
    assert len({figure.name for figure in figures}) == len(figures)
    assert {figure.section for figure in figures} == {"copies on the device", "metadata on the device"}
