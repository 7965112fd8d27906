import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.__main__ import SECTIONS, main, run_sections
from benchmarks.compare import KeptRun, compare_runs
from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import QUICK
from benchmarks.report import FULL_RUN, BenchmarkRun, keep_rows, misses, record, write_json
from tests.sources import ROOT, repository_files


def silent(name: str) -> None:
    assert name in SECTIONS


@pytest.fixture(scope="module")
def run() -> BenchmarkRun:
    return run_sections(["lock", "keys"], QUICK, progress=silent)


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


# ---- two runs compared ---------------------------------------------------------------------------------------

CALIBRATION = {
    "memcmp of 128 KB": (3.0, "us"),
    "a million dict look-ups": (50.0, "ms"),
    "memcpy of 64 MiB": (8.0, "GB/s"),
}
SLOWER_MACHINE = {
    "memcmp of 128 KB": (6.0, "us"),
    "a million dict look-ups": (100.0, "ms"),
    "memcpy of 64 MiB": (4.0, "GB/s"),
}

Lines = Mapping[str, tuple[float, str]]
"""Median and unit by line."""


def kept(path: Path, lines: Lines, calibration: Lines = CALIBRATION) -> Path:
    """Write the file of a run that found these medians."""
    sections = {"calibration": calibration, "tree": lines}
    figures = [
        {"section": section, "name": name, "unit": unit, "median": median}
        for section, found in sections.items()
        for name, (median, unit) in found.items()
    ]
    path.write_text(json.dumps({"machine": {"commit": path.stem}, "figures": figures}), encoding="utf-8")
    return path


def asked(*arguments: str | Path) -> tuple[int, str]:
    """Run ``python -m benchmarks``; return its exit status and what it printed."""
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(("unit", "worse"), [("us", 120.0), ("ms", 120.0), ("GB/s", 80.0), ("Mtoken/s", 80.0)])
def test_a_time_that_grew_and_a_rate_that_fell_are_flagged(tmp_path: Path, unit: str, worse: float) -> None:
    old, new = (
        kept(tmp_path / "old.json", {"line": (100.0, unit)}),
        kept(tmp_path / "new.json", {"line": (worse, unit)}),
    )
    (change,) = compare_runs(KeptRun.read(old), KeptRun.read(new)).flagged
    assert (change.old, change.new) == (100.0, worse)
    assert change.slower == pytest.approx(1.2, rel=0.05)
    assert compare_runs(KeptRun.read(new), KeptRun.read(old)).flagged == []


def test_a_slower_machine_is_taken_out(tmp_path: Path) -> None:
    old = kept(tmp_path / "old.json", {"line": (100.0, "us"), "rate": (100.0, "GB/s")})
    new = kept(tmp_path / "new.json", {"line": (200.0, "us"), "rate": (50.0, "GB/s")}, SLOWER_MACHINE)
    compared = compare_runs(KeptRun.read(old), KeptRun.read(new))
    assert compared.machine_slower == pytest.approx(2.0)
    assert [change.slower for change in compared.changes] == pytest.approx([1.0, 1.0])


def test_comparing_fails_and_names_the_figures_that_are_more_than_ten_percent_slower(tmp_path: Path) -> None:
    old = kept(tmp_path / "old.json", {"same": (1.0, "us"), "slow": (1.0, "us"), "gone": (1.0, "us")})
    new = kept(tmp_path / "new.json", {"same": (1.09, "us"), "slow": (1.3, "us"), "added": (1.0, "us")})
    status, output = asked("--compare", old, new, "--json", tmp_path / "compared.json")
    assert status == 1
    assert "slower by more than 10%: 1 of 2" in output
    assert "not measured again, 1: tree: gone" in output
    found = json.loads((tmp_path / "compared.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in found["flagged"]] == ["slow"]
    assert [each["name"] for each in found["changes"]] == ["same", "slow"]


def test_comparing_a_run_with_itself_passes(tmp_path: Path) -> None:
    run = kept(tmp_path / "run.json", {"line": (1.0, "us")})
    status, output = asked("--compare", run, run)
    assert status == 0
    assert "none of 1 figures is slower" in output


@pytest.mark.parametrize("text", ["{}", "not JSON", '{"figures": [{}], "machine": {"commit": "x"}}'])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(text, encoding="utf-8")
    status, output = asked("--compare", kept(tmp_path / "run.json", {}), other)
    assert status == 2
    assert "must be a run kept by" in " ".join(output.replace("│", " ").split())


def test_runs_that_share_no_figure_are_refused(tmp_path: Path) -> None:
    old, new = kept(tmp_path / "old.json", {"a": (1.0, "us")}), kept(tmp_path / "new.json", {"b": (1.0, "us")})
    with pytest.raises(ValueError, match="old and new have none in common"):
        compare_runs(KeptRun.read(old), KeptRun.read(new))


def test_a_real_run_can_be_compared(run: BenchmarkRun, tmp_path: Path) -> None:
    write_json(record(run), tmp_path / "run.json")
    compared = compare_runs(KeptRun.read(tmp_path / "run.json"), KeptRun.read(tmp_path / "run.json"))
    assert compared.machine_slower == pytest.approx(1.0)
    assert len(compared.changes) == len(run.figures) - 3
