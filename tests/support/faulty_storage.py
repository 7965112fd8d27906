"""A store that fails on purpose: a wrapper that injects the faults that stores have, from a seed or a script."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from threading import Condition, Lock
from typing import Protocol, TypeVar

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

Result = TypeVar("Result")

POISON = 0xDB
"""Byte that fills what a short read or a torn write left out."""

LABELS_KEPT_MAX = 256
"""Pages remembered to be returned in place of others."""


class StorageFault(Enum):
    """Fault of a call, or of one page of its batch."""

    FAIL = "fail"
    """The call raises a retryable StorageError; nothing was done."""
    DELAY = "delay"
    """The call sleeps first."""
    HANG = "hang"
    """The call hangs until it is released, and then goes on."""
    SHORT_READ = "short read"
    """A page read ends in its first half and counts as a hit; the rest of its buffers is poison."""
    FLIPPED_BIT = "flipped bit"
    """A page read has one bit wrong and counts as a hit."""
    MISDIRECTED_READ = "misdirected read"
    """A page read has the bytes of another page and counts as a hit."""
    LOST_WRITE = "lost write"
    """A page counts as stored and is not."""
    TORN_WRITE = "torn write"
    """A page counts as stored, and from somewhere in its first half on poison is stored in its place."""
    PARTIAL_WRITE = "partial write"
    """The first pages of a batch are stored, then the call raises a retryable StorageError."""


_OF_EVERY_CALL = frozenset({StorageFault.FAIL, StorageFault.DELAY, StorageFault.HANG})
_FAULTS_OF = {
    Method.GET: _OF_EVERY_CALL | {StorageFault.SHORT_READ, StorageFault.FLIPPED_BIT, StorageFault.MISDIRECTED_READ},
    Method.PUT: _OF_EVERY_CALL | {StorageFault.LOST_WRITE, StorageFault.TORN_WRITE, StorageFault.PARTIAL_WRITE},
}
"""Faults that a method can have; a method that is not named has those of every call."""


class FaultPlan(Protocol):
    """Decides which calls get which faults."""

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Return the fault of call ``number``, counted from 0 over all methods but capability and close.

        Called once for each call, in the order of the numbers.
        """
        ...


class SeededFaults:
    """A plan that gives calls each fault of their method at a rate, drawn from a seed; at most one a call."""

    def __init__(self, rates: Mapping[StorageFault, float], rng: random.Random) -> None:
        assert sum(rates.values()) <= 1, rates
        self._rates = rates
        self._rng = rng

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Draw one number; the same seed and the same calls draw the same faults."""
        drawn = self._rng.random()
        for fault, rate in self._rates.items():
            drawn -= rate
            if drawn < 0:
                return fault if fault in _FAULTS_OF.get(method, _OF_EVERY_CALL) else None
        return None


class ScriptedFaults:
    """A plan that gives faults to calls by their number."""

    def __init__(self, script: Mapping[int, StorageFault]) -> None:
        self._script = script

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Look the number up."""
        fault = self._script.get(number)
        assert fault is None or fault in _FAULTS_OF.get(method, _OF_EVERY_CALL), f"call {number} is {method.value}"
        return fault


