"""Stores that note each call, so that a job can be compared with what it was to move, and that fail by script."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StorageBackend
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer


class StoreCall(NamedTuple):
    """One call that named objects, and what the store answered."""

    method: Method
    labels: tuple[Label, ...]
    answers: tuple[Answer, ...]


class WatchedStorage(StorageLayer):
    """Notes each look-up, get and put. Closing it leaves the store below open, as closing leaves what is on a disk."""

    def __init__(self, store: StorageBackend) -> None:
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


class ScriptedStorage(MemoryStorage):
    """A store in memory that notes what it is asked, and fails or declines for as long as the test says."""

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
        self.answer: Answer | None = None
        """Its answer to every put; None to store the page."""

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        self._begin(Method.EXISTS)
        return super().exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self._begin(Method.GET)
        return super().get(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        self.offered += [page.label for page in pages]
        self._begin(Method.PUT)
        if self.answer is not None:
            return [self.answer] * len(pages)
        answers = super().put(pages, level)
        self.taken |= {page.label for page, answer in zip(pages, answers, strict=True) if answer}
        return answers

    def touch(self, labels: Sequence[Label]) -> None:
        self.touched += labels
        self._begin(Method.TOUCH)
        super().touch(labels)

    def clear(self, identity: bytes) -> int:
        self._begin(Method.CLEAR)
        return super().clear(identity)

    def _begin(self, method: Method) -> None:
        self.calls.append(method)
        if method in self.failing:
            raise StorageError(f"{method.value} is out of order", retryable=False)
