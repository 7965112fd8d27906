"""Forms of the core side by side: this one, and the compiled one or those of other checkouts.

python -m benchmarks.side_by_side [HOME ...]

Without HOME a wheel is built with the core compiled, and unpacked; see ``scripts.check_compiled``. Each form runs in a
process of its own, and they take turns, so that all see the same machine: a batch of requests each, or the figures of
``benchmarks.trees`` each. Requests go by processor time; calls of the tree by the clock, by the median of a turn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.one_form import TREE, Taken
from benchmarks.remembering import BATCH_REQUESTS, REQUESTS, SIZES, WARM_SHARE
from scripts.check_compiled import unpacked

HERE = Path(__file__).resolve().parent.parent
TREE_TURNS = 7


class Form:
    """A process that runs one form of the core."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def turn(self, name: str) -> Taken:
        """Have it take one turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        taken: Taken = json.loads(self._process.stdout.readline())
        return taken


@contextmanager
def started(home: Path) -> Iterator[Form]:
    """Start the form whose package lies in ``home``, for the length of a ``with`` block."""
    command = [sys.executable, "-m", "benchmarks.one_form"]
    environment = {**os.environ, "PYTHONPATH": str(home)}
    with subprocess.Popen(
        command, cwd=home, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Form(process)  # at the end its input is closed, and it ends


def compare(forms: Sequence[Form], name: str, turns: int, warm: int = 0) -> list[list[Taken]]:
    """Let forms take turns, every other one backwards; return by form what each turn took but the first ``warm``."""
    taken: list[list[Taken]] = [[] for _ in forms]
    numbered = list(enumerate(forms))
    for turn in range(turns):
        for number, form in numbered:
            figures = form.turn(name)
            if turn >= warm:
                taken[number].append(figures)
        numbered.reverse()
    return taken


def told(taken: Sequence[Sequence[Taken]], figure: str) -> str:
    """Say how the others relate to the first form, by medians over turns of the ratios, and their quartiles."""
    first = [turn[figure] for turn in taken[0]]
    words: list[str] = []
    for other in taken[1:]:
        ratios = [turn[figure] / ours for turn, ours in zip(other, first, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        words.append(f"{median:.3f} of its time ({low:.3f} to {high:.3f})")
    return "; ".join(words)


def main(homes: Sequence[Path]) -> None:
    """Print each figure of all forms, and how the others relate to the first."""
    turns = -(-REQUESTS // BATCH_REQUESTS)
    warm = int(turns * WARM_SHARE)
    counted = REQUESTS - warm * BATCH_REQUESTS
    with ExitStack() as processes:
        forms = [processes.enter_context(started(home)) for home in homes]
        for name in SIZES:
            taken = compare(forms, name, turns, warm)
            rates = ", ".join(f"{counted / sum(turn[name] for turn in each):,.0f}" for each in taken)
            print(f"{name}: {rates} requests/s; {told(taken, name)}", flush=True)
        taken = compare(forms, TREE, TREE_TURNS)
        for figure in taken[0][0]:
            times = ", ".join(f"{statistics.median(turn[figure] for turn in each):.1f}" for each in taken)
            print(f"{figure}: {times} us; {told(taken, figure)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        main([HERE, *map(Path, sys.argv[1:])])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main([HERE, unpacked(Path(directory))])
