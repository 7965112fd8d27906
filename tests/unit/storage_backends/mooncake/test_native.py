"""Mooncake's needs of a machine, and the errors where they are missing."""

import sys
from pathlib import Path

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.mooncake.native import missing_packages, usable_wheel


def install(wheel: str, directory: Path) -> None:
    """Lay down a wheel's metadata, as pip does."""
    location = directory / f"{wheel.replace('-', '_')}-1.0.dist-info"
    location.mkdir()
    (location / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.0\n", encoding="utf-8")


def everything(library: str) -> str:
    return library


def nothing(library: str) -> str:
    raise OSError(f"{library}: cannot open shared object file")


def without_numa(library: str) -> str:
    return nothing(library) if "numa" in library else library


def refusal(directory: Path, load: object = everything) -> str:
    with pytest.raises(ConfigError) as caught:
        usable_wheel([str(directory)], load)  # type: ignore[arg-type]
    return str(caught.value)


def test_without_a_wheel_it_says_which_extra_to_install(tmp_path: Path) -> None:
    assert "pip install 'unified-cache[mooncake]'" in refusal(tmp_path)


def test_both_wheels_are_refused_by_name(tmp_path: Path) -> None:
    install("mooncake-transfer-engine", tmp_path)
    install("mooncake-transfer-engine-non-cuda", tmp_path)
    assert "mooncake-transfer-engine-non-cuda and mooncake-transfer-engine are both installed" in refusal(tmp_path)


def test_a_missing_library_is_named_by_its_debian_package_and_the_command(tmp_path: Path) -> None:
    install("mooncake-transfer-engine", tmp_path)
    said = refusal(tmp_path, without_numa)
    assert "Mooncake needs libnuma1; install with: apt-get install" in said
    assert said.endswith(" libnuma1")


def test_all_missing_libraries_are_named_together() -> None:
    assert missing_packages(nothing) == ["libibverbs1", "libnuma1", "libcurl4"]
    assert missing_packages(everything) == []


def test_another_system_than_linux_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refusal(tmp_path) == "Mooncake runs on Linux only, found darwin"
