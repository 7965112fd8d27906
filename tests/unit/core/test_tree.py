"""Promises of the tree, one sentence each; random histories are in tests/property."""

import traceback
from collections.abc import Callable

import numpy as np
import pytest

from tests.sources import ROOT
from tests.support.components import toy_components
from unified_cache.components import Full
from unified_cache.core.errors import InputError, LockError, SlotError, StaleMatchError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import PoolSpec, Slots, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock, RadixTree


def full_tree(page_size: int = 1) -> RadixTree:
    return RadixTree(toy_components((SPAN_ALL,)), page_size)


def slots(*values: int) -> Slots:
    return np.array(values, np.int32)


def insert(tree: RadixTree, tokens: list[int], first_slot: int) -> None:
    prompt = Prompt.of(tokens, tree.page_size)
    tree.insert(prompt, 0, [np.arange(first_slot, first_slot + prompt.pages_count, dtype=np.int32)], Tier.DEVICE)


def lock(tree: RadixTree, tokens: list[int], end: int | None = None) -> Lock:
    found = tree.match(Prompt.of(tokens, tree.page_size))
    return tree.lock(found, found.device_end if end is None else end, Tier.DEVICE)


def evict(tree: RadixTree, pages: int) -> list[int]:
    return [slot for array in tree.evict(Tier.DEVICE, 0, pages).slots[0] for slot in array.tolist()]


def test_a_match_may_end_inside_a_node_and_changes_no_structure() -> None:
    tree = full_tree()
    insert(tree, [1, 2, 3, 4], 1)
    found = tree.match(Prompt.of([1, 2, 9], 1))
    assert (found.device_end, found.host_end, found.tree_end) == (2, 2, 2)
    assert tree.slots(found, Tier.DEVICE, 0, 0, 2).tolist() == [1, 2]
    assert tree.nodes_count() == 1


def test_a_split_keeps_both_halves_locked() -> None:
    tree = full_tree()
    insert(tree, [1, 2, 3, 4], 1)
    held = lock(tree, [1, 2, 3, 4])
    insert(tree, [1, 2, 9], 10)
    tree.check([held])
    assert evict(tree, 99) == [12]
    tree.unlock(held)
    assert sorted(evict(tree, 99)) == [1, 2, 3, 4]


def test_locking_a_long_path_touches_its_last_node_alone() -> None:
    tree = full_tree()
    for end in range(1, 20):
        insert(tree, list(range(end)), 1)
    held = lock(tree, list(range(19)))
    assert sum(any(node.locks) for node in tree._state.nodes()) == 1
    assert evict(tree, 99) == []
    tree.unlock(held)
    assert len(evict(tree, 99)) == 19


def test_a_lock_is_taken_back_once() -> None:
    tree = full_tree()
    insert(tree, [1, 2], 1)
    held = lock(tree, [1, 2])
    tree.unlock(held)
    with pytest.raises(LockError, match="already"):
        tree.unlock(held)


def test_another_trees_lock_is_refused_and_stays_held() -> None:
    mine, yours = full_tree(), full_tree()
    insert(yours, [1, 2], 1)
    held = lock(yours, [1, 2])
    with pytest.raises(LockError, match="another tree"):
        mine.unlock(held)
    yours.check([held])


def test_a_lock_from_before_clear_is_void_and_harmless() -> None:
    tree = full_tree()
    insert(tree, [1, 2], 1)
    held = lock(tree, [1, 2])
    assert [array.tolist() for array in tree.clear().slots[0]] == [[1, 2]]
    insert(tree, [1, 2], 1)
    tree.unlock(held)
    tree.check([])
    assert sorted(evict(tree, 9)) == [1, 2]


def test_a_match_is_dead_after_the_tree_changed() -> None:
    tree = full_tree()
    insert(tree, [1, 2], 1)
    found = tree.match(Prompt.of([1, 2], 1))
    insert(tree, [1, 3], 5)
    with pytest.raises(StaleMatchError):
        tree.lock(found, 2, Tier.DEVICE)
    with pytest.raises(StaleMatchError):
        tree.slots(found, Tier.DEVICE, 0, 0, 2)
    tree.check([])


def test_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    tree = full_tree()
    mine, yours = Prompt.of([1, 2], 1, Namespace(tenant="a")), Prompt.of([1, 2], 1, Namespace(tenant="b"))
    tree.insert(mine, 0, [slots(1, 2)], Tier.DEVICE)
    assert tree.match(yours).host_end == 0
    assert tree.match(mine).host_end == 2
    evict(tree, 2)
    assert not tree._state.roots


def test_bad_inserts_change_nothing() -> None:
    tree = full_tree()
    insert(tree, [1, 2], 1)
    prompt = Prompt.of([1, 2, 3], 1)
    with pytest.raises(InputError, match="expected 2 slots"):
        tree.insert(prompt, 1, [slots(5)], Tier.DEVICE)
    with pytest.raises(SlotError, match="every page"):
        tree.insert(prompt, 2, [slots(-1)], Tier.DEVICE)
    with pytest.raises(InputError, match="not held on HOST"):
        tree.insert(prompt, 2, [slots(5)], Tier.HOST)
    with pytest.raises(InputError, match="start must be"):
        tree.insert(prompt, 4, [slots()], Tier.DEVICE)
    with pytest.raises(InputError, match="1-token pages"):
        tree.match(Prompt.of([1, 2], 2))
    with pytest.raises(InputError, match="end must be"):
        tree.lock(tree.match(prompt), 3, Tier.DEVICE)
    tree.check([])
    assert len(tree.check()[0]) == 2


