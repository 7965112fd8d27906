"""``make release`` runs the commands that README.md shows, but for some, each for a reason."""

import pytest

from scripts.check_versions import ON_THE_WIRE, newer_than_pinned, oldest_versions, pinned_versions
from scripts.release import LEFT_OUT, left_out, readme_commands
from tests.sources import ROOT


def shown() -> list[list[str]]:
    return list(readme_commands((ROOT / "README.md").read_text(encoding="utf-8")))


def test_most_commands_of_the_readme_are_run() -> None:
    run = [arguments for arguments in shown() if left_out(arguments) is None]
    assert {arguments[0] for arguments in run} >= {"replay", "layout", "storage", "backup"}
    assert len(run) > len(shown()) / 2


def test_every_reason_to_leave_a_command_out_is_about_one() -> None:
    reasons = {left_out(arguments) for arguments in shown()}
    assert reasons - {None} == set(LEFT_OUT)


def test_commands_are_read_from_console_blocks_with_places_of_their_own() -> None:
    text = "unified-cache no\n```console\nunified-cache backup file:a 'file:/mnt/backup/kv' # why\nls\n```\n```bash\n"
    text += 'unified-cache no\n```\n```console\nunified-cache serve --storage "$url" &\n```\n'
    assert list(readme_commands(text)) == [["backup", "file:a", "file:backup/kv"], ["serve", "--storage", "$url"]]


# Generated code: what it demands of whoever loads it


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


def test_packages_in_other_versions_than_pinned_are_named_with_both() -> None:
    pinned = pinned_versions("# a comment\ntransformers==5.23.0\ntyping_extensions==4.16.0\ntorch==2.13.0\n")
    versions = {"transformers": "5.24.0", "typing-extensions": "4.16.0", "torch": "2.13.0+cpu", "pip": "26.3"}
    installed = [{"name": name, "version": version} for name, version in versions.items()]
    assert newer_than_pinned(installed, pinned) == ["transformers 5.24.0, pinned 5.23.0"]
