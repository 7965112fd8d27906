"""Public names are in an ``__all__``, and programs use no others. That they exist, once and in order, ruff sees."""

import ast

import pytest

from tests.sources import ROOT, Source, python_sources
from tests.unit.repository.test_layers import PACKAGE, room_of

SYMLINKS = {
    "components": "unified_cache/components",
    "controller": "unified_cache/controller",
    "storage_backends": "unified_cache/storage_backends",
}

PROGRAM = "sizing"
"""The room of what stands on the library and uses only what that exports."""

LIBRARY = {source.module: source for source in python_sources() if source.path.startswith(f"{PACKAGE}/")}


def exports(source: Source) -> list[str] | None:
    """Return the names of ``__all__``; None where there is none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def unexported_imports(source: Source, library: dict[str, Source]) -> list[str]:
    """Return each name that a file imports from another room's module and that its ``__all__`` does not have."""
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module in library
        if room_of(node.module) != room_of(source.module)
        for alias in node.names
        if alias.name not in (exports(library[node.module]) or ())
    ]


def test_every_module_says_what_others_may_use() -> None:
    # A package whose modules are imported by name holds nothing but a docstring.
    full = [source for source in LIBRARY.values() if len(source.tree.body) > 1 and source.path[-11:] != "__main__.py"]
    assert [source.path for source in full if exports(source) is None] == []


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


def test_only_the_command_line_names_a_program() -> None:
    """The floors hold for imports; this one is about names of modules that are imported later."""
    others = [source for source in LIBRARY.values() if room_of(source.module) not in (PROGRAM, "cli")]
    assert [source.path for source in others if f"{PACKAGE}.{PROGRAM}" in source.text] == []


def test_a_program_imports_what_the_library_exports() -> None:
    programs = [source for source in LIBRARY.values() if room_of(source.module) == PROGRAM]
    assert programs
    found = {source.path: names for source in programs if (names := unexported_imports(source, LIBRARY))}
    assert found == {}


def test_an_import_of_a_name_that_is_not_exported_is_found() -> None:
    library = {"unified_cache.core.page": Source.of("unified_cache/core/page.py", "__all__ = ['Prompt']\nDIGEST = 1\n")}
    program = Source.of("unified_cache/sizing/demo/run.py", "from unified_cache.core.page import DIGEST, Prompt\n")
    assert unexported_imports(program, library) == ["unified_cache.core.page.DIGEST"]
