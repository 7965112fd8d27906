"""Print which tests hold each threat of SECURITY.md: those marked with its name, ``@pytest.mark.threat("name")``.

python -m scripts.threats
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "SECURITY.md"
TESTS = ROOT / "tests"

THREAT = re.compile(r"^\* \*\*([^*]+)\*\*:", re.MULTILINE)
"""A threat of the document: an item that begins with its name and a colon."""

MARK = "pytest.mark.threat"


def threats_in(text: str) -> list[str]:
    """Return the names of the threats of a document, in order."""
    return THREAT.findall(text)


def marks_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield test and threat of every mark in the text of a Python file.

    Raises:
        ValueError: a mark has anything but one name.
    """
    if MARK not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not ast.unparse(decorator).startswith(MARK):
                continue
            match decorator:
                case ast.Call(args=[ast.Constant(value=str(name))], keywords=[]):
                    yield node.name, name
                case _:
                    raise ValueError(f"{node.name}: expected {MARK} with one name, found {ast.unparse(decorator)}")


def marked_tests(directory: Path = TESTS) -> dict[str, list[str]]:
    """Return the marked tests below ``directory`` by the name of their threat, as ``path::test``."""
    found: dict[str, list[str]] = {}
    for path in sorted(directory.rglob("*.py")):
        for test, threat in marks_in(path.read_text(encoding="utf-8")):
            found.setdefault(threat, []).append(f"{path.relative_to(directory)}::{test}")
    return found


def table(threats: list[str], tests: Mapping[str, list[str]]) -> str:
    """Return a table of each threat and its tests."""
    rows = [f"| {threat} | {'<br>'.join(tests.get(threat, []))} |" for threat in threats]
    return "\n".join(["| threat | tests |", "|---|---|", *rows])


if __name__ == "__main__":
    sys.stdout.write(table(threats_in(DOCUMENT.read_text(encoding="utf-8")), marked_tests()) + "\n")
