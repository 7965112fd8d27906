"""The engine of a simulation: requests, each from its match to its end, and what they compute."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tests.sim.audit import Audit, Claim, longest
from tests.sim.cells import Cell
from tests.sim.memory import POISON, ContentMemory, Contents
from tests.sim.prompts import Prompts
from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.errors import InputError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Pages, Slots, Tier
from unified_cache.tree import UNNAMED, Lock, RadixTree

SETTLE_S = 60.0
ROUNDS_MAX = 4
"""Of serving one prompt, until nothing that faults have left in the store keeps it from coming back whole."""


@dataclass(eq=False)
class SimRequest:
    """One request from its match to its end."""

    prompt: Prompt
    numbers: Contents
    """Of its pages."""
    lock: Lock
    needed: list[Pages]
    pages: list[Slots]
    """By component: the request's own from ``start`` on, until they are inserted."""
    start: int
    fork: list[Slots]
    inserted: bool = False
    claim: Claim | None = None


class SimEngine:
    """Runs requests on one cache, in steps that a scheduler calls; each tells what came of it."""

    def __init__(self, cell: Cell, rng: random.Random, cache: UnifiedCache, tree: RadixTree, audit: Audit) -> None:
        self.rng = rng
        self.cache = cache
        self.layout = cell.layout
        self.components = len(cell.layout.components)
        self.tree = tree
        self.audit = audit
        self.memory: ContentMemory = audit.memory
        self.prompts = Prompts(rng, cell.layout.page_size, audit.numbers)
        self.requests: list[SimRequest] = []
        self.subject: Contents = np.empty(0, np.int64)
        """Pages of the prompt that the step now is about."""
        self.happened: Counter[str] = Counter()
        self.rounds_max = ROUNDS_MAX

    def begin(self) -> object:
        """Match, lock, allocate and compute the next prompt; of windows what a resume needs, or all, or nothing."""
        prompt, numbers = self.prompts.next()
        self.subject = numbers
        found = self.cache.match(prompt, self.priority())
        spans = self.tree.spans
        device_end, host_end = longest(self.audit.picture, numbers[: prompt.reusable_pages], spans)
        assert found.device_end == device_end, "not the longest device prefix"
        assert found.host_end == host_end, "not the longest prefix"
        ends = self.cache.checkpoint_ends(found)
        lock = self.cache.lock(found)
        dice = self.rng.random()
        needed = self.cache.pages_to_allocate(lock.end, prompt.pages_count, ends if dice > 0.1 else ())
        asked = [np.ones_like(mask) if dice > 0.8 else mask for mask in needed]
        fork = self.fork(lock)
        fits = all(np.count_nonzero(mask) <= self.cache.available(number) for number, mask in enumerate(asked))
        pages = self.cache.allocate(asked)
        assert (pages is not None) == fits, "what is available is not what can be allocated"
        if pages is None:
            self.cache.free(fork)
            self.cache.release(lock)
            self.happened["refused"] += 1
            return "refused"
        request = SimRequest(prompt, numbers, lock, needed, pages, lock.end, fork)
        self.requests.append(request)
        for component in range(self.components):
            self.write(component, pages[component], numbers[lock.end :])
        self.claim(request)
        self.happened["resumed"] += lock.end > 0
        return lock.end, [len(mask) for mask in needed], [int((slots >= 0).sum()) for slots in pages]

    def priority(self) -> int:
        """Draw a priority; most requests have none."""
        return self.rng.choice((UNNAMED, UNNAMED, UNNAMED, 1, 2, 3))

    def write(self, component: int, slots: Slots, numbers: Contents) -> None:
        """Fill device pages as a forward pass would."""
        given = slots >= 0
        for pool in self.layout.components[component].pools:
            if pool.page_bytes:
                self.memory.device[self.memory.on_device(pool, slots[given])] = self.memory.contents(
                    pool, numbers[given]
                )

    def fork(self, lock: Lock) -> list[Slots]:
        """Copy the recurrent state that a lock pins, if there is one; the request runs on it and so changes it."""
        none = [np.empty(0, np.int32) for _ in range(self.components)]
        number = self.components - 1
        component = self.layout.components[number]
        if number == 0 or component.mapped or not lock.end or (self.cache.slots(lock, number) < 0).any():
            return none
        fork = self.cache.fork(lock)
        if fork is None:
            return none
        for pool in component.pools:
            mine, theirs = (
                self.memory.on_device(pool, given) for given in (fork[number], self.cache.slots(lock, number))
            )
            assert self.memory.device[mine] == self.memory.device[theirs], "a fork is no copy"
            self.memory.device[mine] = POISON
        self.happened["forked"] += 1
        return fork

    def insert(self) -> object:
        request = self.rng.choice([request for request in self.requests if not request.inserted])
        self.subject = request.numbers
        last = self.components - 1
        if len(request.fork[last]) and len(request.pages[last]) and request.pages[last][-1] < 0:
            request.pages[last][-1] = int(request.fork[last][0])
            request.fork[last] = request.fork[last][:0]
            self.write(last, request.pages[last][-1:], request.numbers[-1:])
            self.happened["fork inserted"] += 1
        try:
            request.lock = self.cache.insert(request.prompt, request.pages, request.lock, self.priority())
        except InputError:
            assert request.lock.is_void, "refused, though what it stands on was locked all along"
            self.happened["insert refused"] += 1
            self.end(request)
            return "refused"
        request.inserted = True
        request.claim = None
        self.cache.free(request.fork)
        kept = self.cache.slots(request.lock)[request.start :]
        duplicates = int((kept != request.pages[0]).sum())
        self.happened["duplicate"] += duplicates > 0
        return request.lock.end, duplicates

    def trim(self) -> object:
        request = self.rng.choice([request for request in self.requests if not request.inserted])
        self.cache.trim(request.pages, request.needed)
        self.claim(request)
        return [int((slots >= 0).sum()) for slots in request.pages]

    def end_one(self) -> object:
        request = self.rng.choice([request for request in self.requests if request.inserted])
        self.end(request)
        return request.lock.end

    def give_up(self) -> object:
        request = self.rng.choice([request for request in self.requests if not request.inserted])
        self.end(request)
        return request.lock.end

    def end(self, request: SimRequest) -> None:
        self.requests.remove(request)
        if not request.inserted:
            self.cache.free(request.pages)
            self.cache.free(request.fork)
        self.cache.release(request.lock)

    def squeeze(self) -> object:
        """Others need room: any part of it, now and then all."""
        tier, component = self.rng.choice(list(Tier)), self.rng.randrange(self.components)
        return self.make_room(tier, component, self.rng.randrange(1, 20))

    def make_room(self, tier: Tier, component: int, pages: int) -> object:
        ledger = self.cache._ledger
        free = ledger.free_count(tier, component)
        wanted = min(pages, ledger.capacity(tier, component))
        fits = wanted <= ledger.available_pages(tier, component)
        slots = ledger.allocate(tier, component, wanted)
        assert (slots is not None) == fits, "what is free or can be evicted is not what can be allocated"
        if slots is None:
            self.happened["refused"] += 1
            return "refused"
        ledger.free(tier, component, slots)
        assert ledger.free_count(tier, component) == max(free, len(slots)), "evicted more than was short"
        return free

    def claim(self, request: SimRequest) -> None:
        """Note what a request has out; again whenever that changes."""
        numbers = request.numbers[request.start :]
        bases = self.audit.bases.tolist()
        out, rows, contents = [], [], []
        for component, slots in enumerate(request.pages):
            given = slots >= 0
            out += [slots[given] + bases[component], request.fork[component] + bases[component]]
            for pool in self.layout.components[component].pools:
                if pool.page_bytes:
                    rows.append(self.memory.on_device(pool, slots[given]))
                    contents.append(self.memory.contents(pool, numbers[given]))
        mapped = self.layout.mapped
        peers = request.pages[0][:0] if mapped is None else np.maximum(request.pages[mapped], 0)
        request.claim = Claim(
            np.concatenate(out),
            np.concatenate(rows),
            np.concatenate(contents),
            full=peers if mapped is None else request.pages[0],
            peers=peers,
        )

    def serve(self) -> None:
        """Compute a prompt, bring it down to the store, lose it in memory, and get all of it back.

        What faults have left in the store shows when it is read, and is mended by the next round.
        """
        prompt, numbers = self.prompts.next()
        for _ in range(self.rounds_max):
            for leg in (self.cache.prefetch, self.cache.load):
                leg(prompt)
                self.cache.wait_all(SETTLE_S)
            found = self.cache.match(prompt)
            lock = self.cache.lock(found)
            resumed = lock.end
            pages = self.cache.allocate(
                self.cache.pages_to_allocate(lock.end, prompt.pages_count, self.cache.checkpoint_ends(found))
            )
            assert pages is not None, "no room in an idle cache"
            for component, slots in enumerate(pages):
                self.write(component, slots, numbers[lock.end :])
            lock = self.cache.insert(prompt, pages, lock)
            self.cache.backup(prompt)
            self.cache.wait_all(SETTLE_S)
            self.cache.release(lock)
            for tier in Tier:
                self.make_room(tier, 0, 10**6)
        worthwhile = prompt.reusable_pages * self.layout.page_size >= self.cache.config.prefetching.threshold_tokens
        assert resumed == (prompt.reusable_pages if worthwhile else 0), "what was stored does not come back"
