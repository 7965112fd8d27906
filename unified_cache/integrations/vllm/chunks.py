"""The tier without vLLM's types: chunks by offload key, looked up, loaded and stored under the names of this engine.

An offload key of vLLM is the hash of a prefix, then the number of a group of layers. The hash is the page key, and each
group a pool: a chunk of a group is one page of that pool. A row of vLLM's host memory holds one chunk of any group, of
all workers side by side; the payload of a page is the row without its alignment.

Everything belongs to the scheduler's thread, and returns at once; only
``drain`` and ``close`` wait, and both are bounded.

    load  ──> a get of the store, urgent   ─┐                            ┌─> ended ─> scheduler
    store ──> a put of it, which waits     ─┴─> threads of EngineStore ──┘

What waits to be stored is bounded by the share of vLLM's rows that it holds: such a row cannot take what is loaded. The
store touches no row of a job that has ended, so with the last one nobody holds a view of vLLM's memory.
"""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Semaphore
from typing import NamedTuple

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, dtype_name, facts_of
from unified_cache.core.seal import Label
from unified_cache.integrations.engine_store import (
    EnginePage,
    EngineStore,
    EngineStoreConfig,
    EngineStoreCounts,
    HitWatch,
)
from unified_cache.integrations.vllm.facts import RowShape, VllmFacts
from unified_cache.integrations.vllm.lookups import Lookups
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

HINTS_MAX = 64
"""Calls of touch that wait; more are dropped: recency is worth no request's time."""

CHANGES_MAX = 10_000
"""Changes that wait for vLLM to take them; the oldest are dropped beyond it."""

HASH_BYTES = 32
"""Bytes of a hash that is the same in every process: SHA-256, as vLLM's sha256 and sha256_cbor."""

GROUP_BYTES = 4
"""Bytes of the group's number, big-endian; as make_offload_key in vLLM 0.32."""

POOL_PREFIX = "g"
"""Of the name of a group's pool; what follows is the group's number."""

DOCUMENT = "docs/vllm.md#nothing-is-restored"


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """Identity and layout of one engine's pages in one generation, and the label of each chunk."""

    identity: Identity
    layout: ModelLayout
    pools: Mapping[bytes, tuple[bytes, str]]
    """By group, as a chunk's key ends: the digest that its pool is stored under, and the pool's name."""

    @classmethod
    def of(cls, facts: VllmFacts, row: RowShape) -> "ChunkNames":
        """Name the pages of an engine.

        Raises:
            ConfigError: no group, or no revision: pages of other weights would be taken for this engine's.
        """
        if not facts.revision:
            raise ConfigError(
                f"a store that outlives the engine needs the revision of {facts.model}'s weights, found none: "
                f"say revision, or use UnifiedCacheConnector, which finds it out"
            )
        if not facts.groups:
            raise ConfigError("an engine that offloads has groups of layers, found none")
        kinds = {f"group {group.number}": group.kind for group in facts.groups}
        others = facts_of({**facts.others, **kinds, "kv dtype": facts.dtype})
        # Those that need most pages first.
        groups = sorted(facts.groups, key=lambda group: (-group.span, group.number))
        components: list[Component] = []
        for group in groups:
            pool = PoolSpec(f"{POOL_PREFIX}{group.number}", row.payload_bytes)
            components.append(Component(pool.name, group.span, (pool,), page_size=group.tokens_per_chunk))
        identity = Identity(facts.model, facts.revision, dtype_name(facts.dtype), facts=others)
        return cls._named(identity, ModelLayout(groups[0].tokens_per_chunk, tuple(components)))

    def renewed(self, generation: int) -> "ChunkNames":
        """Return the names of the same engine in another generation, where none of these pages is found."""
        return self._named(replace(self.identity, generation=generation), self.layout)

    @classmethod
    def _named(cls, identity: Identity, layout: ModelLayout) -> "ChunkNames":
        owners = identity.owners(layout).items()
        groups = [int(pool.removeprefix(POOL_PREFIX)).to_bytes(GROUP_BYTES, "big") for pool, _ in owners]
        return cls(
            identity, layout, {group: (owner, pool) for group, (pool, owner) in zip(groups, owners, strict=True)}
        )

    def offload_key(self, label: Label) -> bytes | None:
        """Return the chunk that a label names; None if it is another engine's, or another generation's."""
        for group, pool in self.pools.items():
            if pool == (label.identity, label.pool):
                return label.key + group
        return None

    def label(self, offload_key: bytes) -> Label:
        """Return the label of a chunk; ``offload_key`` is one that ``is_stable_key``."""
        owner, pool = self.pools[offload_key[HASH_BYTES:]]
        return Label(owner, offload_key[:HASH_BYTES], pool)


