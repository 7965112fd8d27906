"""Run the benchmarks: ``python -m benchmarks [--only NAME] [--json FILE] [--quick] [--storage-dir DIR]``.

Where UNIFIED_CACHE_SKETCH names a folder with another implementation of the tree, a ``tree.py``, that one is measured
in turns with ours.
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

from benchmarks.components import components_figures
from benchmarks.copies import copies_figures
from benchmarks.files import files_figures
from benchmarks.keys import keys_figures
from benchmarks.machine import calibrate, machine
from benchmarks.measure import Figure
from benchmarks.mooncake import mooncake_figures
from benchmarks.plan import FULL, QUICK, BenchmarkPlan, Effort
from benchmarks.remote import remote_figures
from benchmarks.report import BenchmarkRun, print_run, result_path, write_json
from benchmarks.trees import evict_figures, insert_figures, lock_figures, match_figures
from benchmarks.ttft import ttft_figures

SKETCH_VARIABLE = "UNIFIED_CACHE_SKETCH"

Section = Callable[[BenchmarkPlan], Iterator[Figure]]

SECTIONS: dict[str, Section] = {
    "match": match_figures,
    "insert": insert_figures,
    "evict": evict_figures,
    "lock": lock_figures,
    "components": components_figures,
    "keys": keys_figures,
    "copies": copies_figures,
    "files": files_figures,
    "ttft": ttft_figures,
    "remote": remote_figures,
    "mooncake": mooncake_figures,
}
"""What ``--only`` can name."""


def run_sections(
    names: Sequence[str],
    effort: Effort,
    *,
    sketch: Path | None = None,
    storage_dir: Path | None = None,
    progress: Callable[[str], None],
) -> BenchmarkRun:
    """Calibrate, then measure the named sections; ``progress`` is told each one as it begins."""
    started, began = datetime.now(UTC), time.monotonic()
    at = machine()
    calibration = calibrate()
    plan = BenchmarkPlan(effort, calibration, sketch, storage_dir)
    figures = list(calibration.figures())
    for name in names:
        progress(name)
        figures += SECTIONS[name](plan)
    return BenchmarkRun(started, time.monotonic() - began, at, os.getloadavg(), calibration, tuple(figures))


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Measure this alone: {', '.join(SECTIONS)}.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where to keep the figures; benchmarks/results by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, small trees only.")] = False,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Directory on the file system to measure.", exists=True, file_okay=False, writable=True),
    ] = None,
) -> None:
    """Measure what the cache costs on this machine, and print and keep the figures."""
    names = only or list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise typer.BadParameter(f"expected one of {', '.join(SECTIONS)}, found {name!r}", param_hint="--only")
    folder = os.environ.get(SKETCH_VARIABLE)
    sketch = Path(folder) if folder and (Path(folder) / "tree.py").is_file() else None
    console = Console(width=None if sys.stdout.isatty() else 200)
    errors = Console(stderr=True)
    run = run_sections(
        names,
        QUICK if quick else FULL,
        sketch=sketch,
        storage_dir=storage_dir,
        progress=lambda name: errors.print(f"measuring {name}"),
    )
    path = json or result_path(run)
    write_json(run, path)
    print_run(run, console)
    console.print(f"figures kept in {path}")


if __name__ == "__main__":
    typer.run(main)
