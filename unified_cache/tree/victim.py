"""Victims of eviction, one by one, for a caller that saves pages to the host before they go."""

from typing import NamedTuple

from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.tree.node import Node
from unified_cache.tree.radix import Freed, RadixTree


class Victim(NamedTuple):
    """A node that eviction from a component on a tier takes next, until the tree's next change."""

    tree: RadixTree
    node: Node
    tier_component: int

    @classmethod
    def next(cls, tree: RadixTree, tier: Tier, component: int) -> "Victim | None":
        """Return what ``RadixTree.evict`` would take from next; None if locks pin everything."""
        tier_component = tree.tier_component(tier, component)
        node = tree.queues.next_victim(tier_component)
        return None if node is None else cls(tree, node, tier_component)

    def evict(self, pages: int) -> Freed:
        """Free up to ``pages`` slots."""
        freed = self.tree.nothing_freed()
        self.tree.evict_from(self.node, self.tier_component, pages, freed)
        return freed

    def would_lose(self, pages: int, *, with_superseded: bool) -> bool:
        """Return whether evicting up to ``pages`` takes any page that the other tier lacks.

        Superseded windows count ``with_superseded`` alone.
        """
        node, components = self.node, self.tree.components_count
        tier, component = divmod(self.tier_component, components)
        if component == 0:
            start, end = max(0, node.held_count[self.tier_component] - pages), node.pages
        else:
            start, end = 0, node.end_of_oldest(self.tier_component, pages)
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

    def prompt(self) -> Prompt:
        """Return a prompt that needs the pages of the victim.

        Where a window may reach from there into what is below, it follows the branch used last.
        """
        tier, component = divmod(self.tier_component, self.tree.components_count)
        full = self.tree.tier_component(Tier(tier), 0)
        lowest = self.node
        reach = lowest.end + (self.tree.spans[component] - 1 if component else 0)
        while lowest.end < reach:
            children = [child for child in lowest.children.values() if child.held_count[full]]
            if not children:
                break
            lowest = max(children, key=lambda child: child.stamps[self.tier_component])
        path = [lowest]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        root = path.pop()
        media = {page: items for part in path for page, items in part.media.items()}
        tokens = b"".join(part.key for part in reversed(path))
        return Prompt.below(root.key, tokens, self.tree.page_size, media, root.namespace)
