"""Imports inside the package point one way, and the tree is free of torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, Source, python_sources

PACKAGE = "unified_cache"

FACADE = "__init__"
"""The package itself, ``unified_cache/__init__.py``, in the table below."""

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "files"),
    ("extras",),
    ("page",),
    ("window",),
    ("pool",),
    ("config", "slots", "seal", "proto"),
    ("wire",),
    ("tree", "storage_backends", "memory", "ranks"),
    ("components", "controller", "forward"),
    ("ledger",),
    ("transfers",),
    ("stats", "backup_scheduler"),
    ("cache",),
    (FACADE,),
    ("service", "testing", "integrations", "events", "replay", "cluster", "offline"),
    ("demo",),
    ("cli",),
)
"""Lowest first. A room imports from itself and from lower layers; rooms of one layer do not know each other."""

TORCH_FREE = frozenset({"errors", "page", "window", "pool", "tree"})
"""Rooms that never import torch by themselves; for the tree, nothing that it imports does so either."""

HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else FACADE


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported; of ``from p import n`` it is ``p.n`` where that is a room."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            for alias in node.names:
                yield node.lineno, f"{PACKAGE}.{alias.name}" if alias.name in HEIGHT else PACKAGE
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def against_the_order(source: Source) -> Iterator[str]:
    room = room_of(source.module)
    if room not in HEIGHT:
        yield f"{source.path}:1: found the room {room!r}; expected one of LAYERS in the test of layers"
        return
    for line, module in imported_modules(source):
        if module.startswith("."):
            yield f"{source.path}:{line}: found a relative import; expected the whole name"
        if module.split(".")[0] != PACKAGE or room_of(module) == room:
            continue
        below = HEIGHT.get(room_of(module), len(LAYERS)) < HEIGHT[room]
        if not below:
            yield f"{source.path}:{line}: found {room!r} importing {module}; expected imports from lower layers only"


def torch_imports(source: Source) -> Iterator[str]:
    if room_of(source.module) in TORCH_FREE:
        for line, module in imported_modules(source):
            if module.split(".")[0] == "torch":
                yield f"{source.path}:{line}: found {module}; expected no torch in {sorted(TORCH_FREE)}"


def package_sources() -> list[Source]:
    return [source for source in python_sources() if source.path.startswith(f"{PACKAGE}/")]


def test_imports_point_to_lower_layers() -> None:
    findings = [finding for source in package_sources() for finding in against_the_order(source)]
    assert not findings, "\n" + "\n".join(findings)


def test_the_lowest_rooms_and_the_tree_name_no_torch() -> None:
    findings = [finding for source in package_sources() for finding in torch_imports(source)]
    assert not findings, "\n" + "\n".join(findings)


def test_importing_every_module_of_the_tree_does_not_import_torch() -> None:
    modules = [source.module for source in package_sources() if room_of(source.module) == "tree"]
    program = f"import sys, {', '.join(modules)}\nsys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_no_room_stands_in_two_layers() -> None:
    assert len(HEIGHT) == sum(len(layer) for layer in LAYERS)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("unified_cache/tree/node.py", "from unified_cache.cache import UnifiedCache\n"),
        ("unified_cache/tree/node.py", "from unified_cache import memory\n"),
        ("unified_cache/tree/node.py", "import unified_cache.storage_backends.file.store\n"),
        ("unified_cache/transfers.py", "from unified_cache import UnifiedCache\n"),
        ("unified_cache/ledger.py", "from unified_cache.transfers import Transfer\n"),
        ("unified_cache/__init__.py", "from unified_cache.cli.main import main\n"),
        ("unified_cache/pool.py", "from .page import PageKey\n"),
        ("unified_cache/pool.py", "def f():\n    import unified_cache.slots\n"),
        ("unified_cache/attic.py", "x = 1\n"),
    ],
)
def test_an_import_against_the_order_is_found(path: str, text: str) -> None:
    (finding,) = against_the_order(Source.of(path, text))
    assert finding.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("unified_cache/tree/node.py", "import torch\nfrom unified_cache.tree.lock import Lock\n"),
        ("unified_cache/cache.py", "from unified_cache import transfers\nfrom unified_cache.pool import Tier\n"),
        ("unified_cache/demo/show.py", "from unified_cache import UnifiedCache\n"),
        ("unified_cache/__init__.py", "from unified_cache.cache import UnifiedCache\n"),
    ],
)
def test_an_import_along_the_order_passes(path: str, text: str) -> None:
    assert list(against_the_order(Source.of(path, text))) == []


@pytest.mark.parametrize("text", ["import torch\n", "from torch.nn import Module\n"])
def test_torch_in_the_tree_is_found(text: str) -> None:
    assert len(list(torch_imports(Source.of("unified_cache/tree/node.py", text)))) == 1
