"""Heads and tails under whatever else happens meanwhile: no byte is wrong, no slot is lost, what is left is sound."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import PHASES, examples
from tests.support.components import COMPONENT_SETS
from tests.support.conversations import VanishingStorage, conversation, cramped, store_turns
from tests.support.operations import Stepped, started
from tests.support.ranks import out_pages
from tests.support.tables import check_tables
from unified_cache.controller import Operation
from unified_cache.errors import StorageError
from unified_cache.pool import ModelLayout, Tier

LAYOUTS = {name: layouts[-1] for name, layouts in COMPONENT_SETS.items()}
END = 12
TURNS = (4, 8, END)


class Meanwhile:
    """An engine whose store does, in the middle of its calls, whatever a seed says."""

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store, self.workers = VanishingStorage(), Stepped()
        store_turns(layout, self.store, TURNS)
        host_pages = [self.rng.choice((END, END + 4, 60))] * len(layout.components)
        self.toy = cramped(layout, self.store, self.workers, host_pages)
        self.cache = self.toy.cache
        self.prompt = conversation(self.cache, END)
        self.store.vanishing = set(self.rng.sample(sorted(self.store._pages), self.rng.choice((0, 0, 0, 1, 3))))
        self.failing_call = self.rng.choice((-1, -1, -1, 0, 4, 8))
        self.tail: Operation | None = None
        self.joining: Operation | None = None
        self.depth = 0

    def run(self) -> None:
        self.store.before_get = self.in_call
        self.tail = started(self.cache.prefetch_tail(self.prompt))
        for _ in range(25):
            self.act()
        self.drain()

    def in_call(self, number: int) -> None:
        if number == self.failing_call:
            raise StorageError("gone", retryable=False)
        self.depth += 1
        if self.depth == 1:
            for _ in range(self.rng.randrange(4)):
                self.act()
        self.depth -= 1

    def act(self) -> None:
        rare = (self.prefetch, self.stop, self.cancel, self.squeeze, self.squeeze)
        self.rng.choice(
            rare if self.rng.random() < 0.03 else (self.work, self.poll, self.poll, self.compute, self.join, self.join)
        )()
        self.cache.check()

    def work(self) -> None:
        if self.workers.waiting:
            self.rng.choice((self.workers.run, self.workers.run_last))()

    def poll(self) -> None:
        self.cache.poll()

    def compute(self) -> None:
        end = min(END, self.cache.match(self.prompt).device_end + 1)
        lock = self.toy.serve(conversation(self.cache, end))
        if lock is not None:
            self.cache.release(lock)

    def join(self) -> None:
        assert self.tail is not None
        landed = self.cache.landed_tail(self.tail)
        met = landed is not None and landed.start <= self.cache.match(self.prompt).device_end
        if landed is not None and (met or self.rng.random() < 0.05):
            self.joining = self.cache.join_tail(self.tail)
            assert self.joining is not None
            assert self.cache.landed_tail(self.tail) is None

    def squeeze(self) -> None:
        ledger, tier = self.cache._ledger, self.rng.choice(list(Tier))
        slots = ledger.allocate(tier, 0, self.rng.randrange(1, ledger.capacity(tier, 0)))
        if slots is not None:
            ledger.free(tier, 0, slots)

    def prefetch(self) -> None:
        self.cache.prefetch(self.prompt)

    def stop(self) -> None:
        assert self.tail is not None
        self.cache.finish_early(self.tail)

    def cancel(self) -> None:
        assert self.tail is not None
        self.cache.cancel(self.tail)

    def drain(self) -> None:
        """Let all jobs end, and the engine meet the tail as far as that has come; or give it up."""
        assert self.tail is not None
        while self.workers.waiting:
            self.workers.run()
            self.cache.poll()
        landed = self.cache.landed_tail(self.tail)
        if landed is not None and landed.start < END:
            if landed.start:
                lock = self.toy.serve(conversation(self.cache, landed.start))
                assert lock is not None
                self.cache.release(lock)
            self.joining = self.cache.join_tail(self.tail)
        else:
            self.cache.cancel(self.tail)
        self.settle()

    def settle(self) -> None:
        while self.cache._controller.live_count:
            self.cache.poll()
            if self.workers.waiting:
                self.workers.run()

    def check(self) -> None:
        """Resume what can be resumed, by the right bytes; nothing is under way any more."""
        self.cache.load(self.prompt)
        self.settle()
        lock = self.cache.lock(self.cache.match(self.prompt))
        self.toy.verify(self.prompt, lock)
        self.cache.release(lock)
        check_tables(self.cache, [])
        assert out_pages(self.cache) == 0
        self.cache.check()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@settings(max_examples=examples(10, 500), deadline=None, phases=PHASES)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_meanwhile_no_byte_is_wrong_and_no_slot_is_lost(layout: ModelLayout, seed: int) -> None:
    engine = Meanwhile(layout, seed)
    engine.run()
    engine.check()


def test_some_of_these_histories_join_a_tail() -> None:
    joined = 0
    for seed in range(40):
        engine = Meanwhile(LAYOUTS["full"], seed)
        engine.run()
        joined += engine.joining is not None and engine.joining.pages_count > 0
    assert joined >= 5
