"""Build what is released into ``dist``, and try it as a stranger would: ``make release``.

    unified_cache-VERSION.tar.gz, ...-py3-none-any.whl   sdist and wheel, checked by ``twine``
    requirements-service.txt, requirements-node.txt      what they run with, pinned as in ``constraints.txt``, with the
                                                         hash of every file and of the wheel: ``pip install
                                                         --require-hashes --find-links dist -r ...``
    unified-cache-VERSION.cdx.json                       an SBOM of the service's environment (CycloneDX)
    SHA256SUMS                                           of all of these

Each list is installed into an environment of its own that has nothing else; the one of the service must be small and
serve, and with torch added run commands of README.md. It needs the package index, and the extra ``release``.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from scripts.check_wheel import build

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
COMMAND = "unified-cache"
LISTS = {"service": ("service",), "node": ("mooncake",)}
"""By the name of a list of requirements: extras that it is for."""

PYTHON_OLDEST = "3.11"
SERVICE_BYTES_MAX = 200_000_000
"""Room that the environment of a service may take, pip aside."""

START_TIMEOUT_S = 60
COMMAND_TIMEOUT_S = 900

TRIED = (
    ("samples",),
    ("replay", "traces/mooncake_conversation_1000.jsonl.gz", "--limit", "100", "--storage", "file:kv-store"),
    ("storage", "verify", "file:kv-store"),
    ("layout", "deepseek-v4-flash"),
)
"""Commands of README.md, all of which ``make test`` runs."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that was made empty."""

    directory: Path

    @classmethod
    def made(cls, directory: Path) -> "Environment":
        """Make it, with pip and nothing else."""
        venv.create(directory, with_pip=True)
        return cls(directory)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def install(self, *arguments: str) -> None:
        """Have its pip install something."""
        ran(str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def run(self, arguments: Iterable[str], directory: Path) -> None:
        """Run a command line of ours in a directory, and show it."""
        line = (COMMAND, *arguments)
        sys.stdout.write(f"$ {shlex.join(line)}\n")
        sys.stdout.flush()
        ran(str(self.directory / "bin" / COMMAND), *line[1:], directory=directory)

    def serves(self, directory: Path) -> None:
        """Start a service, ask it, and end it as an operator would.

        Raises:
            SystemExit: it did not start, answer or end well.
        """
        program = str(self.directory / "bin" / COMMAND)
        url = f"unix:{directory / 'socket'}"
        command = [program, "serve", "--listen", url, "--storage", f"file:{directory / 'served'}"]
        environment = {**os.environ, "UNIFIED_CACHE_SERVE_METRICS__LISTEN": "127.0.0.1:0"}
        with subprocess.Popen(command, cwd=directory, env=environment) as child:  # noqa: S603  # what was just built
            try:
                deadline_s = time.monotonic() + START_TIMEOUT_S
                while not (directory / "socket").exists() and time.monotonic() < deadline_s:
                    time.sleep(0.1)
                self.run(("ping", f"grpc://{url}"), directory)
                child.terminate()
                if child.wait(START_TIMEOUT_S):
                    sys.exit(f"serve must end with status 0 after SIGTERM, found {child.returncode}")
            finally:
                child.kill()


def ran(*command: str, directory: Path = ROOT) -> None:
    """Run a command.

    Raises:
        SystemExit: it failed.
    """
    result = subprocess.run(command, check=False, cwd=directory, timeout=COMMAND_TIMEOUT_S)  # noqa: S603  # ours
    if result.returncode:
        sys.exit(f"{shlex.join(command)} ended with status {result.returncode}")


def bytes_under(directory: Path) -> int:
    """Add up the room that files take, as ``du`` does, without pip's own."""
    pip = f"{os.sep}pip{os.sep}"
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if pip not in f"{path}{os.sep}")


def requirements(name: str, extras: Iterable[str], wheel: Path) -> Path:
    """Write a list of exact requirements with the hashes of their files, and of the wheel."""
    target = DIST / f"requirements-{name}.txt"
    wanted = [word for extra in extras for word in ("--extra", extra)]
    ran(
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header"),
        *("--no-annotate", "--python-version", PYTHON_OLDEST, "--constraint", str(CONSTRAINTS), *wanted),
        *("--output-file", str(target), str(ROOT / "pyproject.toml")),
    )
    pinned = target.read_text(encoding="utf-8")
    ours = [f"unified-cache[{','.join(extras)}]=={wheel.name.split('-')[1]}", f"    --hash=sha256:{digest(wheel)}"]
    target.write_text(pinned + " \\\n".join(ours) + "\n", encoding="utf-8")
    return target


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def try_out(service: Environment, version: str, scratch: Path) -> None:
    """Run the service, and then, with torch added, some commands.

    Raises:
        SystemExit: something failed, or the service takes too much room.
    """
    size = bytes_under(service.directory)
    sys.stdout.write(f"a service's environment takes {size / 1e6:.0f} MB\n")
    if size > SERVICE_BYTES_MAX:
        sys.exit(f"a service's environment may take {SERVICE_BYTES_MAX} bytes, found {size}")
    service.serves(scratch)
    (torch,) = (line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    service.install("-c", str(CONSTRAINTS), torch)
    service.install("-c", str(CONSTRAINTS), "--find-links", str(DIST), f"unified-cache[engine,report]=={version}")
    for arguments in TRIED:
        service.run(arguments, scratch)


def main() -> None:
    """Build, check, try and sum up.

    Raises:
        SystemExit: a step failed; its output says why.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        built = [build(kind, ROOT, scratch / kind) for kind in ("sdist", "wheel")]
        sdist, wheel = (Path(shutil.copy(path, DIST)) for path in built)
        number = wheel.name.split("-")[1]
        ran(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
        environments: dict[str, Environment] = {}
        for name, extras in LISTS.items():
            environments[name] = Environment.made(scratch / name)
            pinned = requirements(name, extras, wheel)
            environments[name].install("--require-hashes", "--find-links", str(DIST), "-r", str(pinned))
        bill = DIST / f"unified-cache-{number}.cdx.json"
        ran(
            *(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--pyproject"),
            *(str(ROOT / "pyproject.toml"), "--output-file", str(bill), str(environments["service"].python)),
        )
        environments["node"].run(("conformance", "--help"), scratch)
        place = scratch / "place"
        place.mkdir()
        try_out(environments["service"], number, place)
    files = sorted(path for path in DIST.iterdir())
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text(sums, encoding="utf-8")
    sys.stdout.write(f"{sums}released with twine {version('twine')} and Python {sys.version.split()[0]}\n")


if __name__ == "__main__":
    main()
