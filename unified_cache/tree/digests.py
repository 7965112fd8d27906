"""Digests of the pages of nodes, made when a page is first forgotten and kept with the node."""

from unified_cache.forgotten import Digests, chained_digests, root_digest
from unified_cache.tree.node import Node

__all__ = ["digests_of"]


def digests_of(node: Node, page_bytes: int) -> Digests:
    """Return the digest of every page of a node, and of more where its tail was cut off: see ``chained_digests``.

    Makes those of the nodes above it too, once each.
    """
    if node.digests is not None:
        return node.digests
    todo: list[Node] = []
    at = node
    while at.digests is None and at.parent is not None:
        todo.append(at)
        at = at.parent
    before = root_digest(at.key) if at.digests is None else int(at.digests[at.pages - 1])
    made = node.digests
    for each in reversed(todo):
        made = each.digests = chained_digests(before, each.key, page_bytes)
        before = int(made[-1])
    assert made is not None, "a root has no pages"
    return made
