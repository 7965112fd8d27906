"""What Mooncake needs of a machine: Linux, one of its two wheels, three system libraries."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from unified_cache.errors import ConfigError

__all__ = ["apt_command", "master_program", "missing_packages"]

WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Without and with CUDA; both install the package ``mooncake``, one over the other."""

PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Debian's package of every library that the wheels leave to the system."""

APT = ("apt-get", "install", "--yes", "--no-install-recommends")


def missing_packages(load: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """Name the Debian packages whose library ``load`` cannot load."""
    missing: list[str] = []
    for library, package in PACKAGES.items():
        try:
            load(library)
        except OSError:
            missing.append(package)
    return missing


def apt_command(packages: Sequence[str]) -> list[str]:
    """Return the command that installs ``packages`` on Debian; it needs root."""
    return [*APT, *packages]


def master_program(search: Sequence[str] = sys.path, load: Callable[[str], object] = ctypes.CDLL) -> Path:
    """Return the program ``mooncake_master`` of the wheel found along ``search``; all that Mooncake needs is here.

    Raises:
        ConfigError: not Linux, no wheel, both wheels, or a library is missing; the message says what to do.
    """
    if sys.platform != "linux":
        raise ConfigError(f"Mooncake runs on Linux only, found {sys.platform}")
    wheel = _wheel(search)
    missing = missing_packages(load)
    if missing:
        raise ConfigError(f"Mooncake needs {', '.join(missing)}; install with: {' '.join(apt_command(missing))}")
    program = Path(str(wheel.locate_file("mooncake/mooncake_master")))
    if not program.is_file():
        raise ConfigError(f"{program} is missing from {wheel.name} {wheel.version}; install the wheel again")
    return program


def _wheel(search: Sequence[str]) -> Distribution:
    # A directory named twice on the path lists its wheels twice.
    found = {name: wheel for name in WHEELS for wheel in distributions(name=name, path=list(search))}
    if not found:
        raise ConfigError(
            "Mooncake is not installed; pip install 'unified-cache[mooncake]', or [mooncake-cuda] where CUDA is"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found)} are both installed, and each overwrites the other; pip uninstall both, then "
            f"pip install 'unified-cache[mooncake]', or [mooncake-cuda] where CUDA is"
        )
    return next(iter(found.values()))
