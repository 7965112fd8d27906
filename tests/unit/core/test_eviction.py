"""Order of eviction under each policy, with preferences."""

import numpy as np
import pytest

from tests.support.components import toy_components
from tests.support.operations import present
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.errors import InputError, StaleMatchError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import UNNAMED, Preference, RadixTree

CAPACITY = 40


class Toy:
    """A tree of one-token pages, with slots given out in turn; slots are asked for by the prompt they belong to."""

    def __init__(
        self,
        kind: EvictionPolicy = EvictionPolicy.LRU,
        spans: tuple[int, ...] = (SPAN_ALL,),
        kinds: tuple[EvictionPolicy, ...] = (),
    ) -> None:
        config = EvictionConfig(device=kinds or (kind,) * len(spans), preferred_share=0.25)
        self.tree = RadixTree(toy_components(spans), 1, config, [[CAPACITY] * len(spans)] * 2)

    def insert(self, *tokens: int, priority: int = 0) -> None:
        """Insert a prompt; the slot of a page is its token, so that tests read well."""
        start = self.tree.match(Prompt.of(tokens, 1)).device_end
        slots = np.array(tokens[start:], np.int32)
        self.tree.insert(Prompt.of(tokens, 1), start, [slots] * len(self.tree.components), Tier.DEVICE, priority)

    def use(self, *tokens: int) -> None:
        found = self.tree.match(Prompt.of(tokens, 1))
        self.tree.use(found, found.device_end)

    def prefer(self, *tokens: int) -> Preference | None:
        found = self.tree.match(Prompt.of(tokens, 1))
        return self.tree.prefer(found, found.device_end, Tier.DEVICE)

    def evict(self, pages: int, component: int = 0) -> list[int]:
        """Evict one page after the other; return their slots, which are their last tokens."""
        gone: list[int] = []
        for _ in range(pages):
            freed = self.tree.evict(Tier.DEVICE, component, 1)
            gone += [slot for slots in freed.slots[component] for slot in slots.tolist()]
            self.tree.check([])
        return gone


@pytest.mark.parametrize("other", [EvictionPolicy.LRU, EvictionPolicy.PRIORITY])
def test_windows_before_the_one_that_is_resumed_from_go_first_under_every_priority(other: EvictionPolicy) -> None:
    toy = Toy(spans=(SPAN_ALL, 1, 3), kinds=(other, EvictionPolicy.PRIORITY, other))
    toy.insert(1, 2, 3, 4, 5, 6, priority=UNNAMED)
    toy.insert(11, 12, 13, 14, 15, 16, priority=-1)
    assert toy.evict(12, component=1) == [1, 2, 3, 11, 12, 13, 4, 5, 6, 14, 15, 16]


def test_each_component_and_tier_has_a_policy_of_its_own() -> None:
    config = EvictionConfig(device=(EvictionPolicy.LRU, EvictionPolicy.PRIORITY))
    tree = RadixTree(toy_components((SPAN_ALL, 1)), 1, config)
    for token in (1, 2):
        tree.insert(Prompt.of([token], 1), 0, [np.array([token], np.int32)] * 2, Tier.DEVICE, priority=token)
    tree.match(Prompt.of([1], 1))
    assert tree.evict(Tier.DEVICE, 1, 1).slots[1][0].tolist() == [1], "of the lowest priority"
    assert tree.evict(Tier.DEVICE, 0, 1).slots[0][0].tolist() == [2], "least recently used"
    assert config.policy(Tier.HOST, 1) is EvictionPolicy.LRU


# ---- pins ----------------------------------------------------------------------------------------------------


def test_a_pin_ends_where_it_says_and_what_hangs_below_is_not_pinned() -> None:
    toy = Toy()
    toy.insert(1, 2, 3, 4)
    found = toy.tree.match(Prompt.of([1, 2, 3, 4], 1))
    assert toy.tree.prefer(found, 2, Tier.DEVICE) is not None
    toy.insert(5)
    assert toy.evict(5) == [4, 3, 5, 2, 1]


def test_one_pin_too_many_is_declined_and_changes_nothing() -> None:
    toy = Toy()
    toy.insert(*range(1, 9))
    toy.insert(21, 22, 23)
    preference = present(toy.prefer(*range(1, 9)))
    nodes = toy.tree.nodes_count()
    found = toy.tree.match(Prompt.of([21, 22, 23], 1))
    assert toy.tree.prefer(found, 3, Tier.DEVICE) is None, "8 and 3 pages are more than a quarter of 40"
    assert toy.tree.nodes_count() == nodes
    assert toy.tree.prefer(found, 2, Tier.DEVICE) is not None
    toy.tree.unprefer(preference)
    toy.insert(31, 32, 33)
    assert toy.prefer(31, 32, 33) is not None
    toy.tree.check([])


