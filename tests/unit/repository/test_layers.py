"""Imports inside the package point one way and run in no circle, and the tree is free of torch."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache

import pytest

from tests.sources import ROOT, Source, python_sources

PACKAGE = "unified_cache"

FACADE = "__init__"
"""The package itself, its ``__init__.py``, in the tables below."""

LIBRARY: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("components", "forward", "proto", "tree"),
    ("storage_backends",),
    ("controller",),
    ("cache",),
    (FACADE,),
    ("integrations", "observe", "testing"),
    ("service",),
)
PROGRAMS: tuple[tuple[str, ...], ...] = (("sizing",), ("cli",))
"""Programs over the public API; nothing in the library imports them."""

ROOMS_MAX = 14
ARROWS_MAX = 60
"""Pairs of rooms of which one imports the other, the facade not counted."""

LINES_MAX: Mapping[str, int] = {
    "cache": 2_000,
    "cli": 3_600,
    "components": 2_330,
    "controller": 6_490,
    "core": 4_640,
    "forward": 990,
    "integrations": 7_670,
    "observe": 1_680,
    "proto": 560,
    "service": 3_940,
    "sizing": 6_020,
    "storage_backends": 14_430,
    "testing": 720,
    "tree": 2_740,
}
"""Lines of Python of each room, at most: what grows in a room makes something else in it smaller."""

FLOORS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    PACKAGE: LIBRARY + PROGRAMS,
    f"{PACKAGE}.storage_backends": (
        ("memory_reads",),
        ("protocol", "manifest"),
        ("common", "catalog", "removals"),
        ("directory", "wrappers"),
        ("verified",),
        ("memory", "file", "packed", "object", "mooncake", "remote"),
        (FACADE,),
        ("url",),
        ("offline",),
    ),
    f"{PACKAGE}.service": (
        ("access",),
        ("store",),
        ("requests", "operations"),
        ("servicer",),
        ("server",),
        (FACADE,),
    ),
}
"""Rooms of a package by floor, lowest first. A room imports from itself and from lower floors; rooms of one floor do
not know each other."""

TORCH_FREE = frozenset({"core", "components", "proto", "storage_backends", "tree"})
"""Rooms that never import torch by themselves; for the tree, nothing that it imports does so either."""

HEIGHT = {
    package: {room: height for height, floor in enumerate(floors) for room in floor}
    for package, floors in FLOORS.items()
}


def package_sources() -> list[Source]:
    return [source for source in python_sources() if source.path.startswith(f"{PACKAGE}/")]


@cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in package_sources())


def room_of(module: str, package: str = PACKAGE) -> str:
    """Return the room of ``package`` that ``module`` lies in: the next part of its name."""
    return module.removeprefix(package).split(".")[1] if module != package else FACADE


def lies_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything imported; of ``from p import n`` ``p.n`` where that is a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for name in sorted({f"{base}.{alias.name}" for alias in node.names}):
                yield node.lineno, name if name in modules() else base


def against_the_order(source: Source) -> Iterator[str]:
    imported = dict.fromkeys(imported_modules(source))
    for line, module in imported:
        if module.startswith("."):
            yield f"{source.path}:{line}: found a relative import; expected the whole name"
    for package, height in HEIGHT.items():
        if not lies_in(source.module, package):
            continue
        room = room_of(source.module, package)
        if room not in height:
            yield f"{source.path}:1: found the room {room!r}; expected one of FLOORS[{package!r}] in the test of layers"
            continue
        for line, module in imported:
            if not lies_in(module, package) or room_of(module, package) == room:
                continue
            if height.get(room_of(module, package), len(height)) >= height[room]:
                found = f"found {room!r} importing {module}"
                yield f"{source.path}:{line}: {found}; expected imports from lower floors only"


Graph = Mapping[str, Collection[str]]


def module_graph() -> dict[str, set[str]]:
    """Return the modules of the package that each of them imports."""
    return {
        source.module: {module for _, module in imported_modules(source) if module in modules()} - {source.module}
        for source in package_sources()
    }


def room_graph(graph: Graph, package: str) -> dict[str, set[str]]:
    """Return the rooms of ``package`` that each of them imports: packages in it as a whole, and modules beside them."""
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if lies_in(module, package):
            room = room_of(module, package)
            others = {room_of(other, package) for other in imported if lies_in(other, package)}
            rooms.setdefault(room, set()).update(others - {room})
    return rooms


def cycles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach one another, as sorted lists; Tarjan's strongly connected components."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in path:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def torch_imports(source: Source) -> Iterator[str]:
    if room_of(source.module) in TORCH_FREE:
        for line, module in imported_modules(source):
            if module.split(".")[0] == "torch":
                yield f"{source.path}:{line}: found {module}; expected no torch in {sorted(TORCH_FREE)}"


def test_imports_point_to_lower_layers() -> None:
    findings = [finding for source in package_sources() for finding in against_the_order(source)]
    assert not findings, "\n" + "\n".join(findings)


def test_there_are_few_rooms_and_few_arrows_between_them() -> None:
    graph = {room: others for room, others in room_graph(module_graph(), PACKAGE).items() if room != FACADE}
    assert len(graph) <= ROOMS_MAX
    assert sum(len(others - {FACADE}) for others in graph.values()) <= ARROWS_MAX


def test_rooms_and_nothing_else_lie_at_the_root_of_the_package() -> None:
    files = {path.name for path in (ROOT / PACKAGE).iterdir() if path.is_file()}
    assert files <= {"__init__.py", "py.typed"}


def test_every_room_keeps_to_its_budget_of_lines() -> None:
    lines: dict[str, int] = {}
    for source in package_sources():
        room = room_of(source.module)
        lines[room] = lines.get(room, 0) + len(source.text.splitlines())
    assert set(lines) - {FACADE} == set(LINES_MAX)
    assert {room: count for room, count in lines.items() if count > LINES_MAX.get(room, count)} == {}


def test_the_lowest_rooms_and_the_tree_name_no_torch() -> None:
    findings = [finding for source in package_sources() for finding in torch_imports(source)]
    assert not findings, "\n" + "\n".join(findings)


def test_importing_every_module_of_the_tree_does_not_import_torch() -> None:
    modules = [source.module for source in package_sources() if room_of(source.module) == "tree"]
    program = f"import sys, {', '.join(modules)}\nsys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_stands_on_one_floor_and_exists(package: str) -> None:
    floors = [room for floor in FLOORS[package] for room in floor]
    assert len(floors) == len(set(floors))
    assert set(floors) == {room_of(module, package) for module in modules() if lies_in(module, package)} | {FACADE}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(module_graph()) == []


def test_no_rooms_of_a_package_import_each_other_in_a_circle() -> None:
    graph = module_graph()
    packages = {module.rpartition(".")[0] for module in modules()} - {""}
    found = {package: cycles(room_graph(graph, package)) for package in sorted(packages)}
    assert {package: circles for package, circles in found.items() if circles} == {}


def test_a_circle_is_found_and_what_leads_into_it_is_not_in_it() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": {"c"}, "e": set()}) == [["b", "c", "d"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("unified_cache/tree/node.py", "from unified_cache.cache.cache import UnifiedCache\n"),
        ("unified_cache/tree/node.py", "from unified_cache.controller import memory\n"),
        ("unified_cache/tree/node.py", "import unified_cache.storage_backends.file.store\n"),
        ("unified_cache/controller/loads.py", "from unified_cache import UnifiedCache\n"),
        ("unified_cache/controller/ledger.py", "from unified_cache.cache.stats import Stats\n"),
        ("unified_cache/__init__.py", "from unified_cache.cli.main import main\n"),
        ("unified_cache/core/pool.py", "from .page import PageKey\n"),
        ("unified_cache/core/pool.py", "def f():\n    import unified_cache.tree.node\n"),
        ("unified_cache/attic.py", "x = 1\n"),
        (
            "unified_cache/storage_backends/offline/prompts.py",
            "from unified_cache.sizing.replay.trace import read_trace\n",
        ),
        ("unified_cache/storage_backends/file/store.py", "import unified_cache.storage_backends.packed.store\n"),
        ("unified_cache/service/access/tokens.py", "from unified_cache.service.server import Service\n"),
        ("unified_cache/service/attic.py", "x = 1\n"),
        ("unified_cache/storage_backends/directory/root.py", "from unified_cache.storage_backends import memory\n"),
    ],
)
def test_an_import_against_the_order_is_found(path: str, text: str) -> None:
    (finding,) = against_the_order(Source.of(path, text))
    assert finding.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("unified_cache/tree/node.py", "import torch\nfrom unified_cache.tree.lock import Lock\n"),
        (
            "unified_cache/cache/cache.py",
            "from unified_cache.controller import loads\nfrom unified_cache.core.pool import Tier\n",
        ),
        ("unified_cache/sizing/demo/show.py", "from unified_cache import UnifiedCache\n"),
        ("unified_cache/__init__.py", "from unified_cache.cache.cache import UnifiedCache\n"),
        ("unified_cache/storage_backends/url.py", "from unified_cache import storage_backends\n"),
        ("unified_cache/storage_backends/file/store.py", "from unified_cache.storage_backends.file import quota\n"),
        ("unified_cache/service/servicer.py", "from unified_cache.service.requests.lookup import longest_prefix\n"),
    ],
)
def test_an_import_along_the_order_passes(path: str, text: str) -> None:
    assert list(against_the_order(Source.of(path, text))) == []


@pytest.mark.parametrize("text", ["import torch\n", "from torch.nn import Module\n"])
def test_torch_in_the_tree_is_found(text: str) -> None:
    assert len(list(torch_imports(Source.of("unified_cache/tree/node.py", text)))) == 1
