"""Our stores beside SGLang's file backend, and our tree beside its Rust tree, by turns in one process.

    python -m benchmarks.sglang_figures [--stores file,packed] [--json FILE]

Ratios are for people; ``--json`` adds them to a file, with the machine.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import calibrate, machine
from benchmarks.measure import Spread
from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import ROOT, STACKS, EngineRunner, whole

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


def stores_beside_the_file_backend(runner: EngineRunner) -> list[Line]:
    """Write and read against SGLang's file backend, in one process, by turns; medians of their ratios."""
    lines = []
    for stack in STACKS:
        for kind in runner.stores:
            with tempfile.TemporaryDirectory(dir=runner.root) as plain:
                stores = [{"file_storage_path": plain}, runner.fresh(kind)]
                run = runner.start(EngineJob(stack, stores=stores, rounds=8, prompts=2, pages=16, layers=8))
                theirs, ours = runner.end(run, whole)
            lines.append(line_of(stack, kind, theirs, ours))
            print(f"{stack} ({ours['prompt_bytes'] / 1e6:.0f} MB a prompt): {told(lines[-1])}", flush=True)
        runner.clear()
    return lines


def trees(runner: EngineRunner) -> list[Line]:
    """Time our tree in turns with the engine's."""
    command = [str(runner.installation.python), "-W", "ignore", "-m", "benchmarks.sglang_trees"]
    environment = {**runner.installation.environment, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    for line in lines:
        times = f"{line['ours_us']['median']:.1f} by {line['theirs_us']['median']:.1f} us"
        print(f"{line['components']}, {line['figure']}: {line['ratio']:.2f} ({times})", flush=True)
    return lines


def main() -> None:
    """Measure both, and keep them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default="file,packed", help="kinds of stores, a comma list")
    parser.add_argument("--json", type=Path, default=None, help="file to add the figures to")
    chosen = parser.parse_args()
    with EngineRunner.running(chosen.stores.split(",")) as runner:
        for measure, note in ((stores_beside_the_file_backend, FILE_BACKEND_NOTE), (trees, TREE_NOTE)):
            lines = measure(runner)
            if chosen.json is not None:
                add_figures(chosen.json, runner.root, lines, note)


if __name__ == "__main__":
    main()
