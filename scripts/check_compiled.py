"""Check the compiled core: it passes the tests of the core, and answers as the same files in plain Python do.

A wheel is built with the core compiled and unpacked beside the tests, which then run over it. After that both forms
simulate the same operations and replay the same trace; what they print must be the same. Where nothing can be compiled
it says so and checks nothing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.check_wheel import build
from scripts.compile_core import CHOICE, can_compile

__all__ = ["unpacked"]

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("tests", "benchmarks", "docs", "traces", "proto", "pyproject.toml")
"""What is taken along: tests find it from where they lie."""

TESTS = (
    "tests/unit/core",
    "tests/property/test_tree_against_model.py",
    "tests/property/test_eviction_policies.py",
    "tests/property/test_adaptive_eviction.py",
    "tests/property/test_window_grid.py",
)
SIMULATED = ("--seed", "11", "--seeds", "1", "--ops", "8000")
REPLAYED = (
    "traces/mooncake_conversation_1000.jsonl.gz",
    "--no-bytes",
    "--device-pages",
    "1000",
    "--host-pages",
    "4000",
)
POLICIES = ("lru", "priority", "adaptive")
COMMAND_LINE = "import sys; from unified_cache.cli.main import main; sys.exit(main())"
APART = frozenset({"environment", "seconds", "requests_per_s"})
"""Keys of a result that say where it was found, and how fast."""


def unpacked(directory: Path) -> Path:
    """Build a wheel with the core compiled and unpack it, with what the tests need beside it; return where.

    Raises:
        SystemExit: it cannot be built, or nothing in it is compiled.
    """
    os.environ[CHOICE] = "1"
    try:
        wheel = build("wheel", ROOT, directory / "dist")
    finally:
        del os.environ[CHOICE]
    home = directory / "compiled"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)  # the wheel that was just built
    if not list(home.rglob("*.so")):
        sys.exit(f"{wheel.name} should hold the compiled core, found no library in it")
    for name in BESIDE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, home / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, home / name)
    return home


def output_of(home: Path, *arguments: str) -> str:
    """Run Python over the package that lies in ``home``; return what it prints.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, *arguments]
    result = subprocess.run(  # noqa: S603  # this Python
        command, check=False, cwd=home, env={**os.environ, "PYTHONPATH": str(home)}, capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{' '.join(arguments)} ended with status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def answers(home: Path) -> list[object]:
    """Return what the package in ``home`` does in a simulation, as a digest, and what it finds in replays."""
    simulated = output_of(home, "-m", "tests.sim", *SIMULATED)
    (steps,) = (line for line in simulated.splitlines() if line.startswith("trace "))
    found: list[object] = [steps]
    for policy in POLICIES:
        result = json.loads(output_of(home, "-c", COMMAND_LINE, "replay", *REPLAYED, "--policy", policy, "--json"))
        found.append({key: value for key, value in result.items() if key not in APART})
    return found


def main() -> None:
    """Test the compiled form, and hold both forms against each other.

    Raises:
        SystemExit: a test failed, or the forms differ.
    """
    if not can_compile():
        sys.stdout.write("the compiled core was not checked: it takes a C compiler and CPython on 64-bit Linux\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        home = unpacked(Path(directory))
        if output_of(home, "-c", "import unified_cache; print(unified_cache.compiled)").strip() != "True":
            sys.exit("expected the package in the wheel to run compiled, found that it does not")
        output_of(home, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", *TESTS)
        compiled, plain = answers(home), answers(ROOT)
    for ours, theirs in zip(plain, compiled, strict=True):
        if ours != theirs:
            sys.exit(f"the two forms of the core differ\nplain Python: {ours}\ncompiled:     {theirs}")
    sys.stdout.write(f"the compiled core passes {len(TESTS)} groups of tests and gives the same {len(plain)} results\n")


if __name__ == "__main__":
    main()
