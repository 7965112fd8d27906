"""The L3 of a cache: names of a page's objects, where their bytes lie, the order of puts and clears, recency hints.

A store does not see hits in memory. One that evicts goes by what it is asked for, and evicts for the sake of what is
put: so uses of stored pages wait in ``RecencyHints``, and are sent ahead of the next put.

The store may be away when the cache opens: ``StoreArrival`` attaches it as soon as every rank has its own.
"""

import logging
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt

from unified_cache.controller.memory import PageMemory
from unified_cache.controller.ranks.group import RankGroup, together
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import (
    CacheError,
    ConfigError,
    StorageError,
    StorageTimeoutError,
    check_kind,
    without_secrets,
)
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import Identity, ModelLayout, PageCopies, PageNumbers, PoolSpec, all_pages
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.storage_backends.common.bounded_call import call_within
from unified_cache.storage_backends.common.breaker import Backoff, StoreOpening
from unified_cache.storage_backends.common.other_identities import OtherIdentities
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.guard import DECLARATION_S
from unified_cache.storage_backends.wrappers.layer import Method, VerifiedStorage

logger = logging.getLogger(__name__)


class StoreEpoch:
    """Puts and clears of one store that are under way. Thread-safe.

    A put that is under way when a clear begins is *superseded*: its job takes its pages back, however long after the
    clear the store returns from it. Until then no other may put, and nothing is read. One that cannot take them back
    stays superseded until another clear has removed them.
    """

    __slots__ = ("_clears_count", "_guard", "_puts", "_superseded")

    def __init__(self) -> None:
        self._clears_count = 0
        self._puts: set[object] = set()
        self._superseded: set[object] = set()
        self._guard = Lock()

    @contextmanager
    def clear(self) -> Iterator[None]:
        """Supersede the puts under way, and allow no other during the ``with`` block, which raises if it fails."""
        with self._guard:
            self._clears_count += 1
            over = self._superseded - self._puts
            self._superseded |= self._puts
        try:
            yield
            with self._guard:
                self._superseded -= over
        finally:
            with self._guard:
                self._clears_count -= 1

    @contextmanager
    def put(self, job: object) -> Iterator[bool]:
        """Count ``job`` as putting pages during the ``with`` block; yield False if it must put none."""
        with self._guard:
            allowed = not self._clears_count and not self._superseded
            if allowed:
                self._puts.add(job)
        try:
            yield allowed
        finally:
            with self._guard:
                self._puts.discard(job)

    @property
    def is_waiting(self) -> bool:
        """Whether pages that were put before a clear may be in the store, or come to it."""
        return bool(self._superseded)

    def is_superseded(self, job: object) -> bool:
        """Return whether ``job`` has to remove the pages that it has put."""
        with self._guard:
            return job in self._superseded

    def take_back(self, job: object) -> None:
        """Record that ``job`` has removed them."""
        with self._guard:
            self._superseded.discard(job)


HINTS_MAX = 64
"""Uses that wait for a put; with one more the oldest is dropped: recency is worth no request's memory for long."""


@dataclass(frozen=True, slots=True)
class UsedPages:
    """Pages of a prompt that a request was handed from memory, and that storage has."""

    prompt: Prompt
    pages: tuple[PageNumbers, ...]
    """Their numbers, by component."""

    @property
    def count(self) -> int:
        """Pages of all components together."""
        return sum(map(len, self.pages))


@dataclass(frozen=True, slots=True)
class HintCounts:
    """Pages in use, by whether storage was given the hint; each as often as one was due."""

    hinted_pages: int = 0
    dropped_pages: int = 0
    """Not hinted: too many uses waited for a put, or the store failed."""


