"""Stores that note each call, and of which a call fails, hangs or is followed by another by a test's script.

    store.before[Method.GET] = raising(StorageError("gone", retryable=False))    every get fails
    store.before[Method.PUT] = at(2, lambda: cache.cancel(operation))            before the third put from now on
    store.before[Method.CLOSE] = may_close.wait                                  close returns when the test lets it

Faults by a seed, and pages that are damaged or lost, are those of ``faulty_storage``.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Scan, Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

Result = TypeVar("Result")


class StoreCall(NamedTuple):
    """One call that named objects, and what the store answered."""

    method: Method
    labels: tuple[Label, ...]
    answers: tuple[Answer, ...]


class WatchedStorage(StorageLayer):
    """Notes each look-up, get and put. Closing it leaves the store below open, as closing leaves what is on a disk."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._calls: list[StoreCall] = []
        self.known: set[Label] = set()
        """Objects that the store ever said it has or took."""

    def take(self) -> list[StoreCall]:
        """Return the calls since the last time; one that raised counts as begun and answered by nothing."""
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
        number = len(self._calls)
        self._calls.append(StoreCall(method, tuple(labels), ()))
        answers = call()
        self._calls[number] = StoreCall(method, tuple(labels), tuple(answers))
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
        self.failing: set[Method] = set()
        """Calls that raise."""
        self.before: dict[Method, Act] = {}
        self.after: dict[Method, Act] = {}
        self.answer: Answer | None = None
        """Its answer to every put; None to store the page."""

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        self._call(Method.REGISTER, lambda: super(ScriptedStorage, self).register(manifest, slabs))

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return self._call(Method.EXISTS, lambda: super(ScriptedStorage, self).exists(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        return self._call(Method.GET, lambda: super(ScriptedStorage, self).get(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self.offered += [page.label for page in pages]
        return self._call(Method.PUT, lambda: self._put(pages, level))

    def touch(self, labels: Sequence[Label]) -> None:
        self.touched += labels
        self._call(Method.TOUCH, lambda: super(ScriptedStorage, self).touch(labels))

    def clear(self, identity: bytes) -> int:
        return self._call(Method.CLEAR, lambda: super(ScriptedStorage, self).clear(identity))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return self._call(Method.SCAN, lambda: super(ScriptedStorage, self).scan(identity, cursor))

    def close(self) -> None:
        self._call(Method.CLOSE, super().close)

    def _put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        if self.answer is not None:
            return [self.answer] * len(pages)
        answers = super().put(pages, level)
        self.taken |= {page.label for page, answer in zip(pages, answers, strict=True) if answer}
        return answers

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        self.calls.append(method)
        if method in self.failing:
            raise StorageError(f"{method.value} is out of order", retryable=False)
        self.before.get(method, nothing)()
        answer = work()
        self.after.get(method, nothing)()
        return answer
