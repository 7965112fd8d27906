"""Ten histories of a cache in which the n-th call goes wrong: of the file system, of a copy, of an allocation.

For every n and every way it can go wrong: no wrong byte, no slot lost, no exception but typed ones, and normal service
once the fault has passed.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tests.support.budget import LONG
from tests.support.files import DiskFault, FaultyDisk
from tests.support.operations import UnreturnedCall, engine
from tests.support.store_calls import ScriptedStorage
from tests.support.store_kinds import StoreKind
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller.copies.gpu import AT_ONCE, Copied
from unified_cache.controller.ledger import Ledger
from unified_cache.controller.memory import TieredMemory
from unified_cache.core.errors import CacheError, StorageTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, Pages, PoolSpec, Slots, Tier
from unified_cache.core.seal import Label
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.wrappers.layer import Method

PAGE = 16
LAYOUT = ModelLayout(
    PAGE,
    (
        Full((PoolSpec("kv", 64), PoolSpec("kv_index", 32))),
        SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 48), PoolSpec("swa_scale", 24))),
        RecurrentState((PoolSpec("mamba", 40),)),
    ),
)
SIZES = (16, 10, 6)
STRIDE = 1 if LONG else 11
DISK_STRIDE = 1 if LONG else 41
"""Of the calls of a history, every one goes wrong in the long mode; in the short one, others for each fault."""


@dataclass
class Trigger:
    """Counts calls, and says of one that it goes wrong."""

    at: int = -1
    count: int = 0

    def fires(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at


class FailingCall(Enum):
    """Kind of call that goes wrong, but for those of the file system."""

    COPY = "a copy that moves nothing"
    HALF_COPY = "a copy that moves half of its pages"
    STORE = "a call of the store that does not return in time"
    ALLOCATION = "an allocation that finds no room"


@dataclass
class CacheUnderFaults:
    """A cache over a store in a directory, and everything that can go wrong with it."""

    root: Path
    kind: StoreKind = StoreKind.FILE
    disk: FaultyDisk = field(default_factory=FaultyDisk)
    triggers: dict[FailingCall, Trigger] = field(default_factory=lambda: {call: Trigger() for call in FailingCall})
    calls: list[UnreturnedCall] = field(default_factory=list)
    prompts: dict[tuple[int, ...], Prompt] = field(default_factory=dict)
    """By contents, the one that a history asked for last at the end."""

    def __post_init__(self) -> None:
        self.toy = engine(layout=LAYOUT, device=SIZES, memory=FaultyMemory)
        self.cache = self.toy.cache
        memory = self.cache._memory
        assert isinstance(memory, FaultyMemory)
        memory.triggers = self.triggers
        store = ScriptedStorage(self.kind.open(self.root, disk=self.disk))
        store.before = dict.fromkeys((Method.GET, Method.PUT, Method.EXISTS), self.hang)
        self.cache.attach(store)
        self.disk.calls.clear()

    def hang(self) -> None:
        """Let a call of the store not return in time, if it is its turn."""
        if self.triggers[FailingCall.STORE].fires():
            self.calls.append(UnreturnedCall("store"))
            raise StorageTimeoutError("the store hangs", self.calls[-1])

    # ---- what histories are made of --------------------------------------------------------------------------

    def prompt(self, *contents: int) -> Prompt:
        pages = [np.arange(PAGE, dtype=np.int32) + 1000 * content for content in contents]
        prompt = self.prompts.pop(contents, None) or self.cache.prompt(np.concatenate(pages))
        self.prompts[contents] = prompt
        return prompt

    def serve(self, *contents: int) -> None:
        lock = self.toy.serve(self.prompt(*contents))
        if lock is not None:
            self.cache.release(lock)

    def back_up(self, *contents: int, level: Level = Level.CACHED) -> None:
        self.cache.backup(self.prompt(*contents), level)
        self.poll()

    def bring(self, *contents: int) -> None:
        prompt = self.prompt(*contents)
        self.cache.prefetch(prompt)
        self.poll()
        self.cache.load(prompt)
        self.poll()
        lock = self.cache.lock(self.cache.match(prompt))
        self.toy.verify(prompt, lock)
        self.cache.release(lock)

    def poll(self) -> None:
        for _ in range(4):
            for operation in self.cache.poll():
                assert operation.error is None or isinstance(operation.error, CacheError)

    def squeeze(self, tier: Tier) -> None:
        """Leave no page of a tier in the tree."""
        ledger = self.cache._ledger
        for component in range(len(SIZES)):
            ledger._take_back(ledger.tree.evict(tier, component, 10**6))

    def run_fork(self, *contents: int) -> None:
        lock = self.cache.lock(self.cache.match(self.prompt(*contents)))
        with suppress(CacheError):  # no state is held there, or it could not be copied
            fork = self.cache.fork(lock)
            if fork is not None:
                self.cache.free(fork)
        self.cache.release(lock)

    # ---- and what must be true afterwards --------------------------------------------------------------------

    def heal(self) -> None:
        """Let the fault pass: stores return from their calls, nothing goes wrong any more."""
        self.disk.failing = range(0)
        for trigger in self.triggers.values():
            trigger.at = -1
        for call in self.calls:
            call.returned = True
        self.cache.wait_all(5)

    def check(self) -> None:
        self.heal()
        self.cache.check()
        assert all(occupancy.out == 0 for occupancy in self.cache.stats().occupancy), "a slot is lost"
        for prompt in self.prompts.values():
            lock = self.toy.serve(prompt)
            assert lock is not None
            assert lock.end == prompt.pages_count
            self.toy.verify(prompt, lock)
            backup = self.cache.backup(prompt)
            self.cache.wait_all(5)
            assert backup
            assert backup.error is None
            self.cache.release(lock)
        self.cache.reset()
        last = next(reversed(self.prompts.values()))
        self.cache.prefetch(last)
        self.cache.wait_all(5)
        assert self.cache.match(last).host_end == last.pages_count, "normal service stores and finds"
        assert self.cache.close() == []
        assert not list((self.root / "tmp").rglob("*.part"))


class FaultyMemory(TieredMemory):
    """Memory of which one copy goes wrong, with nothing moved or half of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.triggers = {call: Trigger() for call in FailingCall}

    def backup(self, pool: PoolSpec, source: Slots, target: Slots) -> None:
        self._copy(partial(super().backup, pool), source, target)

    def load_layer(self, pool: PoolSpec, layer: int, source: Slots, target: Slots) -> Copied:
        self._copy(partial(super().load_layer, pool, layer), source, target)
        return AT_ONCE

    def seal(self, pool: PoolSpec, slots: Slots, labels: Iterable[Label]) -> None:
        self._copy(lambda *_: super(FaultyMemory, self).seal(pool, slots, labels), slots[:0], slots[:0])

    def _copy(self, copy: Callable[[Slots, Slots], object], source: Slots, target: Slots) -> None:
        fails, fails_half = (self.triggers[call].fires() for call in (FailingCall.COPY, FailingCall.HALF_COPY))
        if fails_half and len(source):
            half = len(source) // 2
            copy(source[:half], target[:half])
        if fails or fails_half:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        copy(source, target)


