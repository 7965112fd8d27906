"""Ranks decide together: what one cannot do none does, what they hold stays equal, and nobody waits for ever."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pytest

from tests.cache_fixture import IDENTITY, ToyEngine, toy_layout
from tests.components import ToyComponent
from tests.operation_fixture import Clock, Stepped
from tests.ranks_fixture import (
    Declining,
    DecliningAllocator,
    Meeting,
    Rank,
    ThreadRanks,
    compare,
    digest_of,
    in_threads,
    out_pages,
    ranked,
)
from unified_cache.cache import UnifiedCache
from unified_cache.components.layouts.presets import layout
from unified_cache.config import EvictionConfig, EvictionPolicy
from unified_cache.controller import InlineWorkers, Leg, Operation, OperationState
from unified_cache.errors import (
    ConfigError,
    CopyError,
    LayoutError,
    OperationTimeoutError,
    RankError,
    RankLostError,
    SettleTimeoutError,
    StorageError,
    StorageTimeoutError,
)
from unified_cache.page import Prompt
from unified_cache.pool import Identity, ModelLayout, Pages, PoolSpec, Tier
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.ranks import LocalRanks, RankGroup, check_alike, together
from unified_cache.ranks.agreement import failed_ranks
from unified_cache.ranks.shards import Shard, heads_per_unit
from unified_cache.seal import Label
from unified_cache.storage_backends.manifest import described_by
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.window import SPAN_ALL

PAGE = 4
SPANS = (SPAN_ALL, 1)

Result = TypeVar("Result")


def bits(text: str) -> Pages:
    return np.array([letter == "1" for letter in text], np.bool_)


def engine(spans: tuple[int, ...] = SPANS, host: int = 24) -> ToyEngine:
    room = tuple(host for _ in spans)
    return ToyEngine(toy_layout(spans, PAGE), room, room, None, InlineWorkers())


def prompt_of(cache: UnifiedCache, pages: int) -> Prompt:
    return cache.prompt(np.arange(pages * PAGE, dtype=np.int32))


def served(toy: ToyEngine, pages: int) -> Prompt:
    prompt = prompt_of(toy.cache, pages)
    lock = toy.serve(prompt)
    assert lock is not None
    toy.cache.release(lock)
    return prompt


def over(cache: UnifiedCache, operation: Operation | None) -> Operation:
    assert operation is not None
    cache.settle(30)
    return operation


def same(results: Sequence[Result]) -> Result:
    """Return what all ranks return."""
    assert all(result == results[0] for result in results), results
    return results[0]


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


def test_a_value_that_differs_is_refused_by_all() -> None:
    def live(ranks: ThreadRanks) -> str:
        check_alike(ranks, "the name", "same")
        with pytest.raises(ConfigError, match="the name must be the same on all 3 ranks") as refused:
            check_alike(ranks, "the name", "a" if ranks.rank < 2 else "b")
        return str(refused.value)[:-1]

    assert len(in_threads(3, live)) == 3


def test_failures_are_told_with_their_ranks() -> None:
    def live(ranks: ThreadRanks) -> list[list[int]]:
        return failed_ranks(ranks, [ranks.rank == 1, False, ranks.rank != 1])

    assert same(in_threads(3, live)) == [[1], [], [0, 2]]


def test_what_fails_on_one_rank_fails_on_all_with_its_own_error_where_it_did() -> None:
    def live(ranks: ThreadRanks) -> str:
        def copy(failing: int) -> None:
            with together(ranks, "copying"):
                if ranks.rank == failing:
                    raise CopyError("no")

        copy(-1)
        with pytest.raises((CopyError, RankError)) as failed:
            copy(1)
        return repr(failed.value)

    other = "RankError('copying failed on ranks [1]')"
    assert in_threads(3, live) == [other, "CopyError('no')", other]


# ---- opening -----------------------------------------------------------------------------------------------------


def test_ranks_with_other_sizes_are_refused() -> None:
    def live(ranks: ThreadRanks) -> None:
        toy = engine()
        with pytest.raises(ConfigError, match="the configuration must be the same"):
            ranked(toy, ranks, None, host_pages=(24, 24 - ranks.rank))

    in_threads(2, live)


def test_a_time_to_live_is_refused_since_clocks_differ() -> None:
    def live(ranks: ThreadRanks) -> None:
        eviction = EvictionConfig((EvictionPolicy.LFU,), ttl_s=1.0)
        with pytest.raises(ConfigError, match="clocks differ between ranks"):
            ranked(engine(), ranks, None, eviction=eviction)

    in_threads(2, live)


def test_a_store_that_one_rank_cannot_take_over_is_taken_by_none() -> None:
    class Refusing(MemoryStorage):
        def register(self, manifest: Manifest, slabs: object) -> None:
            raise StorageError("no such layout", retryable=False)

    def live(ranks: ThreadRanks) -> str:
        cache = ranked(engine(), ranks, None)
        with pytest.raises((StorageError, RankError)) as failed:
            cache.attach(Refusing() if ranks.rank == 1 else MemoryStorage())
        assert cache.prefetch(prompt_of(cache, 2)) is None
        cache.attach(MemoryStorage())
        return type(failed.value).__name__

    assert in_threads(2, live) == ["RankError", "StorageError"]


# ---- how long a prefix -------------------------------------------------------------------------------------------


def prefetched(kept: Sequence[Sequence[int]], spans: tuple[int, ...] = SPANS, pages: int = 6) -> list[int]:
    """Prefetch a prompt of which rank r's store has Full and, of the window, pages ``kept[r]``; return its ends."""

    def live(ranks: ThreadRanks) -> int:
        store = MemoryStorage()
        toy = engine(spans)
        cache = ranked(toy, ranks, store)
        prompt = prompt_of(cache, pages)
        for end in range(1, pages + 1):
            served(toy, end)
            over(cache, cache.backup(prompt.head(end)))
        gone = [
            Label(toy.digest, prompt.keys[page], pool.name)
            for page in set(range(pages)) - set(kept[ranks.rank])
            for pool in toy.layout.components[1].pools
        ]
        store.remove(gone)
        cache.reset()
        over(cache, cache.prefetch(prompt))
        cache.check()
        return cache.match(prompt).any_end

    return in_threads(len(kept), live)


