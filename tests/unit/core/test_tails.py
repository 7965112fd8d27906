"""Tails: read from the end backward while the engine computes the head, and joined where both meet."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.sources import ROOT
from tests.support.cache import ToyEngine
from tests.support.components import COMPONENT_SETS
from tests.support.conversations import VanishingStorage, conversation, cramped, pages_on, remembered, store_turns
from tests.support.documents import code_blocks
from tests.support.operations import Stepped, started
from tests.support.ranks import ThreadRanks, digest_of, head_of, in_threads, out_pages, ranked, same
from tests.support.tables import check_tables
from unified_cache.cache import UnifiedCache
from unified_cache.config import Prefetching, WritePolicy
from unified_cache.controller import InlineWorkers, LeftAloneReason, Operation, OperationState
from unified_cache.errors import StorageError
from unified_cache.page import Prompt
from unified_cache.pool import ModelLayout, Tier
from unified_cache.seal import Label
from unified_cache.tails import LandedTail
from unified_cache.transfer_policy import TransferPolicy
from unified_cache.tree import Lock

LAYOUTS = {name: layouts[-1] for name, layouts in COMPONENT_SETS.items()}
FULL = LAYOUTS["full"]
END = 16

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@dataclass
class Overlapping:
    """An engine that computes a head while a store reads the tail, one call of the store after the other."""

    toy: ToyEngine
    store: VanishingStorage
    workers: Stepped

    @classmethod
    def over(cls, layout: ModelLayout, turns: tuple[int, ...] = (END,)) -> "Overlapping":
        store, workers = VanishingStorage(), Stepped()
        store_turns(layout, store, turns)
        return cls(remembered(layout, store, workers), store, workers)

    @property
    def cache(self) -> UnifiedCache:
        return self.toy.cache

    @property
    def prompt(self) -> Prompt:
        return conversation(self.cache, END)

    def read(self, in_call: Callable[[int, Operation], None] = lambda number, operation: None) -> Operation:
        """Read the tail; ``in_call`` is what the engine does in the middle of each call of the store."""
        operation = started(self.cache.prefetch_tail(self.prompt))
        self.workers.run()
        self.cache.poll()
        self.store.before_get = lambda number: in_call(number, operation)
        self.workers.run()
        self.cache.poll()
        self.store.before_get = lambda number: None
        return operation

    def landed(self, operation: Operation) -> LandedTail:
        landed = self.cache.landed_tail(operation)
        assert landed is not None
        return landed

    def compute(self, pages: int) -> Lock:
        """Compute the head up to ``pages``, and insert it."""
        lock = self.toy.serve(conversation(self.cache, pages))
        assert lock is not None
        return lock

    def join(self, operation: Operation) -> Operation:
        """Join a tail to a head that is in the tree; return the operation that does it, which is over."""
        joining = started(self.cache.join_tail(operation))
        while joining.state is OperationState.RUNNING:
            self.workers.run_last()
            self.cache.poll()
        return joining

    def check_resumed(self, end: int = END) -> None:
        """See that the prompt is resumed at ``end``, by the right bytes, and nothing is left of what was under way."""
        cache = self.cache
        while self.workers.waiting:
            self.workers.run()
            cache.poll()
        cache.wait_all(5)
        if (operation := cache.load(self.prompt)) is not None:
            while operation.state is OperationState.RUNNING:
                self.workers.run()
                cache.poll()
        found = cache.match(self.prompt)
        assert found.device_end == end
        lock = cache.lock(found)
        assert self.toy.verify(self.prompt, lock) >= end
        cache.release(lock)
        self.check_at_rest()

    def check_at_rest(self) -> None:
        check_tables(self.cache, [])
        assert out_pages(self.cache) == 0
        self.cache.check()


@every_layout
def test_pages_come_backward_all_pools_of_one_together_kv_first(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)
    operation = engine.read()
    page_of = {key: page for page, key in enumerate(engine.prompt.keys)}
    order = [pool.name for _, pool in layout.transfer_order]
    came = [(-page_of[label.key], order.index(label.pool)) for label in engine.store.came]
    assert came == sorted(came)
    assert engine.landed(operation) == LandedTail(0, END)
    assert engine.store.calls_count >= END // 2, "a tail is told to have come long before all of it has"


@every_layout
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_head_and_a_tail_that_meet_are_resumed_at_the_end(layout: ModelLayout, share: float) -> None:
    engine = Overlapping.over(layout)
    locks: list[Lock] = []
    met: list[LandedTail] = []

    def meet(number: int, operation: Operation) -> None:
        landed = engine.landed(operation)
        if not met and landed.start <= END * (1 - share):
            met.append(landed)
            locks.append(engine.compute(landed.start))
            engine.join(operation)

    operation = engine.read(meet)
    (landed,) = met
    assert 0 < landed.start < END
    assert engine.cache.landed_tail(operation) is None, "it is joined once"
    for lock in locks:
        engine.cache.release(lock)
    engine.check_resumed()
    head = set(engine.prompt.keys[: max(landed.start - 2, 0)])
    assert not {label.key for label in engine.store.came} & head, "of the head no more is read"


@every_layout
def test_a_tail_is_joined_while_its_store_hangs_in_a_call(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)
    ends: list[tuple[OperationState, int, int]] = []

    def meet(number: int, operation: Operation) -> None:
        landed = engine.landed(operation)
        if not ends and landed.start <= END // 2:
            engine.cache.release(engine.compute(landed.start))
            joining = engine.join(operation)
            ends.append((joining.state, joining.pages_count, engine.cache.match(engine.prompt).host_end))
            assert not operation.is_released, "the store may still fill its pages"
            assert joining.pages_count == END - landed.start

    engine.read(meet)
    assert [(state, end) for state, _, end in ends] == [(OperationState.DONE, END)]
    engine.check_resumed()


@every_layout
def test_a_head_that_went_on_past_the_tail_is_joined_too(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)
    operation = engine.read()
    engine.cache.release(engine.compute(5))
    assert engine.join(operation).pages_count == END - engine.cache.match(conversation(engine.cache, 5)).host_end
    engine.check_resumed()


@every_layout
def test_a_tail_that_came_whole_needs_no_head(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)
    operation = engine.read()
    joining = engine.join(operation)
    assert (joining.pages_count, joining.left_alone) == (END, None)
    engine.check_resumed()


@every_layout
def test_what_came_before_the_store_failed_is_joined(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)

    def fail_late(number: int, operation: Operation) -> None:
        if engine.landed(operation).start <= 9:
            raise StorageError("gone", retryable=False)

    operation = engine.read(fail_late)
    assert operation.state is OperationState.FAILED
    start = engine.landed(operation).start
    assert 0 < start <= 9
    engine.cache.release(engine.compute(start))
    assert engine.join(operation).state is OperationState.DONE
    engine.check_resumed()


@every_layout
def test_a_tail_that_never_came_leaves_the_head(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)

    def fail(number: int, operation: Operation) -> None:
        raise StorageError("gone", retryable=False)

    operation = engine.read(fail)
    assert engine.landed(operation) == LandedTail(END, END)
    engine.cache.release(engine.compute(10))
    assert engine.join(operation).pages_count == 0
    engine.check_resumed(10)


@every_layout
def test_a_page_that_did_not_come_is_where_the_tail_begins(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)
    engine.store.vanishing = _labels(engine, 6, 0)
    operation = engine.read()
    assert engine.landed(operation) == LandedTail(7, END)
    engine.cache.release(engine.compute(7))
    engine.join(operation)
    engine.check_resumed()


@pytest.mark.parametrize("layout", [layout for name, layout in LAYOUTS.items() if name != "full"])
def test_nothing_has_landed_as_long_as_a_window_of_the_end_is_missing(layout: ModelLayout) -> None:
    engine = Overlapping.over(layout)
    engine.store.vanishing = _labels(engine, END - 1, 1)
    operation = engine.read()
    assert engine.landed(operation) == LandedTail(END, END)
    engine.cache.release(engine.compute(4))
    assert engine.join(operation).pages_count == 0
    engine.check_resumed(4)


def test_a_tail_without_its_head_is_given_back() -> None:
    engine = Overlapping.over(FULL)
    engine.store.vanishing = _labels(engine, 6, 0)
    operation = engine.read()
    engine.cache.release(engine.compute(5))
    joining = engine.join(operation)
    assert (joining.state, joining.pages_count) == (OperationState.DONE, 0)
    engine.check_resumed(5)


@pytest.mark.parametrize("end", ["cancel", "reset", "detach", "close"])
def test_a_tail_that_nobody_joins_is_given_back(end: str) -> None:
    engine = Overlapping.over(FULL)
    operation = engine.read()
    assert engine.cache.poll() == []
    assert operation.state is OperationState.RUNNING, "it waits for its head"
    assert out_pages(engine.cache) == END
    if end == "cancel":
        assert engine.cache.cancel(operation)
        assert engine.cache.poll() == [operation]
    elif end == "reset":
        engine.cache.reset()
    elif end == "detach":
        assert engine.cache.detach() == []
    else:
        assert engine.cache.close() == []
        assert operation.is_released
        return
    assert operation.is_released
    assert (engine.cache.landed_tail(operation), engine.cache.join_tail(operation)) == (None, None)
    assert pages_on(engine.cache, engine.prompt, Tier.HOST) == [set()]
    engine.check_at_rest()


@pytest.mark.parametrize("awaits", [False, True], ids=["looked up", "waiting for another"])
@pytest.mark.parametrize("end", ["reset", "detach", "close"])
def test_a_tail_of_which_nothing_is_read_yet_holds_up_no_end(end: str, *, awaits: bool) -> None:
    store = VanishingStorage()
    store_turns(FULL, store, (END,))
    cache = remembered(FULL, store).cache
    prompt = conversation(cache, END)
    operations = [started(cache.prefetch_tail(prompt)) for _ in range(1 + awaits)]
    if awaits:
        while operations[-1].awaited is None:
            cache.poll()
    ends: dict[str, Callable[[], object]] = {"reset": cache.reset, "detach": cache.detach, "close": cache.close}
    ends[end]()  # waits for what does not end, and then raises or leaves it
    assert [operation.state for operation in operations] == [OperationState.DONE] * len(operations)
    assert all(operation.is_released for operation in operations)


def test_a_tail_that_is_cancelled_in_the_middle_of_a_call_is_given_back_after_it() -> None:
    engine = Overlapping.over(FULL)

    def cancel(number: int, operation: Operation) -> None:
        if number == 3:
            assert engine.cache.cancel(operation)
            engine.cache.poll()
            assert not operation.is_released

    operation = engine.read(cancel)
    assert (operation.state, operation.is_released) == (OperationState.CANCELLED, True)
    assert engine.store.calls_count == 4
    engine.check_at_rest()


def test_another_prefetch_waits_until_the_tail_is_joined_and_reads_nothing_again() -> None:
    engine = Overlapping.over(FULL)
    operation = engine.read()
    other = started(engine.cache.prefetch(engine.prompt))
    engine.workers.run()
    engine.cache.poll()
    assert other.awaited is operation
    calls_count = engine.store.calls_count
    engine.join(operation)
    while other.state is OperationState.RUNNING:
        engine.cache.poll()
    assert (other.pages_count, engine.store.calls_count) == (END, calls_count)
    engine.check_resumed()


def test_a_tail_waits_for_a_prefetch_of_the_same_pages() -> None:
    engine = Overlapping.over(FULL)
    other = started(engine.cache.prefetch(engine.prompt))
    engine.workers.run()
    engine.cache.poll()
    operation = started(engine.cache.prefetch_tail(engine.prompt))
    engine.workers.run_last()
    engine.cache.poll()
    assert operation.awaited is other
    assert engine.cache.landed_tail(operation) is None
    engine.workers.run()
    engine.cache.wait_all(5)
    assert (operation.state, operation.pages_count) == (OperationState.DONE, 0), "all of it is there"
    engine.check_resumed()


def test_a_head_that_a_write_policy_backs_up_meanwhile_is_joined_all_the_same() -> None:
    engine = Overlapping.over(FULL)
    engine.cache.set_write_policy(WritePolicy.THROUGH)
    engine.store.vanishing = _labels(engine, 7, 0)
    operation = engine.read()
    lock = engine.compute(8)
    assert len(engine.workers.waiting) == 1, "the backup of the head"
    joining = engine.join(operation)
    assert joining.pages_count == END - 8
    engine.cache.release(lock)
    engine.check_resumed()


def test_a_tail_is_given_back_where_the_host_has_no_room_for_its_head() -> None:
    store, workers = VanishingStorage(), Stepped()
    store_turns(FULL, store, (END,))
    engine = Overlapping(cramped(FULL, store, workers, (END,)), store, workers)
    store.vanishing = _labels(engine, 9, 0)
    operation = engine.read()
    engine.cache.release(engine.compute(10))
    assert engine.join(operation).pages_count == 0
    engine.check_resumed(10)


def test_what_was_computed_of_what_storage_has_is_said() -> None:
    engine = Overlapping.over(FULL)
    engine.store.vanishing = _labels(engine, 6, 0)
    operation = engine.read()
    engine.cache.release(engine.compute(7))
    left = engine.join(operation).left_alone
    assert left is not None
    assert (left.start, left.end, left.reason) == (0, 7, LeftAloneReason.COMPUTING_IS_FASTER)
    assert sum(engine.cache.stats().loading.left_alone_tokens.values()) == 7 * FULL.page_size
    engine.check_resumed()


def test_no_tail_is_read_that_is_not_worth_it() -> None:
    engine = Overlapping.over(FULL)
    cache = engine.cache
    usual = cache.config
    cache.config = replace(usual, transfer=TransferPolicy.NEVER)
    assert cache.prefetch_tail(engine.prompt) is None
    cache.config = replace(usual, prefetching=Prefetching(threshold_tokens=END * FULL.page_size + 1))
    assert cache.prefetch_tail(engine.prompt) is None
    cache.config = usual
    stranger = started(cache.prefetch_tail(cache.prompt(np.arange(10**6, 10**6 + 4 * FULL.page_size))))
    engine.workers.run()
    assert cache.poll() == [stranger]
    assert (stranger.pages_count, cache.landed_tail(stranger), cache.join_tail(stranger)) == (0, None, None)
    engine.check_at_rest()


def test_the_block_of_the_document_on_policies_joins_head_and_tail() -> None:
    engine = Overlapping.over(FULL)
    engine.store.vanishing = _labels(engine, 6, 0)
    cache, prompt = engine.cache, engine.prompt

    def compute_page(lock: Lock, end: int) -> int:
        if engine.workers.waiting:
            engine.workers.run()
        return end + 1

    def insert_pages(lock: Lock, end: int) -> Lock:
        cache.release(lock)
        return engine.compute(end)

    text = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    (block,) = [block.text for block in code_blocks(text) if "prefetch_tail" in block.text]
    named: dict[str, object] = {"cache": cache, "prompt": prompt, "OperationState": OperationState}
    named |= {"compute_page": compute_page, "insert_pages": insert_pages}
    exec(block, named)
    joining, lock = named["joining"], named["lock"]
    assert isinstance(joining, Operation)
    assert isinstance(lock, Lock)
    assert lock.end == 7
    engine.workers.run()
    engine.cache.poll()
    assert joining.pages_count == END - 7
    cache.release(lock)
    engine.check_resumed()


@pytest.mark.parametrize("missing_rank", [0, 1])
def test_ranks_join_at_one_place_what_came_to_all_of_them(missing_rank: int) -> None:
    def live(group: ThreadRanks) -> tuple[LandedTail | None, int, str, int]:
        store = VanishingStorage()
        store_turns(FULL, store, (END,), head_of(group))
        toy = remembered(FULL, store, InlineWorkers())
        cache = ranked(toy, group, store, InlineWorkers())
        prompt = conversation(cache, END)
        if group.rank == missing_rank:
            tier = cache._storage
            assert tier is not None
            store.vanishing = set(tier.labels([prompt.keys[8]], tier.pools(0)[0]))
        operation = started(cache.prefetch_tail(prompt))
        for _ in range(4):
            cache.poll()
        landed = cache.landed_tail(operation)
        lock = toy.serve(conversation(cache, 9))
        assert lock is not None
        joining = started(cache.join_tail(operation))
        cache.wait_all(30)
        cache.release(lock)
        return landed, joining.pages_count, digest_of(cache), out_pages(cache)

    landed, pages_count, _, out = same(in_threads(2, live))
    assert (landed, pages_count, out) == (LandedTail(9, END), END - 9, 0)


def _labels(engine: Overlapping, page: int, component: int) -> set[Label]:
    tier = engine.cache._storage
    assert tier is not None
    key = engine.prompt.keys[page]
    return {label for pool in tier.pools(component) for label in tier.labels([key], pool)}
