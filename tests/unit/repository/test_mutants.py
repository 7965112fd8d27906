"""The mistakes that ``scripts.mutants`` plants still fit the code, and their tests are there."""

import ast

import pytest

from scripts.mutants import MUTANTS, TESTS, Mutant, planted
from tests.sources import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_fits_one_place_of_its_file_and_leaves_a_program(mutant: Mutant) -> None:
    path = ROOT / "unified_cache" / mutant.path
    ast.parse(planted(mutant, path.read_text(encoding="utf-8")), mutant.path)


def test_no_two_mistakes_have_one_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_that_must_catch_a_mistake_are_there() -> None:
    named = {*TESTS, *(test for mutant in MUTANTS for test in mutant.tests)}
    assert {test for test in named if not (ROOT / test.partition("::")[0]).is_file()} == set()


@pytest.mark.parametrize("text", ["", "x = 1\nx = 1\n"])
def test_a_mistake_that_fits_no_place_or_two_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected its text once"):
        planted(Mutant("twice", "x.py", "x = 1\n", "x = 2\n"), text)