def is_stable_key(offload_key: bytes) -> bool:
    """Return whether another process gives the same chunk the same key: xxhash's are shorter and seeded at random."""
    return len(offload_key) == HASH_BYTES + GROUP_BYTES


@dataclass(slots=True)
class TierCounts:
    """Counts of one tier since it was opened, in chunks, beside those of its store."""

    chunk_bytes: int
    looked_up: Mapping[Answer, int]
    """Chunks that the store was asked for, once while any request lives that asks for them."""
    dropped_count: int = 0
    """Chunks that were not stored, since too many waited, or their keys are not stable."""
    unstable_count: int = 0
    """Look-ups whose key another process would not find."""


class ChunkChange(NamedTuple):
    """Chunks that are in the store from now on, or that it has removed, by offload key."""

    keys: tuple[bytes, ...]
    is_removal: bool = False


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Outcome of a job that vLLM submitted. Its rows are vLLM's again."""

    number: int
    is_load: bool
    """Whether its rows were to be filled, and not stored."""
    keys: tuple[bytes, ...]
    answers: tuple[Answer, ...]
    """In the order of the keys; UNAVAILABLE for one that the store was not asked for."""
    seconds: float
    """From the submit to the end."""

    @property
    def moved(self) -> tuple[bytes, ...]:
        """Offload keys of the chunks that were moved."""
        return tuple(key for key, answer in zip(self.keys, self.answers, strict=True) if answer)

    @property
    def failed(self) -> tuple[bytes, ...]:
        """Offload keys of the others."""
        return tuple(key for key, answer in zip(self.keys, self.answers, strict=True) if not answer)


