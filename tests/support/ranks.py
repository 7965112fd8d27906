"""Ranks of a group, as threads, and what each holds: opened, compared, and short of room where the others are not."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import numpy as np

from tests.support.cache_model import walk
from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.errors import RankLostError
from unified_cache.core.pool import Pages, Slots, Tier
from unified_cache.core.slots import PairedAllocator, SlotAllocator

Result = TypeVar("Result")

# ---- ranks that are threads ----------------------------------------------------------------------------------------


class Meeting:
    """Meeting point at which threads agree."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.barrier = Barrier(size, timeout=timeout_s)
        self.said: list[Pages] = [np.empty(0, np.bool_) for _ in range(size)]


class ThreadRanks:
    """One rank of a group of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.barrier.parties
        self.is_lost = False
        self.count = 0
        """Agreements so far."""

    def agree(self, bits: Pages) -> Pages:
        self.count += 1
        said = self._meeting.said
        try:
            if self.is_lost:
                raise BrokenBarrierError
            said[self.rank] = bits.copy()
            self._meeting.barrier.wait()
            if len({len(other) for other in said}) > 1:
                raise BrokenBarrierError
            agreed: Pages = np.logical_and.reduce(said)
            self._meeting.barrier.wait()
        except BrokenBarrierError as error:
            self.is_lost = True
            self._meeting.barrier.abort()
            raise RankLostError("a rank did not come, or came with another question") from error
        return agreed


def in_threads(size: int, live: Callable[[ThreadRanks], Result], timeout_s: float = 60.0) -> list[Result]:
    """Run every rank of a group in a thread of its own; return by rank what came of it."""
    meeting = Meeting(size, timeout_s)

    def work(rank: int) -> Result:
        finished = False
        try:
            result = live(ThreadRanks(meeting, rank))
            finished = True
        finally:
            if not finished:
                meeting.barrier.abort()
        return result

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, RankLostError)):
        raise error  # that of the rank that did not merely lose the others
    return [future.result() for future in futures]


# ---- one rank's cache ----------------------------------------------------------------------------------------------


def digest_of(cache: UnifiedCache) -> str:
    """Digest what must be the same on all ranks: the tree with its slots, pins and marks, and every free list."""
    found = hashlib.sha256()
    for node, keys in walk(cache._ledger.tree):
        marks = {tier_component: pages.tolist() for tier_component, pages in (node.in_flight or {}).items()}
        found.update(
            repr((keys[-1], node.start, node.end, node.locks, node.partial_locks, node.stamps, marks)).encode()
        )
        for slots in node.slots:
            found.update(b"none" if slots is None else slots.tobytes())
    for tier in cache._ledger._allocators:
        for allocator in tier:
            found.update(allocator._free[: allocator.free_count].tobytes())
    if cache.pairing is not None:
        found.update(cache.pairing.map.table.tobytes())
    return found.hexdigest()


class Declining:
    """Says now and then that there is no room, where that could differ between ranks: in transfers."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._rng = rng
        self._rate = rate
        self._armed = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Decline for the length of a ``with`` block."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def strikes(self) -> bool:
        return self._armed and self._rng.random() < self._rate

    def install(self, cache: UnifiedCache) -> None:
        """Put allocators that decline into a new cache."""
        ledger = cache._ledger
        ledger._allocators = [
            [FlakyAllocator(allocator.capacity, self) for allocator in tier] for tier in ledger._allocators
        ]
        if ledger.layout.mapped is not None:
            device = ledger._allocators[Tier.DEVICE]
            ledger.paired = PairedAllocator(device[0], device[ledger.layout.mapped])


class FlakyAllocator(SlotAllocator):
    """Has no room now and then, though it has."""

    __slots__ = ("_declining",)

    def __init__(self, capacity: int, declining: Declining) -> None:
        super().__init__(capacity)
        self._declining = declining

    def allocate(self, count: int) -> Slots | None:
        return None if self._declining.strikes() else super().allocate(count)


# ---- what ranks say ------------------------------------------------------------------------------------------------


def same(results: Sequence[Result]) -> Result:
    """Return what all ranks return."""
    assert all(result == results[0] for result in results), results
    return results[0]