# ---- ten histories -----------------------------------------------------------------------------------------------


def serve_and_back_up(world: CacheUnderFaults) -> None:
    world.serve(1, 2, 3)
    world.back_up(1, 2, 3)


def durable(world: CacheUnderFaults) -> None:
    world.serve(1, 2, 3, 4)
    world.back_up(1, 2, 3, 4, level=Level.DURABLE)


def load_from_host(world: CacheUnderFaults) -> None:
    serve_and_back_up(world)
    world.squeeze(Tier.DEVICE)
    world.bring(1, 2, 3)


def prefetch_from_storage(world: CacheUnderFaults) -> None:
    serve_and_back_up(world)
    world.squeeze(Tier.DEVICE)
    world.squeeze(Tier.HOST)
    world.bring(1, 2, 3)


def conversation(world: CacheUnderFaults) -> None:
    for turn in range(1, 5):
        world.bring(*range(turn))
        world.serve(*range(turn + 1))
        world.back_up(*range(turn + 1))


def branches(world: CacheUnderFaults) -> None:
    for content in (7, 8, 9):
        world.serve(1, 2, 3, content)
        world.back_up(1, 2, 3, content)
    world.squeeze(Tier.DEVICE)
    world.bring(1, 2, 3, 8)


def pressure(world: CacheUnderFaults) -> None:
    for first in range(5):
        world.serve(*range(10 * first, 10 * first + 5))
        world.back_up(*range(10 * first, 10 * first + 5))
    world.bring(*range(5))


