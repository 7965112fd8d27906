"""Two engines over a cluster whose nodes die:

    python -m tests.soak.mooncake [--minutes M] [--round-s S] [--json FILE].

In the middle of every round one of three nodes is killed, and started again a twelfth of a round later. Each engine
serves prompts that the other serves too, and compares every byte that it reuses: a wrong one ends it, and the soak. A
line for every round, and JSON at the end; exit status 1 unless every engine had hits from storage in every round, no
slot leaked, and, over rounds enough to tell, memory and threads of the engines stayed flat.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression

import numpy as np
import psutil

from tests.support.cache import ToyEngine
from tests.support.mooncake import LASTING, LocalCluster
from unified_cache import GuardConfig, Identity, open_storage
from unified_cache.components import Full, RecurrentState
from unified_cache.controller import TransferKind
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.storage_backends.wrappers import StorageGuard

__all__ = ["ENGINES", "SoakOutcome", "soak"]

ENGINES = 2
NODES = 3
SEGMENT_BYTES = 64 << 20
"""The shared prompts take a third of the cluster; fresh ones fill it within two minutes."""

PAGE_SIZE = 16
PROMPT_PAGES = 16
LAYOUT = ModelLayout(PAGE_SIZE, (Full((PoolSpec("kv", 32 << 10),)), RecurrentState((PoolSpec("state", 8 << 10),))))
SHARED_PROMPTS = 60
"""Served again and again by all engines."""
FRESH_SHARE = 0.05
"""Share of the requests with a prompt of their own: a store without new pages would never evict."""
DEVICE_PAGES = (4 * PROMPT_PAGES, 8)
HOST_PAGES = (5 * PROMPT_PAGES, 20)
"""A twelfth of the shared prompts, so that nearly every hit is storage's."""

PACE_S = 0.02
"""Pause between two requests: a soak is about time, and leaves the machine to others."""
SETTLE_S = 60.0
REPORT_TIMEOUT_S = 60.0
"""An engine answers between two requests, each of which may wait for a few calls that hang until their deadline."""

WARM_ROUNDS = 2
"""Memory is still being touched for the first time."""
FLAT_ROUNDS_MIN = 5
"""Fewer say nothing about a slope."""
RESIDENT_SLOPE_MAX = 1 << 20
"""Bytes a round: an engine at 40 requests/s that kept a page of every request would grow by 70 MiB in 60 s."""
THREADS_SLOPE_MAX = 0.5
"""A round; in each a node, and so a connection, is lost and another comes."""


@dataclass(frozen=True)
class Account:
    """Counts of an engine since it began, and the resources it uses now."""

    requests: int
    storage_pages: int
    """Pages that came from storage."""
    failures: int
    """Transfers that failed: what a node's death costs."""
    leaked_slots: int
    """Slots that are out although nothing is under way."""
    resident_bytes: int
    threads: int


class SoakEngine:
    """A cache over a guarded store, in a process of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self._draws = random.Random(seed)
        self._fresh = SHARED_PROMPTS * (seed + 1) * 1_000_000
        store = open_storage(url)
        guard = StorageGuard(store, store.capability(), GuardConfig())
        self._toy = ToyEngine(LAYOUT, DEVICE_PAGES, HOST_PAGES, guard, None, Identity("soak"))
        self.cache = self._toy.cache
        self._own = psutil.Process()
        self._requests = self._failures = 0

    def serve(self) -> None:
        """Serve a prompt: fetch, load, compare what is reused, compute the rest, write through."""
        cache, prompt = self.cache, self._next_prompt()
        for start in (cache.prefetch, cache.load):
            start(prompt)
            self._settle()
        lock = self._toy.serve(prompt)
        assert lock is not None, "nothing but this request's own pages is pinned"
        cache.backup(prompt)
        self._settle()
        cache.release(lock)
        self._requests += 1

    def account(self) -> Account:
        """Sum up, after a check of every invariant."""
        self.cache.check()
        stats = self.cache.stats()
        return Account(
            self._requests,
            stats.traffic[TransferKind.PREFETCH].pages,
            self._failures,
            0 if stats.operations_live else sum(occupancy.out for occupancy in stats.occupancy),
            self._own.memory_info().rss,
            self._own.num_threads(),
        )

    def _next_prompt(self) -> Prompt:
        number = self._draws.randrange(SHARED_PROMPTS)
        if self._draws.random() < FRESH_SHARE:
            self._fresh += 1
            number = self._fresh
        tokens = np.random.default_rng(number).integers(0, 1 << 30, PROMPT_PAGES * PAGE_SIZE, np.int32)
        return self.cache.prompt(tokens)

    def _settle(self) -> None:
        self._failures += sum(ended.error is not None for ended in self.cache.wait_all(SETTLE_S))


def serve_orders(url: str, seed: int, orders: Connection) -> None:
    """Serve; send an ``Account`` for every order, and end when the other end of ``orders`` is closed."""
    _silence_mooncake()
    engine = SoakEngine(url, seed)
    orders.send(engine.account())
    try:
        while True:
            if orders.poll(PACE_S):
                orders.recv_bytes()
                orders.send(engine.account())
            engine.serve()
    except (EOFError, BrokenPipeError):
        engine.cache.close()


def _silence_mooncake() -> None:
    """Let it log a line for every page on a dead node elsewhere; what Python says still goes to standard error."""
    stderr = os.dup(sys.stderr.fileno())
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    sys.stderr = os.fdopen(stderr, "w", buffering=1)


@contextmanager
def engine_running(url: str, seed: int) -> Iterator[Connection]:
    """Start an engine's process, which takes orders; it ends by itself when they can come no more."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=serve_orders, args=(url, seed, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        child.join(REPORT_TIMEOUT_S)
        child.kill()


