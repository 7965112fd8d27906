"""SECURITY.md holds: tests are marked with every threat that it names, and with no other."""

import re

import pytest

from tests.sources import ROOT, python_sources

THREAT = re.compile(r"^\* \*\*([^*]+)\*\*:", re.MULTILINE)
"""A threat of the document: an item that begins with its name and a colon."""

MARK = re.compile(r'^@pytest\.mark\.threat(?:\("([^"]+)"\)$)?', re.MULTILINE)
"""A mark and its one name; no name where it has none, or more than one."""


def test_every_threat_has_a_name_of_its_own_and_a_marked_test_and_every_mark_names_a_threat() -> None:
    threats = THREAT.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(threats) > 20
    assert len(set(threats)) == len(threats)
    tests = (source for source in python_sources() if source.path.startswith("tests/"))
    assert {name for source in tests for name in MARK.findall(source.text)} == set(threats)


def test_only_an_item_that_begins_with_a_name_and_a_colon_is_a_threat() -> None:
    text = "**not one**: a\n* **one threat**: held\n* **No threat.** A limit.\n* **another**: too\n"
    assert THREAT.findall(text) == ["one threat", "another"]


@pytest.mark.parametrize("arguments", ["", "()", "(NAME)", '("a", "b")', '(name="a")'])
def test_a_mark_without_one_name_is_found(arguments: str) -> None:
    assert MARK.findall(f'@pytest.mark.threat("a")\n@pytest.mark.threat{arguments}\n') == ["a", ""]
