"""An engine over a cluster whose processes are killed, stopped and started again while it works."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import linear_regression

import numpy as np
import psutil
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.clock import ManualClock
from tests.support.mooncake import LocalCluster, open_mooncake
from tests.support.mooncake_needed import needs_etcd, needs_mooncake
from tests.support.waiting import wait_until
from unified_cache.controller import NotStarted, Operation, OperationState, TransferKind
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.mooncake.endpoints import STAY_S, NodeChoice
from unified_cache.storage_backends.mooncake.store import MooncakeStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import StorageLayer
from unified_cache.testing.storage_contract import LAYOUT, label, open_for_contract, sealed_page

pytestmark = needs_mooncake

GUARD = GuardConfig(deadline_s=3.0, breaker_pause_s_max=4.0)
RECOVERY_S = 10.0
PAGE_SIZE = 4
PROMPTS_COUNT = 6
PROMPT_PAGES = 24
HOST_PAGES = 60
"""Fewer than half of the prompts' pages: the rest must come from storage."""
INJECT_AFTER_S = 0.02
"""Into a round, which takes ten times as long."""


class CountedStorage(StorageLayer):
    """A store that counts what was declined of the pages put."""

    def __init__(self, backend: Store) -> None:
        super().__init__(backend)
        self.declined_count = 0

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        stored = super().put(pages, level)
        self.declined_count += len(stored) - stored.count(Answer.STORED)
        return stored


@dataclass
class MooncakeLoad:
    """An engine that serves the same prompts again and again, most of them from storage."""

    storage: CountedStorage
    toy: ToyEngine
    prompts: list[Prompt] = field(init=False)
    failures_count: int = 0

    def __post_init__(self) -> None:
        tokens = np.arange(PROMPT_PAGES * PAGE_SIZE, dtype=np.int32)
        self.prompts = [self.toy.cache.prompt(tokens + 1000 * number) for number in range(PROMPTS_COUNT)]

    def round(self) -> None:
        """Serve every prompt: fetch, load, compute the rest, compare every byte that was reused, write through."""
        cache = self.toy.cache
        for prompt in self.prompts:
            for start in (cache.prefetch, cache.load):
                self.run(start, prompt)
            lock = self.toy.serve(prompt)
            assert lock is not None, "the cache must go on serving"
            self.toy.verify(prompt, lock)
            self.run(cache.backup, prompt)
            cache.release(lock)

    def run(self, start: Callable[[Prompt], Operation | NotStarted], prompt: Prompt) -> None:
        """Make a transfer; ``test_frozen_stores`` has how long an engine waits for one."""
        operation = start(prompt)

        def is_over() -> bool:
            self.count_failures(self.toy.cache.poll())
            return not operation or operation.state is not OperationState.RUNNING

        assert wait_until(is_over, 60)

    def count_failures(self, ended: Sequence[Operation]) -> None:
        self.failures_count += sum(operation.error is not None for operation in ended)

    def is_normal(self) -> bool:
        """Tell whether in one round nothing failed or was declined, and storage had prefixes that memory had not."""
        failed, declined, fetched_pages = self.failures_count, self.storage.declined_count, self.fetched_pages
        self.round()
        self.count_failures(self.toy.cache.wait_all(60))
        nothing_new = (self.failures_count, self.storage.declined_count) == (failed, declined)
        return nothing_new and self.fetched_pages > fetched_pages

    @property
    def fetched_pages(self) -> int:
        return self.toy.cache.stats().traffic[TransferKind.PREFETCH].pages

    def check_nothing_leaked(self) -> None:
        stats = self.toy.cache.stats()
        assert stats.operations_live == stats.calls_quarantined == 0
        assert [occupancy.out for occupancy in stats.occupancy] == [0] * len(stats.occupancy)
        self.toy.cache.check()


@contextmanager
def work_over(cluster: LocalCluster) -> Iterator[MooncakeLoad]:
    store = open_mooncake(cluster)
    storage = CountedStorage(store)
    guard = StorageGuard(storage, store.capability(), GUARD)
    layout = toy_layout((SPAN_ALL, 3), PAGE_SIZE)
    work = MooncakeLoad(storage, ToyEngine(layout, (HOST_PAGES, HOST_PAGES), (HOST_PAGES, HOST_PAGES), guard, None))
    yield work
    assert work.toy.cache.close() == []


Act = Callable[[LocalCluster], object]

FAULTS: dict[str, tuple[Act, Act]] = {
    "a node is killed and stays away": (lambda cluster: cluster.nodes[0].kill(), lambda _: None),
    "a node is killed and another takes its place": (
        lambda cluster: cluster.nodes[0].kill(),
        lambda cluster: cluster.replace_node(cluster.nodes[0]),
    ),
    "a node stalls": (lambda cluster: cluster.nodes[0].stop(), lambda cluster: cluster.nodes[0].cont()),
    "the master is killed and starts anew": (
        lambda cluster: cluster.master.kill(),
        lambda cluster: cluster.restart_master(),
    ),
    "the master stalls": (lambda cluster: cluster.master.stop(), lambda cluster: cluster.master.cont()),
}

SHORT = {
    ("a node is killed and stays away", False),
    ("a node is killed and another takes its place", True),
    ("a node stalls", True),
    ("the master is killed and starts anew", False),
}
"""Those of every run; by whether it happens during gets."""


