"""Ranks decide together: what one cannot do none does, what they hold stays equal, and nobody waits for ever."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.clock import ManualClock
from tests.support.operations import Stepped, UnreturnedCall, out_pages, over, present, prompt_of_pages, serve
from tests.support.operations import engine as toy_engine
from tests.support.ranks import Declining, FlakyAllocator, ThreadRanks, digest_of, in_threads, same
from tests.support.store_calls import ScriptedStorage, raising
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full
from unified_cache.controller import NotStarted, OperationState, TransferKind
from unified_cache.controller.memory import TieredMemory
from unified_cache.controller.ranks.group import (
    LocalRanks,
    RankGroup,
    pools_to_store,
)
from unified_cache.core.config import WritePolicy
from unified_cache.core.errors import (
    ConfigError,
    CopyError,
    OperationTimeoutError,
    RankError,
    RankLostError,
    StorageError,
    StorageTimeoutError,
    WaitTimeoutError,
)
from unified_cache.core.pool import Identity, ModelLayout, Pages, PoolSpec, Slots, Tier
from unified_cache.core.seal import Label
from unified_cache.core.shards import Extent, Shard
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.wrappers.layer import Method

PAGE = 4
SPANS = (SPAN_ALL, 1)

Result = TypeVar("Result")


def bits(text: str) -> Pages:
    return np.array([letter == "1" for letter in text], np.bool_)


engine = partial(toy_engine, layout=toy_layout(SPANS, PAGE), device=24)
FULL = toy_layout((SPAN_ALL,), PAGE)


# ---- agreeing ----------------------------------------------------------------------------------------------------


def test_a_group_of_one_agrees_with_itself() -> None:
    ranks: RankGroup = LocalRanks()
    assert (ranks.rank, ranks.size, ranks.is_lost) == (0, 1, False)
    assert ranks.agree(bits("101")).tolist() == [True, False, True]


def test_what_is_agreed_on_is_true_on_every_rank() -> None:
    said = ("1101", "1011", "1001")
    found = in_threads(3, lambda ranks: ranks.agree(bits(said[ranks.rank])).tolist())
    assert same(found) == bits("1001").tolist()


def test_ranks_that_ask_different_questions_are_lost_to_each_other() -> None:
    def live(ranks: ThreadRanks) -> bool:
        with pytest.raises(RankLostError):
            ranks.agree(bits("1" * (3 + ranks.rank)))
        with pytest.raises(RankLostError):
            ranks.agree(bits("1"))
        return ranks.is_lost

    assert same(in_threads(2, live))


def test_of_a_pool_that_all_ranks_hold_alike_the_first_rank_stores_the_pages() -> None:
    layout = ModelLayout(PAGE, (Full((PoolSpec("kv", 8, replicated=True),)),))

    def live(ranks: ThreadRanks) -> list[str]:
        identity = Identity("model", shard=Shard.of_rank(ranks.rank, ranks.size, 1, Extent.whole(4)))
        return sorted(pools_to_store(ranks, identity, layout))

    assert in_threads(3, live) == [["kv"], [], []]


# ---- opening -----------------------------------------------------------------------------------------------------


def test_ranks_with_other_sizes_are_refused() -> None:
    def live(ranks: ThreadRanks) -> None:
        with pytest.raises(ConfigError, match="the configuration must be the same"):
            engine(host=(24, 24 - ranks.rank), ranks=ranks)

    in_threads(2, live)


def test_a_store_that_one_rank_cannot_take_over_is_taken_by_none() -> None:
    def live(ranks: ThreadRanks) -> str:
        cache = engine(ranks=ranks).cache
        store = ScriptedStorage()
        store.failing = {Method.REGISTER} if ranks.rank == 1 else set()
        with pytest.raises((StorageError, RankError)) as failed:
            cache.attach(store)
        assert cache.prefetch(prompt_of_pages(cache, 2)) is NotStarted.NO_STORAGE
        cache.attach(MemoryStorage())
        return type(failed.value).__name__

    assert in_threads(2, live) == ["RankError", "StorageError"]


def drawn_windows(count: int) -> Iterator[list[list[int]]]:
    """Yield, for groups of two and three ranks, the windows that each rank's store has."""
    rng = random.Random(7)
    for number in range(count):
        yield [sorted(rng.sample(range(6), rng.randrange(2, 6))) for _ in range(2 + number % 2)]


