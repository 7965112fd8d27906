"""Public names are in an ``__all__``, exist, and are documented."""

import ast
import importlib
import re
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, Source, module_name, python_paths, python_sources
from tests.unit.repository.test_layers import PACKAGE, imported_modules, package_sources, room_of

SCRIPT = "__main__.py"
"""Files of this name are run and never imported."""

SYMLINKS = {
    "components": "unified_cache/components",
    "controller": "unified_cache/controller",
    "storage_backends": "unified_cache/storage_backends",
}


def is_ours(path: str) -> bool:
    return path.startswith(f"{PACKAGE}/") and not path.endswith(f"/{SCRIPT}")


def is_empty(source: Source) -> bool:
    """Tell whether a file holds nothing but a docstring: a package whose modules are imported by name."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in source.tree.body)


def exports(source: Source) -> tuple[int, list[str]] | None:
    """Return line and names of ``__all__``; None where there is none, or where it is more than a list of strings."""
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [ast.unparse(target) for target in targets] == ["__all__"] and isinstance(node, ast.Assign):
            try:
                return node.lineno, list(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort as ruff does: CONSTANTS, then Classes, then the rest; numbers inside names by value."""
    is_constant = name.isupper() and len(name) > 1
    is_class = name[0].isupper()
    parts = re.findall(r"\d+|\D+", name)
    return 2 - is_class - is_constant, [(int(part), "") if part.isdigit() else (1 << 62, part) for part in parts]


def flaws(source: Source) -> Iterator[str]:
    if is_empty(source):
        return
    found = exports(source)
    if found is None:
        yield f"{source.path}:1: found no __all__; expected a list of strings"
        return
    line, names = found
    if len(set(names)) != len(names):
        yield f"{source.path}:{line}: found a name twice in __all__; expected each once"
    if names != sorted(names, key=order):
        yield f"{source.path}:{line}: found __all__ in disorder; expected {sorted(names, key=order)}"
    definitions = {
        node.name: node
        for node in source.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name in names:
        if name in definitions and not ast.get_docstring(definitions[name]):
            yield f"{source.path}:{definitions[name].lineno}: found {name} without a docstring; expected one"


def test_every_module_says_what_others_may_use() -> None:
    findings = [flaw for source in python_sources() if is_ours(source.path) for flaw in flaws(source)]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize("path", [path for path in python_paths() if is_ours(path)])
def test_every_exported_name_exists(path: str) -> None:
    try:
        module = importlib.import_module(module_name(path))
        names = vars(module).get("__all__", [])
        missing = [name for name in names if not hasattr(module, name)]
    except ModuleNotFoundError as error:
        if (error.name or PACKAGE).split(".")[0] == PACKAGE:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert missing == []


@pytest.mark.parametrize(("name", "target"), SYMLINKS.items())
def test_the_required_folders_at_the_root_are_those_of_the_package(name: str, target: str) -> None:
    link = ROOT / name
    if not link.is_dir() and not link.is_symlink():
        # In the place of a link git leaves a file with its target, an archive nothing.
        assert not link.exists() or link.read_text(encoding="utf-8") == target
        pytest.skip("this copy of the repository has no symbolic links")
    assert link.is_symlink()
    assert link.readlink().as_posix() == target
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "__all__ = [*other]\n",
        "__all__ = ['b', 'a']\n",
        "__all__ = ['Class', 'CONSTANT']\n",
        "__all__ = ['a', 'a']\n",
        "__all__ = ['f']\ndef f(): ...\n",
    ],
)
def test_a_flaw_in_what_is_exported_is_found(text: str) -> None:
    (flaw,) = flaws(Source.of("unified_cache/bad.py", text))
    assert flaw.startswith("unified_cache/bad.py:")


@pytest.mark.parametrize(
    "text",
    [
        "",
        '"""A package."""\n',
        "__all__ = ['KEY_BYTES', 'Page', 'f', 'part2', 'part10']\ndef f():\n    'Do it.'\n",
    ],
)
def test_sound_exports_pass(text: str) -> None:
    assert list(flaws(Source.of("unified_cache/good.py", text))) == []


# Replay, plan and demo are programs over the library: it knows nothing of them, and they use only what it exports


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