def test_the_longest_prefix_is_the_maximum_of_the_intersection_and_no_minimum_of_maxima() -> None:
    # Ends 2 and 4 here, 2 and 6 there: 4 would be legal here alone.
    assert prefetched([[1, 3], [1, 5]]) == [2, 2]


def test_ranks_that_have_no_end_in_common_fetch_nothing() -> None:
    assert prefetched([[1, 3], [2, 4], [1, 5]]) == [0, 0, 0]


def test_ranks_that_have_the_same_fetch_all_of_it() -> None:
    assert prefetched([[1, 5], [5]]) == [6, 6]


def test_a_page_that_one_rank_does_not_get_ends_the_prefix_on_all() -> None:
    class Forgetful(MemoryStorage):
        forgets = False

        def get(self, pages: Sequence[PageIO]) -> list[bool]:
            hits = super().get(pages)
            return [hit and not (self.forgets and number >= 2) for number, hit in enumerate(hits)]

    def live(ranks: ThreadRanks) -> tuple[int, int, str]:
        store = Forgetful()
        toy = engine((SPAN_ALL,))
        cache = ranked(toy, ranks, store)
        prompt = served(toy, 5)
        over(cache, cache.backup(prompt))
        cache.reset()
        store.forgets = ranks.rank == 1
        fetch = over(cache, cache.prefetch(prompt))
        return fetch.pages_count, out_pages(cache), digest_of(cache)

    assert same(in_threads(3, live))[:2] == (2, 0)


# ---- what fails --------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A call that a store does not return from until the test says so."""

    name: str = "get"
    started_s: float = 0.0
    returned: bool = False

    def wait(self, timeout_s: float) -> bool:
        return self.returned


