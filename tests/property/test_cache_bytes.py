"""Random histories on the whole cache with real bytes: transfers interleave with requests, storage lies."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.budget import LONG, PHASES, examples
from tests.cache_fixture import ToyEngine, toy_layout
from tests.components import SPAN_SETS
from unified_cache.controller import Operation
from unified_cache.errors import StorageError
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.testing.seeded_workers import SeededWorkers
from unified_cache.tree import Lock

MOVED: Counter[str] = Counter()
"""What all histories together did: random tests that move nothing prove nothing."""


class LyingStorage(MemoryStorage):
    """Sometimes fails, declines, or hands back a damaged page; ``mood`` says how often, in percent."""

    rng: random.Random
    mood = 0

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        self._maybe_fail()
        hits = super().get(pages)
        for page, hit in zip(pages, hits, strict=True):
            if hit and self.rng.randrange(100) < self.mood:
                where = self.rng.randrange(len(page.buffers[0]))
                page.buffers[0][where] ^= 1 << self.rng.randrange(8)
        return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        self._maybe_fail()
        if self.rng.randrange(100) < self.mood:
            half = super().put(pages[: len(pages) // 2], level)
            return half + [False] * (len(pages) - len(half))
        return super().put(pages, level)

    def _maybe_fail(self) -> None:
        if self.rng.randrange(100) < self.mood:
            raise StorageError("the store is in a mood", retryable=True)


@dataclass(frozen=True)
class Size:
    """How much each tier holds."""

    full: int
    windowed: int


class CacheHistory(RuleBasedStateMachine):
    """Prompts often replayed; every transfer of every request at any time."""

    @initialize(
        spans=st.sampled_from(SPAN_SETS),
        page_size=st.sampled_from([1, 2, 16, 64]),
        seed=st.integers(0, 10**6),
        mood=st.sampled_from([0, 0, 10, 40]),
        size=st.sampled_from([Size(30, 16), Size(10, 6)]),
    )
    def start(self, spans: tuple[int, ...], page_size: int, seed: int, mood: int, size: Size) -> None:
        self.rng = random.Random(seed)
        storage = LyingStorage()
        storage.rng = self.rng
        storage.mood = mood
        pages = (size.full, *(size.windowed for _ in spans[1:]))
        host = tuple(count + count // 2 for count in pages)
        self.engine = ToyEngine(toy_layout(spans, page_size), pages, host, storage, SeededWorkers(self.rng))
        self.cache = self.engine.cache
        self.running: list[tuple[Prompt, Lock]] = []
        self.operations: list[Operation] = []
        self.history: list[Prompt] = []

    PROMPTS = st.tuples(
        st.integers(0, 4), st.sampled_from([0.5, 1.0, 1.0, 1.0]), st.lists(st.integers(0, 1), max_size=7)
    )

    def prompt(self, choice: tuple[int, float, list[int]]) -> Prompt:
        replay, share, contents = choice
        size = self.engine.page_size
        head = np.empty(0, np.int32)
        if replay < len(self.history):
            old = self.history[-1 - replay]
            head = np.frombuffer(old.tokens, np.int32)[: int(old.pages_count * share) * size]
            contents = contents[:2]
        pages = [np.arange(size) + content * 1000 for content in contents]
        return self.cache.prompt(np.concatenate([head, *pages]).astype(np.int32))

    @rule(choice=PROMPTS)
    def serve(self, choice: tuple[int, float, list[int]]) -> None:
        prompt = self.prompt(choice)
        self.history.append(prompt)
        lock = self.engine.serve(prompt)
        if lock is not None:
            self.running.append((prompt, lock))
        if len(self.running) > 2:
            self.finish(0)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        _, lock = self.running.pop(which % len(self.running))
        self.cache.release(lock)

    @rule(choice=PROMPTS, level=st.sampled_from(list(Level)))
    def backup(self, choice: tuple[int, float, list[int]], level: Level) -> None:
        self.watch(self.cache.backup(self.prompt(choice), Level.CACHED if level is Level.DURABLE else level))

    @rule(choice=PROMPTS)
    def load(self, choice: tuple[int, float, list[int]]) -> None:
        self.watch(self.cache.load(self.prompt(choice)))

    @rule(choice=PROMPTS)
    def prefetch(self, choice: tuple[int, float, list[int]]) -> None:
        self.watch(self.cache.prefetch(self.prompt(choice)))

    @rule(times=st.integers(1, 4))
    def poll(self, times: int) -> None:
        for _ in range(times):
            self.see(self.cache.poll())

    @rule(choice=PROMPTS, patience=st.integers(0, 12), cold=st.integers(0, 2))
    def resume(self, choice: tuple[int, float, list[int]], patience: int, cold: int) -> None:
        """Do what an engine does for a prompt: bring it up tier by tier, with more or less patience, then serve.

        ``cold`` tiers, the device first, have had no room for it meanwhile.
        """
        prompt = self.prompt(choice)
        for tier in list(Tier)[:cold]:
            self.squeeze(tier, 0, 100)
        self.watch(self.cache.prefetch(prompt))
        self.poll(patience)
        self.watch(self.cache.load(prompt))
        self.poll(patience)
        self.serve(choice)
        self.watch(self.cache.backup(prompt))
        self.poll(patience)

    @rule(tier=st.sampled_from(list(Tier)), component=st.integers(0, 2), pages=st.sampled_from([2, 5, 100]))
    def squeeze(self, tier: Tier, component: int, pages: int) -> None:
        """Other prompts need the room."""
        ledger = self.cache._ledger
        component %= len(self.engine.spans)
        count = min(pages, ledger.capacity(tier, component))
        slots = ledger.allocate(tier, component, count)
        if slots is not None:
            ledger.free(tier, component, slots)

    def watch(self, operation: Operation | None) -> None:
        assert operation is not None
        self.operations.append(operation)

    def see(self, over: list[Operation]) -> None:
        for operation in over:
            assert operation.error is None or isinstance(operation.error, StorageError), operation.error

    @invariant()
    def sound(self) -> None:
        if "engine" not in vars(self):
            return
        self.cache.check()
        for prompt, lock in self.running:
            self.engine.verify(prompt, lock)

    def teardown(self) -> None:
        """Let everything end: no slot is out, no lock is left, and what is in memory is right."""
        if "engine" not in vars(self):
            return
        self.see(self.cache.settle(5))
        for _, lock in self.running:
            self.cache.release(lock)
        self.cache.check()
        stats = self.cache.stats()
        for leg, traffic in stats.traffic.items():
            MOVED[leg.value] += traffic.pages
        MOVED["flawed"] += stats.flawed_pages
        MOVED["failed"] += stats.operations_failed
        assert [occupancy.out for occupancy in stats.occupancy] == [0] * len(self.engine.spans) * 2
        for prompt in self.history[-5:]:
            self.cache.load(prompt)
            self.see(self.cache.settle(5))
            lock = self.cache.lock(self.cache.match(prompt))
            self.engine.verify(prompt, lock)
            self.cache.release(lock)
        assert self.cache.close() == []


@pytest.mark.timeout(1800)
def test_random_histories_never_hand_back_a_wrong_byte_or_lose_a_slot() -> None:
    run_machine(
        CacheHistory,
        settings=settings(
            max_examples=examples(100, 1000),
            stateful_step_count=50,
            deadline=None,
            phases=PHASES,
            derandomize=not LONG,  # the sums asserted below must not be a matter of luck
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert min(MOVED[leg] for leg in ("backup", "load", "store", "prefetch")) > 100, MOVED
    assert MOVED["flawed"] > 0, MOVED
    assert MOVED["failed"] > 0, MOVED
