"""An ``__all__`` is a promise, and examples use nothing else. That its names exist, once and in order, ruff sees."""

import ast

import pytest

from tests.sources import ROOT, Source, python_sources, repository_files
from tests.support.documents import program_of
from tests.unit.repository.test_layers import PACKAGE, room_of

SYMLINKS = {
    "components": "unified_cache/components",
    "controller": "unified_cache/controller",
    "storage_backends": "unified_cache/storage_backends",
}

PROGRAM = "sizing"

NAMES_MAX = 200

VLLM_SEAM = "unified_cache/integrations/vllm/engine.py"
"""Hands on names of vLLM, for the modules beside it."""

LIBRARY = {source.module: source for source in python_sources() if source.path.startswith(f"{PACKAGE}/")}


def exports(source: Source) -> list[str] | None:
    """Return the names of ``__all__``; None where there is none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def unpromised_imports(text: str) -> list[str]:
    """Return each name that a program takes from a module whose ``__all__`` does not promise it."""
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in LIBRARY
        for alias in node.names
        if alias.name not in (exports(LIBRARY[node.module]) or ())
    ]


def test_few_names_are_promised() -> None:
    promised = {source.path: len(exports(source) or ()) for source in LIBRARY.values()}
    del promised[VLLM_SEAM]
    assert sum(promised.values()) <= NAMES_MAX


@pytest.mark.parametrize("path", [path for path in repository_files() if path.endswith(".md") or "examples/" in path])
def test_examples_and_documents_use_what_is_promised(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if path.endswith(".md"):
        text = program_of(text)
    assert unpromised_imports(text) == []


def test_a_name_that_is_not_promised_is_found() -> None:
    text = "from unified_cache.core.page import DIGEST_BYTES, Prompt\n"
    assert unpromised_imports(text) == ["unified_cache.core.page.DIGEST_BYTES"]


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
