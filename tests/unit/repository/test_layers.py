"""Imports inside the package point one way and run in no circle, and the tree is free of torch."""

import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter

import grimp
import pytest

from tests.sources import ROOT, python_sources

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
    "cache": 1_760,
    "cli": 3_000,
    "components": 1_910,
    "controller": 5_650,
    "core": 3_590,
    "forward": 710,
    "integrations": 6_830,
    "observe": 1_330,
    "proto": 320,
    "service": 3_490,
    "sizing": 4_540,
    "storage_backends": 14_290,
    "testing": 510,
    "tree": 2_150,
}
"""Lines of Python of each room, at most: what grows in a room makes something else in it smaller."""

FLOORS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    PACKAGE: LIBRARY + PROGRAMS,
    f"{PACKAGE}.storage_backends": (
        ("removals",),
        ("protocol", "manifest"),
        ("common",),
        ("directory", "wrappers"),
        ("memory", "file", "packed", "object", "mooncake", "remote"),
        (FACADE,),
        ("url",),
        ("offline",),
    ),
    f"{PACKAGE}.service": (
        ("limits",),
        ("access",),
        ("store",),
        ("operations",),
        ("servicer",),
        ("server",),
        (FACADE,),
    ),
}
"""Rooms of a package by floor, lowest first. A room imports from itself and from lower floors; rooms of one floor do
not know each other."""

TORCH_FREE = frozenset({"core", "components", "proto", "storage_backends", "tree"})
"""Rooms that never import torch by themselves; for the tree, nothing that it imports does so either."""

GRAPH = grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)
"""Which module imports which, inside functions too; packages of others are one module each."""

ROOMS = tuple(sorted(GRAPH.find_children(PACKAGE)))


def room_of(module: str, package: str = PACKAGE) -> str:
    """Return the room of ``package`` that ``module`` lies in: the next part of its name."""
    return module.removeprefix(f"{package}.").split(".")[0] if module != package else FACADE


def against_the_order(graph: grimp.ImportGraph, package: str) -> set[grimp.PackageDependency]:
    """Return imports, those by way of others too, that point to a higher floor or to another room of their own."""
    floors = [floor for floor in FLOORS[package] if floor != (FACADE,)]
    layers = [grimp.Layer(*floor, independent=True) for floor in reversed(floors)]
    return graph.find_illegal_dependencies_for_layers(layers, containers={package})


def children_graph(package: str) -> dict[str, set[str]]:
    """Return the children of a package that each of them imports, whatever lies in them."""
    children = GRAPH.find_children(package)
    return {
        child: {
            other
            for other in children - {child}
            if GRAPH.direct_import_exists(importer=child, imported=other, as_packages=True)
        }
        for child in children
    }


@pytest.mark.parametrize("package", FLOORS)
def test_imports_point_to_lower_floors(package: str) -> None:
    assert against_the_order(GRAPH, package) == set()


@pytest.mark.parametrize("package", FLOORS)
def test_a_facade_stands_on_its_floor(package: str) -> None:
    heights = {room: height for height, floor in enumerate(FLOORS[package]) for room in floor}
    inside = {*GRAPH.find_descendants(package)}
    above = {room_of(module, package) for module in GRAPH.find_modules_that_directly_import(package) & inside}
    below = {room_of(module, package) for module in GRAPH.find_modules_directly_imported_by(package) & inside}
    assert {room for room in above if heights[room] <= heights[FACADE]} == set()
    assert {room for room in below if heights[room] >= heights[FACADE]} == set()


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_stands_on_one_floor_and_exists(package: str) -> None:
    rooms = [room for floor in FLOORS[package] for room in floor]
    assert sorted(rooms) == sorted([*(room_of(child, package) for child in GRAPH.find_children(package)), FACADE])


def test_there_are_few_rooms_and_few_arrows_between_them() -> None:
    assert len(ROOMS) <= ROOMS_MAX
    assert sum(map(len, children_graph(PACKAGE).values())) <= ARROWS_MAX


def test_rooms_and_nothing_else_lie_at_the_root_of_the_package() -> None:
    files = {path.name for path in (ROOT / PACKAGE).iterdir() if path.is_file()}
    assert files <= {"__init__.py", "py.typed"}


def test_every_room_keeps_to_its_budget_of_lines() -> None:
    lines: dict[str, int] = {}
    for source in python_sources():
        if source.path.startswith(f"{PACKAGE}/"):
            room = room_of(source.module)
            lines[room] = lines.get(room, 0) + len(source.text.splitlines())
    assert set(lines) - {FACADE} == set(LINES_MAX)
    assert {room: count for room, count in lines.items() if count > LINES_MAX.get(room, count)} == {}


def test_the_lowest_rooms_and_the_tree_name_no_torch() -> None:
    importers = GRAPH.find_modules_that_directly_import("torch")
    assert importers, "torch is a package that the graph knows"
    assert {module for module in importers if room_of(module) in TORCH_FREE} == set()


def test_importing_every_module_of_the_tree_does_not_import_torch() -> None:
    modules = GRAPH.find_descendants(f"{PACKAGE}.tree")
    program = f"import sys, {', '.join(modules)}\nsys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {PACKAGE, *GRAPH.find_descendants(PACKAGE)}
    TopologicalSorter({each: GRAPH.find_modules_directly_imported_by(each) for each in modules}).prepare()


def test_no_rooms_of_a_package_import_each_other_in_a_circle() -> None:
    for package in (PACKAGE, *GRAPH.find_descendants(PACKAGE)):
        TopologicalSorter(children_graph(package)).prepare()


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("tree.node", "cache.cache"),
        ("tree.node", "controller.memory"),
        ("controller.loads", "cache.stats"),
        ("storage_backends.file.store", "storage_backends.packed.store"),
        ("storage_backends.offline.prompts", "sizing.replay.trace"),
    ],
)
def test_an_import_against_the_order_is_found(importer: str, imported: str) -> None:
    spoiled = grimp.build_graph(PACKAGE, cache_dir=None)
    spoiled.add_import(importer=f"{PACKAGE}.{importer}", imported=f"{PACKAGE}.{imported}")
    assert any(against_the_order(spoiled, package) for package in FLOORS)
