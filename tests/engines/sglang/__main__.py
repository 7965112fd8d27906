"""SGLang over the library, end to end: ``make e2e-sglang``, or some of it by name.

    python -m tests.engines.sglang [SECTION...] [--stores file,packed]

Every run is a process of the engine's environment. A line says what held; the last one, whether all did.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.sglang_figures import FILE_BACKEND_NOTE, TREE_NOTE, add_figures, line_of, told
from tests.engines.sglang.bench import ROOT, STACKS, STORES, Bench, whole
from tests.engines.sglang.document import execute
from tests.engines.sglang.install import install
from tests.engines.sglang.linked import (
    linker,
    linker_faults,
    linker_figures,
    linker_shared,
    linker_stages,
    linker_why,
)
from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.restoring import attach, layouts, matrix, processes, ranks, record, talks
from tests.engines.sglang.sizes import sizes
from tests.engines.sglang.surviving import away, damage, faults, loss


def figures(bench: Bench) -> None:
    """Write and read against SGLang's file backend, in one process, by turns; medians of their ratios."""
    print("figures: time of the file backend by ours, write / read, medians of 7 rounds")
    lines = []
    for stack in STACKS:
        for kind in bench.stores:
            with tempfile.TemporaryDirectory(dir=bench.root) as plain:
                stores = [{"file_storage_path": plain}, bench.fresh(kind)]
                run = bench.start(EngineJob(stack, stores=stores, rounds=8, prompts=2, pages=16, layers=8))
                said = run.end()
            if not said:
                bench.line(False, f"figures {stack} {kind}", run.failure)
                continue
            theirs, ours = said
            if whole(theirs) or whole(ours):
                bench.say(f"figures {stack}", said, whole)
                continue
            lines.append(line_of(stack, kind, theirs, ours))
            print(f"     {stack} ({ours['prompt_bytes'] / 1e6:.0f} MB a prompt): {told(lines[-1])}", flush=True)
        bench.stop_services()
    if bench.figures_path is not None:
        add_figures(bench.figures_path, bench.root, lines, FILE_BACKEND_NOTE)


def speed(bench: Bench) -> None:
    """Time our tree in turns with the engine's."""
    print("speed: time of our tree by that of SGLang's Rust core, in turns in one process; medians, microseconds")
    found = bench.tree_figures(ROOT)
    for line in found:
        times = f"{line['ours_us']['median']:.1f} by {line['theirs_us']['median']:.1f} us"
        print(f"     {line['components']}, {line['figure']}: {line['ratio']:.2f} ({times})", flush=True)
    bench.line(bool(found), "speed", f"{len(found)} figures")
    if bench.figures_path is not None:
        add_figures(bench.figures_path, bench.root, found, TREE_NOTE)


def document(bench: Bench) -> None:
    """Every command of docs/sglang.md."""
    execute(bench, parser())


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section
    for section in (
        *(faults, loss, damage, away),
        *(matrix, processes, ranks, talks, attach, layouts),
        *(linker, linker_faults, linker_stages, linker_why, linker_shared, linker_figures),
        *(sizes, document, speed, figures),
    )
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of this program's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("sections", nargs="*", metavar="SECTION", type=_section, help=f"{', '.join(SECTIONS)}; or record")
    made.add_argument("--stores", default=",".join(STORES), help="comma list of %(default)s")
    made.add_argument("--directory", type=Path, default=Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    made.add_argument("--json", type=Path, default=None, help="file to add the figures to")
    return made


def _section(name: str) -> str:
    if name not in {*SECTIONS, record.__name__}:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(SECTIONS)}, or record, found {name!r}")
    return name


def main() -> None:
    """Install the engine if need be, and run what was asked for."""
    chosen = parser().parse_args()
    sections = {**SECTIONS, record.__name__: record}
    # Whoever ends this ends what it has started: services and the engine are ended by what leaves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended by signal {signal.SIGTERM}"))
    installation = install()
    root = Path(tempfile.mkdtemp(prefix="e2e-sglang-", dir=chosen.directory))
    bench = Bench(installation, root, chosen.stores.split(","), chosen.json)
    keep = True
    try:
        with bench.engine():
            for name in chosen.sections or SECTIONS:
                started_s = time.monotonic()
                with bench.serving():
                    sections[name](bench)
                print(f"     {name} took {time.monotonic() - started_s:.0f} s", flush=True)
                for left in root.glob("*-*"):
                    if left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)
        keep = bool(bench.failures)
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
    print(f"{len(bench.failures)} of the runs failed{': see ' + str(root) if bench.failures else ''}")
    sys.exit(bool(bench.failures))


if __name__ == "__main__":
    main()
