"""Random histories on the whole cache, on real components with real bytes: requests interleave, storage lies."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.support.budget import PHASES, examples
from tests.support.cache import ToyEngine
from tests.support.cache_model import (
    Census,
    Payloads,
    Pinned,
    flow_of,
    verify_bytes,
    verify_map,
    verify_slots_out,
)
from tests.support.components import COMPONENT_SETS
from tests.support.seeded_workers import SeededWorkers
from unified_cache.controller import NotStarted, Operation
from unified_cache.core.errors import InputError, StorageError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import ModelLayout, Pages, Slots, Tier
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.tree import Lock


class Leaves(Enum):
    """Windows and states that a request computes and hands over, beside all pages of Full."""

    ENDS = "those that a resume at its ends needs"
    ALL = "all"
    NOTHING = "none"


NAMESPACES = (Namespace(), Namespace(tenant="b"))

EVERYWHERE = (
    "backup",
    "load",
    "store",
    "prefetch",
    "flawed",
    "failed",
    "inserted",
    "duplicate",
    "insert_refused",
    "resumed",
    "refused",
    "given_up",
    "out_of_order",
    "split_under_request",
    "split_under_transfer",
    "evicted_under_request",
    "reset_under_request",
    "reset_in_flight",
)
WHERE_WINDOWED = ("revived_under_request", "recovered_under_request", "trimmed")
"""A tombstone filled in a window that a lock covers; one filled in front of it, while the lock pins Full there."""
WHERE_RECURRENT = ("forked", "fork_inserted", "fork_freed")
ROUNDS_MIN, ROUNDS_MAX = 4, 24
"""Rounds of histories: as few as show all of this, since the rarest of it needs about as many as the least."""
TIMES_MIN = 5
"""How often each of these must have happened in all histories of a component set: else they prove nothing."""


class LyingStorage(MemoryStorage):
    """Sometimes fails, declines, or hands back a damaged page; ``mood`` says how often, in percent."""

    rng: random.Random
    mood = 0

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self._maybe_fail()
        hits = super().get(pages)
        for page, hit in zip(pages, hits, strict=True):
            if hit and self.rng.randrange(100) < self.mood:
                where = self.rng.randrange(len(page.buffers[0]))
                page.buffers[0][where] ^= 1 << self.rng.randrange(8)
        return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self._maybe_fail()
        if self.rng.randrange(100) < self.mood:
            half = super().put(pages[: len(pages) // 2], level)
            return half + [Answer.DECLINED] * (len(pages) - len(half))
        return super().put(pages, level)

    def _maybe_fail(self) -> None:
        if self.rng.randrange(100) < self.mood:
            raise StorageError("the store is in a mood", retryable=True)


@dataclass(eq=False)
class HistoryRequest:
    """One request from its match to its end."""

    prompt: Prompt
    lock: Lock
    needed: list[Pages]
    pages: list[Slots]
    """Computed, by component; the request's own until they are inserted."""
    fork: list[Slots]
    """Its own copies of recurrent states, by component."""
    inserted: bool = False

    def own(self) -> list[list[Slots]]:
        return [] if self.inserted else [self.pages, self.fork]


