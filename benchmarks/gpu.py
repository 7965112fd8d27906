"""Every test and benchmark that needs a GPU, by one command: ``make gpu``.

    python -m benchmarks.gpu [--quick] [--json FILE]

Tests first, those of captured graphs before all others, each group in a process of its own, since an error of a kernel
ends a process's use of the device. Then copies against the copy engine, and what a forward's metadata costs. Outcomes
and figures are kept in ``benchmarks/results/gpu.json``, in place of those before.

Where there is no CUDA device, one line says so, and the exit status is 0. Where there is one that torch cannot use,
the status is 1; so it is where a test fails.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import torch
import typer
from rich.console import Console

from benchmarks.machine import ROOT, calibrate, machine
from benchmarks.measure import Figure
from benchmarks.on_device import device_figures
from benchmarks.plan import FULL, QUICK, BenchmarkPlan
from benchmarks.report import FULL_RUN, BenchmarkRun, print_run, record, write_json

__all__ = ["GpuTest", "absent", "read_outcomes", "run_tests"]

GPU_RUN = FULL_RUN.with_name("gpu.json")
"""Outcomes and figures of the last run with a GPU."""

STALENESS = ("tests/unit/forward/test_graph.py", "tests/e2e/test_engine_staleness.py")
"""Tests of captured graphs: what is replayed must write where the map leads now."""

TESTS_S = 1200
"""Longest that a group of tests may take, seconds."""

DRIVER = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver; it is there where a GPU can be reached, whatever torch was built for."""


@dataclass(frozen=True, slots=True)
class GpuTest:
    """A test that ran, or was to run, on a GPU."""

    name: str
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    seconds: float
    message: str = ""
    """First line of a failure, or the reason of a skip."""


def absent(*, is_usable: bool, has_driver: bool) -> tuple[str, int] | None:
    """Return why nothing runs here, in a line, and the exit status that goes with it; None where a GPU can be used."""
    if is_usable:
        return None
    if not has_driver:
        return f"no CUDA device here: no test and no benchmark to run (torch {torch.__version__})", 0
    return (
        f"expected a torch that can use the GPU of this machine ({DRIVER} is there), found {torch.__version__}, built "
        f"for CUDA {torch.version.cuda}; install one as pytorch.org/get-started says, into .venv, and try again",
        1,
    )


def run_tests(paths: Sequence[str], ignored: Sequence[str] = ()) -> list[GpuTest]:
    """Run the tests marked ``gpu`` below some paths, long ones too; what pytest prints goes to the terminal."""
    with tempfile.TemporaryDirectory(prefix="unified-cache-gpu-") as directory:
        report = Path(directory) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-v", f"--junit-xml={report}"]
        command += [f"--ignore={path}" for path in ignored]
        began = time.monotonic()
        try:
            status = subprocess.run([*command, *paths], cwd=ROOT, timeout=TESTS_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return [GpuTest(" ".join(paths), "failed", TESTS_S, f"not at its end after {TESTS_S} s")]
        if not report.exists():
            seconds = time.monotonic() - began
            return [GpuTest(" ".join(paths), "failed", seconds, f"pytest ended with status {status}, without a report")]
        return read_outcomes(report)


def read_outcomes(report: Path) -> list[GpuTest]:
    """Return the outcome of every test in a report that pytest has written as JUnit's XML."""
    outcomes = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for kind, found in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            element = case.find(kind)
            if element is not None:
                outcome, message = found, element.get("message", "").partition("\n")[0]
        name = f"{case.get('classname', '')}.{case.get('name', '')}".lstrip(".")
        outcomes.append(GpuTest(name, outcome, float(case.get("time", "0")), message))
    return outcomes


def _described(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def main(
    json: Annotated[Path, typer.Option(metavar="FILE", help="Keep outcomes and figures here.")] = GPU_RUN,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
) -> None:
    """Run every test and benchmark that needs a CUDA device; say so in one line where there is none."""
    why = absent(is_usable=torch.cuda.is_available(), has_driver=DRIVER.exists())
    if why is not None:
        line, status = why
        typer.echo(line, err=bool(status))
        raise typer.Exit(status)
    # cuBLAS sums in the same order each time only with a workspace of its own, which it is given by this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    console = Console(width=None if sys.stdout.isatty() else 200)
    device = torch.device("cuda", torch.cuda.current_device())
    started, began = datetime.now(UTC), time.monotonic()
    tests = run_tests(STALENESS) + run_tests(["tests"], STALENESS)
    at, calibration = machine(), calibrate()
    figures: list[Figure] = list(calibration.figures())
    figures += device_figures(BenchmarkPlan(QUICK if quick else FULL, calibration, None), device)
    run = BenchmarkRun(started, time.monotonic() - began, at, os.getloadavg(), calibration, tuple(figures))
    print_run(run, console)
    counts = Counter(test.outcome for test in tests)
    console.print(f"tests on {torch.cuda.get_device_name(device)}: {dict(counts)}")
    write_json(record(run) | {"device": _described(device), "tests": [asdict(test) for test in tests]}, json)
    console.print(f"figures kept in {json}")
    raise typer.Exit(1 if counts["failed"] or not counts["passed"] else 0)


if __name__ == "__main__":
    typer.run(main)