# ---- how long a prefix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "end"),
    [
        # Ends 2 and 4 here, 2 and 6 there: 4 would be legal here alone.
        ([[1, 3], [1, 5]], 2),
        ([[1, 3], [2, 4], [1, 5]], 0),
        ([[1, 5], [5]], 6),
        *((kept, max(set.intersection(*map(set, kept)), default=-1) + 1) for kept in drawn_windows(20)),
    ],
)
def test_the_longest_prefix_is_the_maximum_of_the_intersection_and_no_minimum_of_maxima(
    kept: Sequence[Sequence[int]], end: int
) -> None:
    """Prefetch a prompt of six pages of which rank r's store has all of Full and, of the window, ``kept[r]``."""

    def live(ranks: ThreadRanks) -> int:
        store = MemoryStorage()
        toy = engine(store, ranks=ranks)
        cache = toy.cache
        prompt = prompt_of_pages(cache, 6)
        for turn in range(1, 7):
            serve(toy, turn)
            over(cache, cache.backup(prompt.head(turn)))
        gone = [
            Label(toy.digest, prompt.keys[page], pool.name)
            for page in set(range(6)) - set(kept[ranks.rank])
            for pool in toy.layout.components[1].pools
        ]
        store.remove(gone)
        cache.reset()
        over(cache, cache.prefetch(prompt))
        cache.check()
        return cache.match(prompt).host_end

    assert same(in_threads(len(kept), live)) == end


# ---- what fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", [TransferKind.BACKUP, TransferKind.PREFETCH])
def test_a_transfer_that_fails_on_one_rank_fails_on_all_and_leaves_the_same(leg: TransferKind) -> None:
    def live(ranks: ThreadRanks) -> tuple[str, str, int]:
        store = ScriptedStorage()
        toy = engine(store, ranks=ranks)
        cache = toy.cache
        prompt = serve(toy, 4)
        if leg is TransferKind.PREFETCH:
            over(cache, cache.backup(prompt))
            cache.reset()
        store.failing = {Method.GET, Method.PUT} if ranks.rank == 2 else set()
        operation = over(cache, cache.prefetch(prompt) if leg is TransferKind.PREFETCH else cache.backup(prompt))
        assert operation.state is OperationState.FAILED
        assert isinstance(operation.error, RankError)
        assert "failed on ranks [2]" in str(operation.error)
        assert isinstance(operation.error.__cause__, StorageError) == (ranks.rank == 2)
        cache.check()
        return digest_of(cache), str(cache.stats().traffic), out_pages(cache)

    assert same(in_threads(3, live))[2] == 0


class DecliningOnce(Declining):
    """Declines the first time, and never again."""

    left = 1

    def strikes(self) -> bool:
        self.left -= 1
        return self.left >= 0


class BrokenBus(TieredMemory):
    """Copies nothing to the host once it is told so."""

    is_broken = False

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        if self.is_broken:
            raise CopyError("the bus is gone")
        super().backup(pool, source, target)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("troubled", [None, 0, 1])
def test_what_eviction_saves_on_one_rank_it_saves_on_all(troubled: int | None, copies: bool) -> None:
    """One of them has no room for it, or cannot copy it."""

    def live(ranks: ThreadRanks) -> tuple[int, int, str]:
        toy = engine(layout=FULL, ranks=ranks, write=WritePolicy.BACK, dirty_share=1.0, memory=BrokenBus)
        cache = toy.cache
        assert isinstance(cache._memory, BrokenBus)
        cache._memory.is_broken = not copies and ranks.rank == troubled
        host = cache._ledger._allocators[Tier.HOST]
        if copies and ranks.rank == troubled:
            host[0] = FlakyAllocator(host[0].capacity, DecliningOnce(random.Random(0), 1.0))
        prompt = serve(toy, 4)
        room = cache._ledger.capacity(Tier.DEVICE, 0)
        slots = present(cache.allocate(cache.pages_to_allocate(0, room, [room])))
        cache.free(slots)
        return cache.match(prompt).full_end(Tier.HOST), out_pages(cache), digest_of(cache)

    assert same(in_threads(2, live))[:2] == (4 if troubled is None else 0, 0)


# ---- time --------------------------------------------------------------------------------------------------------


def stepped(ranks: ThreadRanks, store: MemoryStorage | None = None) -> tuple[ToyEngine, Stepped, ManualClock]:
    """Return a rank whose jobs run, and whose time passes, when the test says so."""
    workers, clock = Stepped(), ManualClock()
    return engine(store, ranks=ranks, workers=workers, clock=clock, operation_timeout_s=2.0), workers, clock


def test_a_transfer_that_is_too_late_by_one_clock_is_too_late_by_all() -> None:
    def live(ranks: ThreadRanks) -> tuple[int, int, str]:
        toy, workers, clock = stepped(ranks)
        cache = toy.cache
        operation = cache.backup(serve(toy, 4))
        assert operation
        assert cache.poll() == []
        clock.now_s = 2.0 if ranks.rank == 1 else 0.5
        assert cache.poll() == [operation]
        assert isinstance(operation.error, OperationTimeoutError)
        held = out_pages(cache)
        if ranks.rank == 0:
            workers.run()
        assert cache.poll() == []
        assert out_pages(cache) == held, "another rank's worker may still be copying"
        if ranks.rank == 1:
            workers.run()
        cache.poll()
        return held, out_pages(cache), digest_of(cache)

    held, out, _ = same(in_threads(2, live))
    assert (held > 0, out) == (True, 0)