def test_a_window_that_goes_takes_nothing_along_that_locks_pin_of_a_longer_one() -> None:
    tree = RadixTree(toy_components((SPAN_ALL, 1, 3)), 1)
    prompt = Prompt.of(list(range(6)), 1)
    tree.insert(prompt, 0, [np.arange(first, first + 6, dtype=np.int32) for first in (1, 11, 21)], Tier.DEVICE)
    held = lock(tree, list(range(6)))
    freed = [np.concatenate(arrays).tolist() if arrays else [] for arrays in tree.evict(Tier.DEVICE, 1, 99).slots]
    assert freed[:3] == [[], [11, 12, 13, 14, 15], [21, 22, 23]]
    tree.check([held])


def test_a_parent_is_as_recent_as_the_child_that_left_it() -> None:
    tree = full_tree()
    insert(tree, [1], 1)
    tree.insert(Prompt.of([1, 2], 1), 1, [slots(2)], Tier.DEVICE)
    insert(tree, [9], 9)
    held = lock(tree, [9])
    tree.match(Prompt.of([1, 2], 1))
    assert evict(tree, 1) == [2], "the leaf that nothing pins"
    tree.unlock(held)
    assert evict(tree, 1) == [9], "older than the prefix that was used after it"
    assert evict(tree, 1) == [1]


def test_queues_do_not_grow_with_nodes_that_died() -> None:
    tree = RadixTree(toy_components((SPAN_ALL, 1)), 1)
    for i in range(2000):
        tree.insert(Prompt.of([i + 10], 1), 0, [slots(1 + i % 7), slots(1 + i % 7)], Tier.DEVICE)
        tree.evict(Tier.DEVICE, 0, 1)
    assert all(tree._state.queues.queue_length(tier_component) < 200 for tier_component in range(4))


# ---- matched again -------------------------------------------------------------------------------------------------


def insert_at(tree: RadixTree, prompt: Prompt, start: int, first_slot: int, tier: Tier = Tier.DEVICE) -> None:
    count = prompt.pages_count - start
    tree.insert(prompt, start, [np.arange(first_slot, first_slot + count, dtype=np.int32)], tier)


PROMPT = Prompt.of([1, 2, 3, 4], 1)

CHANGES: dict[str, Callable[[RadixTree], object]] = {
    "a longer prompt": lambda tree: insert_at(tree, Prompt.of([1, 2, 3, 4, 5], 1), 4, 5),
    "a branch": lambda tree: insert_at(tree, Prompt.of([1, 2, 9], 1), 2, 5),
    "a page of it evicted": lambda tree: tree.evict(Tier.DEVICE, 0, 1),
    "all of it evicted": lambda tree: tree.evict(Tier.DEVICE, 0, 4),
    "the host has it too": lambda tree: insert_at(tree, PROMPT, 0, 1, Tier.HOST),
    "cleared": RadixTree.clear,
}


def tree_of_prompt() -> RadixTree:
    tree = RadixTree(toy_components((SPAN_ALL,)), 1)
    insert_at(tree, PROMPT, 0, 1)
    return tree


def test_a_prompt_is_found_by_the_same_match_while_nothing_changes() -> None:
    tree = tree_of_prompt()
    found = tree.match(PROMPT)
    tree.unlock(tree.lock(found, 4, Tier.DEVICE))
    assert tree.match(PROMPT) is found
    assert tree.peek(PROMPT) is found


@pytest.mark.parametrize("change", CHANGES)
def test_a_prompt_is_looked_for_again_after(change: str) -> None:
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
    insert_at(tree, other, 0, 5)
    tree.match(PROMPT)
    tree.match(other)
    tree.match(PROMPT)
    tree.match(PROMPT)
    assert [slot for slots in tree.evict(Tier.DEVICE, 0, 2).slots[0] for slot in slots.tolist()] == [5, 6]


# ---- in plain Python and compiled ----------------------------------------------------------------------------------


def test_a_traceback_names_the_lines_of_the_core_that_it_went_through() -> None:
    tree = RadixTree((Full((PoolSpec("kv", 0),)),), 1)
    with pytest.raises(InputError) as refused:
        tree.insert(Prompt.of([1, 2, 3], 1), 2, [np.array([7], np.int32)], Tier.DEVICE)
    frames = [
        frame
        for frame in traceback.extract_tb(refused.value.__traceback__)
        if frame.filename.endswith("unified_cache/tree/match.py")
    ]
    assert [frame.name for frame in frames] == ["insert", "_check_input"]
    source = (ROOT / "unified_cache/tree/match.py").read_text(encoding="utf-8").splitlines()
    for frame in frames:
        assert frame.lineno is not None
        assert frame.line == source[frame.lineno - 1].strip()
    assert frames[0].line is not None
    assert "_check_input(" in frames[0].line
    assert frames[1].line is not None
    assert frames[1].line.startswith("raise InputError(")
