"""Promises of the tree, one sentence each; random histories are in tests/property."""

import random

import numpy as np
import pytest

from tests.support.components import toy_components
from unified_cache.core.errors import InputError, LockError, SlotError, StaleMatchError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Slots, Tier
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


def test_locking_part_of_a_node_leaves_the_rest_evictable() -> None:
    tree = full_tree()
    insert(tree, [1, 2, 3, 4], 1)
    held = lock(tree, [1, 2, 3, 4], end=3)
    assert evict(tree, 99) == [4]
    tree.check([held])


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


def test_inserting_what_exists_gives_the_slots_back() -> None:
    tree = full_tree()
    insert(tree, [1, 2, 3], 1)
    inserted = tree.insert(Prompt.of([1, 2, 4], 1), 0, [slots(7, 8, 9)], Tier.DEVICE)
    assert [array.tolist() for array in inserted.duplicates] == [[7, 8]]


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


def test_eviction_frees_what_was_asked_for_from_the_tail() -> None:
    tree = full_tree()
    insert(tree, [1, 2, 3, 4], 1)
    assert evict(tree, 2) == [3, 4]
    assert tree.match(Prompt.of([1, 2, 3, 4], 1)).device_end == 2


def test_a_window_that_goes_takes_nothing_along_that_locks_pin_of_a_longer_one() -> None:
    tree = RadixTree(toy_components((SPAN_ALL, 1, 3)), 1)
    prompt = Prompt.of(list(range(6)), 1)
    tree.insert(prompt, 0, [np.arange(first, first + 6, dtype=np.int32) for first in (1, 11, 21)], Tier.DEVICE)
    held = lock(tree, list(range(6)))
    freed = [np.concatenate(arrays).tolist() if arrays else [] for arrays in tree.evict(Tier.DEVICE, 1, 99).slots]
    assert freed[:3] == [[], [11, 12, 13, 14, 15], [21, 22, 23]]
    tree.check([held])


def test_an_evicted_page_that_the_host_holds_is_only_demoted() -> None:
    tree = full_tree()
    insert(tree, [1, 2, 3], 1)
    found = tree.match(Prompt.of([1, 2, 3], 1))
    transfer = tree.begin(found, 3, Tier.DEVICE, Tier.HOST)
    tree.expect(transfer, [slots(4, 5, 6)])
    tree.publish(transfer)
    tree.release(transfer)
    evict(tree, 3)
    again = tree.match(Prompt.of([1, 2, 3], 1))
    assert (again.device_end, again.host_end) == (0, 3)
    assert tree.slots(again, Tier.HOST, 0, 0, 3).tolist() == [4, 5, 6]


@pytest.mark.parametrize("seed", range(20))
def test_the_victim_is_always_the_least_recently_used_leaf(seed: int) -> None:
    """A naive cache keeps, per page, when a prompt through it was last used; the tree must evict in that order."""
    rng = random.Random(seed)
    tree = full_tree()
    used: dict[tuple[int, ...], int] = {}
    slot_of: dict[int, tuple[int, ...]] = {}
    prompts: list[list[int]] = []
    for now in range(1, 200):
        if prompts and rng.random() < 0.4:
            tokens = rng.choice(prompts)
        else:
            body = [rng.randrange(2) for _ in range(rng.randrange(6))]
            tokens = [*body, 1000 + now]  # a last page of its own: every prompt ends at a node's end
            prompts.append(tokens)
        found = tree.match(Prompt.of(tokens, 1))
        pages = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        fresh = list(range(now * 10, now * 10 + len(tokens) - found.device_end))
        slot_of.update(zip(fresh, pages[found.device_end :], strict=True))
        tree.insert(Prompt.of(tokens, 1), found.device_end, [slots(*fresh)], Tier.DEVICE)
        used.update(dict.fromkeys(pages, now))
        while len(used) > 40:
            parents = {page[:-1] for page in used}
            oldest = min(when for page, when in used.items() if page not in parents)
            (victim,) = evict(tree, 1)
            page = slot_of.pop(victim)
            assert page not in parents, "a page went before the pages that stand on it"
            assert used.pop(page) == oldest
        tree.check([])


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
