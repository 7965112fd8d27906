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

TREE_NOTE = "Ratios are times of our tree by those of SGLang's."
FILE_BACKEND_NOTE = (
    "Ratios are times of SGLang's file backend by ours. raw_read_ms: as many bytes read and checked by one thread, "
    "without any store or engine."
)


def line_of(stack: str, store: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Line:
    """Compare two outcomes round by round, without the first, which makes directories, threads and page tables."""
    line: Line = {"stack": stack, "store": store, "prompt_bytes": ours["prompt_bytes"], "pools": ours["pools"]}
    for phase in ("write", "read"):
        for kind in ("", "_cpu"):
            key = f"{phase}{kind}_s"
            before, after = theirs[key][1:], ours[key][1:]
            line[f"{phase}{kind}_ratio"] = _spread([t / o for t, o in zip(before, after, strict=True)])
            line[f"{phase}{kind}_ms"] = {"file_backend": _ms(before), "ours": _ms(after)}
    line["read_bytes"] = ours["payload_bytes"] // len(ours["read_s"])
    line["raw_read_ms"] = _ms(ours["raw_read_s"][1:])
    return line


def told(line: Line) -> str:
    """Return a line for people."""
    write, read = line["write_ratio"], line["read_ratio"]
    cpu = f"[{line['write_cpu_ratio']['median']:.2f} / {line['read_cpu_ratio']['median']:.2f}]"
    times = f"{line['read_ms']['file_backend']['median']:.1f} and {line['read_ms']['ours']['median']:.1f} ms"
    return (
        f"{line['store']} {write['median']:.2f} / {read['median']:.2f} {cpu}, read in {times}, "
        f"bare {line['raw_read_ms']['median']:.1f} ms"
    )


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
