"""Generated code: what it demands of whoever loads it."""

import pytest

from scripts.check_oldest import ON_THE_WIRE, oldest_versions
from tests.sources import ROOT


def test_generated_code_asks_for_no_version_of_its_runtime() -> None:
    generated = sorted((ROOT / "unified_cache" / "proto").glob("*_pb2.py"))
    assert len(generated) == len(list((ROOT / "proto").rglob("*.proto")))
    for path in generated:
        assert "runtime_version" not in path.read_text(), path.name


def test_the_oldest_versions_of_what_is_on_the_wire_are_those_that_the_project_promises() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    oldest = oldest_versions(project)
    assert tuple(oldest) == ON_THE_WIRE
    for name, version in oldest.items():
        assert f'"{name}>={version}"' in project


def test_a_package_that_is_promised_twice_with_different_versions_is_found() -> None:
    project = (ROOT / "pyproject.toml").read_text().replace('"grpcio>=1.73"', '"grpcio>=1.74"', 1)
    with pytest.raises(SystemExit, match=r"grpcio must have one least version, found 1\.74 and 1\.73"):
        oldest_versions(project)
