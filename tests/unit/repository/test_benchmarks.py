import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.__main__ import SECTIONS, run_sections
from benchmarks.growth import CLIENTS, UNITS, fill, of_directory, of_tree
from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.picture import FIGURES, PICTURE, drawn, rates_of
from benchmarks.plan import QUICK
from benchmarks.report import FULL_RUN, BenchmarkRun, keep_rows, misses, record, write_json
from tests.sources import ROOT, repository_files


def silent(name: str) -> None:
    assert name in SECTIONS


@pytest.fixture(scope="module")
def run() -> BenchmarkRun:
    return run_sections(["lock", "components"], QUICK, progress=silent)


def test_a_run_opens_with_the_calibration_and_every_figure_is_positive_and_within_its_spread(run: BenchmarkRun) -> None:
    assert [figure.section for figure in run.figures[:3]] == ["calibration"] * 3
    assert run.calibration.scale == pytest.approx(run.calibration.memcmp_us.median / 1.3)
    for figure in run.figures:
        assert 0 < figure.spread.p10 <= figure.spread.median <= figure.spread.p90
        assert figure.spread.n >= 5
    sections = [figure.section for figure in run.figures if figure.name.startswith("lock + unlock")]
    assert sections == ["Full", "Full + window of 64"]


def test_a_run_is_kept_as_json_with_spread_calibration_machine_and_commit(run: BenchmarkRun, tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.json"
    write_json(record(run), path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert {"started", "seconds", "machine", "load_average_after", "calibration", "figures", "misses"} <= kept.keys()
    assert {"cpu", "cores", "load_average", "commit", "dirty", "python", "numpy", "torch"} <= kept["machine"].keys()
    assert {"memcmp_us", "dict_lookups_ms", "memcpy_gb_per_s", "scale"} <= kept["calibration"].keys()
    assert len(kept["figures"]) == len(run.figures)
    assert {"section", "name", "unit", "median", "p10", "p90", "n", "comparisons", "note"} <= kept["figures"][-1].keys()
    compared = [held for figure in kept["figures"] for held in figure["comparisons"]]
    assert compared
    assert all({"against", "median", "ratio", "met"} <= held.keys() for held in compared)


def test_the_picture_is_drawn_of_the_kept_figures() -> None:
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))["figures"]
    assert PICTURE.read_text(encoding="utf-8") == drawn(rates_of(figures))
    assert {call for _, call in rates_of(figures)} == {"put", "get"}


def test_runs_that_keep_rows_at_the_same_time_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rows.json"

    def keep(run: int) -> None:
        for part in range(5):
            keep_rows([{"run": run, "part": part, "pages": list(range(2_000))}], path, ("run", "part"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(keep, range(4)))
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert sorted((row["run"], row["part"]) for row in kept) == [(run, part) for run in range(4) for part in range(5)]


def test_rows_take_the_place_of_those_with_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    keep_rows([{"kind": "one", "hits": 1}, {"kind": "two", "hits": 2}], path, ("kind",))
    keep_rows([{"kind": "one", "hits": 3}], path, ("kind",))
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert kept == [{"kind": "one", "hits": 3}, {"kind": "two", "hits": 2}]


def test_documents_name_the_folder_of_results_and_no_file_in_it() -> None:
    folder = FULL_RUN.parent.relative_to(ROOT).as_posix()
    documents = [path for path in repository_files() if path.endswith(".md")]
    named = [path for path in documents if re.search(rf"{folder}/[\w.-]+", (ROOT / path).read_text(encoding="utf-8"))]
    assert named == []


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


def test_growth_measures_all_figures_of_a_store_and_those_of_a_tree(tmp_path: Path) -> None:
    url = f"packed:{tmp_path / 'store'}"
    figures = of_directory(url, 6_000, fill(url, 6_000, CLIENTS))
    assert figures.keys() == UNITS.keys()
    assert all(figures[name] > 0 for name in UNITS if name != "memory")  # of so few pages it may be less than none
    assert of_tree(1_000).keys() == UNITS.keys() - {"open", "stat"}