class RecencyHints:
    """Uses to hint to a store, the latest last, at most HINTS_MAX, and counts of them. Thread-safe."""

    __slots__ = ("_dropped_pages", "_guard", "_hinted_pages", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[UsedPages] = deque()
        self._hinted_pages = 0
        self._dropped_pages = 0
        self._guard = Lock()

    def add(self, used: UsedPages) -> None:
        """Queue a use until the next put."""
        with self._guard:
            self._waiting.append(used)
            if len(self._waiting) > HINTS_MAX:
                self._dropped_pages += self._waiting.popleft().count

    def take_all(self) -> Sequence[UsedPages]:
        """Return and forget all that wait, the oldest first; the caller records whether the hints were sent."""
        with self._guard:
            waiting, self._waiting = self._waiting, deque()
        return waiting

    def record_hinted(self, used: UsedPages) -> None:
        """Count a use that the store was given a hint of."""
        with self._guard:
            self._hinted_pages += used.count

    def record_dropped(self, used: UsedPages) -> None:
        """Count a use that the store could not be given a hint of."""
        with self._guard:
            self._dropped_pages += used.count

    def counts(self) -> HintCounts:
        """Return the counts so far."""
        with self._guard:
            return HintCounts(self._hinted_pages, self._dropped_pages)


PoolOrder = tuple[tuple[int, PoolSpec], ...]
"""(component, pool) in the order in which a transfer moves those of a page: KV before sidecars."""

ListedObject = tuple[int, int, PageIO]
"""Number of a part of a transfer, index in that part, and the object of that page in one pool."""


class AnswerCounts:
    """Answers of a store so far, by method; workers count them, and anybody may ask."""

    __slots__ = ("_counts", "_guard")

    def __init__(self) -> None:
        self._counts: Counter[tuple[Method, Answer]] = Counter()
        self._guard = Lock()

    def add(self, method: Method, answers: Sequence[Answer]) -> None:
        """Count the answers of one call."""
        found = Counter(answers)
        with self._guard:
            for answer, count in found.items():
                self._counts[method, answer] += count

    def copy(self) -> dict[tuple[Method, Answer], int]:
        """Return them, the caller's own."""
        with self._guard:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class StorageTier:
    """The L3 of one cache. Pool suffixes come from the layout's pools; pools without bytes have no objects."""

    backend: VerifiedStorage
    guard: StorageGuard | None
    """The guard below it; None for a store that looks after itself."""
    layout: ModelLayout
    owners: Mapping[str, bytes]
    """``Identity.owners``."""
    memory: PageMemory
    read_order: PoolOrder
    """The pools that have objects."""
    write_order: PoolOrder
    """Those that this rank stores; see ``ranks.pools_to_store``."""
    epoch: StoreEpoch = field(default_factory=StoreEpoch)
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    hints: RecencyHints | None = None
    """Uses that the store is to be given hints of; None for one that never evicts."""

    @classmethod
    def open(
        cls,
        store: Store,
        config: GuardConfig | None,
        layout: ModelLayout,
        identity: Identity,
        memory: PageMemory,
        written: Collection[str],
    ) -> "StorageTier":
        """Take a store over and announce the layout to it; guarded unless ``config`` is None, and verified.

        ``written`` names the pools that this rank stores.

        Raises:
            ConfigError: the store's cap is less than a page.
            StorageError: the store does not take the layout.
        """
        if isinstance(store, str):
            raise ConfigError(
                f"a store is an object, such as open_storage({without_secrets(store)!r}) returns, found its URL"
            )
        capability = declared_capability(store)
        capability.check_cap(layout)
        guard = None if config is None else StorageGuard(store, capability, config)
        backend = VerifiedStorage(store if guard is None else guard)
        others = OtherIdentities.of(backend)
        for part in identity.parts(layout):
            manifest = manifest_of(part.identity, part.layout)
            backend.register(manifest, memory.slabs())
            others.warn(manifest)
        reads = tuple((component, pool) for component, pool in layout.transfer_order if pool.page_bytes)
        writes = tuple((component, pool) for component, pool in reads if pool.name in written)
        hints = RecencyHints() if capability.evicts else None
        return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes, hints=hints)

    def close(self, timeout_s: float) -> list[str]:
        """Close the store, once it has returned from its calls; name what it is in after ``timeout_s``."""
        try:
            call_within(timeout_s, Method.CLOSE.value, self.backend.close)
        except StorageTimeoutError as error:
            return [str(error)]
        except Exception as error:  # noqa: BLE001  # the edge: a store's code; it has returned, and its memory is free
            logger.warning("the store failed to close: %s: %s", type(error).__name__, error)
        return []

    def prompt_pages_max(self, pages_count: int) -> int:
        """Return how many of a prompt's pages fit under the store's cap, with the windows at one end.

        A longer prompt would evict its own beginning, and with it all that was put.
        """
        capability = self.backend.capability()
        if capability.bytes_max is None:
            return pages_count
        sizes = [
            (self.layout.components[component].span, capability.taken_bytes(HEADER_BYTES + pool.page_bytes))
            for component, pool in self.write_order
        ]

        def needed_bytes(pages: int) -> int:
            return sum(min(pages, span) * size for span, size in sizes)

        return bisect_right(range(pages_count + 1), capability.bytes_max, key=needed_bytes) - 1

    def labels(self, keys: Sequence[PageKey], pool: PoolSpec) -> list[Label]:
        """Name the objects of one pool for these pages."""
        owner, name = self.owners[pool.name], pool.name
        return [Label(owner, key, name) for key in keys]

    def touch(self, used: UsedPages) -> None:
        """Send the store recency hints, as far as this rank stores them; the first of a prompt most of all."""
        keys = used.prompt.keys
        named = [
            (page, Label(self.owners[pool.name], keys[page], pool.name))
            for component, pool in self.write_order
            for page in used.pages[component].tolist()
        ]
        if named:
            named.sort(key=lambda each: each[0])
            self.backend.touch([label for _, label in named])

    def pages(self, prompt: Prompt, parts: Sequence[PageCopies], order: PoolOrder) -> list[ListedObject]:
        """List every object of ``parts`` in these pools, to read or to write.

        Page by page as in the prompt, so that what has been moved is a prefix. Host slots are the parts' ``target``.
        """
        by_component: dict[int, tuple[int, list[int], list[int]]] = {}
        for number, part in enumerate(parts):
            by_component[part.component] = number, part.pages.tolist(), part.target.tolist()
        keys = prompt.keys
        listed: list[ListedObject] = []
        pages: list[int] = []
        for component, pool in order:
            if component not in by_component:
                continue
            number, of_part, slots = by_component[component]
            owner, name = self.owners[pool.name], pool.name
            for index, buffers in enumerate(self.memory.buffers(pool, slots)):
                listed.append((number, index, PageIO(Label(owner, keys[of_part[index]], name), buffers)))
            pages += of_part
        if len(order) > 1:
            listed = [listed[at] for at in np.argsort(pages, kind="stable").tolist()]
        return listed