def forks(world: CacheUnderFaults) -> None:
    serve_and_back_up(world)
    world.run_fork(1, 2, 3)
    world.serve(1, 2, 3, 4)
    world.run_fork(1, 2, 3, 4)


def forgetting(world: CacheUnderFaults) -> None:
    serve_and_back_up(world)
    world.cache.reset() if not world.cache.stats().operations_live else None
    world.bring(1, 2, 3)
    world.serve(1, 2, 3, 4)


def cancelling(world: CacheUnderFaults) -> None:
    serve_and_back_up(world)
    world.squeeze(Tier.DEVICE)
    operation = world.cache.load(world.prompt(1, 2, 3))
    assert operation
    world.cache.cancel(operation)
    world.poll()
    world.bring(1, 2, 3)


History = Callable[[CacheUnderFaults], None]
HISTORIES: tuple[History, ...] = (
    serve_and_back_up,
    durable,
    load_from_host,
    prefetch_from_storage,
    conversation,
    branches,
    pressure,
    forks,
    forgetting,
    cancelling,
)


@cache
def disk_calls_count(history: History, kind: StoreKind) -> int:
    """Return how many calls of the file system a history makes if all goes well."""
    with TemporaryDirectory() as root:
        right = CacheUnderFaults(Path(root), kind)
        history(right)
        count = len(right.disk.calls)
        right.check()
    return count


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("fault", DiskFault)
def test_a_file_system_call_that_goes_wrong(
    history: History, fault: DiskFault, kind: StoreKind, memory_path: Path
) -> None:
    for number in range(list(DiskFault).index(fault), disk_calls_count(history, kind), DISK_STRIDE):
        world = CacheUnderFaults(memory_path / str(number), kind)
        world.disk.fault = fault
        world.disk.failing = range(number, number + 1)
        history(world)
        world.check()


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("call", FailingCall)
def test_a_call_that_goes_wrong(
    call: FailingCall, history: History, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = CacheUnderFaults(memory_path / "right")
    allocate, allocate_pages = Ledger.allocate, Ledger.allocate_pages

    def flaky(self: Ledger, tier: Tier, component: int, count: int) -> Slots | None:
        return None if world.triggers[FailingCall.ALLOCATION].fires() else allocate(self, tier, component, count)

    def flaky_pages(self: Ledger, masks: Sequence[Pages]) -> list[Slots] | None:
        return None if world.triggers[FailingCall.ALLOCATION].fires() else allocate_pages(self, masks)

    monkeypatch.setattr(Ledger, "allocate", flaky)
    monkeypatch.setattr(Ledger, "allocate_pages", flaky_pages)
    history(world)
    count = world.triggers[call].count
    assert count > 0
    stride = 1 if call is FailingCall.STORE else STRIDE
    for number in range(count % stride, count, stride):
        world = CacheUnderFaults(memory_path / str(number))
        world.triggers[call].at = number
        history(world)
        assert len(world.calls) == (call is FailingCall.STORE)
        world.check()
