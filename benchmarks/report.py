"""A run's figures as a table for people and as JSON for comparing runs."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Calibration, Machine, machine
from benchmarks.measure import Comparison, Figure

FULL_RUN = Path(__file__).resolve().parent / "results" / "full.json"
"""Figures of the last full run."""


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """All figures of one run."""

    started: datetime
    seconds: float
    machine: Machine
    load_average_after: tuple[float, float, float]
    calibration: Calibration
    figures: tuple[Figure, ...]
    """Calibration first."""


def misses(run: BenchmarkRun) -> list[tuple[Figure, Comparison]]:
    """Return the comparisons whose target was not met."""
    return [(figure, held) for figure in run.figures for held in figure.comparisons if held.met is False]


def record(run: BenchmarkRun) -> dict[str, object]:
    """Return a run as what JSON can hold."""
    return {
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": round(run.seconds, 1),
        "machine": asdict(run.machine),
        "load_average_after": run.load_average_after,
        "calibration": asdict(run.calibration) | {"scale": run.calibration.scale},
        "figures": [_figure_record(figure) for figure in run.figures],
        "misses": [
            {"section": figure.section, "name": figure.name, "against": held.against, "ratio": held.ratio}
            for figure, held in misses(run)
        ],
    }


def _figure_record(figure: Figure) -> dict[str, object]:
    return {
        "section": figure.section,
        "name": figure.name,
        "unit": figure.unit,
        **asdict(figure.spread),
        "comparisons": [asdict(held) | {"met": held.met} for held in figure.comparisons],
        "note": figure.note,
    }


def write_json(found: dict[str, object], path: Path) -> None:
    """Write what ``record`` returned to a file; directories are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def keep_rows(rows: Sequence[Mapping[str, object]], path: Path, key: Sequence[str]) -> None:
    """Put rows into a file of rows, in the place of those with the same values under ``key``, after the others.

    Runs that keep rows at the same time wait for each other, so none loses those of another.
    """
    here = asdict(machine())
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        found = {tuple(row[name] for name in key): row for row in (*kept, *rows)}
        write_json({"machine": here, "rows": list(found.values())}, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others who do the same out of a folder for the length of a ``with`` block."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def print_run(run: BenchmarkRun, console: Console) -> None:
    """Print the table, section by section, and last what missed its target."""
    at = run.machine
    dirty = " and changes" if at.dirty else ""
    console.print(f"{at.cpu}, {at.cores} cores; commit {at.commit}{dirty}; Python {at.python}, ", end="")
    console.print(
        f"numpy {at.numpy}, torch {at.torch}; load {at.load_average[0]:.2f} -> {run.load_average_after[0]:.2f}"
    )
    sections: dict[str, list[Figure]] = {}
    for figure in run.figures:
        sections.setdefault(figure.section, []).append(figure)
    for section, figures in sections.items():
        console.print(_table(section, figures))
    _print_misses(run, console)
    console.print(f"{run.seconds:.0f} s in all")


def _print_misses(run: BenchmarkRun, console: Console) -> None:
    found = misses(run)
    held_count = sum(held.met is not None for figure in run.figures for held in figure.comparisons)
    if not found:
        console.print(f"misses: none of {held_count} targets")
        return
    table = Table(title=f"misses: {len(found)} of {held_count} targets", title_justify="left")
    for heading in ("section", "line", "ours", "against", "reference", "ratio", "wanted"):
        table.add_column(heading, justify="right" if heading in ("ours", "reference", "ratio") else "left")
    for figure, held in found:
        ours = f"{_number(figure.spread.median)} {figure.unit}"
        reference = f"{_number(held.median)} {figure.unit}"
        table.add_row(figure.section, figure.name, ours, held.against, reference, f"{held.ratio:.2f}", held.wanted)
    console.print(table)


def _table(section: str, figures: Sequence[Figure]) -> Table:
    table = Table(title=section, title_justify="left")
    for heading in ("line", "median", "p10 .. p90", "n", "against", "reference", "ratio", "wanted", "note"):
        numeric = heading in ("median", "p10 .. p90", "n", "reference", "ratio")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=heading != "note")
    for figure in figures:
        spread, held = figure.spread, figure.comparisons
        table.add_row(
            figure.name,
            f"{_number(spread.median)} {figure.unit}",
            f"{_number(spread.p10)} .. {_number(spread.p90)}",
            str(spread.n),
            "\n".join(each.against for each in held),
            "\n".join(_number(each.median) for each in held),
            "\n".join(_ratio(each) for each in held),
            "\n".join(each.wanted for each in held),
            figure.note,
        )
    return table


def _ratio(held: Comparison) -> str:
    colour = {None: "", True: "green", False: "red"}[held.met]
    return f"[{colour}]{held.ratio:.2f}[/]" if colour else f"{held.ratio:.2f}"


def _number(value: float) -> str:
    """Show three digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
