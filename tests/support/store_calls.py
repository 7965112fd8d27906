"""Calls to the store, noted one by one, so that a job can be compared with what it was to move."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unified_cache.core.seal import Label
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
