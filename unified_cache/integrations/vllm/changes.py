"""Gains and losses of the store, of one engine's chunks, for vLLM's KV events.

A job's end is reported to vLLM some time after the store has taken its chunks. Chunks that are removed, and reported as
removed, in between are not reported as stored. Belongs to the scheduler's thread.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CHANGES_MAX = 10_000
"""Changes that wait for vLLM to take them; the oldest are dropped beyond it."""


class ChunksStored(NamedTuple):
    """Chunks that are in the store from now on, by offload key."""

    keys: tuple[bytes, ...]


class ChunksRemoved(NamedTuple):
    """Chunks that the store has removed, by offload key."""

    keys: tuple[bytes, ...]


class ChunkChanges:
    """Changes in their order, and the jobs whose chunks are not reported yet."""

    __slots__ = ("_began", "_changes", "_gone", "_reported_count")

    def __init__(self) -> None:
        self._changes: deque[ChunksStored | ChunksRemoved] = deque(maxlen=CHANGES_MAX)
        self._reported_count = 0
        """Times that removals were reported."""
        self._began: dict[int, int] = {}
        """By store job under way: how often removals had been reported before it."""
        self._gone: dict[bytes, int] = {}
        """Chunks that went while jobs were under way: when it was reported, oldest first."""

    def begin(self, job: int) -> None:
        """Record that a store job has begun."""
        self._began[job] = self._reported_count

    def end(self, job: int, stored: Iterable[bytes]) -> None:
        """Record that a job has ended, and what it has stored; nothing of a job from before ``forget``."""
        began = self._began.pop(job, None)
        if began is None:
            return
        there = tuple(key for key in stored if self._gone.get(key, -1) < began)
        if there:
            self._changes.append(ChunksStored(there))
        self._prune()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Record that the store has let chunks go."""
        if not keys:
            return
        self._changes.append(ChunksRemoved(tuple(keys)))
        if self._began:
            for key in keys:
                self._gone.pop(key, None)
                self._gone[key] = self._reported_count
        self._reported_count += 1

    def take(self) -> list[ChunksStored | ChunksRemoved]:
        """Return the changes since the last call."""
        taken = list(self._changes)
        self._changes.clear()
        return taken

    def forget(self) -> None:
        """Forget what was not taken, and what jobs under way store: it belongs to nobody any more."""
        self._changes.clear()
        self._began.clear()
        self._gone.clear()

    def _prune(self) -> None:
        """Forget what went before the oldest job under way."""
        oldest = min(self._began.values(), default=self._reported_count)
        while self._gone and next(iter(self._gone.values())) < oldest:
            del self._gone[next(iter(self._gone))]
