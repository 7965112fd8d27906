"""SGLang beside the repository: its wheel unpacked, and an environment with the packages that its caches import.

UNIFIED_CACHE_SGLANG_VERSION    the version; 0.5.23 unless it is set
UNIFIED_CACHE_SGLANG_HOME       directory of both; ~/.cache/unified-cache/sglang-0.5.23 unless it is set
"""

import os
import re
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

VERSION_VARIABLE = "UNIFIED_CACHE_SGLANG_VERSION"
VERSION = "0.5.23"
VARIABLE = "UNIFIED_CACHE_SGLANG_HOME"

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
"""What SGLang's caches import on a CPU, and what this library needs beside."""


@dataclass(frozen=True)
class Installation:
    """Directory with a wheel and an environment."""

    root: Path

    @property
    def wheel(self) -> Path:
        return self.root / "wheel"

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that runs the engine; nothing is written beside its sources."""
        return {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "SGLANG_WHEEL": str(self.wheel),
            "PYTHONPYCACHEPREFIX": str(self.root / "pyc"),
            "TORCH_EXTENSIONS_DIR": str(self.root / "torch_extensions"),
            "SGLANG_RUST_BUILD_MODE": "never",
            "OMP_NUM_THREADS": "1",
            "HOME": os.environ.get("HOME", "/tmp"),
        }


def version() -> str:
    """Return the version that the checks run under."""
    return os.environ.get(VERSION_VARIABLE) or VERSION


def installation() -> Installation:
    """Return where the engine is, or would be installed."""
    default = Path.home() / ".cache" / "unified-cache" / f"sglang-{version()}"
    return Installation(Path(os.environ.get(VARIABLE) or default))


def install() -> Installation:
    """Return the engine, downloaded and installed if it is not there."""
    found = installation()
    found.root.mkdir(parents=True, exist_ok=True)
    if not (found.wheel / "sglang").is_dir():
        downloads = found.root / "dl"
        _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"sglang=={version()}", "-d", str(downloads))
        (wheel,) = downloads.glob(f"sglang-{version()}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(found.wheel)
    ready, wanted = found.root / "packages", REQUIREMENTS.read_text(encoding="utf-8").strip()
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        if not found.python.exists():
            venv.create(found.root / "venv", with_pip=True)
        _run(str(found.python), "-m", "pip", "install", "-q", "-r", str(REQUIREMENTS))
        ready.write_text(wanted, encoding="utf-8")
    return found


def install_transformers(found: Installation) -> Path:
    """Return a directory with the transformers that SGLang pins; its caches are imported without it."""
    (metadata,) = found.wheel.glob("sglang-*.dist-info/METADATA")
    pinned = re.search(r"^Requires-Dist: (transformers==[\w.]+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned, f"{metadata} pins no transformers"
    place = found.root / pinned[1]
    if not place.is_dir():
        with TemporaryDirectory(dir=found.root) as fresh:
            _run(str(found.python), "-m", "pip", "install", "-q", "--target", f"{fresh}/packages", pinned[1])
            Path(fresh, "packages").rename(place)
    return place


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