def test_a_tree_that_was_told_no_capacity_declines_every_pin() -> None:
    tree = RadixTree(toy_components((SPAN_ALL,)), 1)
    tree.insert(Prompt.of([1], 1), 0, [np.array([1], np.int32)], Tier.DEVICE)
    assert tree.prefer(tree.match(Prompt.of([1], 1)), 1, Tier.DEVICE) is None


def test_pins_vanish_with_clear_and_may_be_taken_back_after_it() -> None:
    toy = Toy()
    toy.insert(*range(1, 11))
    preference = present(toy.prefer(*range(1, 11)))
    toy.tree.clear()
    toy.tree.unprefer(preference)
    toy.insert(*range(1, 11))
    assert toy.prefer(*range(1, 11)) is not None
    toy.tree.check([])


def test_a_pin_covers_the_window_that_a_resume_at_its_end_needs() -> None:
    toy = Toy(spans=(SPAN_ALL, 2))
    toy.insert(1, 2, 3, 4, 5)
    found = toy.tree.match(Prompt.of([1, 2, 3, 4, 5], 1))
    assert toy.tree.prefer(found, 4, Tier.DEVICE) is not None
    toy.insert(9)
    assert toy.evict(4, component=1) == [1, 2, 5, 9]
    assert set(toy.evict(2, component=1)) == {3, 4}


def test_a_pin_of_nothing_is_declined_and_one_of_more_than_there_is_refused() -> None:
    toy = Toy()
    toy.insert(1)
    found = toy.tree.match(Prompt.of([1], 1))
    assert toy.tree.prefer(found, 0, Tier.DEVICE) is None
    with pytest.raises(InputError):
        toy.tree.prefer(found, 2, Tier.DEVICE)
    toy.insert(2)
    with pytest.raises(StaleMatchError):
        toy.tree.use(found, 1)


@pytest.mark.parametrize("kind", EvictionPolicy)
def test_queues_do_not_grow_with_pins(kind: EvictionPolicy) -> None:
    toy = Toy(kind)
    for token in (1, 2, 3, 4):
        toy.insert(token)
    for turn in range(500):
        toy.use(1 + turn % 4)
        preference = toy.prefer(1 + turn % 3)
        toy.insert(100 + turn)
        assert toy.evict(1)
        if preference is not None:
            toy.tree.unprefer(preference)
    assert toy.tree._state.queues.queue_length(0) < 300


# ---- pages of one touch -------------------------------------------------------------------------------------

WINDOW = (SPAN_ALL, 2)


@pytest.mark.parametrize("kind", EvictionPolicy)
def test_of_windows_touched_together_the_last_of_the_prompt_goes_last(kind: EvictionPolicy) -> None:
    toy = Toy(kind, spans=WINDOW)
    toy.insert(*range(1, 17))
    assert toy.evict(16, component=1) == list(range(1, 17))


@pytest.mark.parametrize("kind", EvictionPolicy)
@pytest.mark.parametrize("again", ["insert", "match", "split", "unlock", "unlock a part"])
def test_windows_keep_the_order_of_the_prompt_however_they_were_touched(kind: EvictionPolicy, again: str) -> None:
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
        toy.tree.unlock(toy.tree.lock(toy.tree.match(prompt), 16, Tier.DEVICE))
    else:
        found = toy.tree.match(prompt)
        assert toy.tree.next_victim(Tier.DEVICE, 1) is not None  # queued as a whole, and then split
        toy.tree.unlock(toy.tree.lock(found, 8, Tier.DEVICE))
    gone = [page for page in toy.evict(14, component=1) if page <= 16]
    assert gone == sorted(gone)
    assert toy.tree.match(prompt).device_end == 16


def test_windows_of_a_session_go_in_order_while_adaptive_predicts_nothing() -> None:
    toy = Toy(EvictionPolicy.ADAPTIVE, spans=WINDOW)
    prompt = Prompt.of(range(1, 17), 1, session="one")
    request = present(toy.tree.use(toy.tree.match(prompt), 0))
    toy.tree.insert(prompt, 0, [np.arange(1, 17, dtype=np.int32)] * 2, Tier.DEVICE, 0, request)
    assert toy.evict(16, component=1) == list(range(1, 17))


def test_windows_of_one_touch_go_in_order_beside_those_of_older_ones() -> None:
    toy = Toy(spans=WINDOW)
    toy.insert(*range(1, 9))
    toy.insert(*range(21, 29))
    assert toy.tree.match(Prompt.of(range(1, 9), 1)).device_end == 8
    assert toy.evict(16, component=1) == [21, 22, 23, 24, 25, 26, 27, 28, *range(1, 9)]
