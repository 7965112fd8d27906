"""Generate Python from ``proto/``, or check that what is committed is what would be generated.

python scripts/generate_proto.py write
python scripts/generate_proto.py check

The compiler has each module refuse every runtime that is older than itself, and warn under a newer one, whatever the
module holds: the compiler that is pinned here would exclude all engines that pin protobuf 6. What ours hold is a
descriptor and three calls of ``google.protobuf.internal.builder`` that are the same from 6.31 on, so the check goes out
of the generated code; ``make oldest`` runs it under the oldest runtime that ``pyproject.toml`` promises.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
GENERATED = Path("unified_cache/proto")
"""Folder of the generated modules, relative to the destination: they import each other as unified_cache.proto."""

GENERATED_GLOB = "*_pb2*.py*"

_RUNTIME_CHECK = re.compile(
    r"from google\.protobuf import runtime_version as _runtime_version\n"
    r"|_runtime_version\.ValidateProtobufRuntimeVersion\([^)]*\)\n"
    r"|# Protobuf Python Version: [^\n]*\n"
)
_RUNTIME_CHECK_PARTS = 3


def generate(destination: Path) -> None:
    """Write a module and its stub below ``destination`` for every contract in ``proto/``.

    Raises:
        SystemExit: the compiler refused, its message is on stderr; or its check of the runtime has another form.

    """
    contracts = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}"]
    outputs = [f"--python_out={destination}", f"--pyi_out={destination}"]
    result = subprocess.run([*compiler, *outputs, *contracts], check=False, cwd=ROOT)  # noqa: S603  # pinned compiler
    if result.returncode:
        sys.exit(f"protoc failed with status {result.returncode}")
    for contract in contracts:
        path = destination / contract.replace(".proto", "_pb2.py")
        text, found_count = _RUNTIME_CHECK.subn("", path.read_text())
        if found_count != _RUNTIME_CHECK_PARTS:
            sys.exit(f"{path.name} must check its runtime in {_RUNTIME_CHECK_PARTS} known parts, found {found_count}")
        path.write_text(text)


def drift(committed: Path, fresh: Path) -> list[str]:
    """Name every generated file in which two trees differ, with what is wrong with the committed one."""
    ours = {path.name: path.read_bytes() for path in (committed / GENERATED).glob(GENERATED_GLOB)}
    theirs = {path.name: path.read_bytes() for path in (fresh / GENERATED).glob(GENERATED_GLOB)}
    flaws: list[str] = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            flaws.append(f"{GENERATED / name} is missing")
        elif name not in theirs:
            flaws.append(f"{GENERATED / name} has no contract in proto/")
        elif ours[name] != theirs[name]:
            flaws.append(f"{GENERATED / name} is not what its contract generates")
    return flaws


def main(verb: str) -> None:
    """Do what the command line asks.

    Raises:
        SystemExit: drift, a refusing compiler, or an unknown verb.

    """
    if verb == "write":
        generate(ROOT)
    elif verb == "check":
        with tempfile.TemporaryDirectory() as fresh:
            generate(Path(fresh))
            flaws = drift(ROOT, Path(fresh))
        if flaws:
            sys.exit("\n".join([*flaws, "run make proto, and commit the result"]))
        sys.stdout.write("generated code is what proto/ generates\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")