@pytest.mark.parametrize(
    ("fault", "during_gets"),
    [
        pytest.param(fault, during_gets, marks=() if (fault, during_gets) in SHORT else pytest.mark.long)
        for fault in FAULTS
        for during_gets in (False, True)
    ],
)
def test_an_engine_goes_on_serving_right_bytes_and_is_back_to_normal_soon(fault: str, during_gets: bool) -> None:
    inject, clear = FAULTS[fault]
    with LocalCluster.running(nodes=3) as cluster, work_over(cluster) as work:
        if during_gets:
            work.round()
            assert work.is_normal()
        # From a thread that outlives the fault: cluster processes die with the thread that started them.
        injection = threading.Timer(INJECT_AFTER_S, inject, (cluster,))
        injection.start()
        work.round()
        injection.join()
        work.round()
        clear(cluster)
        cleared_s = time.monotonic()
        while not work.is_normal():
            assert time.monotonic() - cleared_s < RECOVERY_S, "service must be normal again"
        work.check_nothing_leaked()


RESUME_S = 20.0
"""A leader that is gone is missed after five seconds, and the next one lets as many go by before it serves."""


@needs_etcd
def test_another_master_leads_with_all_pages_and_where_none_can_an_error_says_why_in_time() -> None:
    with LocalCluster.running(nodes=3, masters=2) as cluster, work_over(cluster) as work:
        work.round()
        assert work.is_normal()
        pages = set(cluster.admin.keys(lambda _: True))
        cluster.master.kill()
        killed_s = time.monotonic()
        work.prompts.append(work.toy.cache.prompt(np.arange(PROMPT_PAGES * PAGE_SIZE, dtype=np.int32) + 900_000))
        failures = work.failures_count
        work.round()
        assert work.failures_count > failures, "nobody leads"
        while not work.is_normal():
            assert time.monotonic() - killed_s < RESUME_S, "service must be normal again"
        keys = cluster.admin.keys(lambda _: True)
        assert pages < set(keys)
        assert len(keys) == len(set(keys)) == len(pages) + len(pages) // PROMPTS_COUNT, "the late prompt, once"
        assert len(cluster.admin.segments()) == 3
        cluster.restart_master(1 - cluster.leading())
        assert work.is_normal()
        with pytest.raises(ConfigError, match="a second"):
            open_storage("mooncake:etcd://127.0.0.1:1")
        cluster.nodes[0].kill()
        assert stored_by_a_newcomer(cluster) == {Answer.STORED}, "before the master misses the node"

        for member in cluster.etcd[:2]:
            member.kill()
        assert wait_until(lambda: "no member of etcd says" in refusal_in_time(cluster), RESUME_S)
        for _ in range(2):
            work.round()
        work.check_nothing_leaked()


def stored_by_a_newcomer(cluster: LocalCluster) -> set[Answer]:
    """Have a client that knows of no failure put pages on pair after pair of nodes; return the answers that it got."""
    clock = ManualClock()
    with closing(open_storage(f"{cluster.url}&replicas=2")) as store:
        assert isinstance(store, MooncakeStorage)
        client = store._client
        client.choice = NodeChoice(client.admin.segments, client.endpoints, clock, seed=0)
        open_for_contract(store)
        answers: set[Answer] = set()
        for number in range(4):
            store.register(manifest_of(Identity(f"late {number}"), LAYOUT), {})
            answers |= set(store.put([sealed_page(label(10 * number + page)) for page in range(10)], Level.CACHED))
            clock.now_s += STAY_S
    return answers


def refusal_in_time(cluster: LocalCluster) -> str:
    """Return what a store says of a call that it cannot make; empty if it can."""
    before_s = time.monotonic()
    try:
        with closing(open_mooncake(cluster)) as store:
            store.exists([Label(bytes(32), bytes(32), "kv")])
    except StorageError as error:
        return str(error)
    finally:
        assert time.monotonic() - before_s < GUARD.deadline_s
    return ""


ROUNDS, WARM_ROUNDS = 10, 4
"""Deaths of a node, and the first of them, in which memory is still being touched for the first time."""
RESIDENT_SLOPE_MAX = 1 << 20
"""Bytes a round: a round's pages in buffers that nobody gives back would be more."""
THREADS_SLOPE_MAX = 0.5
"""A round; in each a node, and so a connection, is lost and another comes."""


@pytest.mark.long
def test_nodes_that_die_again_and_again_cost_two_engines_neither_hits_nor_memory_nor_threads() -> None:
    own, sizes = psutil.Process(), list[tuple[int, int]]()
    with LocalCluster.running(nodes=3) as cluster, work_over(cluster) as one, work_over(cluster) as other:
        for number in range(ROUNDS):
            node = cluster.nodes[number % 3]
            node.kill()
            for work in (one, other):
                work.round()
            cluster.replace_node(node)
            cleared_s = time.monotonic()
            for work in (one, other):
                while not work.is_normal():
                    assert time.monotonic() - cleared_s < RECOVERY_S, "service must be normal again"
                work.check_nothing_leaked()
            sizes.append((own.memory_info().rss, own.num_threads()))
    rounds = range(ROUNDS - WARM_ROUNDS)
    resident_bytes, threads = (
        linear_regression(rounds, measured).slope for measured in zip(*sizes[WARM_ROUNDS:], strict=True)
    )
    assert resident_bytes < RESIDENT_SLOPE_MAX, sizes
    assert threads < THREADS_SLOPE_MAX, sizes
