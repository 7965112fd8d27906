import json
from pathlib import Path

import pytest

from benchmarks.__main__ import SECTIONS, run_sections
from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import QUICK
from benchmarks.report import BenchmarkRun, misses, result_path, write_json


def silent(name: str) -> None:
    assert name in SECTIONS


@pytest.fixture(scope="module")
def run() -> BenchmarkRun:
    return run_sections(["lock"], QUICK, progress=silent)


def test_a_run_opens_with_the_calibration(run: BenchmarkRun) -> None:
    assert [figure.section for figure in run.figures[:3]] == ["calibration"] * 3
    assert run.calibration.scale == pytest.approx(run.calibration.memcmp_us.median / 1.3)


def test_every_figure_is_positive_and_within_its_spread(run: BenchmarkRun) -> None:
    for figure in run.figures:
        assert 0 < figure.spread.p10 <= figure.spread.median <= figure.spread.p90
        assert figure.spread.n >= 5


def test_a_line_of_the_tree_is_held_against_the_scaled_reference(run: BenchmarkRun) -> None:
    lines = [figure for figure in run.figures if figure.name.startswith("lock + unlock")]
    assert len(lines) == 2
    for line in lines:
        (held,) = line.comparisons
        assert held.ratio == pytest.approx(line.spread.median / held.median)
        assert held.met is not None


def test_a_run_is_kept_as_json_with_spread_calibration_machine_and_commit(run: BenchmarkRun, tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.json"
    write_json(run, path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert {"started", "seconds", "machine", "load_average_after", "calibration", "figures", "misses"} <= kept.keys()
    assert {"cpu", "cores", "load_average", "commit", "dirty", "python", "numpy", "torch"} <= kept["machine"].keys()
    assert {"memcmp_us", "dict_lookups_ms", "memcpy_gb_per_s", "scale"} <= kept["calibration"].keys()
    assert len(kept["figures"]) == len(run.figures)
    assert {"section", "name", "unit", "median", "p10", "p90", "n", "comparisons", "note"} <= kept["figures"][-1].keys()
    assert {"against", "median", "ratio", "met"} <= kept["figures"][-1]["comparisons"][0].keys()


def test_results_are_named_by_day_and_commit(run: BenchmarkRun) -> None:
    assert result_path(run).name == f"{run.started:%Y-%m-%d}-{run.machine.commit}.json"


def test_a_target_that_was_not_met_is_a_miss(run: BenchmarkRun) -> None:
    spread = Spread.of([1.0, 2.0, 3.0])
    held = (
        Comparison("fast", 1.0, 2.0, at_most=1.5),
        Comparison("slow", 4.0, 0.5, at_most=1.5),
        Comparison("plain", 1.0, 0.8, at_least=0.9),
        Comparison("shown", 1.0, 9.0),
    )
    figure = Figure("section", "line", "us", spread, held)
    only = BenchmarkRun(run.started, 1.0, run.machine, (0.0, 0.0, 0.0), run.calibration, (figure,))
    assert [missed.against for _, missed in misses(only)] == ["fast", "plain"]


def test_subjects_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    subjects = [timed(lambda: order.append("a")), timed(lambda: order.append("b"))]
    taken = interleaved(subjects, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in taken] == [2, 2]
