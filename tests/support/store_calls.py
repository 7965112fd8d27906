"""The one store of the tests that notes what it is asked, and goes wrong by a script, by number or by a seed.

It stands before any store, one in memory unless said otherwise, and passes on what nothing is said of::

    store.before[Method.GET] = raising(StorageError("gone", retryable=False))    every get fails
    store.before[Method.PUT] = at(2, lambda: cache.cancel(operation))            before the third put from now on
    store.before[Method.CLOSE] = may_close.wait                                  close returns when the test lets it
    store.failing = {Method.PUT}                                                 as long as it stands there
    store.answers[Method.PUT] = Answer.DECLINED                                  for every object
    store.answers[Method.GET] = [True, None]                                     whatever it is, and no call is made
    store.claims["call_bytes"] = 1 << 26                                         of what it says it can do
    store.vanishing = {label}                                                    it says it has, and does not bring

    ScriptedStorage(plan=ScriptedFaults({0: StorageFault.HANG}))                 the first call, until ``release``
    ScriptedStorage(below, SeededFaults({StorageFault.TORN_WRITE: 0.1}, rng), rng)

What it was asked is in ``noted``, and ``calls``, ``offered``, ``asked``, ``came`` and ``touched`` are views of that;
``take`` begins anew. By URL, ``tests.support.store_calls:held:METHOD,N:DIR`` is the file store in DIR whose N-th call
of METHOD never returns, or its N-th opening where that is ``open``.
"""

import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from threading import Condition, Lock
from typing import Protocol, TypeVar, cast

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Store, page_bytes
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

Result = TypeVar("Result")

POISON = 0xDB
"""Byte that fills what a short read or a torn write left out."""

LABELS_KEPT_MAX = 256
"""Pages remembered to be returned in place of others."""

# ---- what goes wrong ---------------------------------------------------------------------------------------------

Act = Callable[[], object]
"""What is done before a call of a store, or after it: it may raise, wait for an event, or call the cache."""


def nothing() -> None:
    """Leave a call as it is."""


def raising(error: BaseException) -> Act:
    """Make every call raise."""

    def act() -> None:
        raise error

    return act


def at(number: int, act: Act) -> Act:
    """Act at one call, counted from 0 from now on."""
    numbers = count()
    return lambda: act() if next(numbers) == number else None


def after(number: int, act: Act) -> Act:
    """Act at every call but the first so many."""
    numbers = count()
    return lambda: act() if next(numbers) >= number else None


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


# ---- the store -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StoreCall:
    """One call, the objects that it named, and what the store answered: nothing where it raised, or goes on."""

    method: Method
    labels: tuple[Label, ...]
    answers: tuple[Answer, ...] = ()


