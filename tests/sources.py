"""The files of this repository, as the tests about the repository itself see them."""

import ast
import gc
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PRUNED = frozenset({"__pycache__", "build", "dist"})
"""Directories that hold nothing of ours, asked only where git cannot tell; so do hidden ones but for ``.ci``."""

REPORT = "report"
"""At the root what ``replay`` writes; below it a package of ours."""

GENERATED_SUFFIXES = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: where it lies, relative to the root with forward slashes, and what it says."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """What it says as Python; parsed once."""
        return _parsed(self)

    @property
    def module(self) -> str:
        """Dotted name under which the file is imported."""
        return module_name(self.path)


@cache
def _parsed(source: Source) -> ast.Module:
    # Trees stay: the garbage collector need not look at them again and again.
    gc.disable()
    tree = ast.parse(source.text, source.path)
    gc.freeze()
    gc.enable()
    return tree


def module_name(path: str) -> str:
    """Return the dotted name under which the file at ``path`` is imported; a package's without ``__init__``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def scoped_nodes(tree: ast.Module) -> tuple[tuple[ast.AST, str], ...]:
    """Return all nodes in source order; with each comes the dotted name of the class or function around it."""
    found: list[tuple[ast.AST, str]] = []
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, scope = waiting.pop()
        found.append((node, scope))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = f"{scope}.{node.name}" if scope else node.name
        waiting.extend((child, scope) for child in reversed(list(ast.iter_child_nodes(node))))
    return tuple(found)


@cache
def repository_files() -> tuple[str, ...]:
    """List the files that git tracks or would add, links aside; without git, those that are no build product."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listing = []
    # Unpacked inside somebody else's ignored directory, git answers with nothing.
    names = {name for name in listing if name} or set(_walk())
    return tuple(sorted(name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()))


def _walk() -> Iterator[str]:
    for directory, folders, names in os.walk(ROOT):
        pruned = PRUNED | {REPORT} if Path(directory) == ROOT else PRUNED
        folders[:] = [name for name in folders if name not in pruned and (name == ".ci" or not name.startswith("."))]
        for name in names:
            yield (Path(directory) / name).relative_to(ROOT).as_posix()


def python_paths() -> list[str]:
    """List every Python file that people write; generated code is its generator's business."""
    return [path for path in repository_files() if path.endswith(".py") and not path.endswith(GENERATED_SUFFIXES)]


@cache
def python_sources() -> tuple[Source, ...]:
    """Read every Python file that people write."""
    return tuple(Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in python_paths())