class Failing(MemoryStorage):
    """Raises from get and put when told to."""

    broken = False

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        self._fail()
        return super().get(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        self._fail()
        return super().put(pages, level)

    def _fail(self) -> None:
        if self.broken:
            raise StorageError("the disk is gone", retryable=False)


@pytest.mark.parametrize("leg", [Leg.BACKUP, Leg.PREFETCH])
def test_a_transfer_that_fails_on_one_rank_fails_on_all_and_leaves_the_same(leg: Leg) -> None:
    def live(ranks: ThreadRanks) -> tuple[str, str, int]:
        store = Failing()
        toy = engine()
        cache = ranked(toy, ranks, store)
        prompt = served(toy, 4)
        if leg is Leg.PREFETCH:
            over(cache, cache.backup(prompt))
            cache.reset()
        store.broken = ranks.rank == 2
        operation = over(cache, cache.prefetch(prompt) if leg is Leg.PREFETCH else cache.backup(prompt))
        assert operation.state is OperationState.FAILED
        assert isinstance(operation.error, RankError)
        assert "failed on ranks [2]" in str(operation.error)
        assert isinstance(operation.error.__cause__, StorageError) == (ranks.rank == 2)
        cache.check()
        return digest_of(cache), str(cache.stats().traffic), out_pages(cache)

    assert same(in_threads(3, live))[2] == 0


@pytest.mark.parametrize(("rank", "times", "pages"), [(1, 1, 4), (0, 3, 2), (1, 99, 0)])
def test_no_room_on_one_rank_is_no_room_on_any(rank: int, times: int, pages: int) -> None:
    class Times(Declining):
        left = times

        def strikes(self) -> bool:
            self.left -= 1
            return self.left >= 0

    def live(ranks: ThreadRanks) -> tuple[int, int, str]:
        toy = engine((SPAN_ALL,))
        cache = ranked(toy, ranks, None)
        prompt = served(toy, 5)
        host = cache._ledger._allocators[Tier.HOST]
        if ranks.rank == rank:
            host[0] = DecliningAllocator(host[0].capacity, Times(random.Random(0), 1.0))
        assert over(cache, cache.backup(prompt)).pages_count == pages
        return cache._ledger.tree.full_end(cache.match(prompt), Tier.HOST), out_pages(cache), digest_of(cache)

    assert same(in_threads(2, live))[:2] == (pages, 0)


# ---- time --------------------------------------------------------------------------------------------------------


def stepped(ranks: ThreadRanks, store: MemoryStorage | None = None) -> tuple[ToyEngine, Stepped, Clock]:
    """Return a rank whose jobs run, and whose time passes, when the test says so."""
    workers, clock = Stepped(), Clock()
    toy = engine()
    cache = ranked(toy, ranks, store, workers, operation_timeout_s=2.0)
    cache._controller._clock = clock
    return toy, workers, clock


def test_a_transfer_goes_on_when_its_job_has_ended_on_every_rank() -> None:
    def live(ranks: ThreadRanks) -> list[int]:
        toy, workers, _ = stepped(ranks)
        toy.cache.backup(served(toy, 4))
        told: list[int] = []
        for poll in range(3):
            if poll == ranks.rank:
                workers.run()
            told.append(len(toy.cache.poll()))
        return told

    assert same(in_threads(3, live)) == [0, 0, 1]


def test_a_transfer_that_is_too_late_by_one_clock_is_too_late_by_all() -> None:
    def live(ranks: ThreadRanks) -> tuple[int, int, str]:
        toy, workers, clock = stepped(ranks)
        cache = toy.cache
        operation = cache.backup(served(toy, 4))
        assert operation is not None
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
    class Hanging(MemoryStorage):
        call: Call | None = None

        def get(self, pages: Sequence[PageIO]) -> list[bool]:
            if self.call is not None:
                raise StorageTimeoutError("get hangs", self.call)
            return super().get(pages)

    def live(ranks: ThreadRanks) -> tuple[int, int, int, str]:
        store = Hanging()
        toy = engine()
        cache = ranked(toy, ranks, store)
        prompt = served(toy, 4)
        over(cache, cache.backup(prompt))
        cache.reset()
        call = Call()
        store.call = call if ranks.rank == 1 else None
        operation = cache.prefetch(prompt)
        assert operation is not None
        assert cache.poll() + cache.poll() == [operation]
        assert isinstance(operation.error, RankError)
        held = out_pages(cache)
        assert (operation.is_released, cache.stats().calls_quarantined) == (False, int(ranks.rank == 1))
        call.returned = True
        cache.settle(30)
        cache.check()
        return held, out_pages(cache), cache.match(prompt).any_end, digest_of(cache)

    held, out, end, _ = same(in_threads(2, live))
    assert (held > 0, out, end) == (True, 0, 0)


def test_when_time_to_settle_is_up_on_one_rank_it_is_up_on_all() -> None:
    def live(ranks: ThreadRanks) -> None:
        toy, workers, _ = stepped(ranks)
        operation = toy.cache.backup(served(toy, 4))
        with pytest.raises(SettleTimeoutError):
            toy.cache.settle(0 if ranks.rank == 0 else 1000)
        workers.run()
        assert toy.cache.settle(1000) == [operation]

    in_threads(2, live)


# ---- a rank that is lost -----------------------------------------------------------------------------------------


def test_ranks_that_lose_one_fail_what_moves_once_and_go_on_with_the_device_alone() -> None:
    meeting = Meeting(2, timeout_s=0.2)

    def live(ranks: ThreadRanks) -> None:
        ranks = ThreadRanks(meeting, ranks.rank)
        toy, workers, _ = stepped(ranks, MemoryStorage())
        cache = toy.cache
        operations = [cache.backup(served(toy, 4)), cache.prefetch(prompt_of(cache, 9))]
        if ranks.rank == 1:
            return
        with pytest.raises(RankLostError):
            cache.poll()
        assert cache.poll() == operations
        for operation in operations:
            assert operation is not None
            assert isinstance(operation.error, RankLostError)
        assert out_pages(cache) > 0, "a worker may still be copying"
        workers.run(2)
        cache.settle(1)
        assert out_pages(cache) == 0
        prompt = served(toy, 6)
        assert (cache.load(prompt), cache.backup(prompt), cache.prefetch(prompt)) == (None, None, None)
        assert cache.stats().operations_declined == 3
        cache.check()
        assert cache.close() == []

    in_threads(2, live)


def test_a_rank_that_is_lost_while_a_transfer_starts_fails_it() -> None:
    meeting = Meeting(2, timeout_s=0.2)

    def live(ranks: ThreadRanks) -> None:
        ranks = ThreadRanks(meeting, ranks.rank)
        toy = engine()
        cache = ranked(toy, ranks, None)
        prompt = served(toy, 4)
        if ranks.rank == 0:
            operation = cache.backup(prompt)
            assert operation is not None
            assert isinstance(operation.error, RankLostError)
            assert out_pages(cache) == 0
            cache.reset()
            cache.check()

    in_threads(2, live)


# ---- who stores what ---------------------------------------------------------------------------------------------


def mixed_layout() -> ModelLayout:
    """Make MLA with recurrent state: what attention keeps is alike on all ranks, the state is not."""
    full = ToyComponent("full", SPAN_ALL, (PoolSpec("kv", 64, True), PoolSpec("index", 40, True)))
    return ModelLayout(PAGE, (full, ToyComponent("state", 1, (PoolSpec("state", 48),))))


class Counting(Failing):
    """Shared by all ranks; counts the puts of each pool."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[Label] = []

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        self.puts += [page.label for page in pages]
        return super().put(pages, level)


def identity_of(rank: int, size: int) -> Identity:
    shard = Shard.of_rank(rank, size, 8, 32)
    return replace(IDENTITY, shard=shard.text, stage=shard.stage)


def on_shared_store(
    store: Counting, live: Callable[[ToyEngine, ThreadRanks], Result], size: int = 2, chosen: ModelLayout | None = None
) -> list[Result]:
    """Run ranks over one store."""
    model = mixed_layout() if chosen is None else chosen
    room = tuple(24 for _ in model.components)

    def opened(ranks: ThreadRanks) -> Result:
        toy = ToyEngine(model, room, room, None, InlineWorkers())
        ranked(toy, ranks, None, identity=identity_of(ranks.rank, ranks.size)).attach(store)
        return live(toy, ranks)

    return in_threads(size, opened)


def test_replicated_pools_are_stored_by_one_rank_and_read_by_all() -> None:
    store = Counting()

    def live(toy: ToyEngine, ranks: ThreadRanks) -> tuple[list[int], int, int]:
        cache = toy.cache
        prompt = served(toy, 4)
        over(cache, cache.backup(prompt))
        stored = cache.stats().traffic[Leg.STORE].component_pages
        cache.reset()
        fetched = over(cache, cache.prefetch(prompt))
        over(cache, cache.load(prompt))
        lock = cache.lock(cache.match(prompt))
        return stored, fetched.pages_count, toy.verify(prompt, lock)

    assert same(on_shared_store(store, live)) == ([4, 1], 4, 5)
    puts = [label.pool for label in store.puts]
    assert [puts.count(pool) for pool in ("kv", "index", "state")] == [4, 4, 2]
    owners = {pool: {label.identity for label in store.puts if label.pool == pool} for pool in puts}
    assert [len(owners[pool]) for pool in ("kv", "index", "state")] == [1, 1, 2]


def test_what_the_one_writer_could_not_store_is_stored_for_nobody() -> None:
    store = Counting()
    store.broken = True

    def live(toy: ToyEngine, ranks: ThreadRanks) -> tuple[OperationState, list[int]]:
        operation = over(toy.cache, toy.cache.backup(served(toy, 4)))
        return operation.state, toy.cache.stats().traffic[Leg.STORE].component_pages

    latent = ModelLayout(PAGE, mixed_layout().components[:1])
    assert same(on_shared_store(store, live, 4, latent)) == (OperationState.FAILED, [0])
    assert store.puts, "the first rank tried"


def test_groups_of_other_sizes_share_replicated_pools_and_equal_shards() -> None:
    mixed = mixed_layout()
    by_size = {size: [identity_of(rank, size).owners(mixed) for rank in range(size)] for size in (1, 2, 4)}
    assert len({owners["kv"] for found in by_size.values() for owners in found}) == 1
    assert len({owners["state"] for found in by_size.values() for owners in found}) == 1 + 2 + 4


def test_an_identity_that_names_no_shard_owns_everything_under_its_own_digest() -> None:
    for model in (mixed_layout(), toy_layout(SPANS, PAGE)):
        assert set(IDENTITY.owners(model).values()) == {IDENTITY.digest(model)}
        assert IDENTITY.parts(model) == ((IDENTITY, model),)


def test_a_store_is_told_of_both_owners_of_a_mixed_layout() -> None:
    told: list[bytes] = []

    class Told(MemoryStorage):
        def register(self, manifest: Manifest, slabs: object) -> None:
            described_by(manifest)
            told.append(manifest.identity)

    mixed = mixed_layout()
    toy = ToyEngine(mixed, (8, 8), (8, 8), None, InlineWorkers())
    ranked(toy, LocalRanks(), Told(), identity=identity_of(1, 2))
    owners = identity_of(1, 2).owners(mixed)
    assert told == [owners["kv"], owners["state"]]


def test_a_replicated_pool_beside_sharded_attention_is_refused() -> None:
    full = ToyComponent("full", SPAN_ALL, (PoolSpec("kv", 64),))
    with pytest.raises(LayoutError, match="those of full must be"):
        ModelLayout(PAGE, (full, ToyComponent("state", 1, (PoolSpec("state", 48, True),))))


@pytest.mark.parametrize(
    ("model", "replicated"), [("deepseek-v4-flash", True), ("deepseek-v3.2", True), ("qwen3-next-80b-a3b", False)]
)
def test_latent_attention_is_replicated_and_heads_are_not(model: str, replicated: bool) -> None:
    assert {pool.replicated for pool in layout(model).pools} == {replicated}


def test_whether_a_pool_is_replicated_changes_no_identity() -> None:
    assert PoolSpec("kv", 64, True) == PoolSpec("kv", 64)
    alike = ModelLayout(PAGE, (ToyComponent("full", SPAN_ALL, (PoolSpec("kv", 64, True),)),))
    apart = ModelLayout(PAGE, (ToyComponent("full", SPAN_ALL, (PoolSpec("kv", 64),)),))
    assert IDENTITY.digest(alike) == IDENTITY.digest(apart)


# ---- shards ------------------------------------------------------------------------------------------------------


def test_a_shard_is_named_by_what_it_holds() -> None:
    assert Shard.of_rank(1, 4, 8, 32).text == "heads 2-4/8, layers 0-32/32"
    assert Shard.of_rank(3, 16, 8, 32) == Shard.of_rank(2, 16, 8, 32), "two ranks share a head"
    assert Shard(0, 8, 8, 16, 32, 32).stage == "layers 16-32/32"


def test_groups_of_two_four_and_eight_share_units_of_heads() -> None:
    unit = heads_per_unit(8, (2, 4, 8))
    assert unit == 1
    assert heads_per_unit(32, (2, 4, 8)) == 4
    assert heads_per_unit(4, (2, 4, 8)) == 1
    for size in (2, 4, 8):
        units = [part.text for rank in range(size) for part in Shard.of_rank(rank, size, 32, 9).units(4)]
        assert units == [part.text for part in Shard(0, 32, 32, 0, 9, 9).units(4)]


def test_a_shard_that_cannot_be_is_refused() -> None:
    for make in (
        lambda: Shard(2, 2, 8, 0, 1, 1),
        lambda: Shard(0, 9, 8, 0, 1, 1),
        lambda: Shard(0, 1, 8, 0, 0, 1),
        lambda: Shard.of_rank(4, 4, 8, 1),
        lambda: Shard.of_rank(0, 3, 8, 1),
        lambda: Shard.of_rank(1, 2, 8, 1).units(3),
        lambda: heads_per_unit(8, (2, 3)),
    ):
        with pytest.raises(LayoutError):
            make()


# ---- anything at any time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("troubled", [False, True], ids=["lag", "trouble"])
@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 1), (2, 2), (3, 3), (2, 4), (4, 5), (2, 6)])
def test_ranks_with_other_stores_lag_and_luck_keep_the_same_trees(size: int, seed: int, troubled: bool) -> None:
    def live(ranks: ThreadRanks) -> dict[str, object]:
        rank = Rank(seed, ranks, troubled)
        rank.run(150)
        rank.close()
        return rank.report()

    happened = compare(in_threads(size, live), troubled=troubled)
    assert happened["prefetches"] > 0