class ScriptedStorage(StorageLayer):
    """Notes each call and passes it on, but for what the script or the plan says. It counts every wrong answer.

    A fault of the plan strikes only where it makes a difference: a read that finds nothing cannot be damaged, a page
    that is stored cannot be lost by putting it again, a batch of one page cannot be stored in part. Otherwise the call
    goes through and nothing is counted.

    Thread-safe where the store below is; repeatable where one thread calls it.
    """

    def __init__(
        self,
        backend: Store | None = None,
        plan: FaultPlan | None = None,
        rng: random.Random | None = None,
        *,
        delay_s: float = 0.0,
        hang_s_max: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        leaves_open: bool = False,
    ) -> None:
        """``rng`` chooses pages, offsets and bits. A call that nobody releases hangs ``hang_s_max``.

        With ``leaves_open`` closing it does nothing, as what is on a disk stays there.
        """
        super().__init__(MemoryStorage() if backend is None else backend)
        self.noted: list[StoreCall] = []
        self.known: set[Label] = set()
        """Objects that the store ever said it has or took."""
        self.given: Sequence[PageIO] = ()
        """Pages of the get or put that is under way."""
        self.vanishing: set[Label] = set()
        self.failing: set[Method] = set()
        self.before: dict[Method, Act] = {}
        self.after: dict[Method, Act] = {}
        self.answers: dict[Method, object] = {}
        self.claims: dict[str, object] = {}
        self.calls_count = 0
        """Calls so far, which is the number of the next one."""
        self._plan = plan
        self._rng = random.Random(0) if rng is None else rng
        self._delay_s, self._hang_s_max, self._sleep = delay_s, hang_s_max, sleep
        self._leaves_open = leaves_open
        self._fired_count: Counter[StorageFault] = Counter()
        self._hung_count = self._releases_count = 0
        self._sizes: deque[tuple[Label, int]] = deque(maxlen=LABELS_KEPT_MAX)
        self._changed = Condition(Lock())

    def take(self) -> list[StoreCall]:
        """Return the calls since the last time."""
        calls, self.noted = self.noted, []
        return calls

    @property
    def calls(self) -> list[Method]:
        """Methods that were called."""
        return [call.method for call in self.noted]

    @property
    def offered(self) -> list[Label]:
        """Objects that it was given to put, taken or not."""
        return list(self._named(Method.PUT))

    @property
    def asked(self) -> list[Label]:
        """Objects that it was to get."""
        return list(self._named(Method.GET))

    @property
    def touched(self) -> list[Label]:
        """Objects that were made recent."""
        return list(self._named(Method.TOUCH))

    @property
    def came(self) -> list[Label]:
        """Objects that were read."""
        gets = [call for call in self.noted if call.method is Method.GET]
        return [label for call in gets for label, answer in zip(call.labels, call.answers, strict=False) if answer]

    @property
    def pages(self) -> dict[Label, bytes]:
        """The objects of the store in memory below it, which a test may damage."""
        assert isinstance(self._backend, MemoryStorage)
        return self._backend._pages

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
        """Say what the wrapped backend can do, never faulty; any call may wait, whatever is wrapped."""
        found = self._backend.capability()
        costs_io = found.exists_costs_io or self._plan is not None
        return replace(found, **{"bounded": False, "exists_costs_io": costs_io, **self.claims})  # type: ignore[arg-type]

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return self._answered(Method.EXISTS, labels, lambda _: self._backend.exists(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.given = pages
        return self._answered(Method.GET, [page.label for page in pages], lambda fault: self._read(pages, fault))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self.given = pages
        labels = [page.label for page in pages]
        return self._answered(Method.PUT, labels, lambda fault: self._write(pages, level, fault))

    def touch(self, labels: Sequence[Label]) -> None:
        self._made(StoreCall(Method.TOUCH, tuple(labels)), lambda _: self._backend.touch(labels))

    def close(self) -> None:
        """Close the wrapped backend; calls that hang go on hanging."""
        self._call(Method.CLOSE, nothing if self._leaves_open else self._backend.close)

    def _call(self, method: Method, work: Callable[[], Result], asked_count: int | None = None) -> Result:
        return self._made(StoreCall(method, ()), lambda _: work())

    def _answered(
        self, method: Method, labels: Sequence[Label], work: Callable[[StorageFault | None], list[Answer]]
    ) -> list[Answer]:
        call = StoreCall(method, tuple(labels))
        if method in self.answers:
            said = self.answers[method]
            if not isinstance(said, Answer):
                return cast("list[Answer]", self._made(call, lambda _: said))
            answers = self._made(call, lambda _: [said] * len(labels))
        else:
            answers = self._made(call, work)
        call.answers = tuple(answers)
        self.known |= {label for label, answer in zip(labels, answers, strict=True) if answer}
        return answers

    def _made(self, call: StoreCall, work: Callable[[StorageFault | None], Result]) -> Result:
        """Note a call and make it, with all that the plan and the script have for it."""
        self.noted.append(call)
        try:
            fault = None if self._plan is None or call.method is Method.CLOSE else self._begin(self._plan, call.method)
            if call.method in self.failing:
                raise StorageError(f"{call.method.value} is out of order", retryable=False)
            self.before.get(call.method, nothing)()
            answer = work(fault)
            self.after.get(call.method, nothing)()
        finally:
            self.given = ()
        return answer

    def _named(self, method: Method) -> Iterator[Label]:
        return (label for call in self.noted if call.method is method for label in call.labels)

    def _begin(self, plan: FaultPlan, method: Method) -> StorageFault | None:
        """Number a call and let it fail, sleep or hang; return the fault that its method has to apply itself."""
        with self._changed:
            number = self.calls_count
            self.calls_count += 1
            fault = plan.fault_of(number, method)
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

    def _read(self, pages: Sequence[PageIO], fault: StorageFault | None) -> list[Answer]:
        """Fill each page's buffers, one page perhaps not with what is stored."""
        there = [page._replace(checksum=None) for page in pages if page.label not in self.vanishing]
        found = iter(self._backend.get(there))
        answers = [Answer.MISS if page.label in self.vanishing else next(found) for page in pages]
        hits = [page for page, answer in zip(pages, answers, strict=True) if answer and any(page.buffers)]
        if fault is not None and hits:
            page = self._rng.choice(hits)
            content = self._damaged(fault, page)
            if content is not None:
                _fill(page.buffers, content)
                self._count(fault)
        return answers

    def _write(self, pages: Sequence[PageIO], level: Level, fault: StorageFault | None) -> list[Answer]:
        """Store pages; a fault leaves out one of them or the last ones, or changes one."""
        with self._changed:
            self._sizes.extend((page.label, page_bytes(page)) for page in pages)
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
            known = list(self._sizes)
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


# ---- by URL --------------------------------------------------------------------------------------------------------

HELD_VARIABLE = "UNIFIED_CACHE_TEST_HELD"
"""A FIFO, into which a byte is written when a call is held, so that a command can be interrupted there."""

openings = count(1)


def hold() -> None:
    """Say that a call is held, and hold it until the process ends."""
    fifo = os.environ.get(HELD_VARIABLE)
    if fifo is not None:
        Path(fifo).write_bytes(b"h")
    threading.Event().wait()


def held(rest: str, bytes_max: int | None) -> ScriptedStorage:
    """Open a file store that stops at a call."""
    call, _, path = rest.partition(":")
    method, _, number = call.partition(",")
    if (method, int(number)) == ("open", next(openings)):
        hold()
    store = ScriptedStorage(FileStorage.open(Path(path), bytes_max=bytes_max))
    if method != "open":
        store.before[Method(method)] = at(int(number) - 1, hold)
    return store