def whole_pages(
    parts: Sequence[PageCopies], listed: Sequence[ListedObject], answers: Sequence[Answer]
) -> list[npt.NDArray[np.bool_]]:
    """Return a mask by part of the pages that every pool of their component has."""
    whole = [all_pages(len(part.pages)) for part in parts]
    for (number, index, _), answer in zip(listed, answers, strict=True):
        if answer is not Answer.STORED and answer is not Answer.HIT:  # in the place of its truth, which is a call
            whole[number][index] = False
    return whole


@contextmanager
def storage_of(storage: Store | str | None) -> Iterator[Store | None]:
    """Yield a store, opened if it is a URL; what was opened here is closed if the block raises."""
    if not isinstance(storage, str):
        expected = 'storage as a Store, or the URL of a store, such as "file:/var/cache/kv"'
        check_kind(storage, Store | None, expected, ConfigError)
        yield storage
        return
    opened = open_storage(storage)
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


class StoreArrival:
    """Opens a cache's store beside its owner, again after pauses, until every rank has its own; the owner asks.

    A store that is away is one whose opening failed in a way that passes by itself, or goes on. Any other failure is
    raised when the cache opens; later it is logged, and tried again.
    """

    __slots__ = ("_given", "_opening", "_ranks")

    def __init__(
        self,
        opened: Callable[[], StorageTier],
        given: Store | None,
        config: GuardConfig,
        ranks: RankGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``opened`` opens the store, or takes over the one that was ``given``."""
        pauses = Backoff(config.breaker_pause_s, config.breaker_pause_s_max)
        self._opening = StoreOpening(opened, lambda tier: tier.close(config.deadline_s), pauses, clock)
        self._given = given
        self._ranks = ranks

    def begin(self) -> StorageTier | None:
        """Try for ``DECLARATION_S`` at most; return the tier once every rank has its own.

        Raises:
            CacheError: what keeps the store away does not pass by itself; RankError on the other ranks.
        """
        self._opening.reach(DECLARATION_S)
        failure = self._opening.failure
        with together(self._ranks, "taking a store over"):
            if failure is not None and not (isinstance(failure, StorageError) and failure.retryable):
                raise failure if isinstance(failure, CacheError) else StorageError(str(failure), retryable=False)
        return self.poll()

    def poll(self) -> StorageTier | None:
        """Try again where that is due, without waiting; return the tier once every rank has its own.

        Raises:
            RankLostError: as ``RankGroup.agree``.
        """
        tier = self._opening.reach(0.0)
        return tier if self._ranks.agree(np.array([tier is not None], np.bool_))[0] else None

    def end(self, timeout_s: float) -> StorageTier | None:
        """Try no more; return the tier, which is the caller's to close, or close a store that was given."""
        tier = self._opening.close()
        if tier is None and self._given is not None:
            with suppress(StorageError):
                call_within(timeout_s, Method.CLOSE.value, self._given.close)
        return tier

    def leave(self, timeout_s: float) -> None:
        """Try no more, and close what was opened here; a store that was given stays its owner's."""
        tier = self._opening.close()
        if tier is not None and self._given is None:
            tier.close(timeout_s)
