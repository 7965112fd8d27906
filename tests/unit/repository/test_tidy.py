"""The style of this repository where ruff has no rule for it; all that ruff can find stands in pyproject.toml."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, Source, python_paths, python_sources, scoped_nodes

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
ATTRIBUTE_BUILTINS = frozenset({"getattr", "setattr", "hasattr", "delattr"})
QUESTION_WORDS = frozenset({"What", "Who", "Whose", "Whom", "Where", "When", "How", "Which", "Why"})
LINTER_SKIPS = frozenset({"unified_cache/proto/__init__.py"})
"""Beside generated code."""


def long_files(source: Source) -> Iterator[str]:
    count = len(source.text.splitlines())
    if count > FILE_LINES_MAX:
        yield f"{count}: expected at most {FILE_LINES_MAX} lines in a file"


def long_functions(source: Source) -> Iterator[str]:
    for node, _ in scoped_nodes(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {count} lines, expected at most {FUNCTION_LINES_MAX}"


def literal_attributes(source: Source) -> Iterator[str]:
    for node, _ in scoped_nodes(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant(), *_]) if name in ATTRIBUTE_BUILTINS:
                yield f"{node.lineno}: {ast.unparse(node)}, expected the attribute itself, in a type that has it"


def suppressed_everything(source: Source) -> Iterator[str]:
    """Find what ruff's rule about handlers does not look at."""
    for node, _ in scoped_nodes(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            names = {ast.unparse(each) for each in node.args}
            if names & {"Exception", "BaseException"}:
                yield f"{node.lineno}: {ast.unparse(node)}, expected narrow types"


def questions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0] in QUESTION_WORDS:
                yield f"{node.body[0].lineno}: a docstring opens with {words[0]}, expected the thing itself"


def homonyms(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return the class names that occur more than once, each with every ``path:line`` of a class of that name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node, _ in scoped_nodes(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


Rule = Callable[[Source], Iterator[str]]

RULES: tuple[Rule, ...] = (long_files, long_functions, literal_attributes, suppressed_everything, questions)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    findings = [f"{source.path}:{finding}" for source in python_sources() for finding in rule(source)]
    assert not findings, "\n" + "\n".join(findings)


def test_no_class_name_occurs_twice() -> None:
    assert homonyms(python_sources()) == {}


def test_a_class_name_that_occurs_twice_is_found() -> None:
    sources = [Source("a.py", "class Page: ...\nclass Slot: ...\n"), Source("b.py", "\nclass Page: ...\n")]
    assert homonyms(sources) == {"Page": ["a.py:1", "b.py:2"]}


def test_the_linter_looks_at_every_file() -> None:
    # An exclude without a slash hits a directory of that name at any depth.
    command = [sys.executable, "-m", "ruff", "check", "--show-files"]
    seen = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    unseen = set(python_paths()) - {Path(name).relative_to(ROOT).as_posix() for name in seen} - LINTER_SKIPS
    assert not unseen, f"pyproject.toml: found ruff passing over {sorted(unseen)}; expected only LINTER_SKIPS"


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (long_files, "x = 1\n" * (FILE_LINES_MAX + 1), "x = 1\n" * FILE_LINES_MAX),
        (
            long_functions,
            "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX,
            "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1),
        ),
        (literal_attributes, "getattr(x, 'name', None)\n", "getattr(x, name)\nobject.__setattr__(x, 'name', 1)\n"),
        (suppressed_everything, "with contextlib.suppress(Exception):\n    f()\n", "suppress(OSError)\n"),
        (
            questions,
            'class Gap:\n    """What is missing."""\n',
            '"""Whatever comes."""\nclass Gap:\n    """Pages."""\n',
        ),
    ],
)
def test_a_rule_finds_what_breaks_it_and_passes_what_keeps_it(rule: Rule, bad: str, good: str) -> None:
    assert len(list(rule(Source("bad.py", bad)))) == 1
    assert list(rule(Source("good.py", good))) == []
