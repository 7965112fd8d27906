"""Figures of runs beside SGLang's file backend, by turns in one process: for people, and as JSON to keep."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import calibrate, machine
from benchmarks.measure import Spread

__all__ = ["FILE_BACKEND_NOTE", "TREE_NOTE", "add_figures", "line_of", "told"]

Line = dict[str, Any]

FILE_BACKEND_NOTE = "Ratios are times of SGLang's file backend by ours."
TREE_NOTE = "Ratios are times of our tree by those of SGLang's."


def line_of(stack: str, store: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Line:
    """Compare outcomes round by round, without the first, which makes directories, threads and page tables."""
    line: Line = {"stack": stack, "store": store, "prompt_bytes": ours["prompt_bytes"], "pools": ours["pools"]}
    for phase in ("write", "read"):
        before, after = theirs[f"{phase}_s"][1:], ours[f"{phase}_s"][1:]
        line[f"{phase}_ratio"] = _spread([t / o for t, o in zip(before, after, strict=True)])
        line[f"{phase}_ms"] = {"file_backend": _ms(before), "ours": _ms(after)}
    return line


def told(line: Line) -> str:
    """Return a line for people."""
    ratios = " / ".join(f"{line[f'{phase}_ratio']['median']:.2f}" for phase in ("write", "read"))
    medians = [(phase, line[f"{phase}_ms"]) for phase in ("write", "read")]
    times = [f"{phase} {ms['file_backend']['median']:.1f} and {ms['ours']['median']:.1f} ms" for phase, ms in medians]
    return f"{line['store']} {ratios}; {'; '.join(times)}"


def add_figures(path: Path, directory: Path, lines: Sequence[Line], note: str) -> None:
    """Add a run to a file: its figures and what they mean, the file system of the stores, the machine and its speed."""
    kept: dict[str, Any] = {"runs": []}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
    before = machine()
    run = {
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(before),
        "calibration": asdict(calibrate()),
        "file_system": _file_system(directory),
        "note": note,
        "lines": list(lines),
    }
    kept["runs"].append(run)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _file_system(directory: Path) -> str:
    found = subprocess.run(["df", "--output=fstype", str(directory)], capture_output=True, text=True, check=True)
    return found.stdout.split()[-1]


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return _spread([1e3 * each for each in seconds])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(Spread.of(values)).items()}
