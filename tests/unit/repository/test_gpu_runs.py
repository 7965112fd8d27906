"""``make gpu``: what it finds, what it says where it finds nothing, and that its benchmarks run, on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import STALENESS, absent, read_outcomes, run_tests
from benchmarks.machine import Calibration
from benchmarks.measure import Spread
from benchmarks.on_device import SHAPES, device_figures
from benchmarks.plan import QUICK, BenchmarkPlan
from tests.sources import ROOT, python_sources

ONE = Spread.of([1.0])


def test_a_machine_without_a_device_is_told_so_in_one_line_and_nothing_has_failed() -> None:
    why = absent(is_usable=False, has_driver=False)
    assert why is not None
    line, status = why
    assert (line.count("\n"), status) == (0, 0)
    assert "no CUDA device" in line


def test_a_device_that_torch_was_not_built_for_is_an_error_that_says_what_to_install() -> None:
    why = absent(is_usable=False, has_driver=True)
    assert why is not None
    line, status = why
    assert status == 1
    assert torch.__version__ in line
    assert "install" in line


def test_a_device_that_can_be_used_is_used() -> None:
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device: its tests would run here a second time")
def test_tests_that_need_a_device_are_found_and_skipped_where_none_is() -> None:
    found = run_tests(["tests/unit/core/test_device_copies.py"])
    assert len(found) >= 10
    assert {test.outcome for test in found} == {"skipped"}
    assert all("no CUDA device" in test.message for test in found)


def test_outcomes_are_read_with_the_first_line_of_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a.b" name="holds" time="0.5"/>'
        '<testcase classname="a.b" name="breaks" time="1.5">'
        '<failure message="assert 1 == 2&#10;more">...</failure></testcase>'
        '<testcase classname="" name="a.c" time="0"><error message="collection failure">...</error></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    found = [(test.name, test.outcome, test.seconds, test.message) for test in read_outcomes(report)]
    assert found == [
        ("a.b.holds", "passed", 0.5, ""),
        ("a.b.breaks", "failed", 1.5, "assert 1 == 2"),
        ("a.c", "failed", 0.0, "collection failure"),
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
