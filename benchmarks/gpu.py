"""Every test, check and benchmark that needs a GPU, by one command: ``make gpu``.

    python -m benchmarks.gpu [--quick] [--json FILE]

Tests first, those of captured graphs before all others, then checks of figures against their bounds, each group in a
process of its own, since an error of a kernel ends a process's use of the device. Then copies against the copy engine,
and what a forward's metadata costs, as long as there is time: all of it ends within LIMIT_S. Outcomes and figures are
kept in ``benchmarks/results/gpu.json``, in place of those before.

Needs what a machine with a GPU has: Python 3.11, torch for CUDA, numpy, pytest with pytest-timeout, hypothesis, rich,
xxhash and protobuf, and transformers for tests of a whole engine; nothing is installed.

Where there is no CUDA device, one line says so, and the exit status is 0. Where there is one that torch cannot use,
the status is 1; so it is where a test fails, or a bound is missed.
"""

import argparse
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
from xml.etree import ElementTree

import torch
from rich.console import Console

from benchmarks.machine import ROOT, calibrate, machine
from benchmarks.measure import Figure
from benchmarks.on_device import device_figures
from benchmarks.plan import FULL, QUICK, BenchmarkPlan
from benchmarks.report import FULL_RUN, BenchmarkRun, print_run, record, write_json

GPU_RUN = FULL_RUN.with_name("gpu.json")
"""Outcomes and figures of the last run with a GPU."""

STALENESS = ("tests/unit/forward/test_graph.py", "tests/e2e/test_engine_staleness.py")
"""Tests of captured graphs: what is replayed must write where the map leads now."""

OTHERS = (
    "tests/unit/core/test_device_copies.py",
    "tests/unit/forward/test_forward.py",
    "tests/property/test_row_geometries.py",
    "tests/property/test_device_histories.py",
)
"""The other files with tests marked ``gpu``."""

CHECKS = "benchmarks/check_gpu.py"
"""Figures that are held against bounds."""

LIMIT_S = 570
"""Longest run, seconds: a machine that is lent may end a command after 600."""

FIGURES_S = 90
"""Of these, what is left to figures without bounds."""

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
    figure: str = ""
    """What a check has found."""


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


def run_tests(paths: Sequence[str], limit_s: float = LIMIT_S) -> list[GpuTest]:
    """Run the tests marked ``gpu`` in some files, long ones too; what pytest prints goes to the terminal.

    Neither ``conftest.py`` nor warnings count: the one wants packages that such a machine need not have, the others may
    be those of another torch.
    """
    with tempfile.TemporaryDirectory(prefix="unified-cache-gpu-") as directory:
        report = Path(directory) / "tests.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            "-W",
            "default",
            "-m",
            "gpu",
        ]
        command += ["-v", "-o", "python_files=test_*.py check_*.py", "-o", "python_functions=test_* check_*"]
        command.append(f"--junit-xml={report}")
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))}
        try:
            ran = subprocess.run([*command, *paths], cwd=ROOT, env=environment, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return [GpuTest(" ".join(paths), "failed", limit_s, f"not at its end after {limit_s:.0f} s")]
        if not report.exists():
            message = f"pytest ended with status {ran.returncode}, without a report"
            return [GpuTest(" ".join(paths), "failed", time.monotonic() - began, message)]
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
        figures = [each.get("value", "") for each in case.iter("property") if each.get("name") == "figure"]
        name = f"{case.get('classname', '')}.{case.get('name', '')}".lstrip(".")
        outcomes.append(GpuTest(name, outcome, float(case.get("time", "0")), message, *figures))
    return outcomes


def print_tests(tests: Sequence[GpuTest], console: Console) -> None:
    """Print a line for each check, and for each test that did not pass."""
    for test in tests:
        if test.figure or test.outcome != "passed":
            said = test.figure or test.message
            console.print(f"{test.outcome:8} {test.name.rpartition('.')[2]}: {said}", markup=False, highlight=False)


def _described(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def main() -> int:
    """Run every test, check and benchmark that needs a CUDA device; say so in one line where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=GPU_RUN, metavar="FILE", help="keep outcomes and figures here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    asked = parser.parse_args()
    why = absent(is_usable=torch.cuda.is_available(), has_driver=DRIVER.exists())
    if why is not None:
        line, status = why
        print(line, file=sys.stderr if status else sys.stdout)
        return status
    # cuBLAS sums in the same order each time only with a workspace of its own, which it is given by this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    console = Console(width=None if sys.stdout.isatty() else 200)
    device = torch.device("cuda", torch.cuda.current_device())
    started, began = datetime.now(UTC), time.monotonic()
    end_s = began + LIMIT_S
    tests: list[GpuTest] = []
    for paths in (STALENESS, OTHERS, (CHECKS,)):
        tests += run_tests(paths, max(end_s - FIGURES_S - time.monotonic(), 1))
    at, calibration = machine(), calibrate()
    figures: list[Figure] = list(calibration.figures())
    for figure in device_figures(BenchmarkPlan(QUICK if asked.quick else FULL, calibration, None), device):
        figures.append(figure)
        if time.monotonic() > end_s:
            console.print("no time is left for further figures; --quick takes fewer repetitions")
            break
    run = BenchmarkRun(started, time.monotonic() - began, at, os.getloadavg(), calibration, tuple(figures))
    print_run(run, console)
    print_tests(tests, console)
    counts = Counter(test.outcome for test in tests)
    console.print(f"tests on {torch.cuda.get_device_name(device)}: {dict(counts)}")
    write_json(record(run) | {"device": _described(device), "tests": [asdict(test) for test in tests]}, asked.json)
    console.print(f"figures kept in {asked.json}")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
