"""Plant known mistakes of systems of this kind, one at a time, and see that the tests catch every one.

    python -m scripts.mutants                    all of them
    python -m scripts.mutants NAME ...           some

Works on a copy; the tree is not touched. Exit status 1 if a mutant survives.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.mutants import MUTANTS, TESTS, Mutant, planted

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
"""Longest run of all tests over one mutant."""
TEST_TIMEOUT_S = 60
"""Longest test; one that a mutant keeps from ending fails after it."""


def main() -> int:
    """Run the chosen mutants; print each and the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant, all unless given")
    given = parser.parse_args()
    unknown = set(given.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"expected names of mutants, such as {MUTANTS[0].name!r}, found {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    survivors: list[str] = []
    for mutant in chosen:
        started_s = time.monotonic()
        caught_by = caught(mutant)
        taken_s = time.monotonic() - started_s
        sys.stdout.write(f"{'caught  ' if caught_by else 'SURVIVED'}  {mutant.name:48} {taken_s:5.0f} s  {caught_by}\n")
        sys.stdout.flush()
        if not caught_by:
            survivors.append(mutant.name)
    sys.stdout.write(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught\n")
    return 1 if survivors else 0


def caught(mutant: Mutant) -> str:
    """Return the test file that fails on the mutant; empty if nothing notices it."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for part in ("unified_cache", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "unified_cache" / mutant.path
        path.write_text(planted(mutant, path.read_text()))
        pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S)]
        try:
            done = subprocess.run(  # noqa: S603 -- our own command
                [sys.executable, *pytest, *(mutant.tests or TESTS)],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": directory, "UNIFIED_CACHE_TEST_FIRST_FAILURE": "1"},
                timeout=TIMEOUT_S,
                capture_output=True,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"not over after {TIMEOUT_S} s"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: its tests did not run:\n{done.stdout}{done.stderr}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:::| )", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else ""


if __name__ == "__main__":
    sys.exit(main())
