"""Promises of the tree, and the order of eviction under each policy; random histories are in tests/property."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.components import toy_components
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.errors import InputError, LockError, SlotError, StaleMatchError
from unified_cache.core.page import MediaItem, Prompt
from unified_cache.core.pool import Slots, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock, RadixTree
from unified_cache.tree.check import check
from unified_cache.tree.transfer import Victim

WINDOW = (SPAN_ALL, 2)


class Toy:
    """A tree of one-token pages on the device; the slot of a page is its token, so that tests read well."""

    def __init__(
        self,
        kind: EvictionPolicy = EvictionPolicy.LRU,
        spans: tuple[int, ...] = (SPAN_ALL,),
        kinds: tuple[EvictionPolicy, ...] = (),
    ) -> None:
        config = EvictionConfig(device=kinds or (kind,) * len(spans))
        self.tree = RadixTree(toy_components(spans), 1, config)

    def insert(self, *tokens: int, priority: int = 0) -> None:
        """Insert what the device lacks of a prompt."""
        start = self.tree.match(Prompt.of(tokens, 1)).device_end
        given = [slots(*tokens[start:])] * len(self.tree.components)
        self.tree.insert(Prompt.of(tokens, 1), start, given, Tier.DEVICE, priority)

    def lock(self, *tokens: int) -> Lock:
        found = self.tree.match(Prompt.of(tokens, 1))
        return self.tree.lock(found, found.device_end, Tier.DEVICE)

    def use(self, *tokens: int) -> None:
        self.tree.match(Prompt.of(tokens, 1))

    def evict(self, pages: int, component: int = 0) -> list[int]:
        """Evict one page after the other, as far as there are any; return their slots, which are their tokens."""
        gone: list[int] = []
        for _ in range(pages):
            freed = self.tree.evict(Tier.DEVICE, component, 1)
            gone += [slot for slots in freed.slots[component] for slot in slots.tolist()]
            check(self.tree)
        return gone


def slots(*values: int) -> Slots:
    return np.array(values, np.int32)


def test_locking_a_long_path_touches_its_last_node_alone() -> None:
    toy = Toy()
    for end in range(1, 20):
        toy.insert(*range(1, end + 1))
    found = toy.tree.match(Prompt.of([*range(1, 11), 99], 1))
    assert (found.device_end, len(list(toy.tree.nodes()))) == (10, 19)
    held = toy.lock(*range(1, 20))
    assert sum(any(node.locks) for node in toy.tree.nodes()) == 1
    assert toy.evict(99) == []
    toy.tree.unlock(held)
    assert len(toy.evict(99)) == 19


def test_a_window_that_goes_takes_nothing_along_that_locks_pin_of_a_longer_one() -> None:
    toy = Toy(spans=(SPAN_ALL, 1, 3))
    toy.insert(1, 2, 3, 4, 5, 6)
    held = toy.lock(1, 2, 3, 4, 5, 6)
    freed = [
        [slot for array in arrays for slot in array.tolist()] for arrays in toy.tree.evict(Tier.DEVICE, 1, 99).slots
    ]
    assert freed[:3] == [[], [1, 2, 3, 4, 5], [1, 2, 3]]
    check(toy.tree, [held])


def test_prompts_share_the_text_before_a_picture_and_nothing_behind_another_one() -> None:
    tree = RadixTree(toy_components((SPAN_ALL,)), 1)
    pictures = [[MediaItem(2, 2, name)] for name in ("cat", "dog")]
    cat, dog, plain = (Prompt.of([1, 2, 9, 9, 3], 1, media=media, whole=True) for media in (*pictures, ()))
    tree.insert(cat, 0, [slots(1, 2, 3, 4, 5)], Tier.DEVICE)
    assert [tree.match(prompt).device_end for prompt in (cat, dog, plain)] == [5, 2, 2]
    tree.insert(dog, 2, [slots(6, 7, 8)], Tier.DEVICE)
    tree.insert(plain, 2, [slots(9, 10, 11)], Tier.DEVICE)
    ways = {prompt: tree.match(prompt).slots(Tier.DEVICE, 0, 0, 5).tolist() for prompt in (cat, dog, plain, cat)}
    assert list(ways.values()) == [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8], [1, 2, 9, 10, 11]]
    two = Prompt.of([1, 2, 9, 9, 3], 1, media=[MediaItem(2, 1, "cat"), MediaItem(3, 1, "dog")], whole=True)
    assert tree.match(two).device_end == 2
    check(tree, [])


def test_an_insert_from_within_a_node_fills_its_tombstones_and_no_page_that_is_held() -> None:
    tree, prompt = RadixTree(toy_components(WINDOW), 1), Prompt.of([1, 2, 3, 4], 1)
    tree.insert(prompt, 0, [slots(1, 2, 3, 4), slots(-1, -1, -1, 4)], Tier.DEVICE)
    inserted = tree.insert(prompt, 2, [slots(5, 6), slots(7, 8)], Tier.DEVICE)
    assert [given.tolist() for given in inserted.duplicates] == [[5, 6], [8]]
    assert tree.match(prompt).slots(Tier.DEVICE, 1, 0, 4).tolist() == [-1, -1, 7, 4]
    check(tree, [])


def test_bad_calls_change_nothing() -> None:
    tree = Toy().tree
    stale = tree.match(Prompt.of([1, 2], 1))
    tree.insert(Prompt.of([1, 2], 1), 0, [slots(1, 2)], Tier.DEVICE)
    prompt = Prompt.of([1, 2, 3], 1)
    found = tree.match(prompt)
    calls: tuple[tuple[type[Exception], str, Callable[[], object]], ...] = (
        (InputError, "expected 2 slots", lambda: tree.insert(prompt, 1, [slots(5)], Tier.DEVICE)),
        (SlotError, "every page", lambda: tree.insert(prompt, 2, [slots(-1)], Tier.DEVICE)),
        (InputError, "not held on HOST", lambda: tree.insert(prompt, 2, [slots(5)], Tier.HOST)),
        (InputError, "start must be", lambda: tree.insert(prompt, 4, [slots()], Tier.DEVICE)),
        (InputError, "1-token pages", lambda: tree.match(Prompt.of([1, 2], 2))),
        (InputError, "end must be", lambda: tree.lock(found, 3, Tier.DEVICE)),
        (StaleMatchError, "match again", lambda: tree.lock(stale, 2, Tier.DEVICE)),
        (StaleMatchError, "match again", lambda: stale.slots(Tier.DEVICE, 0, 0, 2)),
    )
    for error, text, call in calls:
        with pytest.raises(error, match=text):
            call()
    assert check(tree, [])[0].tolist() == [1, 2]


# ---- matched again -------------------------------------------------------------------------------------------------


def insert_at(tree: RadixTree, prompt: Prompt, start: int, first_slot: int, tier: Tier = Tier.DEVICE) -> None:
    count = prompt.pages_count - start
    tree.insert(prompt, start, [np.arange(first_slot, first_slot + count, dtype=np.int32)], tier)


PROMPT = Prompt.of([1, 2, 3, 4], 1)


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


def test_a_clear_voids_matches_and_locks_and_another_tree_takes_neither() -> None:
    tree, other = tree_of_prompt(), tree_of_prompt()
    found = tree.match(PROMPT)
    held = tree.lock(found, 4, Tier.DEVICE)
    with pytest.raises(StaleMatchError):
        other.lock(found, 4, Tier.DEVICE)
    with pytest.raises(LockError):
        other.unlock(held)
    tree.clear()
    with pytest.raises(StaleMatchError):
        tree.lock(found, 4, Tier.DEVICE)
    insert_at(tree, PROMPT, 0, 1)
    tree.unlock(held)
    assert tree.match(PROMPT).device_end == 4
    check(tree, [])


# ---- order of eviction ---------------------------------------------------------------------------------------------


def test_each_component_and_tier_has_a_policy_of_its_own() -> None:
    toy = Toy(spans=(SPAN_ALL, 1), kinds=(EvictionPolicy.LRU, EvictionPolicy.PRIORITY))
    for token in (1, 2):
        toy.insert(token, priority=token)
    toy.use(1)
    assert toy.evict(1, component=1) == [1], "of the lowest priority"
    assert toy.evict(1) == [2], "least recently used"
    assert EvictionConfig(device=(EvictionPolicy.PRIORITY,)).policy(Tier.HOST, 0) is EvictionPolicy.LRU


@pytest.mark.parametrize("kind", EvictionPolicy)
def test_queues_do_not_grow_with_nodes_that_died(kind: EvictionPolicy) -> None:
    toy = Toy(kind, spans=(SPAN_ALL, 1))
    for token in (1, 2, 3, 4):
        toy.insert(token)
    for turn in range(500):
        toy.use(1 + turn % 4)
        toy.insert(100 + turn)
        assert toy.evict(1)
    assert all(toy.tree.queues.queue_length(tier_component) < 300 for tier_component in range(4))


@pytest.mark.parametrize("kind", EvictionPolicy)
@pytest.mark.parametrize("again", ["never", "insert", "match", "split", "unlock", "unlock a part"])
def test_windows_touched_together_go_in_the_order_of_the_prompt(kind: EvictionPolicy, again: str) -> None:
    toy = Toy(kind, spans=WINDOW)
    prompt = Prompt.of(range(1, 17), 1)
    toy.insert(*range(1, 17))
    if again == "insert":
        toy.insert(*range(1, 20))
        toy.insert(*range(1, 17))
    elif again == "match":
        assert toy.tree.match(prompt).device_end == 16
    elif again == "split":
        toy.insert(*range(1, 9), 50, 51)
        assert toy.tree.match(prompt).device_end == 16
    elif again == "unlock":
        toy.tree.unlock(toy.lock(*range(1, 17)))
    elif again == "unlock a part":
        found = toy.tree.match(prompt)
        assert Victim.next(toy.tree, Tier.DEVICE, 1) is not None  # queued as a whole, and then split
        toy.tree.unlock(toy.tree.lock(found, 8, Tier.DEVICE))
    gone = [page for page in toy.evict(14, component=1) if page <= 16]
    assert gone == sorted(gone)
    assert toy.tree.match(prompt).device_end == 16
    if again == "never":
        assert toy.evict(2, component=1) == [15, 16]


def test_windows_of_one_touch_go_in_order_beside_those_of_older_ones() -> None:
    toy = Toy(spans=WINDOW)
    toy.insert(*range(1, 9))
    toy.insert(*range(21, 29))
    toy.use(*range(1, 9))
    assert toy.evict(16, component=1) == [21, 22, 23, 24, 25, 26, 27, 28, *range(1, 9)]
