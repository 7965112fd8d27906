"""The tier without vLLM's types: chunks by offload key, looked up, loaded and stored under the names of this engine.

Everything belongs to the scheduler's thread, and returns at once; only
``drain`` and ``close`` wait, and both are bounded.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unified_cache.core.config import GuardConfig
from unified_cache.integrations.engine_store import (
    EngineStore,
    EngineStoreConfig,
    EngineStoreCounts,
    HitWatch,
)
from unified_cache.integrations.vllm.changes import ChunkChanges, ChunksRemoved, ChunksStored
from unified_cache.integrations.vllm.lookups import Lookups
from unified_cache.integrations.vllm.moving import (
    ChunkJob,
    HostRows,
    JobEnd,
    MovedChunk,
    Moving,
)
from unified_cache.integrations.vllm.names import ChunkNames, RowShape, VllmFacts, group_of, is_stable_key
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 256 << 20
"""Memory that chunks pass through, unless a few of them are larger."""

BOUNCE_ROWS_MIN = 4
"""Chunks that fit in it at the least."""

CLOSE_S = 5.0
"""Longest wait for the store to close, after the threads have ended."""


DOCUMENT = "docs/vllm.md#nothing-is-restored"


@dataclass(slots=True)
class TierCounts:
    """Counts of one tier since it was opened, in chunks."""

    looked_up: Mapping[Answer, int]
    """Chunks that the store was asked for, once while any request lives that asks for them."""
    loaded: Counter[Answer] = field(default_factory=Counter)
    stored: Counter[Answer] = field(default_factory=Counter)
    """With chunks that were there already."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    unstable_count: int = 0
    """Look-ups whose key another process would not find."""


