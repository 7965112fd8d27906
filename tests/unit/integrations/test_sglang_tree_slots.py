"""The tree over slots that the engine allocates, and recorded calls on SGLang's own tree."""

from pathlib import Path

import numpy as np
import pytest

from tests.sources import ROOT
from tests.support.sglang_tree import ReplayedTree, replay
from unified_cache.errors import InputError, LockError, StaleMatchError
from unified_cache.integrations.sglang.tree_slots import EngineSlotTree, TreePrefix, in_subtree_order
from unified_cache.page import Namespace, Prompt

RECORDINGS = sorted((ROOT / "tests" / "recordings" / "sglang_tree").glob("*.txt"))
PAGE = 4


def prompt(*pages: int, extra_key: str | None = None) -> Prompt:
    """Make a prompt of one page for each number."""
    return Prompt.of(np.repeat(np.array(pages, np.int64), PAGE), PAGE, Namespace(extra_key), whole=True)


def give(tree: EngineSlotTree, tokens: Prompt, start: int, *slots: int) -> list[int]:
    """Insert slots for the pages from ``start`` on; return those that were duplicates."""
    duplicates: list[int] = tree.insert(tokens, start, np.array(slots, np.int32)).duplicates.tolist()
    return duplicates


def test_there_are_recordings() -> None:
    assert RECORDINGS


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_calls_find_free_and_keep_what_the_engines_own_tree_did(path: Path) -> None:
    lines = path.read_text().splitlines()
    replayed = list(replay(lines))
    assert [ours for _, ours in replayed] == [theirs for theirs, _ in replayed]
    assert len(replayed) == len(lines) - 1 > 100


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_has_every_kind_of_call(path: Path) -> None:
    lines = path.read_text().splitlines()[1:]
    assert {line.split()[0] for line in lines} >= {"match", "insert", "lock", "unlock", "evict"}
    answers = [line.split(" -> ")[1].split(" | ")[0] for line in lines if line.startswith("evict")]
    assert any(answer != "-" for answer in answers), "nothing was evicted"


def test_a_call_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a call"):
        ReplayedTree(PAGE, bigrams=False).call(["forget"])


def test_a_prefix_that_somebody_else_inserted_is_a_duplicate() -> None:
    tree = EngineSlotTree(PAGE)
    assert give(tree, prompt(1, 2), 0, 11, 12) == []
    taken = tree.insert(prompt(1, 2, 3), 0, np.array([21, 22, 23], np.int32))
    assert (taken.matched_end, taken.duplicates.tolist()) == (2, [21, 22])
    assert tree.slots(TreePrefix.whole(prompt(1, 2, 3))).tolist() == [11, 12, 23]
    assert (tree.held_pages, tree.evictable_pages, tree.protected_pages) == (3, 3, 0)
    tree.check()


def test_an_extra_key_keeps_equal_tokens_apart() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2), 0, 11, 12)
    assert tree.match(prompt(1, 2, extra_key="adapter")).end == 0
    give(tree, prompt(1, 2, extra_key="adapter"), 0, 21, 22)
    assert tree.slots(tree.match(prompt(1, 2))).tolist() == [11, 12]
    assert tree.slots(tree.match(prompt(1, 2, extra_key="adapter"))).tolist() == [21, 22]


def test_eviction_gives_whole_nodes_back_least_recent_first() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2, 3), 0, 11, 12, 13)
    give(tree, prompt(4, 5), 0, 21, 22)
    tree.match(prompt(1, 2, 3))
    assert [slots.tolist() for slots in tree.evict(1)] == [[21, 22]]
    assert [slots.tolist() for slots in tree.evict(9)] == [[11, 12, 13]]
    assert tree.evict(1) == []
    assert tree.held_pages == 0


def test_a_match_cuts_and_what_is_cut_off_goes_first() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2, 3, 4), 0, 11, 12, 13, 14)
    assert tree.match(prompt(1, 2, 9)).end == 2
    assert [slots.tolist() for slots in tree.evict(1)] == [[13, 14]]
    assert tree.match(prompt(1, 2, 9)).end == 2


def test_what_is_cut_off_counts_as_used() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2, 3), 0, 11, 12, 13)
    give(tree, prompt(7), 0, 21)
    tree.match(prompt(1, 9))
    assert [slots.tolist() for slots in tree.evict(2)] == [[21], [12, 13]]


def test_a_locked_prefix_is_protected_and_stays() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2, 3), 0, 11, 12, 13)
    lock = tree.lock(tree.match(prompt(1, 2)))
    assert (tree.evictable_pages, tree.protected_pages) == (1, 2)
    assert [slots.tolist() for slots in tree.evict(9)] == [[13]]
    tree.unlock(lock)
    assert (tree.evictable_pages, tree.protected_pages) == (2, 0)
    with pytest.raises(LockError):
        tree.unlock(lock)


def test_an_evicted_prefix_is_told_and_not_found_in_part() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2), 0, 11, 12)
    found = tree.match(prompt(1, 2))
    tree.evict(2)
    with pytest.raises(StaleMatchError):
        tree.slots(found)
    with pytest.raises(StaleMatchError):
        tree.lock(found)


def test_pages_before_the_first_slot_must_be_held() -> None:
    tree = EngineSlotTree(PAGE)
    with pytest.raises(InputError):
        give(tree, prompt(1, 2), 1, 12)
    assert tree.held_pages == 0


def test_a_prompt_without_a_whole_page_changes_nothing() -> None:
    tree = EngineSlotTree(PAGE)
    assert give(tree, prompt(), 0) == []
    assert tree.match(prompt()).end == 0
    assert tree.slots(TreePrefix.whole(prompt())).tolist() == []
    tree.unlock(tree.lock(TreePrefix.whole(prompt())))
    tree.check()


def test_clearing_forgets_pins_and_makes_locks_void() -> None:
    tree = EngineSlotTree(PAGE)
    give(tree, prompt(1, 2), 0, 11, 12)
    lock = tree.lock(tree.match(prompt(1, 2)))
    tree.clear()
    assert (tree.held_pages, tree.protected_pages) == (0, 0)
    assert tree.match(prompt(1, 2)).end == 0
    tree.unlock(lock)
    assert give(tree, prompt(1, 2), 0, 11, 12) == []
    tree.check()


def test_requests_are_ordered_by_the_subtree_that_most_of_them_lie_in() -> None:
    tree = EngineSlotTree(PAGE)
    for pages, slots in (((1,), (1,)), ((2, 3), (2, 3)), ((2, 4), (4, 5)), ((2, 4, 5), (6, 7, 8))):
        tree.insert(prompt(*pages), 0, np.array(slots, np.int32))
    asked = [prompt(1), prompt(2, 3), prompt(9), prompt(2, 4), prompt(2, 4, 5), prompt(2)]
    matched = [tree.match(tokens) for tokens in asked]
    assert in_subtree_order(matched) == [4, 3, 1, 5, 0, 2]
