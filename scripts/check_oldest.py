"""Run the tests of everything on the wire under the oldest protobuf and gRPC that ``pyproject.toml`` promises.

Engines pin protobuf; what they pin must load our generated code. The two packages, and gRPC's own that need the same
protobuf, are installed into a temporary directory that comes before ``.venv`` in the path; nothing else is changed.
It needs the package index.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["oldest_versions"]

ROOT = Path(__file__).resolve().parent.parent
ON_THE_WIRE = ("protobuf", "grpcio", "grpcio-health-checking", "grpcio-reflection")
TESTS = (
    "tests/contract/test_remote_contract.py",
    "tests/unit/storage_backends/directory/test_directory.py",
    "tests/unit/storage_backends/remote",
    "tests/unit/service/test_requests.py",
    "tests/unit/service/test_server.py",
)

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


def main() -> None:
    """Install the oldest versions beside the others, and run the tests over them.

    Raises:
        SystemExit: with the status of what failed.
    """
    wanted = [f"{name}=={version}" for name, version in oldest_versions((ROOT / "pyproject.toml").read_text()).items()]
    sys.stdout.write(f"{' '.join(wanted)}\n")
    with tempfile.TemporaryDirectory() as directory:
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            directory,
        ]
        subprocess.run([*install, *wanted], check=True)  # noqa: S603  # versions of our own pyproject.toml
        environment = os.environ | {"PYTHONPATH": f"{directory}:{ROOT}"}
        loaded = "import google.protobuf, grpc; print('found', google.protobuf.__version__, grpc.__version__)"
        subprocess.run([sys.executable, "-c", loaded], check=True, env=environment)  # noqa: S603  # ours
        test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *TESTS]
        sys.exit(subprocess.run(test, check=False, cwd=ROOT, env=environment).returncode)  # noqa: S603  # as above


if __name__ == "__main__":
    main()