class FaultyStorage(StorageLayer):
    """A store that passes calls on, except for the faults that ``plan`` gives them. It counts every wrong answer.

    A fault strikes only where it makes a difference: a read that finds nothing cannot be damaged, a page that is
    stored cannot be lost by putting it again, a batch of one page cannot be stored in part. Otherwise the call goes
    through and nothing is counted.

    It owns the wrapped backend. Thread-safe where the backend is; repeatable where one thread calls it.
    """

    def __init__(
        self,
        backend: Store,
        plan: FaultPlan,
        rng: random.Random,
        *,
        delay_s: float = 0.0,
        hang_s_max: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make it; ``rng`` chooses pages, offsets and bits. A call that nobody releases hangs ``hang_s_max``."""
        super().__init__(backend)
        self._plan = plan
        self._rng = rng
        self._delay_s = delay_s
        self._hang_s_max = hang_s_max
        self._sleep = sleep
        self._calls_count = 0
        self._fired_count: Counter[StorageFault] = Counter()
        self._hung_count = 0
        self._releases_count = 0
        self._labels: deque[tuple[Label, int]] = deque(maxlen=LABELS_KEPT_MAX)
        self._changed = Condition(Lock())

    @property
    def calls_count(self) -> int:
        """Calls so far, which is the number of the next one."""
        with self._changed:
            return self._calls_count

    @property
    def fired_count(self) -> dict[StorageFault, int]:
        """Faults that struck so far; a copy, faults that never did are absent."""
        with self._changed:
            return dict(self._fired_count)

    def wait_until_hung(self, calls_count: int, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until that many calls hang at the same time; return whether they do."""
        with self._changed:
            return self._changed.wait_for(lambda: self._hung_count >= calls_count, timeout_s)

    def release(self) -> None:
        """Let all calls go on that hang now."""
        with self._changed:
            self._releases_count += 1
            self._changed.notify_all()

    def capability(self) -> Capability:
        """Say what the wrapped backend can do, never faulty; any call may hang, whatever is wrapped."""
        return replace(self._backend.capability(), bounded=False, exists_costs_io=True)

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        self._begin(method)
        return work()

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers, one page perhaps not with what is stored."""
        fault = self._begin(Method.GET)
        hits = self._backend.get([page._replace(checksum=None) for page in pages])
        found = [page for page, hit in zip(pages, hits, strict=True) if hit and any(page.buffers)]
        if fault is not None and found:
            page = self._rng.choice(found)
            content = self._damaged(fault, page)
            if content is not None:
                _fill(page.buffers, content)
                self._count(fault)
        return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages; a fault leaves out one of them or the last ones, or changes one."""
        fault = self._begin(Method.PUT)
        with self._changed:
            self._labels.extend((page.label, page_bytes(page)) for page in pages)
        if fault is StorageFault.PARTIAL_WRITE and len(pages) > 1:
            stored_count = self._rng.randrange(1, len(pages))
            self._backend.put(pages[:stored_count], level)
            self._count(fault)
            raise StorageError(f"only {stored_count} of {len(pages)} pages were put", retryable=True)
        absent = self._absent(pages) if fault in (StorageFault.LOST_WRITE, StorageFault.TORN_WRITE) else []
        if fault is None or not absent:
            return self._backend.put(pages, level)
        struck = self._rng.choice(absent)
        if fault is StorageFault.TORN_WRITE:
            stored = self._backend.put([self._torn(page) if page is struck else page for page in pages], level)
        else:
            kept = [page for page in pages if page.label != struck.label]
            answers = iter(self._backend.put(kept, level))
            stored = [Answer.STORED if page.label == struck.label else next(answers) for page in pages]
        self._count(fault)
        return stored

    def close(self) -> None:
        """Close the wrapped backend; never faulty, and calls that hang go on hanging."""
        self._backend.close()

    def _begin(self, method: Method) -> StorageFault | None:
        """Number a call and let it fail, sleep or hang; return the fault that its method has to apply itself."""
        with self._changed:
            number = self._calls_count
            self._calls_count += 1
            fault = self._plan.fault_of(number, method)
            if fault not in _OF_EVERY_CALL:
                return fault
            self._fired_count[fault] += 1
            if fault is StorageFault.HANG:
                self._hang()
        if fault is StorageFault.DELAY:
            self._sleep(self._delay_s)
        if fault is StorageFault.FAIL:
            raise StorageError(f"call {number}, {method.value}, fails on purpose", retryable=True)
        return None

    def _hang(self) -> None:
        releases_count = self._releases_count
        self._hung_count += 1
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._releases_count != releases_count, self._hang_s_max)
        self._hung_count -= 1

    def _count(self, fault: StorageFault) -> None:
        with self._changed:
            self._fired_count[fault] += 1

    def _absent(self, pages: Sequence[PageIO]) -> list[PageIO]:
        """Return the pages that are not stored, each once; without bytes there is nothing to lose or to tear."""
        exists = self._backend.exists([page.label for page in pages])
        absent: dict[Label, PageIO] = {}
        for page, known in zip(pages, exists, strict=True):
            if not known and any(page.buffers):
                absent.setdefault(page.label, page)
        return list(absent.values())

    def _damaged(self, fault: StorageFault, page: PageIO) -> bytearray | None:
        """Return what a damaged read of a page brings; None if there is no other page to bring."""
        if fault is StorageFault.MISDIRECTED_READ:
            return self._other(page)
        content = bytearray(b"".join(page.buffers))
        if fault is StorageFault.SHORT_READ:
            return self._cut_short(content)
        content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
        return content

    def _other(self, page: PageIO) -> bytearray | None:
        wanted_bytes = page_bytes(page)
        with self._changed:
            known = list(self._labels)
        others = [label for label, size_bytes in known if label != page.label and size_bytes == wanted_bytes]
        if not others:
            return None
        content = bytearray(wanted_bytes)
        (hit,) = self._backend.get([PageIO(self._rng.choice(others), (memoryview(content),))])
        return content if hit else None

    def _torn(self, page: PageIO) -> PageIO:
        return page._replace(buffers=(memoryview(self._cut_short(bytearray(b"".join(page.buffers)))),))

    def _cut_short(self, content: bytearray) -> bytearray:
        offset = self._rng.randrange((len(content) + 1) // 2)
        content[offset:] = bytes([POISON]) * (len(content) - offset)
        return content


def _fill(buffers: Sequence[memoryview], content: bytearray) -> None:
    start = 0
    for buffer in buffers:
        buffer[:] = content[start : start + len(buffer)]
        start += len(buffer)