class ChunkTier:
    """Chunks of one engine in one store."""

    def __init__(
        self, store: EngineStore, names: ChunkNames, view: memoryview, row: RowShape, settings: TierSettings
    ) -> None:
        self._store = store
        self.names = names
        """Names of this engine's pages, of its generation now."""
        self._memory = view.cast("B")
        self._row = row
        self._rows_count = len(self._memory) // row.stride_bytes
        self._settings = settings
        self._lookups = Lookups(self._is_known)
        self.counts = TierCounts(row.payload_bytes, self._lookups.answered)
        self._jobs_count = 0
        """Jobs whose end was not taken; those that have ended among them."""
        self._ended: deque[JobEnd] = deque()
        self._storing: dict[int, set[bytes]] = {}
        """By store job that was begun, and whose end was not taken: chunks that are there from its end on."""
        self._storing_rows_count = 0
        """Rows of these jobs."""
        self._storing_rows_max = max(int(self._rows_count * settings.store_share), 1)
        self._hints_left = Semaphore(HINTS_MAX)
        self._unstored: dict[bytes, int] = {}
        """Chunks that the store did not answer for, oldest first, and how many chunks had been offered by then."""
        self._offered_count = 0
        self._changes: deque[ChunkChange] | None = None
        self.reports_removals = False
        """Whether the store reports what it removes, as far as is known."""
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
        return cls(store, names, view, row, settings)

    def look_up(self, key: bytes, request: str) -> Answer:
        """Return whether the store has a chunk, as far as is known without waiting."""
        if not is_stable_key(key):
            self.counts.unstable_count += 1
            return Answer.MISS
        return self._lookups.answer(key, request)

    def step_ended(self) -> None:
        """Send the look-ups of a step, which are waited for as one."""
        self._store.give_up_late()
        self._lookups.send(partial(self._ask, self._store.due_s()))

    def watch(self) -> None:
        """Record from now on what the store gains and loses, for ``changes``."""
        self._changes = deque(maxlen=CHANGES_MAX)

    def changes(self) -> list[ChunkChange]:
        """Return what the store has gained and lost of this engine's chunks since the last call, if watched.

        A job's end is taken some time after the store has its chunks: one that is reported as removed in between is not
        reported as stored. Beyond a bound removals are lost, and logged: vLLM has no event that takes back whatever a
        tier has reported.
        """
        if self._changes is None:
            return []
        removals = self._store.take_removals()
        self.reports_removals = removals is not None
        if removals is not None:
            keys = [key for label in removals.labels if (key := self.names.offload_key(label)) is not None]
            if keys:
                self._changes.append(ChunkChange(tuple(keys), is_removal=True))
            for stored in self._storing.values():
                stored.difference_update(keys)
            if removals.lost_count:
                logger.warning("%d pages have left the store and are missing in KV events", removals.lost_count)
        taken = list(self._changes)
        self._changes.clear()
        return taken

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Start to fill rows with chunks."""
        self._jobs_count += 1
        if self._refuses(number, True, keys, rows):
            return
        end = partial(self._end, number, True, tuple(keys), time.monotonic())
        self._store.start(Method.GET, self._pages(keys, rows), end)

    def store(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], end_token: Callable[[bytes], int | None]
    ) -> None:
        """Start to store rows; ``end_token`` tells where in its prompt a chunk ends, which orders what is unordered.

        Where more rows would wait with it than may, or under keys that no other process finds, it ends at once, and
        nothing is moved. A job of more rows than that is begun where no other waits: else it would never be.
        """
        placed = sorted(
            zip(keys, rows, strict=True), key=lambda chunk: (chunk[0][HASH_BYTES:], end_token(chunk[0]) or 0)
        )
        ordered, count = tuple(key for key, _ in placed), len(placed)
        self._offered_count += count
        self._jobs_count += 1
        if self._refuses(number, False, keys, rows):
            return
        is_crowded = bool(self._storing) and self._storing_rows_count + count > self._storing_rows_max
        if is_crowded or not all(map(is_stable_key, ordered)):
            self.counts.dropped_count += count
            self._ended.append(JobEnd(number, False, ordered, (Answer.UNAVAILABLE,) * count, 0.0))
            return
        self._storing[number] = set(ordered)
        self._storing_rows_count += count
        pages = self._pages(ordered, [row for _, row in placed])
        end = partial(self._end, number, False, ordered, time.monotonic())
        self._store.start(Method.PUT, pages, end, self._settings.level)

    def _refuses(self, number: int, is_load: bool, keys: Sequence[bytes], rows: Sequence[int]) -> bool:
        """End a job of rows that vLLM's memory does not have, with nothing moved; return whether it is one."""
        if all(0 <= row < self._rows_count for row in rows):
            return False
        logger.error("expected rows in [0, %d), found %d to %d", self._rows_count, min(rows), max(rows))
        self._ended.append(JobEnd(number, is_load, tuple(keys), (Answer.UNAVAILABLE,) * len(keys), 0.0))
        return True

    @property
    def wants_old_chunks(self) -> bool:
        """Whether a request should offer chunks that were offered before, too: the store was away, and is back."""
        return bool(self._unstored) and self._store.is_up

    def ended(self) -> list[JobEnd]:
        """Return the jobs that ended since the last call, those that the store is late with among them.

        A chunk that was not loaded is a miss from now on.
        """
        self._store.give_up_late()
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._jobs_count -= len(ended)
        for end in ended:
            if not end.is_load:
                self._record_stored(end)
            elif end.failed:
                self._lookups.miss(end.failed)
        return ended

    def touch(self, keys: Collection[bytes]) -> None:
        """Send the store a recency hint for chunks in use."""
        labels = [self.names.label(key) for key in keys if is_stable_key(key)]
        if labels and self._hints_left.acquire(blocking=False):
            self._store.start_asking(Method.TOUCH, labels, lambda _: self._hints_left.release())

    def request_ended(self, request: str) -> None:
        """Drop what only this request needed to know."""
        self._lookups.request_ended(request)
        self._watch.count_request()

    def drain(self) -> None:
        """Wait for all jobs before vLLM resets its caches, and forget the store's pages if ``on_reset`` says so.

        After a time what has not begun ends with nothing moved, so this returns after one deadline more.
        """
        if not self.wait(self._settings.close_timeout_s):
            self._store.drop_waiting()
            self.wait(math.inf)
        if self._settings.on_reset == "forget":
            # Drawn, not counted: another engine whose weights were updated differently counts from 0, too.
            self.names = self.names.renewed(secrets.randbits(63) | 1)
            self._store.remember(self.names.identity, self.names.layout)
            if self._changes is not None:
                self._changes.clear()
            for stored in self._storing.values():
                stored.clear()
        self._unstored.clear()
        self._lookups.ask_again()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every look-up that was sent is answered and every job has ended; False after ``timeout_s``."""
        return self._store.wait_until(
            lambda: len(self._ended) == self._jobs_count and not self._lookups.waiting_count, timeout_s
        )

    def store_counts(self) -> EngineStoreCounts:
        """Return what the store counted."""
        return self._store.counts()

    def close(self) -> bool:
        """End jobs and threads and close the store, within bounds; return whether vLLM's memory is released.

        False if a thread has not ended: vLLM must not unmap its memory then.
        """
        self.wait(self._settings.close_timeout_s)
        self._store.drop_waiting()
        is_over = self.wait(self._settings.close_timeout_s)
        self._store.close(CLOSE_S)
        if is_over:
            self._memory.release()
        return is_over

    def _pages(self, keys: Sequence[bytes], rows: Sequence[int]) -> list[EnginePage]:
        """Return chunks and the payloads of their rows, as the store moves them."""
        pages: list[EnginePage] = []
        for key, row in zip(keys, rows, strict=True):
            start = row * self._row.stride_bytes
            pages.append(EnginePage(self.names.label(key), (self._memory[start : start + self._row.payload_bytes],)))
        return pages

    def _end(
        self, number: int, is_load: bool, keys: tuple[bytes, ...], started_s: float, answers: Sequence[Answer]
    ) -> None:
        """Keep the end of a job for the scheduler's thread."""
        self._ended.append(JobEnd(number, is_load, keys, tuple(answers), time.monotonic() - started_s))

    def _record_stored(self, end: JobEnd) -> None:
        """Report what is there now, and remember what the store did not answer for, as long as host memory may hold it.

        A job that was never begun, or of before a reset that forgets, reports nothing.
        """
        there = self._storing.pop(end.number, None)
        if there is not None:
            self._storing_rows_count -= len(end.keys)
            stored = tuple(key for key in end.moved if key in there)
            if stored and self._changes is not None:
                self._changes.append(ChunkChange(stored))
        for key, answer in zip(end.keys, end.answers, strict=True):
            self._unstored.pop(key, None)
            if answer is Answer.UNAVAILABLE and is_stable_key(key):
                self._unstored[key] = self._offered_count
        oldest = self._offered_count - self._rows_count
        while self._unstored and next(iter(self._unstored.values())) < oldest:
            del self._unstored[next(iter(self._unstored))]

    def _is_known(self, key: bytes) -> bool:
        """Return whether memory alone says that the store has a chunk."""
        return bool(self._store.exists_at_once([self.names.label(key)])[0])

    def _ask(self, due_s: float, keys: Sequence[bytes], on_end: Callable[[Sequence[Answer]], None]) -> None:
        """Ask the store; an answer of another generation is dropped by ``ask_again``."""
        labels = [self.names.label(key) for key in keys]
        self._store.start_asking(Method.EXISTS, labels, on_end, due_s)