class CacheHistory(RuleBasedStateMachine):
    """Prompts often replayed; every step of every request and every transfer at any time."""

    layouts: ClassVar[tuple[ModelLayout, ...]]
    happened: ClassVar[Counter[str]]
    """What all histories together did."""
    engine: ToyEngine | None = None

    @initialize(
        which=st.integers(0, 8),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(self, which: int, seed: int) -> None:
        self.dice = random.Random(seed)
        layout = self.layouts[which % len(self.layouts)]
        storage = LyingStorage(self.dice.choice([None, 8000]))
        storage.rng = self.dice
        storage.mood = self.dice.choice([0, 10, 40])
        full, windowed = self.dice.choice([(30, 16), (12, 8)])
        pages = (full, *(windowed for _ in layout.components[1:]))
        host = tuple(count + count // 2 for count in pages)
        self.workers = SeededWorkers(self.dice)
        self.engine = ToyEngine(layout, pages, host, storage, self.workers)
        self.cache = self.engine.cache
        self.tree = self.cache._ledger.tree
        self.payloads = Payloads()
        self.requests: list[HistoryRequest] = []
        self.operations: dict[Operation, Prompt] = {}
        self.history: list[Prompt] = []
        self.pinned: dict[Lock, Pinned] = {}

    PROMPTS = st.integers(0, 2**32 - 1)
    """A seed rather than a structure: hypothesis would draw the same few prompts again and again."""

    def prompt(self, seed: int) -> Prompt:
        """Return a new prompt or, more often, an old one cut and extended."""
        dice = random.Random(seed)
        page_size = self.cache.layout.page_size
        replay = dice.randrange(6)
        if replay < len(self.history):
            old = self.history[-1 - replay]
            head = old.tokens[: int(old.pages_count * dice.choice([0.5, 0.75, 1, 1])) * page_size * 4]
            namespace, count = old.seed, dice.randrange(3)
        else:
            head, namespace, count = b"", dice.choice(NAMESPACES).seed, dice.randrange(8)
        pages = [np.arange(page_size, dtype=np.int32) + dice.randrange(2) * 1000 for _ in range(count)]
        return Prompt(head + b"".join(page.tobytes() for page in pages), page_size, namespace)

    # ---- requests --------------------------------------------------------------------------------------------

    LEAVES = st.sampled_from(list(Leaves))

    @rule(choice=PROMPTS, leaves=LEAVES)
    def begin(self, choice: int, leaves: Leaves) -> None:
        self.compute(self.prompt(choice), leaves)

    @rule(choice=PROMPTS, leaves=LEAVES)
    def serve(self, choice: int, leaves: Leaves) -> None:
        self.serve_whole(self.prompt(choice), leaves)

    @rule(choice=PROMPTS, first=LEAVES, second=LEAVES)
    def race(self, choice: int, first: Leaves, second: Leaves) -> None:
        """Serve a prompt while another request computes the same one, and leaves the same or more, or less."""
        prompt = self.prompt(choice)
        loser = self.compute(prompt, first)
        self.serve_whole(prompt, second)
        if loser is not None:
            self.insert(loser)

    @rule(choice=PROMPTS, leaves=LEAVES)
    def branch(self, choice: int, leaves: Leaves) -> None:
        """Serve a prompt that leaves another one in its middle, while that one is on its way to the host."""
        trunk = self.prompt(choice)
        self.serve_whole(trunk, leaves)
        self.watch(self.cache.backup(trunk), trunk)
        page_size = self.cache.layout.page_size
        other = np.arange(page_size, dtype=np.int32) + 2000
        head = trunk.tokens[: trunk.pages_count // 2 * page_size * 4]
        self.serve_whole(Prompt(head + other.tobytes(), page_size, trunk.seed), leaves)

    @rule(choice=PROMPTS, leaves=LEAVES)
    def resume(self, choice: int, leaves: Leaves) -> None:
        """Do what an engine does for a prompt: bring it up tier by tier, with more or less patience, then serve it.

        The device, or the host too, have had no room for it meanwhile.
        """
        prompt = self.prompt(choice)
        for tier in list(Tier)[: self.dice.randrange(3)]:
            self.squeeze(tier, 0, 100)
        for leg in (self.cache.prefetch, self.cache.load):
            self.watch(leg(prompt), prompt)
            self.poll(self.dice.randrange(13))
        self.serve_whole(prompt, leaves)
        self.watch(self.cache.backup(prompt), prompt)
        self.poll(self.dice.randrange(13))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def go_on(self, which: int) -> None:
        """Let a request take its next step: insert what it has computed, or end; not in the order they came."""
        request = self.requests[which % len(self.requests)]
        self.happened["out_of_order"] += request is not self.requests[0]
        if request.inserted:
            self.end(request)
        else:
            self.insert(request)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        """End a request whatever it has done so far."""
        self.end(self.requests[which % len(self.requests)])

    @rule(choice=PROMPTS, luck=st.integers(0, 2**32 - 1))
    def reset(self, choice: int, luck: int) -> None:
        """Forget everything, which no engine does with requests under way: their locks become void, no more."""
        if luck % 3 == 1:
            prompt = self.prompt(choice)
            begun = self.compute(prompt, Leaves.ENDS)
            self.watch(self.cache.backup(prompt), prompt)
            self.happened["reset_under_request"] += any(request.lock.end for request in self.requests)
            self.happened["reset_in_flight"] += bool(self.workers._waiting)
            self.cache.reset()
            if begun is not None:
                self.insert(begun)

    def serve_whole(self, prompt: Prompt, leaves: Leaves) -> None:
        """Run a request up to where its pages are the tree's."""
        request = self.compute(prompt, leaves)
        if request is not None:
            self.insert(request)

    def compute(self, prompt: Prompt, leaves: Leaves) -> HistoryRequest | None:
        """Match, lock, allocate and compute; None if pins leave too little room."""
        assert self.engine is not None
        if len(self.requests) > 2:
            self.end(self.requests[0])
        self.history.append(prompt)
        found = self.cache.match(prompt)
        Census.take(self.tree).verify_match(found)
        ends = self.cache.checkpoint_ends(found)
        lock = self.cache.lock(found)
        self.happened["resumed"] += lock.end > 0
        needed = self.cache.pages_to_allocate(lock.end, prompt.pages_count, () if leaves is Leaves.NOTHING else ends)
        asked = [np.ones_like(mask) if leaves is Leaves.ALL else mask for mask in needed]
        fork = self.fork(lock)
        fits = all(np.count_nonzero(mask) <= self.cache.available(number) for number, mask in enumerate(asked))
        pages = self.cache.allocate(asked)
        assert (pages is not None) == fits, "what is available is not what can be allocated"
        if pages is None:
            self.happened["refused"] += 1
            self.cache.free(fork)
            self.cache.release(lock)
            return None
        for component, slots in enumerate(pages):
            self.engine.write_pages(component, slots, prompt, lock.end)
        request = HistoryRequest(prompt, lock, needed, pages, fork)
        self.requests.append(request)
        return request

    def no_slots(self) -> list[Slots]:
        return [np.empty(0, np.int32) for _ in self.cache.layout.components]

    def fork(self, lock: Lock) -> list[Slots]:
        """Copy the recurrent state that a lock pins, if the model has one, the tree holds it, and there is room."""
        assert self.engine is not None
        forked = [n for n, component in enumerate(self.cache.layout.components) if n and not component.mapped]
        if not forked or not lock.end or (self.cache.slots(lock, forked[0]) < 0).any():
            return self.no_slots()
        fork = self.cache.fork(lock)
        if fork is None:
            return self.no_slots()
        self.happened["forked"] += 1
        (mine,), (theirs,) = fork[forked[0]].tolist(), self.cache.slots(lock, forked[0]).tolist()
        assert self.engine.read(forked[0], mine) == self.engine.read(forked[0], theirs)
        return fork

    def insert(self, request: HistoryRequest) -> None:
        """Hand over what was computed, what a resume needs or all of it; a fork becomes the state at the end."""
        if self.dice.random() < 0.5:
            wasted = [(slots[~keep] >= 0).any() for slots, keep in zip(request.pages, request.needed, strict=True)]
            self.happened["trimmed"] += any(wasted)
            self.cache.trim(request.pages, request.needed)
        for component, copies in enumerate(request.fork):
            if len(copies) and len(request.pages[component]) and request.pages[component][-1] < 0:
                self.use_fork(request, component)
        mine = [slots.copy() for slots in request.pages]
        self.compare_preferences()
        try:
            request.lock = self.cache.insert(request.prompt, mine, request.lock)
        except InputError:
            self.happened["insert_refused"] += 1
            assert request.lock.tree is not self.tree._state, "refused, though what it stands on was locked all along"
            self.end(request)
            return
        for slots in mine:
            slots[:] = 77_777  # the caller may reuse its arrays
        request.inserted = True
        self.happened["inserted"] += 1
        self.happened["fork_freed"] += any(len(copies) for copies in request.fork)
        self.cache.free(request.fork)
        kept = self.cache.slots(request.lock)[request.lock.end - len(request.pages[0]) :]
        self.happened["duplicate"] += bool((kept != request.pages[0]).any())

    def use_fork(self, request: HistoryRequest, component: int) -> None:
        """Run the state on to the end of the prompt: what a forward pass does to it."""
        assert self.engine is not None
        self.happened["fork_inserted"] += 1
        (slot,) = request.fork[component].tolist()
        request.fork = self.no_slots()
        request.pages[component][-1] = slot
        self.engine.write(component, slot, request.prompt, request.prompt.pages_count - 1)

    def end(self, request: HistoryRequest) -> None:
        for own in request.own():
            self.cache.free(own)
        self.happened["given_up"] += not request.inserted
        self.cache.release(request.lock)
        self.requests.remove(request)

    # ---- transfers and pressure ------------------------------------------------------------------------------

    @rule(choice=PROMPTS)
    def backup(self, choice: int) -> None:
        prompt = self.prompt(choice)
        self.watch(self.cache.backup(prompt), prompt)

    @rule(choice=PROMPTS)
    def load(self, choice: int) -> None:
        prompt = self.prompt(choice)
        self.watch(self.cache.load(prompt), prompt)

    @rule(choice=PROMPTS)
    def prefetch(self, choice: int) -> None:
        prompt = self.prompt(choice)
        self.watch(self.cache.prefetch(prompt), prompt)

    @rule(times=st.integers(1, 4))
    def poll(self, times: int) -> None:
        for _ in range(times):
            self.see(self.cache.poll())

    @rule(tier=st.sampled_from(list(Tier)), component=st.integers(0, 2), pages=st.sampled_from([2, 5, 100]))
    def squeeze(self, tier: Tier, component: int, pages: int) -> None:
        """Other prompts need the room."""
        ledger = self.cache._ledger
        component %= len(self.cache.layout.components)
        capacity, free = ledger.capacity(tier, component), ledger.free_count(tier, component)
        fits = min(pages, capacity) <= ledger.available_pages(tier, component)
        slots = ledger.allocate(tier, component, min(pages, capacity))
        assert (slots is not None) == fits, "what is available is not what can be allocated"
        if slots is not None:
            ledger.free(tier, component, slots)
        pinning = any(request.lock.end for request in self.requests) and tier is Tier.DEVICE
        self.happened["evicted_under_request"] += pinning and ledger.free_count(tier, component) > free
        self.happened["refused"] += pinning and slots is None

    def watch(self, operation: Operation | NotStarted, prompt: Prompt) -> None:
        assert operation, operation
        self.operations[operation] = prompt

    def see(self, over: list[Operation]) -> None:
        for operation in over:
            assert operation.error is None or isinstance(operation.error, StorageError), operation.error

    # ---- proof -----------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if self.engine is None:
            return
        self.cache.check()
        flows = [flow_of(job, self.operations[operation]) for operation, job in self.workers._waiting]
        own = [pages for request in self.requests for pages in request.own()]
        verify_slots_out(self.cache, own, flows)
        verify_map(self.cache, own)
        census = Census.take(self.tree)
        census.verify_flows(flows)
        for request in self.requests:
            if request.lock.tree is self.tree._state:
                census.verify_lock(self.cache, request.prompt, request.lock)
        verify_bytes(self.engine, self.payloads, census)
        self.compare_preferences()

    def compare_preferences(self) -> None:
        """See what has become of what each lock pinned when this was called before."""
        requests = {request.lock for request in self.requests}
        before, self.pinned = self.pinned, {lock: Pinned.by(lock) for lock in self.tree.locks_out()}
        for lock, now in self.pinned.items():
            if lock in before:
                holder = "request" if lock in requests else "transfer"
                for change in now.changes_since(before[lock]):
                    self.happened[f"{change}_under_{holder}"] += 1

    def teardown(self) -> None:
        """Let everything end: no slot is out, no lock is left, what is in memory is right, and all of it can go."""
        if self.engine is None:
            return
        self.see(self.cache.wait_all(5))
        while self.requests:
            self.end(self.requests[-1])
        assert not self.tree.locks_out()
        self.cache.check()
        stats = self.cache.stats()
        assert [occupancy.out for occupancy in stats.occupancy] == [0] * len(stats.occupancy)
        for leg, traffic in stats.traffic.items():
            self.happened[leg.value] += traffic.pages
        self.happened["flawed"] += stats.flawed_pages
        self.happened["failed"] += stats.operations_failed
        for prompt in self.history[-5:]:
            self.cache.load(prompt)
            self.see(self.cache.wait_all(5))
            lock = self.cache.lock(self.cache.match(prompt))
            self.engine.verify(prompt, lock)
            self.cache.release(lock)
        for occupancy in stats.occupancy:
            number = [component.name for component in self.cache.layout.components].index(occupancy.component)
            self.squeeze(occupancy.tier, number, occupancy.capacity)
        self.cache.check()
        assert all(occupancy.free == occupancy.capacity for occupancy in self.cache.stats().occupancy)
        assert not self.tree._state.roots
        assert self.cache.close() == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("component_set", COMPONENT_SETS)
def test_random_histories_never_hand_back_a_wrong_byte_or_lose_a_slot(component_set: str) -> None:
    class LayoutHistory(CacheHistory):
        layouts = COMPONENT_SETS[component_set]
        happened: ClassVar[Counter[str]] = Counter()

    expected = [*EVERYWHERE]
    if component_set != "full":
        expected += WHERE_WINDOWED
    if "mamba" in component_set:
        expected += WHERE_RECURRENT
    rare: dict[str, int] = {}
    # How often a situation occurs is a matter of luck, that it occurs is not: more histories until each has.
    for number in range(ROUNDS_MAX):
        if number >= ROUNDS_MIN and not rare:
            break
        run_machine(
            seed(number)(LayoutHistory),
            settings=settings(
                max_examples=examples(20, 250),
                stateful_step_count=40,
                deadline=None,
                phases=PHASES,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rare = {name: LayoutHistory.happened[name] for name in expected if LayoutHistory.happened[name] < TIMES_MIN}
    assert not rare, f"too rare to prove anything: {rare} of {LayoutHistory.happened}"
