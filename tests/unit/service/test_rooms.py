"""The rooms of the service stand in an order, and each imports only from those before it."""

import ast

from tests.sources import Source, python_sources

SERVICE = "unified_cache.service."
ORDER = ("access", "store", "requests", "operations", "servicer", "server")
APART = frozenset({("operations", "requests")})
"""Pairs that do not know each other, although the order would let the first import the second."""


def room_of(module: str) -> str:
    return module.removeprefix(SERVICE).split(".")[0]


def rooms_imported(source: Source) -> set[str]:
    modules = [node.module or "" for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)]
    return {room_of(module) for module in modules if module.startswith(SERVICE)}


def test_rooms_of_the_service_import_from_earlier_ones_alone() -> None:
    sources = [source for source in python_sources() if source.module.startswith(SERVICE)]
    assert {room_of(source.module) for source in sources} == set(ORDER)
    for source in sources:
        room = room_of(source.module)
        for other in rooms_imported(source) - {room}:
            assert ORDER.index(other) < ORDER.index(room), f"{source.path}: found {room} importing {other}"
            assert (room, other) not in APART, f"{source.path}: found {room} importing {other}"
