"""A wrapper that tries again: faults that pass are not seen above it."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import TypeVar

from unified_cache.errors import ConfigError, StorageError, StorageTimeoutError
from unified_cache.seal import Label
from unified_cache.storage_backends.common.breaker import Backoff
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, StorageBackend
from unified_cache.storage_backends.wrappers.layer import StorageLayer

__all__ = ["RetryStorage"]

Item = TypeVar("Item", Label, PageIO)


class RetryStorage(StorageLayer):
    """Try ``exists``, ``get`` and ``put`` again, after a pause, when they fail in a way that may pass.

    Each round asks for the pages that have no answer yet, every batch that failed cut in half, so that one bad page
    does not fail its neighbours for long. There are at most ``rounds_max`` rounds, the first included, hence at most
    ``2 ** rounds_max - 1`` calls and ``rounds_max - 1`` pauses; a pause is shortened by up to a half at random, so that
    callers do not come back together.

    Pages without an answer in the end are UNAVAILABLE where others of their batch were answered; where none was, the
    last error is raised. A declined put, a miss, an error that is not retryable and a timeout, whose buffers
    are still in use, are never tried again. The other methods pass.

    It owns the wrapped backend. Thread-safe where the backend is.
    """

    def __init__(
        self,
        backend: StorageBackend,
        rounds_max: int,
        pauses: Backoff,
        rng: random.Random,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if rounds_max < 1:
            raise ConfigError(f"retrying needs rounds_max >= 1, found {rounds_max}")
        super().__init__(backend)
        self._rounds_max = rounds_max
        self._pauses = pauses
        self._rng = rng
        self._sleep = sleep
        self._retries_count = 0
        self._abandoned_pages_count = 0
        self._guard = Lock()

    @property
    def retries_count(self) -> int:
        """Calls to the wrapped backend beyond the first of each batch so far."""
        with self._guard:
            return self._retries_count

    @property
    def abandoned_pages_count(self) -> int:
        """Pages that had no answer after the last round so far."""
        with self._guard:
            return self._abandoned_pages_count

    def capability(self) -> Capability:
        """Say what the wrapped backend can do; several calls and pauses take longer than one call may."""
        return replace(self._backend.capability(), bounded=False)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend, again if need be."""
        return self._in_rounds(labels, self._backend.exists)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers, in several calls if need be."""
        return self._in_rounds(pages, self._backend.get)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages, in several calls if need be. A page that was stored by a call that failed is put once more."""
        return self._in_rounds(pages, lambda part: self._backend.put(part, level))

    def _in_rounds(self, items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]]) -> list[Answer]:
        answers = [Answer.UNAVAILABLE] * len(items)
        parts = [range(len(items))]
        failed: dict[range, StorageError] = {}
        try:
            for failures_count in range(self._rounds_max):
                if failures_count:
                    self._sleep(self._pauses.pause_s(failures_count) * self._rng.uniform(0.5, 1.0))
                    parts = [half for part in failed for half in _halves(part)]
                    failed = {}
                for part in parts:
                    if failures_count:
                        with self._guard:
                            self._retries_count += 1
                    try:
                        answers[part.start : part.stop] = ask(items[part.start : part.stop])
                    except StorageError as error:
                        if not error.retryable or isinstance(error, StorageTimeoutError):
                            raise
                        failed[part] = error
                if not failed:
                    return answers
            self._abandon(failed, len(items))
            return answers
        finally:
            failed.clear()  # tracebacks hold this frame, which would hold them, and with them the caller's pages

    def _abandon(self, failed: Mapping[range, StorageError], asked_count: int) -> None:
        abandoned_count = sum(map(len, failed))
        with self._guard:
            self._abandoned_pages_count += abandoned_count
        if abandoned_count == asked_count:
            raise list(failed.values())[-1]


def _halves(part: range) -> list[range]:
    """Cut a range in two; one of a single page, or none, stays whole."""
    middle = len(part) // 2
    return [part[:middle], part[middle:]] if middle else [part]