class ChunkTier:
    """Chunks of one engine in one store."""

    def __init__(self, store: EngineStore, names: ChunkNames, rows: HostRows, settings: TierSettings) -> None:
        self._store = store
        self._names = names
        self._rows = rows
        self._settings = settings
        self._lookups = Lookups(self._ask, self._is_known)
        self._moving = Moving(store, rows, settings)
        self._counts = TierCounts(self._lookups.answered)
        self._unstored: dict[bytes, int] = {}
        """Chunks that the store did not answer for, oldest first, and how many chunks had been offered by then."""
        self._offered_count = 0
        self._due_s = 0.0
        """When the store is late with the look-ups of a step."""
        self._changes: ChunkChanges | None = None
        self._reports_removals = False
        self._watch = HitWatch(store.counts, settings.url, DOCUMENT)

    @classmethod
    def open(cls, settings: TierSettings, facts: VllmFacts, view: memoryview, row: RowShape) -> "ChunkTier":
        """Open the store, and start to serve an engine from it; ``view`` is vLLM's host memory, all of its rows.

        A store that is away is opened later: meanwhile every look-up is a miss.

        Raises:
            ConfigError: the URL names no store, or the facts name no revision.
        """
        names = ChunkNames.of(facts, row)
        config = EngineStoreConfig(
            guard=GuardConfig(deadline_s=settings.deadline_s),
            bounce_bytes=max(BOUNCE_BYTES, BOUNCE_ROWS_MIN * row.stride_bytes),
        )
        store = EngineStore.open(settings.url, config, bytes_max=settings.bytes_max)
        store.register(names.identity, names.layout)
        return cls(store, names, HostRows(view, row.stride_bytes, row.payload_bytes), settings)

    @property
    def names(self) -> ChunkNames:
        """Names of this engine's pages, of its generation now."""
        return self._names

    def look_up(self, key: bytes, request: str) -> Answer:
        """Return whether the store has a chunk, as far as is known without waiting."""
        if not is_stable_key(key):
            self._counts.unstable_count += 1
            return Answer.MISS
        return self._lookups.answer(key, request)

    def step_ended(self) -> None:
        """Send the look-ups of a step, which are waited for as one."""
        self._store.give_up_late()
        self._due_s = self._store.due_s()
        self._lookups.send()

    def watch(self) -> None:
        """Record from now on what the store gains and loses, for ``changes``."""
        self._changes = ChunkChanges()

    @property
    def reports_removals(self) -> bool:
        """Whether the store reports what it removes, as far as is known."""
        return self._reports_removals

    def changes(self) -> list[ChunksStored | ChunksRemoved]:
        """Return what the store has gained and lost of this engine's chunks since the last call, if watched.

        Beyond a bound removals are lost, and logged: vLLM has no event that takes back whatever a tier has reported.
        """
        if self._changes is None:
            return []
        removals = self._store.take_removals()
        self._reports_removals = removals is not None
        if removals is not None:
            keys = [self._names.offload_key(label) for label in removals.labels]
            self._changes.remove([key for key in keys if key is not None])
            if removals.lost_count:
                logger.warning("%d pages have left the store and are missing in KV events", removals.lost_count)
        return self._changes.take()

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Start to fill rows with chunks."""
        self._submit(number, True, zip(keys, rows, strict=True))

    def store(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], end_token: Callable[[bytes], int | None]
    ) -> None:
        """Start to store rows; ``end_token`` tells where in its prompt a chunk ends, which orders what is unordered."""
        placed = sorted(
            ((group_of(key), end_token(key) or 0, key, row) for key, row in zip(keys, rows, strict=True)),
            key=lambda place: place[:2],
        )
        self._offered_count += len(placed)
        if self._changes is not None:
            self._changes.begin(number)
        self._submit(number, False, [(key, row) for _, _, key, row in placed])

    @property
    def wants_old_chunks(self) -> bool:
        """Whether a request should offer chunks that were offered before, too: the store was away, and is back."""
        return bool(self._unstored) and self._store.is_up

    def ended(self) -> list[JobEnd]:
        """Return the jobs that ended since the last call; a chunk that was not loaded is a miss from now on."""
        ended = self._moving.ended()
        for end in ended:
            moved_bytes = len(end.moved) * self._rows.payload_bytes
            if end.job.is_load:
                self._counts.loaded.update(end.answers)
                self._counts.loaded_bytes += moved_bytes
                self._lookups.miss(end.failed)
            else:
                self._counts.stored.update(end.answers)
                self._counts.stored_bytes += moved_bytes
                self._record_unstored(end)
                if self._changes is not None:
                    self._changes.end(end.job.number, end.moved)
        return ended

    def touch(self, keys: Collection[bytes]) -> None:
        """Send the store a recency hint for chunks in use."""
        labels = [self._names.label(key) for key in keys if is_stable_key(key)]
        if labels:
            self._moving.touch(labels)

    def request_ended(self, request: str) -> None:
        """Drop what only this request needed to know."""
        self._lookups.request_ended(request)
        self._watch.count_request()

    def drain(self) -> None:
        """Wait for all jobs before vLLM resets its caches, and forget the store's pages if ``on_reset`` says so."""
        self._moving.drain(self._settings.close_timeout_s)
        if self._settings.on_reset == "forget":
            # Drawn, not counted: another engine whose weights were updated differently counts from 0, too.
            self._names = self._names.renewed(secrets.randbits(63) | 1)
            self._store.remember(self._names.identity, self._names.layout)
            if self._changes is not None:
                self._changes.forget()
        self._unstored.clear()
        self._lookups.ask_again()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every look-up that was sent is answered and every job has ended; False after ``timeout_s``."""
        return self._store.wait_until(
            lambda: not self._lookups.waiting_count and not self._moving.jobs_count, timeout_s
        )

    def counts(self) -> TierCounts:
        """Return what the tier did so far; the tier goes on counting in it."""
        return self._counts

    def store_counts(self) -> EngineStoreCounts:
        """Return what the store counted."""
        return self._store.counts()

    def close(self) -> bool:
        """End jobs and threads and close the store, within bounds; return whether vLLM's memory is released.

        False if a thread has not ended: vLLM must not unmap its memory then.
        """
        is_over = self._moving.close(self._settings.close_timeout_s)
        self._store.close(CLOSE_S)
        if is_over:
            self._rows.release()
        return is_over

    def _submit(self, number: int, is_load: bool, chunks: Iterable[tuple[bytes, int]]) -> None:
        named = tuple(MovedChunk(key, self._names.label(key), int(row)) for key, row in chunks)
        self._moving.submit(ChunkJob(number, is_load, named))

    def _record_unstored(self, end: JobEnd) -> None:
        """Remember what the store did not answer for, as long as host memory may hold it."""
        for chunk, answer in zip(end.job.chunks, end.answers, strict=True):
            self._unstored.pop(chunk.key, None)
            if answer is Answer.UNAVAILABLE:
                self._unstored[chunk.key] = self._offered_count
        oldest = self._offered_count - self._rows.rows_count
        while self._unstored and next(iter(self._unstored.values())) < oldest:
            del self._unstored[next(iter(self._unstored))]

    def _is_known(self, key: bytes) -> bool:
        """Return whether memory alone says that the store has a chunk."""
        return bool(self._store.exists_at_once([self._names.label(key)])[0])

    def _ask(self, keys: Sequence[bytes], on_end: Callable[[Sequence[Answer]], None]) -> None:
        """Ask the store; an answer of another generation is dropped by ``ask_again``."""
        labels = [self._names.label(key) for key in keys]
        self._store.start_asking(Method.EXISTS, labels, on_end, self._due_s)