def account_of(engine: Connection) -> Account:
    """Wait for an engine's account.

    Raises:
        TimeoutError: none came in time.
        EOFError: the engine is dead.
    """
    if not engine.poll(REPORT_TIMEOUT_S):
        raise TimeoutError(f"an engine did not answer within {REPORT_TIMEOUT_S:g} s")
    account: Account = engine.recv()
    return account


@dataclass(frozen=True)
class SoakOutcome:
    """Accounts of the engines, and what is wrong with them."""

    round_s: float
    accounts: list[list[Account]]
    """By engine, at the start and after every round."""

    @property
    def complaints(self) -> list[str]:
        """Say what must not be; nothing if all is well."""
        found: list[str] = []
        for number, accounts in enumerate(self.accounts):
            if accounts[-1].leaked_slots:
                found.append(f"{accounts[-1].leaked_slots} slots of engine {number} leaked")
            for at, (before, after) in enumerate(pairwise(accounts)):
                if after.storage_pages == before.storage_pages:
                    found.append(f"no hit from storage in round {at} of engine {number}")
            warm = accounts[1 + WARM_ROUNDS :]
            for name, sizes, most in (
                ("resident bytes", [account.resident_bytes for account in warm], RESIDENT_SLOPE_MAX),
                ("threads", [account.threads for account in warm], THREADS_SLOPE_MAX),
            ):
                slope = linear_regression(range(len(sizes)), sizes).slope if len(sizes) >= FLAT_ROUNDS_MIN else 0.0
                if slope > most:
                    found.append(f"{name} of engine {number} grow by {slope:,.1f} a round")
        return found


def soak(rounds: int, round_s: float, say: Callable[[str], object]) -> SoakOutcome:
    """Run that many rounds, and ``say`` a line after each."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster.running(NODES, SEGMENT_BYTES, LASTING))
        engines = [stack.enter_context(engine_running(cluster.url, seed)) for seed in range(ENGINES)]
        outcome = SoakOutcome(round_s, [[account_of(engine)] for engine in engines])
        for number in range(rounds):
            time.sleep(round_s / 2)
            node = cluster.nodes[number % NODES]
            node.kill()
            time.sleep(round_s / 12)
            cluster.replace_node(node)
            time.sleep(round_s / 2 - round_s / 12)
            for engine in engines:
                engine.send_bytes(b"account")
            for engine, accounts in zip(engines, outcome.accounts, strict=True):
                accounts.append(account_of(engine))
            say(f"round {number}: " + "; ".join(map(_line, outcome.accounts)))
        return outcome


def _line(accounts: list[Account]) -> str:
    before, after = accounts[-2:]
    resident_mib = after.resident_bytes / (1 << 20)
    return (
        f"{after.requests - before.requests:,} requests, {after.storage_pages - before.storage_pages:,} pages from "
        f"storage, {after.failures - before.failures} transfers failed, RSS {resident_mib:.1f} MiB, "
        f"{after.threads} threads"
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mooncake", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long")
    parser.add_argument("--round-s", type=float, default=60, help="a node dies once in so many seconds")
    parser.add_argument("--json", type=Path, help="where the outcome goes as JSON, beside standard output")
    given = parser.parse_args()
    rounds = int(given.minutes * 60 / given.round_s)
    if rounds < 1 or given.round_s <= 0:
        parser.error("expected at least one round")
    outcome = soak(rounds, given.round_s, _say)
    text = json.dumps({**asdict(outcome), "complaints": outcome.complaints})
    _say(text)
    if given.json is not None:
        given.json.write_text(f"{text}\n", encoding="utf-8")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
