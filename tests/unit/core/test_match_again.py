"""A prompt that is looked for again is found where it was, until the tree has changed."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.components import toy_components
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import RadixTree


def insert(tree: RadixTree, prompt: Prompt, start: int, first_slot: int, tier: Tier = Tier.DEVICE) -> None:
    count = prompt.pages_count - start
    tree.insert(prompt, start, [np.arange(first_slot, first_slot + count, dtype=np.int32)], tier)


PROMPT = Prompt.of([1, 2, 3, 4], 1)

CHANGES: dict[str, Callable[[RadixTree], object]] = {
    "a longer prompt": lambda tree: insert(tree, Prompt.of([1, 2, 3, 4, 5], 1), 4, 5),
    "a branch": lambda tree: insert(tree, Prompt.of([1, 2, 9], 1), 2, 5),
    "a page of it evicted": lambda tree: tree.evict(Tier.DEVICE, 0, 1),
    "all of it evicted": lambda tree: tree.evict(Tier.DEVICE, 0, 4),
    "the host has it too": lambda tree: insert(tree, PROMPT, 0, 1, Tier.HOST),
    "cleared": RadixTree.clear,
}


def tree_of_prompt() -> RadixTree:
    tree = RadixTree(toy_components((SPAN_ALL,)), 1)
    insert(tree, PROMPT, 0, 1)
    return tree


def test_a_prompt_is_found_by_the_same_match_while_nothing_changes() -> None:
    tree = tree_of_prompt()
    found = tree.match(PROMPT)
    tree.unlock(tree.lock(found, 4, Tier.DEVICE))
    assert tree.match(PROMPT) is found
    assert tree.peek(PROMPT) is found


@pytest.mark.parametrize("change", CHANGES)
def test_a_prompt_is_looked_for_anew_after(change: str) -> None:
    tree = tree_of_prompt()
    before = tree.match(PROMPT)
    CHANGES[change](tree)
    found, fresh = tree.match(PROMPT), tree.match(Prompt.of([1, 2, 3, 4], 1))
    assert found is not before
    ends = (found.device_end, found.host_end, found.tree_end)
    assert ends == (fresh.device_end, fresh.host_end, fresh.tree_end)
    held = tree.slots(fresh, Tier.HOST, 0, 0, fresh.tree_end)
    assert tree.slots(found, Tier.HOST, 0, 0, found.tree_end).tolist() == held.tolist()


def test_what_is_matched_again_is_recent_again() -> None:
    tree = tree_of_prompt()
    other = Prompt.of([7, 8], 1)
    insert(tree, other, 0, 5)
    tree.match(PROMPT)
    tree.match(other)
    tree.match(PROMPT)
    tree.match(PROMPT)
    assert [slot for slots in tree.evict(Tier.DEVICE, 0, 2).slots[0] for slot in slots.tolist()] == [5, 6]