def test_pages_that_one_rank_has_in_quarantine_stay_with_their_operation_on_all() -> None:
    def live(ranks: ThreadRanks) -> tuple[int, int, int, str]:
        store = ScriptedStorage()
        toy = engine(store, ranks=ranks)
        cache = toy.cache
        prompt = serve(toy, 4)
        over(cache, cache.backup(prompt))
        cache.reset()
        call = UnreturnedCall("get")
        if ranks.rank == 1:
            store.before[Method.GET] = raising(StorageTimeoutError("get hangs", call))
        operation = cache.prefetch(prompt)
        assert operation
        assert cache.poll() + cache.poll() == [operation]
        assert isinstance(operation.error, RankError)
        held = out_pages(cache)
        assert (operation.is_released, cache.stats().calls_quarantined) == (False, int(ranks.rank == 1))
        call.returned = True
        cache.wait_all(30)
        cache.check()
        return held, out_pages(cache), cache.match(prompt).host_end, digest_of(cache)

    held, out, end, _ = same(in_threads(2, live))
    assert (held > 0, out, end) == (True, 0, 0)


def test_when_time_to_settle_is_up_on_one_rank_it_is_up_on_all() -> None:
    def live(ranks: ThreadRanks) -> None:
        toy, workers, _ = stepped(ranks)
        operation = toy.cache.backup(serve(toy, 4))
        with pytest.raises(WaitTimeoutError):
            toy.cache.wait_all(0 if ranks.rank == 0 else 1000)
        workers.run()
        assert toy.cache.wait_all(1000) == [operation]

    in_threads(2, live)


# ---- a rank that is lost -----------------------------------------------------------------------------------------


def test_ranks_that_lose_one_fail_what_moves_once_and_go_on_with_the_device_alone() -> None:
    def live(ranks: ThreadRanks) -> None:
        toy, workers, _ = stepped(ranks, MemoryStorage())
        cache = toy.cache
        operations = [cache.backup(serve(toy, 4)), cache.prefetch(prompt_of_pages(cache, 9))]
        if ranks.rank == 1:
            return
        with pytest.raises(RankLostError):
            cache.poll()
        assert cache.poll() == operations
        for operation in operations:
            assert operation
            assert isinstance(operation.error, RankLostError)
        assert out_pages(cache) > 0, "a worker may still be copying"
        workers.run(2)
        cache.wait_all(1)
        assert out_pages(cache) == 0
        prompt = serve(toy, 6)
        assert {start(prompt) for start in (cache.load, cache.backup, cache.prefetch)} == {NotStarted.RANK_LOST}
        assert cache.stats().operations_declined == 3
        cache.check()
        assert cache.close() == []

    in_threads(2, live, timeout_s=1.0)


class LosesOne:
    """A group that loses a rank after some agreements."""

    rank, size = 0, 1
    agreements_left = 1_000

    @property
    def is_lost(self) -> bool:
        return self.agreements_left < 0

    def agree(self, bits: Pages) -> Pages:
        self.agreements_left -= 1
        if self.is_lost:
            raise RankLostError("it is gone")
        return bits


def losses_told(cache: UnifiedCache) -> list[str]:
    """Poll until nothing is left to tell; return what was told, in order."""
    told: list[str] = []
    while True:
        try:
            ended = cache.poll()
        except RankLostError as error:
            told.append(str(error))
            continue
        told += [each.state.value for each in ended]
        if not ended and not cache._controller.live_count:
            return told


@pytest.mark.parametrize("detaches", [False, True])
def test_whichever_agreement_loses_a_rank_a_poll_says_so_once(detaches: bool) -> None:
    outcomes: list[list[str]] = []
    for agreement in range(20):
        ranks = LosesOne()
        toy = engine(MemoryStorage(), ranks=ranks)
        cache = toy.cache
        ranks.agreements_left = agreement
        cache.backup(serve(toy, 4))
        if detaches:
            cache.detach()
        outcomes.append(losses_told(cache))
        ended = ["partial"] if detaches else ["done"]
        if outcomes[-1] == ended:
            break
    *lost, last = outcomes
    assert last == ended
    assert len(lost) > 1, "steps of a backup agree, and looks at it do"
    assert all(told == ["it is gone", "failed"] for told in lost), outcomes
