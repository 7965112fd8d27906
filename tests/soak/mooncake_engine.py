"""One engine of a soak, in a process of its own: it serves prompts that others serve too, and compares every byte."""

import os
import random
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from unified_cache import CacheConfig, Identity, UnifiedCache, open_storage
from unified_cache.components import Full, RecurrentState
from unified_cache.controller import TransferKind
from unified_cache.core.config import WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.core.window import window
from unified_cache.sizing.replay.engine import OracleEngine
from unified_cache.tree import Lock

__all__ = ["Account", "serve_orders"]

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


@dataclass(frozen=True)
class Account:
    """Counts of an engine since it began, and the resources it uses now."""

    requests: int = 0
    hit_pages: int = 0
    """Pages handed back and compared, wherever they came from."""
    storage_pages: int = 0
    """Pages that came from storage."""
    wrong_pages: int = 0
    failures: int = 0
    """Transfers that failed: what a node's death costs."""
    leaked_slots: int = 0
    """Slots that are out although nothing is under way."""
    resident_bytes: int = 0
    threads: int = 0


class SoakEngine:
    """A cache over a store, and the counts of its hits and pages."""

    def __init__(self, url: str, seed: int) -> None:
        self._draws = random.Random(seed)
        self._fresh = SHARED_PROMPTS * (seed + 1) * 1_000_000
        self._engine = OracleEngine.allocate(LAYOUT, DEVICE_PAGES)
        config = CacheConfig(DEVICE_PAGES, HOST_PAGES, write=WritePolicy.ON_CALL)
        identity = Identity("soak")
        self.cache = UnifiedCache.open(LAYOUT, config, self._engine.pools, identity=identity, storage=open_storage(url))
        self._own = psutil.Process()
        self._requests = self._hit_pages = self._wrong_pages = self._failures = 0

    def serve(self) -> None:
        """Serve a prompt: fetch, load, compare what is reused, compute the rest, write through."""
        cache, prompt = self.cache, self._next_prompt()
        cache.prefetch(prompt)
        self._settle()
        cache.load(prompt)
        self._settle()
        found = cache.match(prompt)
        ends = cache.checkpoint_ends(found)
        lock = cache.lock(found)
        self._compare(prompt, lock)
        start = lock.end
        if start < prompt.pages_count:
            slots = cache.allocate(cache.pages_to_allocate(start, prompt.pages_count, ends))
            assert slots is not None, "nothing but this request's own pages is pinned"
            for component, given in enumerate(slots):
                computed = np.flatnonzero(given >= 0)
                keys = [prompt.keys[start + page] for page in computed.tolist()]
                self._engine.compute(component, keys, given[computed])
            lock = cache.insert(prompt, slots, lock)
        cache.backup(prompt)
        self._settle()
        cache.release(lock)
        self._requests += 1

    def account(self) -> Account:
        """Sum up, after a check of every invariant."""
        self.cache.check()
        stats = self.cache.stats()
        return Account(
            requests=self._requests,
            hit_pages=self._hit_pages,
            storage_pages=stats.traffic[TransferKind.PREFETCH].pages,
            wrong_pages=self._wrong_pages,
            failures=self._failures,
            leaked_slots=0 if stats.operations_live else sum(occupancy.out for occupancy in stats.occupancy),
            resident_bytes=self._own.memory_info().rss,
            threads=self._own.num_threads(),
        )

    def _next_prompt(self) -> Prompt:
        if self._draws.random() < FRESH_SHARE:
            self._fresh += 1
            number = self._fresh
        else:
            number = self._draws.randrange(SHARED_PROMPTS)
        tokens = np.random.default_rng(number).integers(0, 1 << 30, PROMPT_PAGES * PAGE_SIZE, np.int32)
        return self.cache.prompt(tokens)

    def _settle(self) -> None:
        self._failures += sum(ended.error is not None for ended in self.cache.wait_all(SETTLE_S))

    def _compare(self, prompt: Prompt, lock: Lock) -> None:
        for number, component in enumerate(LAYOUT.components):
            start = window(lock.end, component.span)
            slots = self.cache.slots(lock, number)
            keys = prompt.keys[start : lock.end]
            self._wrong_pages += self._engine.count_wrong(number, keys, slots)
            self._hit_pages += len(keys)


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
