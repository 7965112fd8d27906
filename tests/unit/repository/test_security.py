"""SECURITY.md holds: tests are marked with every threat that it names, and with no other."""

from pathlib import Path

import pytest

from scripts.threats import DOCUMENT, marked_tests, marks_in, table, threats_in

THREATS = threats_in(DOCUMENT.read_text(encoding="utf-8"))
MARK = "@pytest.mark.threat"


def test_every_threat_has_a_name_of_its_own() -> None:
    assert len(THREATS) > 20
    assert len(set(THREATS)) == len(THREATS)


def test_every_threat_has_a_marked_test_and_every_mark_names_a_threat() -> None:
    assert set(marked_tests()) == set(THREATS)


def test_only_an_item_that_begins_with_a_name_and_a_colon_is_a_threat() -> None:
    text = "**not one**: a\n* **one threat**: held\n* **No threat.** A limit.\n* **another**: too\n"
    assert threats_in(text) == ["one threat", "another"]


def test_marks_are_found_beside_other_decorators(tmp_path: Path) -> None:
    text = f'{MARK}("a")\n{MARK}("b")\n@pytest.mark.long\ndef test_it(): ...\n\n\ndef test_other(): ...\n'
    (tmp_path / "test_them.py").write_text(text, encoding="utf-8")
    found = marked_tests(tmp_path)
    assert found == {"a": ["test_them.py::test_it"], "b": ["test_them.py::test_it"]}
    assert table(["a", "c"], found).splitlines()[2:] == ["| a | test_them.py::test_it |", "| c |  |"]


@pytest.mark.parametrize("arguments", ["", "()", "(NAME)", '("a", "b")', '(name="a")'])
def test_a_mark_without_one_name_is_refused(arguments: str) -> None:
    with pytest.raises(ValueError, match="with one name"):
        list(marks_in(f"{MARK}{arguments}\ndef test_it(): ...\n"))
