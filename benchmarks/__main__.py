"""Run the benchmarks.

    python -m benchmarks [--only NAME] [--quick] [--storage-dir DIR] [--json FILE]

A full run is kept in ``benchmarks/results/full.json``, in place of the one before; other runs where ``--json`` says.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.buckets import bucket_figures
from benchmarks.coded import coded_figures
from benchmarks.components import components_figures
from benchmarks.depth import depth_figures
from benchmarks.files import files_figures
from benchmarks.guard import guard_figures
from benchmarks.lmcache import lmcache_figures
from benchmarks.machine import calibrate, machine
from benchmarks.measure import Figure
from benchmarks.mooncake import mooncake_figures
from benchmarks.plan import FULL, QUICK, BenchmarkPlan, Effort
from benchmarks.report import FULL_RUN, BenchmarkRun, print_run, record, write_json
from benchmarks.trees import lock_figures

Section = Callable[[BenchmarkPlan], Iterator[Figure]]

SECTIONS: dict[str, Section] = {
    "lock": lock_figures,
    "components": components_figures,
    "files": files_figures,
    "depth": depth_figures,
    "guard": guard_figures,
    "coded": coded_figures,
    "lmcache": lmcache_figures,
    "mooncake": mooncake_figures,
    "bucket": bucket_figures,
}
"""Sections by the name that ``--only`` takes."""


def run_sections(
    names: Sequence[str],
    effort: Effort,
    *,
    storage_dir: Path | None = None,
    progress: Callable[[str], None],
) -> BenchmarkRun:
    """Calibrate, then measure the named sections; ``progress`` is told each one as it begins."""
    started, began = datetime.now(UTC), time.monotonic()
    at = machine()
    calibration = calibrate()
    plan = BenchmarkPlan(effort, calibration, storage_dir)
    figures = list(calibration.figures())
    for name in names:
        progress(name)
        figures += SECTIONS[name](plan)
    return BenchmarkRun(started, time.monotonic() - began, at, os.getloadavg(), calibration, tuple(figures))


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Measure this alone: {', '.join(SECTIONS)}.")] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Keep the figures here; a full run goes to {FULL_RUN.name} otherwise."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, small trees only.")] = False,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Directory on the file system to measure.", exists=True, file_okay=False, writable=True),
    ] = None,
) -> None:
    """Measure what the cache costs on this machine, and print and keep the figures."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    names = only or list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise typer.BadParameter(f"expected one of {', '.join(SECTIONS)}, found {name!r}", param_hint="--only")
    errors = Console(stderr=True)
    run = run_sections(
        names,
        QUICK if quick else FULL,
        storage_dir=storage_dir,
        progress=lambda name: errors.print(f"measuring {name}"),
    )
    print_run(run, console)
    path = json or (None if only or quick else FULL_RUN)
    if path is None:
        console.print("figures not kept: only a full run is, or one with --json FILE")
        return
    write_json(record(run), path)
    console.print(f"figures kept in {path}")


if __name__ == "__main__":
    typer.run(main)
