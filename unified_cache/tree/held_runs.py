"""Runs of pages that a tree holds, for who follows it from a start."""

from dataclasses import dataclass

from unified_cache.core.page import NO_MEDIA, Namespace, PageMedia, shift_media
from unified_cache.core.pool import Slots
from unified_cache.tree.node import Node
from unified_cache.tree.radix import RadixTree


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of pages in the tree. Its keys follow from those of the run that it continues."""

    root: bytes
    """Name of the root, see ``Prompt.root``."""
    namespace: Namespace | None
    """Namespace that the root is of, as far as it is known."""
    parent: int | None
    """Number of the run that it continues, in the same list; None for a run that begins at a root."""
    tokens: bytes
    """Encoded, whole pages."""
    media: PageMedia
    """As in a prompt that begins with the run; before page 0 stands the last one above, which may reach into it."""
    pages_count: int
    slots: tuple[Slots | None, ...]
    """Slot of every page, by tier and component, -1 for a tombstone; None where nothing is held. Copies."""


def held_runs(tree: RadixTree) -> list[HeldRun]:
    """Return the tree's runs, each after the one that it continues."""
    runs: list[HeldRun] = []
    numbers: dict[Node, int] = {}
    roots: dict[Node, Node] = {}
    last_media: dict[Node, PageMedia] = {}
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        root = roots.get(parent, parent)
        roots[node] = root
        numbers[node] = len(runs)
        above = last_media.get(parent, NO_MEDIA)
        last_media[node] = dict([max(node.media.items())]) if node.media else above
        media = shift_media({**above, **node.media}, node.start, tree.page_size)
        slots = tuple(None if held is None else held.copy() for held in node.slots)
        assert len(node.key) == node.pages * tree.page_key_bytes
        runs.append(HeldRun(root.key, root.namespace, numbers.get(parent), node.key, media, node.pages, slots))
    return runs
