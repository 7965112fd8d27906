"""The style of this repository, as far as a machine can read it.

Each rule but the one about homonyms is a function over one file. A finding that a reason excuses stands in
``ALLOWED`` under the rule's name. All that ruff can find stands in pyproject.toml.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.sources import ROOT, Function, Source, python_paths, python_sources, scoped_nodes

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
ATTRIBUTE_BUILTINS = frozenset({"getattr", "setattr", "hasattr", "delattr"})
CATCH_ALLS = frozenset({"Exception", "BaseException"})
QUESTION_WORDS = frozenset({"What", "Who", "Whose", "Whom", "Where", "When", "How", "Which", "Why"})
LINTER_SKIPS = frozenset({"unified_cache/proto/__init__.py"})
"""Beside generated code."""

ALLOWED: Mapping[str, Mapping[str, str]] = {
    # rule: {"path::name": reason}. An entry that excuses nothing fails, so that the list stays short.
    "swallowed_exceptions": {
        "unified_cache/controller/controller.py::run_turn": "the one edge where backends' code runs on our threads; "
        "the exception becomes the operation's error",
        "unified_cache/integrations/sglang/hicache.py::UnifiedCacheHiCache._safely": "the edge to SGLang's only worker "
        "thread of a kind, which ends if anything is raised; the exception becomes a miss and a line in the log",
        "tests/engines/sglang/running.py::_Engine.round": "whatever the engine raises is what came of the run",
        "tests/engines/sglang/running.py::_Engine.end": "the same",
        "tests/engines/sglang/linking.py::_run": "the same",
        "tests/engines/sglang/spoken.py::understood_configurations": "whatever the engine says of a configuration is "
        "what comes of it",
        "tests/engines/vllm/config_sizes.py::main": "whatever the engine says of a configuration is what comes of it",
        "unified_cache/storage_backends/common/bounded_call.py::BoundedCall.make": "the same edge for work on threads "
        "for calls to stores; whoever waits for the work takes the exception",
    },
}


@dataclass(frozen=True, slots=True)
class StyleFinding:
    """One place that breaks a rule. ``name`` is what ``ALLOWED`` knows it by: an identifier or the scope around."""

    path: str
    line: int
    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        """Say where, what was found and what was expected."""
        return f"{self.path}:{self.line}: found {self.found}; expected {self.expected}  [{self.path}::{self.name}]"


def functions(source: Source) -> Iterator[tuple[Function, str]]:
    for node, scope in scoped_nodes(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, f"{scope}.{node.name}" if scope else node.name


def long_files(source: Source) -> Iterator[StyleFinding]:
    count = len(source.text.splitlines())
    if count > FILE_LINES_MAX:
        yield StyleFinding(source.path, count, "", f"{count} lines", f"at most {FILE_LINES_MAX} in a file")


def long_functions(source: Source) -> Iterator[StyleFinding]:
    for node, name in functions(source):
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if count > FUNCTION_LINES_MAX:
            found = f"{name} with {count} lines"
            yield StyleFinding(source.path, node.lineno, name, found, f"at most {FUNCTION_LINES_MAX} in a function")


def literal_attributes(source: Source) -> Iterator[StyleFinding]:
    for node, scope in scoped_nodes(source.tree):
        if not isinstance(node, ast.Call) or dotted(node.func) not in ATTRIBUTE_BUILTINS or len(node.args) < 2:
            continue
        if isinstance(node.args[1], ast.Constant):
            yield StyleFinding(
                source.path, node.lineno, scope, ast.unparse(node), "the attribute itself, in a type that has it"
            )


def swallowed_exceptions(source: Source) -> Iterator[StyleFinding]:
    expected = "narrow types, or a raise in the handler"
    for node, scope in scoped_nodes(source.tree):
        if isinstance(node, ast.ExceptHandler) and catches_all(node.type) and not raises(node.body):
            found = f"except {ast.unparse(node.type)}" if node.type else "a bare except"
            yield StyleFinding(source.path, node.lineno, scope, f"{found} that goes on", expected)
        elif isinstance(node, ast.Call) and suppresses_all(node):
            yield StyleFinding(source.path, node.lineno, scope, ast.unparse(node), expected)


def catches_all(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(catches_all(each) for each in caught.elts)
    return caught is None or dotted(caught).split(".")[-1] in CATCH_ALLS


def suppresses_all(call: ast.Call) -> bool:
    return dotted(call.func).split(".")[-1] == "suppress" and any(catches_all(arg) for arg in call.args)


def raises(body: list[ast.stmt]) -> bool:
    """Tell whether a raise stands in ``body`` itself; one in a function defined there runs at another time."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def questions(source: Source) -> Iterator[StyleFinding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0] in QUESTION_WORDS:
                line = node.body[0].lineno
                name = node.name if isinstance(node, ast.ClassDef) else ""
                yield StyleFinding(
                    source.path, line, name, f"a docstring that opens with {words[0]}", "the thing itself"
                )


