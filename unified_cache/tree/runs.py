"""Everything that the tree holds, as values: for whoever was not told from the beginning."""

from dataclasses import dataclass

from unified_cache.page import TOKEN_BYTES
from unified_cache.pool import Slots
from unified_cache.tree.node import Node
from unified_cache.tree.state import TreeState

__all__ = ["HeldRun", "held_runs"]


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of pages in the tree. Its keys follow from those of the run that it continues."""

    root: bytes
    """Name of the root, see ``Prompt.root``."""
    parent: int | None
    """Number of the run that it continues, in the same list; None for a run that begins at a root."""
    tokens: bytes
    """Encoded, whole pages."""
    pages_count: int
    slots: tuple[Slots | None, ...]
    """Slot of every page, by lane, -1 for a hole; None where nothing is held. Copies."""


def held_runs(tree: TreeState) -> list[HeldRun]:
    """Return the tree's runs, each after the one that it continues."""
    runs: list[HeldRun] = []
    numbers: dict[Node, int] = {}
    roots: dict[Node, bytes] = {}
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        root = roots.get(parent, parent.key)
        roots[node] = root
        numbers[node] = len(runs)
        slots = tuple(None if held is None else held.copy() for held in node.slots)
        assert len(node.key) == node.pages * tree.page_size * TOKEN_BYTES
        runs.append(HeldRun(root, numbers.get(parent), node.key, node.pages, slots))
    return runs
