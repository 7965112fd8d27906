"""Replay, plan and demo are programs over the library: it knows nothing of them, and they use only what it exports."""

import ast
from collections.abc import Iterator

import pytest

from tests.sources import Source, python_sources
from tests.unit.repository.test_exports import exports
from tests.unit.repository.test_layers import PACKAGE, imported_modules, package_sources, room_of

PROGRAMS = frozenset({"sizing"})
FRONT = "cli"
"""The room that starts programs."""


def names_of_programs(source: Source) -> Iterator[str]:
    """Yield each place outside of programs and command line that imports a program, or names one to be imported."""
    room = room_of(source.module)
    if room in PROGRAMS or room == FRONT:
        return
    found = [(line, module) for line, module in imported_modules(source) if module.startswith(f"{PACKAGE}.")]
    found += [
        (node.lineno, node.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}.")
    ]
    for line, module in found:
        if room_of(module) in PROGRAMS:
            yield f"{source.path}:{line}: found {module}; expected programs to be known to {FRONT} alone"


def unexported_imports(source: Source, library: dict[str, Source]) -> Iterator[str]:
    """Yield each name that a program imports from another room's module and that its ``__all__`` does not have."""
    room = room_of(source.module)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom) or node.module not in library or room_of(node.module) == room:
            continue
        found = exports(library[node.module])
        for name in (alias.name for alias in node.names):
            if found is None or name not in found[1]:
                yield f"{source.path}:{node.lineno}: found {node.module}.{name}; expected a name of its __all__"


def test_only_the_command_line_knows_programs() -> None:
    findings = [finding for source in package_sources() for finding in names_of_programs(source)]
    assert not findings, "\n" + "\n".join(findings)


def test_programs_import_what_the_library_exports() -> None:
    library = {source.module: source for source in python_sources()}
    programs = [source for source in package_sources() if room_of(source.module) in PROGRAMS]
    assert {room_of(source.module) for source in programs} == PROGRAMS
    findings = [finding for source in programs for finding in unexported_imports(source, library)]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(
    "text",
    [
        "from unified_cache.sizing.replay.trace import read_trace\n",
        "from unified_cache.sizing import demo\n",
        "def f():\n    return import_module('unified_cache.sizing.demo.run')\n",
    ],
)
def test_a_library_module_that_knows_a_program_is_found(text: str) -> None:
    (finding,) = names_of_programs(Source.of("unified_cache/testing/store.py", text))
    assert finding.startswith("unified_cache/testing/store.py:")


def test_an_import_of_a_name_that_is_not_exported_is_found() -> None:
    library = {"unified_cache.core.page": Source.of("unified_cache/core/page.py", "__all__ = ['Prompt']\nDIGEST = 1\n")}
    program = Source.of("unified_cache/sizing/demo/run.py", "from unified_cache.core.page import DIGEST, Prompt\n")
    (finding,) = unexported_imports(program, library)
    assert (
        finding
        == "unified_cache/sizing/demo/run.py:1: found unified_cache.core.page.DIGEST; expected a name of its __all__"
    )