def homonyms(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return the class names that occur more than once, each with every ``path:line`` of a class of that name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node, _ in scoped_nodes(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def dotted(node: ast.expr) -> str:
    """Spell a name or a chain of attributes; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return parts[0] if parts else ""
    return ".".join([node.id, *reversed(parts)])


Rule = Callable[[Source], Iterator[StyleFinding]]

RULES: tuple[Rule, ...] = (
    long_files,
    long_functions,
    literal_attributes,
    swallowed_exceptions,
    questions,
)


def name_of(rule: Rule) -> str:
    return rule.__name__


def excused(rule: Rule, finding: StyleFinding) -> bool:
    return f"{finding.path}::{finding.name}" in ALLOWED.get(name_of(rule), {})


@cache
def findings_of(rule: Rule) -> tuple[StyleFinding, ...]:
    return tuple(finding for source in python_sources() for finding in rule(source))


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    findings = [finding for finding in findings_of(rule) if not excused(rule, finding)]
    assert not findings, "\n" + "\n".join(map(str, findings))


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_every_exception_excuses_something(rule: Rule) -> None:
    stale = set(ALLOWED.get(name_of(rule), {})) - {f"{finding.path}::{finding.name}" for finding in findings_of(rule)}
    assert not stale, (
        f"tests/unit/repository/test_tidy.py: ALLOWED[{name_of(rule)!r}] excuses nothing at {sorted(stale)}"
    )


def test_every_exception_names_a_rule_and_a_reason() -> None:
    assert set(ALLOWED) <= {name_of(rule) for rule in RULES}
    assert all(reason for entries in ALLOWED.values() for reason in entries.values())


def test_no_class_name_occurs_twice() -> None:
    found = homonyms(python_sources())
    assert not found, "\n" + "\n".join(
        f"found class {name} at {', '.join(where)}; expected one class of a name" for name, where in found.items()
    )


def test_a_class_name_that_occurs_twice_is_found() -> None:
    sources = [Source.of("a.py", "class Page: ...\nclass Slot: ...\n"), Source.of("b.py", "\nclass Page: ...\n")]
    assert homonyms(sources) == {"Page": ["a.py:1", "b.py:2"]}


def test_the_linter_looks_at_every_file() -> None:
    # An exclude without a slash hits a directory of that name at any depth.
    command = [sys.executable, "-m", "ruff", "check", "--show-files"]
    seen = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    unseen = set(python_paths()) - {Path(name).relative_to(ROOT).as_posix() for name in seen} - LINTER_SKIPS
    assert not unseen, f"pyproject.toml: found ruff passing over {sorted(unseen)}; expected only LINTER_SKIPS"


BAD: tuple[tuple[Rule, str], ...] = (
    (long_files, "x = 1\n" * (FILE_LINES_MAX + 1)),
    (long_functions, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (literal_attributes, "getattr(x, 'name', None)\n"),
    (literal_attributes, "if hasattr(x, 'name'):\n    setattr(x, y, 1)\n"),
    (swallowed_exceptions, "try:\n    f()\nexcept:\n    pass\n"),
    (swallowed_exceptions, "try:\n    f()\nexcept (KeyError, Exception) as error:\n    log(error)\n"),
    (swallowed_exceptions, "try:\n    f()\nexcept BaseException:\n    def g():\n        raise\n"),
    (swallowed_exceptions, "with contextlib.suppress(Exception):\n    f()\n"),
    (questions, 'class Gap:\n    """What is missing."""\n'),
)


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_a_rule_finds_what_breaks_it(rule: Rule, text: str) -> None:
    (finding,) = rule(Source.of("unified_cache/bad.py", text))
    assert str(finding).startswith("unified_cache/bad.py:")


GOOD: tuple[tuple[Rule, str], ...] = (
    (long_files, "x = 1\n" * FILE_LINES_MAX),
    (long_functions, "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (literal_attributes, "getattr(module, name)\nobject.__setattr__(self, 'name', 1)\n"),
    (swallowed_exceptions, "try:\n    f()\nexcept Exception as error:\n    raise StorageError('x') from error\n"),
    (swallowed_exceptions, "try:\n    f()\nexcept (KeyError, OSError):\n    pass\n"),
    (questions, '"""Whatever comes is kept."""\nclass Gap:\n    """Pages that are missing."""\n'),
)


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_a_rule_passes_what_keeps_it(rule: Rule, text: str) -> None:
    assert list(rule(Source.of("unified_cache/good.py", text))) == []
