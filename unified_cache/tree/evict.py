"""Evict: give slots back, in the order of the eviction policy, never a page that a lock pins."""

from typing import NamedTuple

from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier, numbers_of
from unified_cache.tree.node import Node
from unified_cache.tree.state import Freed, TreeState

__all__ = ["Victim", "evict", "evict_from", "next_victim", "prompt_of", "would_lose"]


class Victim(NamedTuple):
    """A node that eviction from a component on a tier takes next."""

    node: Node
    tier_component: int


def evict(tree: TreeState, tier: Tier, component: int, pages: int) -> Freed:
    """Free up to ``pages`` slots of a component on a tier, and what stands on those pages.

    Full goes from the tail of a leaf-most run, so that it stays prefix-closed; a windowed component from anywhere,
    oldest page first, leaving tombstones. Components after it stand on it: they lose the same pages. A page that the
    other tier holds as well is thereby demoted; a node that holds nothing any more leaves the tree.
    O(log n) per victim. Frees fewer pages only when locks pin everything else.
    """
    freed = Freed([[] for _ in range(2 * tree.components_count)], [])
    tier_component = int(tier) * tree.components_count + component
    got = 0
    while got < pages:
        node = tree.queues.next_victim(tier_component)
        if node is None:
            break
        got += evict_from(tree, node, tier_component, pages - got, freed)
    return freed


def next_victim(tree: TreeState, tier: Tier, component: int) -> Victim | None:
    """Return the node that ``evict`` would take from next; None if locks pin everything."""
    tier_component = int(tier) * tree.components_count + component
    node = tree.queues.next_victim(tier_component)
    return None if node is None else Victim(node, tier_component)


def evict_from(tree: TreeState, node: Node, tier_component: int, pages: int, freed: Freed) -> int:
    """Free up to ``pages`` slots of the next victim of a component on a tier; return how many."""
    pages = tree.queues.pages_at_once(node, tier_component, pages)
    take = _evict_windowed if tier_component % tree.components_count else _evict_tail
    got = take(tree, node, tier_component, pages, freed)
    if not node.children:
        tree.prune(node)
    return got


def would_lose(tree: TreeState, victim: Victim, pages: int, *, with_superseded: bool) -> bool:
    """Return whether evicting up to ``pages`` of a victim takes any page that the other tier lacks.

    Superseded windows count ``with_superseded`` alone.
    """
    node, tier_component = victim
    components = tree.components_count
    tier, component = divmod(tier_component, components)
    if component == 0:
        start, end = max(0, node.held_count[tier_component] - pages), node.pages
    else:
        start, end = 0, _end_of_oldest(node, tier_component, pages)
    is_superseded = not with_superseded and node.is_superseded and len(node.children) == 1
    for dependant in range(component, 1 if is_superseded else components):
        held = node.slots[tier * components + dependant]
        if held is not None:
            lost = held[start:end] >= 0
            other = node.slots[(1 - tier) * components + dependant]
            if other is not None:
                lost &= other[start:end] < 0
            if lost.any():
                return True
    return False


def prompt_of(tree: TreeState, victim: Victim) -> Prompt:
    """Return a prompt that needs the pages of a victim.

    Where a window may reach from there into what is below, it follows the branch used last.
    """
    node, tier_component = victim
    tier, component = divmod(tier_component, tree.components_count)
    reach = node.end + (tree.spans[component] - 1 if component else 0)
    below: list[Node] = []
    while (below[-1] if below else node).end < reach:
        full = tier * tree.components_count
        children = [child for child in (below[-1] if below else node).children.values() if child.held_count[full]]
        if not children:
            break
        below.append(max(children, key=lambda child: child.stamps[tier_component]))
    above = [node]
    while above[-1].parent is not None:
        above.append(above[-1].parent)
    root = above.pop()
    path = (*above[::-1], *below)
    media = {page: items for part in path for page, items in part.media.items()}
    return Prompt.below(root.key, b"".join(part.key for part in path), tree.page_size, media, root.namespace)


def _evict_tail(tree: TreeState, node: Node, tier_component: int, pages: int, freed: Freed) -> int:
    """Drop the last ``pages`` of Full's run in a node, after everything that stands on them."""
    end = node.held_count[tier_component]
    start = max(0, end - pages)
    for dependant in range(tier_component + tree.components_count - 1, tier_component, -1):
        tree.drop(node, dependant, start, node.pages, freed)
    return tree.drop(node, tier_component, start, end, freed)


def _evict_windowed(tree: TreeState, node: Node, tier_component: int, pages: int, freed: Freed) -> int:
    """Drop the oldest ``pages`` that no lock pins, and the same pages of the components after this one."""
    end = _end_of_oldest(node, tier_component, pages)
    last_tier_component = (tier_component // tree.components_count + 1) * tree.components_count - 1
    for dependant in range(last_tier_component, tier_component, -1):
        tree.drop(node, dependant, 0, min(end, node.first_pinned(dependant)), freed)
    return tree.drop(node, tier_component, 0, end, freed)


def _end_of_oldest(node: Node, tier_component: int, pages: int) -> int:
    """Return the offset behind the oldest ``pages`` that no lock pins, or behind all of them if there are fewer."""
    held = node.slots[tier_component]
    assert held is not None
    end = node.first_pinned(tier_component)
    victims = numbers_of(held[:end] >= 0)
    return int(victims[pages - 1]) + 1 if victims.size > pages else end
