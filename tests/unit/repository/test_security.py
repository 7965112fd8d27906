"""SECURITY.md holds: every threat has an answer, and tests that there are."""

import ast
import re
from functools import cache

import pytest

from tests.sources import ROOT

ROW = re.compile(r"^\|(.*)\|$")
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
HEADER = ["threat", "answer", "test"]


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of the tests in a file below ``tests``; none where there is no such file."""
    file = ROOT / "tests" / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def threats_in(text: str) -> list[list[str]]:
    """Return the rows of the tables of threats."""
    rows: list[list[str]] = []
    is_inside = False
    for line in text.splitlines():
        found = ROW.match(line)
        cells = [cell.strip() for cell in found[1].split("|")] if found else []
        is_rule = all(not cell.strip("-") for cell in cells)
        if cells == HEADER:
            is_inside = True
        elif not found:
            is_inside = False
        elif is_inside and not is_rule:
            rows.append(cells)
    return rows


def flaws_of(row: list[str]) -> list[str]:
    """Say what a threat lacks."""
    if len(row) != len(HEADER) or not all(row):
        return [f"a threat has an answer and a test, found {row}"]
    named = TEST.findall(row[2])
    left = TEST.sub("", row[2]).replace(",", "").strip()
    flaws = [f"{path}::{name} is not there" for path, name in named if name not in names_in(path)]
    return flaws + ([f"found {left!r} where tests are named"] if left or not named else [])


def test_every_threat_has_an_answer_and_tests_that_are_there() -> None:
    rows = threats_in((ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(rows) > 20
    assert [flaw for row in rows for flaw in flaws_of(row)] == []


@pytest.mark.parametrize(
    "row",
    [
        "| a | b |",
        "| a | | `unit/repository/test_security.py::test_every_threat_has_an_answer_and_tests_that_are_there` |",
        "| a | b | |",
        "| a | b | by hand |",
        "| a | b | `unit/repository/test_security.py::test_that_nobody_wrote` |",
        "| a | b | `unit/nowhere.py::test_that_nobody_wrote` |",
    ],
)
def test_a_threat_without_answer_or_test_is_found(row: str) -> None:
    (found,) = threats_in(f"| threat | answer | test |\n|---|---|---|\n{row}\n\n| not | one | of them |")
    assert flaws_of(found)
