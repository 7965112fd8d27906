"""Cutting a node of the tree where a match ends."""

import numpy as np
import pytest

from unified_cache.components import Full
from unified_cache.errors import InputError, StaleMatchError
from unified_cache.page import Prompt
from unified_cache.pool import PoolSpec, Tier
from unified_cache.tree import RadixTree

PAGE = 2


def tree_with(*prompts: Prompt) -> RadixTree:
    tree = RadixTree((Full((PoolSpec("kv", 0),)),), PAGE)
    slot = 1
    for prompt in prompts:
        tree.insert(prompt, 0, [np.arange(slot, slot + prompt.pages_count, dtype=np.int32)], Tier.DEVICE)
        slot += prompt.pages_count
    return tree


def prompt(*tokens: int) -> Prompt:
    return Prompt.of(tokens, PAGE)


LONG = prompt(1, 1, 2, 2, 3, 3, 4, 4)
OTHER = prompt(9, 9)


def evicted(tree: RadixTree, pages: int) -> list[int]:
    return [slot for run in tree.evict(Tier.DEVICE, 0, pages).slots[0] for slot in run.tolist()]


def test_both_parts_hold_their_slots_and_are_evicted_by_themselves() -> None:
    tree = tree_with(LONG)
    found = tree.peek(prompt(1, 1, 2, 2, 7, 7))
    assert found.tree_end == 2
    tree.cut(found, 2)
    tree.check()
    assert tree.nodes_count() == 2
    victim = tree.next_victim(Tier.DEVICE, 0)
    assert victim is not None
    assert tree.evict_from(victim, 100).slots[0][0].tolist() == [3, 4]
    assert tree.match(LONG).device_end == 2


def test_the_prompt_of_the_whole_node_comes_back() -> None:
    tree = tree_with(LONG)
    whole = tree.cut(tree.peek(prompt(1, 1, 7, 7)), 1)
    assert whole is not None
    assert (whole.tokens, whole.root) == (LONG.tokens, LONG.root)


@pytest.mark.parametrize("end", [0, 4])
def test_where_a_node_ends_anyway_nothing_changes(end: int) -> None:
    tree = tree_with(LONG)
    found = tree.peek(LONG)
    assert tree.cut(found, end) is None
    assert tree.slots(found, Tier.DEVICE, 0, 0, 4).tolist() == [1, 2, 3, 4]


def test_a_cut_is_no_use() -> None:
    tree = tree_with(LONG, OTHER)
    tree.cut(tree.peek(prompt(1, 1, 7, 7)), 1)
    assert evicted(tree, 4) == [2, 3, 4, 1]


def test_a_lock_covers_both_parts() -> None:
    tree = tree_with(LONG)
    lock = tree.lock(tree.match(LONG), 4, Tier.DEVICE)
    tree.cut(tree.peek(prompt(1, 1, 7, 7)), 1)
    tree.check([lock])
    assert evicted(tree, 4) == []
    assert tree.protected_pages(Tier.DEVICE, 0) == 4
    tree.unlock(lock)
    assert tree.protected_pages(Tier.DEVICE, 0) == 0
    assert len(evicted(tree, 4)) == 4


def test_a_match_is_dead_after_a_cut_and_no_end_beyond_it_can_be_cut() -> None:
    tree = tree_with(LONG)
    found = tree.peek(LONG)
    with pytest.raises(InputError):
        tree.cut(found, 5)
    tree.cut(found, 1)
    with pytest.raises(StaleMatchError):
        tree.cut(found, 2)
