"""Mooncake's needs of a machine, and the errors where they are missing."""

import re
import sys
from pathlib import Path

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.mooncake.native import WHEELS, usable_wheel


def install(wheel: str, directory: Path) -> None:
    """Lay down a wheel's metadata, as pip does."""
    location = directory / f"{wheel.replace('-', '_')}-1.0.dist-info"
    location.mkdir()
    (location / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.0\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("wheels", "missing", "said"),
    [
        ((), "", "pip install 'unified-cache[mooncake]'"),
        (WHEELS, "", "mooncake-transfer-engine-non-cuda and mooncake-transfer-engine are both installed"),
        (WHEELS[:1], "numa", "Mooncake needs libnuma1; install with: apt-get install"),
        (WHEELS[1:], "lib", "Mooncake needs libibverbs1, libnuma1, libcurl4; install with: apt-get install"),
    ],
)
def test_what_a_machine_lacks_is_named_and_what_installs_it(
    wheels: tuple[str, ...], missing: str, said: str, tmp_path: Path
) -> None:
    def load(library: str) -> None:
        if missing and missing in library:
            raise OSError(f"{library}: cannot open shared object file")

    for wheel in wheels:
        install(wheel, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(said)):
        usable_wheel([str(tmp_path)], load)


def test_another_system_than_linux_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Mooncake runs on Linux only, found darwin"):
        usable_wheel([str(tmp_path)])
