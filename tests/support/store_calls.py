"""Stores that note each call, and of which a call fails, hangs or is followed by another by a test's script.

    store.before[Method.GET] = raising(StorageError("gone", retryable=False))    every get fails
    store.before[Method.PUT] = at(2, lambda: cache.cancel(operation))            before the third put from now on
    store.before[Method.CLOSE] = may_close.wait                                  close returns when the test lets it

Faults by a seed, and pages that are damaged or lost, are those of ``faulty_storage``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple, TypeVar

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

Result = TypeVar("Result")


class StoreCall(NamedTuple):
    """One call that named objects."""

    method: Method
    labels: tuple[Label, ...]


class WatchedStorage(StorageLayer):
    """Notes each look-up, get and put. Closing it leaves the store below open, as closing leaves what is on a disk."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._calls: list[StoreCall] = []
        self.known: set[Label] = set()
        """Objects that the store ever said it has or took."""

    def take(self) -> list[StoreCall]:
        """Return the calls since the last time, those that raised among them."""
        calls, self._calls = self._calls, []
        return calls

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return self._noted(Method.EXISTS, labels, lambda: super(WatchedStorage, self).exists(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        return self._noted(Method.GET, [page.label for page in pages], lambda: super(WatchedStorage, self).get(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        labels = [page.label for page in pages]
        return self._noted(Method.PUT, labels, lambda: super(WatchedStorage, self).put(pages, level))

    def close(self) -> None:
        pass

    def _noted(self, method: Method, labels: Sequence[Label], call: Callable[[], list[Answer]]) -> list[Answer]:
        self._calls.append(StoreCall(method, tuple(labels)))
        answers = call()
        self.known |= {label for label, answer in zip(labels, answers, strict=True) if answer}
        return answers


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


class ScriptedStorage(MemoryStorage):
    """A store in memory that notes what it is asked, and fails, waits or declines for as long as the test says."""

    def __init__(self, bytes_max: int | None = None) -> None:
        super().__init__(bytes_max)
        self.calls: list[Method] = []
        self.offered: list[Label] = []
        """Objects that it was given to put, taken or not."""
        self.taken: set[Label] = set()
        """Objects that it ever took."""
        self.touched: list[Label] = []
        self.asked: list[Label] = []
        """Objects that it was to get."""
        self.came: list[Label] = []
        """Those of them that were read."""
        self.given: Sequence[PageIO] = ()
        """Pages of the get or put that is under way."""
        self.vanishing: set[Label] = set()
        """Objects that it says it has, and does not bring."""
        self.failing: set[Method] = set()
        """Calls that raise."""
        self.before: dict[Method, Act] = {}
        self.after: dict[Method, Act] = {}
        self.answers: dict[Method, Answer] = {}
        """What it answers for every object of a call, in the place of what is true."""

    def capability(self) -> Capability:
        """Say that calls may wait: any may, by the script."""
        return replace(super().capability(), bounded=False)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        self._call(Method.REGISTER, lambda: super(ScriptedStorage, self).register(manifest, slabs))

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return self._answer(Method.EXISTS, labels, lambda: super(ScriptedStorage, self).exists(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.given = pages
        self.asked += [page.label for page in pages]
        return self._answer(Method.GET, pages, lambda: self._get(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self.given = pages
        self.offered += [page.label for page in pages]
        return self._answer(Method.PUT, pages, lambda: self._put(pages, level))

    def touch(self, labels: Sequence[Label]) -> None:
        self.touched += labels
        self._call(Method.TOUCH, lambda: super(ScriptedStorage, self).touch(labels))

    def clear(self, identity: bytes) -> int:
        return self._call(Method.CLEAR, lambda: super(ScriptedStorage, self).clear(identity))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return self._call(Method.SCAN, lambda: super(ScriptedStorage, self).scan(identity, cursor))

    def close(self) -> None:
        self._call(Method.CLOSE, super().close)

    def _get(self, pages: Sequence[PageIO]) -> list[Answer]:
        there = [page for page in pages if page.label not in self.vanishing]
        found = dict(zip((page.label for page in there), super().get(there), strict=True))
        self.came += [page.label for page in pages if found.get(page.label)]
        return [found.get(page.label, Answer.MISS) for page in pages]

    def _put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        answers = super().put(pages, level)
        self.taken |= {page.label for page, answer in zip(pages, answers, strict=True) if answer}
        return answers

    def _answer(self, method: Method, of: Sequence[object], work: Callable[[], list[Answer]]) -> list[Answer]:
        answer = self.answers.get(method)
        return self._call(method, work if answer is None else lambda: [answer] * len(of))

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        self.calls.append(method)
        if method in self.failing:
            raise StorageError(f"{method.value} is out of order", retryable=False)
        try:
            self.before.get(method, nothing)()
            answer = work()
            self.after.get(method, nothing)()
        finally:
            self.given = ()
        return answer
